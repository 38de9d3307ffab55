// Charts as SVG: a plane with its axes, paths through points, round ticks. The reports and guard's page draw with these.
const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// box: {wide, high, left, right, top, bottom}. x and y map a value to its place in it.
export function plane(box, [low, high], most, scale = (value) => value) {
  const [end, floor] = [box.wide - box.right, box.high - box.bottom];
  const across = (scale(high) - scale(low)) || 1;
  return {
    ...box, end, floor,
    x: (value) => box.left + ((scale(value) - scale(low)) / across) * (end - box.left),
    y: (value) => floor - (Math.min(value, most) / most) * (floor - box.top),
  };
}

// Ticks are [value, label].
export function axes(on, across, up) {
  const found = [];
  for (const [value, label] of up) {
    found.push(draw("path", { class: "grid", d: `M${on.left} ${on.y(value)}H${on.end}` }),
      draw("text", { class: "tick", x: on.left - 8, y: on.y(value), dy: ".35em", "text-anchor": "end" }, label));
  }
  found.push(draw("path", { class: "axis", d: `M${on.left} ${on.floor}H${on.end}` }));
  for (const [value, label] of across) {
    const x = on.x(value);
    const anchor = x > on.end - 12 ? "end" : x < on.left + 12 ? "start" : "middle";
    found.push(draw("path", { class: "axis", d: `M${x} ${on.floor}v5` }),
      draw("text", { class: "tick", x, y: on.floor + 20, "text-anchor": anchor }, label));
  }
  return found;
}

// The path through points of values. A hole stays a hole: the line ends where a value is null.
export function path(on, points) {
  let found = "";
  let isDown = false;
  for (const [at, value] of points) {
    if (value !== null) found += `${isDown ? "L" : "M"}${on.x(at).toFixed(1)} ${on.y(value).toFixed(1)}`;
    isDown = value !== null;
  }
  return found;
}

function roundStep(rough) {
  const size = 10 ** Math.floor(Math.log10(rough));
  return size * [1, 2, 2.5, 5, 10].find((times) => size * times >= rough * 0.999);
}

// Round values from 0 to at least `most`.
export function roundTicks(most, about = 4) {
  const step = most > 0 ? roundStep(most / about) : 1;
  return Array.from({ length: Math.max(1, Math.ceil(most / step - 1e-9)) + 1 }, (_, place) => Number((place * step).toPrecision(12)));
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];

// Round moments of a span, in seconds. A moment just outside counts as inside: ends are sums of many small steps.
export function timeTicks(low, high) {
  const rough = Math.max(1e-9, high - low) / 8;
  const step = rough < 1 ? roundStep(rough) : TIME_STEPS.find((one) => one >= rough) || Math.ceil(rough / 86400) * 86400;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

// Round values of a log axis whose ends lie at least a factor of four apart: two to five.
export function logTicks(low, high) {
  const decades = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade += 1) decades.push(10 ** decade);
  for (const times of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
    const found = decades.flatMap((decade) => times.map((one) => Number((one * decade).toPrecision(12))))
      .filter((one) => one >= low && one <= high);
    if (found.length >= 3) return found.filter((_, place) => place % Math.ceil(found.length / 5) === 0);
  }
  return [];
}

// A moment of a run: 0.25 s, 45 s, 2:30 min, 1:05 h, 3 d.
export function momentText(at) {
  if (at < 60) return `${Number(at.toFixed(6))} s`;
  const whole = Math.round(at);
  if (whole % 86400 === 0) return `${whole / 86400} d`;
  const [size, unit] = whole < 3600 ? [60, "min"] : [3600, "h"];
  const rest = Math.floor((whole % size) / (size / 60));
  return `${Math.floor(whole / size)}${rest ? `:${String(rest).padStart(2, "0")}` : ""} ${unit}`;
}

// A time to three digits: 5 ms, 20 s, 12.5 min, 1.2 h.
export function spanText(value) {
  const [size, unit] = value >= 3600 ? [3600, "h"] : value >= 600 ? [60, "min"] : value >= 1 ? [1, "s"] : [1e-3, "ms"];
  return `${Number((value / size).toPrecision(3)).toLocaleString("en")} ${unit}`;
}
