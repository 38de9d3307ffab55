// Small helpers. Whatever comes from outside becomes text, never markup: there is no other way into the page than these.

export const $ = (id) => document.getElementById(id);

// An element with attributes, and children that are elements or texts.
export function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, does] of Object.entries(value)) found.addEventListener(event, does);
    else found.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined) found.append(child);
  }
  return found;
}

// A text of unknown origin: it keeps its own direction and cannot turn its neighbours around.
export const foreign = (text) => make("bdi", {}, text);

// Change a text only where it is another one: no layout for nothing.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The same for lists that people open parts of: what was open stays open, and the keyboard stays where it was.
export function refill(element, ...children) {
  const open = new Set([...element.querySelectorAll("details[open]")].map((one) => one.dataset.key));
  const held = element.contains(document.activeElement) ? document.activeElement.closest("details") : null;
  const key = held ? held.dataset.key : null;
  fill(element, ...children);
  for (const one of element.querySelectorAll("details")) {
    if (open.has(one.dataset.key)) one.open = true;
    if (key !== null && one.dataset.key === key) one.firstChild.focus();
  }
}

export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}
