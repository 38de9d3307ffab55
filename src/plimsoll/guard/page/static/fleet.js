// The fleet: one line an engine, the worst first. Lines are changed in place; hundreds of them cost what has changed.
import { fill, make, say } from "./dom.js";
import { STATES, UNKNOWN, count, percent } from "./words.js";

const COLUMNS = [
  ["state", "State"], ["name", "Engine"], ["model", "Model"], ["kv", "KV used"], ["running", "Running"], ["waiting", "Waiting"],
  ["in_flight", "In flight"], ["twice", "Recomputed"], ["rung", "Action"],
];
const ORDERS = { state: "worst first", name: "name", kv: "KV used", waiting: "waiting", twice: "recompute share" };
const RUNGS = { advice: "advise", shed: "shed", compact: "compact", restart: "restart" };
const RESORT_MS = 5000;

export class FleetView {
  constructor() {
    this.rows = new Map(); // by id: {data, line, cells}
    this.order = "state";
    this.wanted = "";
    this.isSorted = false;
    this.sortedAt = 0;
    this.build();
  }

  build() {
    this.tally = make("ul", { class: "tally", "aria-label": "Engines by state" });
    this.find = make("input", { type: "search", id: "find", autocomplete: "off", spellcheck: "false", maxlength: "200" });
    this.find.addEventListener("input", () => { this.wanted = this.find.value.trim().toLowerCase(); this.filter(); });
    this.by = make("select", { id: "order" }, ...Object.entries(ORDERS).map(([key, says]) => make("option", { value: key }, says)));
    this.by.addEventListener("change", () => { this.order = this.by.value; this.sort(true); });
    this.body = make("tbody", { role: "rowgroup" });
    const head = make("tr", { role: "row" }, ...COLUMNS.map(([key, says]) => make("th", { scope: "col", role: "columnheader", class: `c-${key}` }, says)));
    // The roles are said: lines that are laid out as a grid are still a table to whoever reads it.
    this.table = make("table", { class: "fleet", role: "table", "aria-label": "Every engine that guard watches" },
      make("thead", { role: "rowgroup" }, head), this.body);
    this.none = make("p", { class: "empty", hidden: true });
    this.root = make("section", { "aria-labelledby": "fleet-title" },
      make("h1", { id: "fleet-title" }, "Fleet"), this.tally,
      make("div", { class: "find" }, make("label", { for: "find" }, "Find"), this.find, make("label", { for: "order" }, "Order by"), this.by),
      this.none, make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of engines" }, this.table));
  }

  take(data) {
    if (data.all) {
      const kept = new Set(data.rows.map((row) => row.id));
      for (const id of [...this.rows.keys()]) if (!kept.has(id)) this.drop(id);
    }
    for (const id of data.gone) this.drop(id);
    for (const row of data.rows) this.put(row);
    this.count();
    this.sort(false);
    this.filter();
  }

  drop(id) {
    const found = this.rows.get(id);
    if (found) found.line.remove();
    this.rows.delete(id);
  }

  put(data) {
    let found = this.rows.get(data.id);
    if (!found) {
      found = this.line(data.id);
      this.rows.set(data.id, found);
      this.body.append(found.line);
      this.isSorted = false;
    }
    const before = found.data;
    found.data = data;
    if (!before || before.rank !== data.rank || before.name !== data.name) this.isSorted = false;
    this.write(found, data);
  }

  line(id) {
    const cells = {};
    const line = make("tr", { role: "row" });
    for (const [key] of COLUMNS) {
      cells[key] = key === "name" ? make("th", { scope: "row", role: "rowheader", class: `c-${key}` })
        : make("td", { role: "cell", class: `c-${key}` });
      line.append(cells[key]);
    }
    const mark = make("span", { class: "mark" });
    const says = make("bdi", { class: "because" });
    cells.state.append(mark, says);
    const link = make("a", { href: `#/engine/${encodeURIComponent(id)}` }, make("bdi"));
    cells.name.append(link);
    const bar = make("span", { class: "meter", "aria-hidden": "true" }, make("span", { class: "meter-fill" }));
    const kv = make("span");
    cells.kv.append(bar, kv);
    cells.model.append(make("bdi"));
    return { line, cells, mark, says, link: link.firstChild, bar: bar.firstChild, kv, model: cells.model.firstChild, data: null };
  }

  write(found, data) {
    say(found.mark, STATES[data.state] || data.state);
    found.line.className = `is-${data.state}`;
    say(found.says, data.state === "well" ? "" : data.says);
    if (found.says.title !== data.says) found.says.title = data.says;
    say(found.link, data.name);
    say(found.model, data.model === null ? UNKNOWN : data.model);
    say(found.kv, percent(data.kv));
    found.bar.style.transform = `scaleX(${data.kv === null ? 0 : Math.min(1, data.kv)})`;
    found.bar.classList.toggle("is-full", data.kv !== null && data.kv >= 0.95);
    for (const key of ["running", "waiting", "in_flight"]) say(found.cells[key], count(data[key]));
    say(found.cells.twice, percent(data.twice));
    const doing = data.doing ? `doing ${data.doing}` : data.rung ? RUNGS[data.rung] : "none";
    say(found.cells.rung, data.paused ? `${doing}, paused` : doing);
  }

  count() {
    const found = new Map();
    for (const { data } of this.rows.values()) found.set(data.state, (found.get(data.state) || 0) + 1);
    const parts = Object.keys(STATES).filter((state) => found.has(state));
    const texts = parts.map((state) => `${found.get(state)} ${STATES[state]}`);
    const said = `${this.rows.size} engine${this.rows.size === 1 ? "" : "s"}: ${texts.join(", ") || "none"}`;
    if (said === this.said) return;
    this.said = said;
    fill(this.tally, ...parts.map((state, place) => make("li", { class: `is-${state}` }, texts[place])));
    this.none.hidden = this.rows.size > 0;
    say(this.none, "Guard watches no engine: give it one with --engine URL or a configuration.");
  }

  // Lines move only when their order is another one, at most every few seconds by a figure that always changes, and never under
  // the hand of somebody who has the keyboard on one of them.
  sort(isAsked) {
    const isSteady = this.order === "state" || this.order === "name";
    const now = performance.now();
    if (!isAsked && isSteady && this.isSorted) return;
    if (!isAsked && !isSteady && now - this.sortedAt < RESORT_MS) return;
    if (!isAsked && this.body.contains(document.activeElement)) return;
    this.sortedAt = now;
    this.isSorted = true;
    const by = (row) => ({ state: row.rank, name: 0, kv: -(row.kv ?? -1), waiting: -(row.waiting ?? -1), twice: -(row.twice ?? -1) }[this.order]);
    const sorted = [...this.rows.values()].sort((one, other) => by(one.data) - by(other.data) || (one.data.name < other.data.name ? -1 : 1));
    let place = this.body.firstChild;
    for (const { line } of sorted) {
      if (line === place) place = place.nextSibling;
      else this.body.insertBefore(line, place);
    }
  }

  filter() {
    for (const { line, data } of this.rows.values()) {
      const text = this.wanted && `${data.name} ${data.model || ""} ${STATES[data.state]} ${data.says}`.toLowerCase();
      const isHidden = Boolean(this.wanted) && !text.includes(this.wanted);
      if (line.hidden !== isHidden) line.hidden = isHidden;
    }
  }
}
