// Pictures: the ledger of a card, figures over time with what is ahead, and the pool of blocks. Each says in words what it shows.
import { axes, draw, path, plane } from "./plot.js";
import { fill, make, say } from "./dom.js";
import { count, gib, percent, seconds } from "./words.js";

export const PARTS = {
  weights: ["weights", "the model itself"],
  graphs: ["CUDA graphs", "recorded at the start"],
  activation: ["activation", "live beside weights, KV cache and graphs"],
  kv_used: ["KV cache, used", "blocks that hold tokens"],
  kv_free: ["KV cache, free", "blocks that are ready"],
  kv: ["KV cache", "how much of it is used is unknown"],
  live: ["live memory", "weights, KV cache and the rest, not told apart"],
  releasable: ["releasable", "compaction gives it back"],
  unreleasable: ["unreleasable", "free, in pieces that torch cannot give back"],
  outside: ["outside torch", "CUDA's own, NCCL"],
  engine: ["the engine", "all that its processes hold"],
  used: ["used", "by whom is unknown"],
  others: ["other processes", "neighbours on the card"],
  slack: ["slack", "free on the card"],
};

// One card: a bar whose parts add up to it, with the load line; the same as a table for those who read. Where only sizes have
// changed they are written into what stands there, so that nobody who reads it loses the place.
export class LedgerBar {
  constructor() {
    this.root = make("div", { class: "card-bar" });
    this.shape = "";
  }

  show(bar) {
    const shape = JSON.stringify([bar.name, bar.total, bar.line, bar.activation_peak, bar.notes, bar.parts.map((one) => one.part)]);
    const line = bar.line === null ? "" : ` The load line is at ${gib(bar.line)}.`;
    const texts = bar.parts.map((one) => `${PARTS[one.part][0]} ${gib(one.bytes)}`);
    const label = `${bar.name}, ${gib(bar.total)}: ${texts.join(", ")}.${line}`;
    if (shape !== this.shape) {
      this.shape = shape;
      fill(this.root, ...ledger(bar));
    }
    const picture = this.root.querySelector(".ledger");
    const rows = this.root.querySelector("tbody").children;
    picture.setAttribute("aria-label", label);
    bar.parts.forEach((one, place) => {
      picture.children[place].style.flexBasis = `${(100 * one.bytes) / bar.total}%`;
      say(rows[place].children[1], gib(one.bytes));
      say(rows[place].children[2], percent(one.bytes / bar.total));
    });
  }
}

function ledger(bar) {
  const parts = bar.parts.map((one) => make("span", { class: `part p-${one.part}`, title: PARTS[one.part][0] }));
  const picture = make("div", { class: "ledger", role: "img" }, ...parts);
  const marks = make("div", { class: "ledger-marks", "aria-hidden": "true" });
  if (bar.line !== null) {
    const mark = make("span", { class: "load-line" });
    mark.style.left = `${(100 * bar.line) / bar.total}%`;
    const text = make("span", { class: "load-text" }, `load line ${gib(bar.line)}`);
    text.style.right = `${100 - (100 * bar.line) / bar.total}%`;
    marks.append(mark, text);
  }
  const rows = bar.parts.map((one) => make("tr", {},
    make("th", { scope: "row" }, make("span", { class: `key p-${one.part}`, "aria-hidden": "true" }), PARTS[one.part][0]),
    make("td", { class: "number" }), make("td", { class: "number" }),
    make("td", {}, PARTS[one.part][1] + (one.part === "activation" && bar.activation_peak !== null
      ? `; its peak at the start was ${gib(bar.activation_peak)}` : ""))));
  rows.push(make("tr", { class: "sum" }, make("th", { scope: "row" }, "the card"), make("td", { class: "number" }, gib(bar.total)),
    make("td", { class: "number" }, "100 %"), make("td", {}, bar.line === null ? "" : `load line at ${gib(bar.line)}`)));
  const table = make("table", { class: "figures parts" }, make("caption", {}, bar.name),
    make("thead", {}, make("tr", {}, ...["part", "size", "share", "what it is"].map((says) => make("th", { scope: "col" }, says)))),
    make("tbody", {}, ...rows));
  return [make("div", { class: "ledger-frame" }, picture, marks), table, ...bar.notes.map((note) => make("p", { class: "hint" }, note))];
}

// One figure over time. ahead: {soonest, likely, latest, level} in seconds from now, and the level that is reached then.
export class TimeChart {
  constructor(title, name, as, isShare) {
    this.title = title;
    this.as = as;
    this.isShare = isShare;
    this.svg = draw("svg", { class: `chart ch-${name}`, role: "img" });
    this.last = null;
    new ResizeObserver(() => { if (this.last) this.show(...this.last); }).observe(this.svg);
    this.words = make("p", { class: "chart-says" });
    this.root = make("figure", { class: "chart-frame" }, make("figcaption", {}, title), this.svg, this.words);
  }

  show(times, values, ahead, why) {
    this.last = [times, values, ahead, why];
    const [wide, high] = [this.svg.clientWidth || 720, this.svg.clientHeight || 190];
    this.svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    const known = times.map((at, place) => [at, values[place]]).filter((one) => one[1] !== null);
    if (!known.length) {
      this.svg.replaceChildren();
      this.svg.setAttribute("aria-label", `${this.title}: unknown`);
      say(this.words, "unknown: nothing was seen yet");
      return;
    }
    const now = times[times.length - 1];
    const from = Math.min(times[0], now - 60);
    const reach = ahead ? Math.min(ahead.latest, 3 * (now - from)) : 0;
    const to = now + Math.max(reach * 1.08, (now - from) * 0.04);
    const most = this.isShare ? 1 : Math.max(5, ...known.map((one) => one[1]), ahead ? ahead.level : 0) * 1.1;
    const on = plane({ wide, high, left: 52, right: 12, top: 12, bottom: 26 }, [from, to], most);
    const across = [[from, `${seconds(now - from)} ago`], [now, "now"]];
    if (to - now > 0.15 * (to - from)) across.push([to, `in ${seconds(to - now)}`]);
    this.svg.replaceChildren(...(ahead ? cone(on, now, known[known.length - 1][1], ahead, to) : []),
      ...axes(on, across, [0, 0.5, 1].map((share) => [most * share, this.as(most * share)])),
      draw("line", { class: "now", x1: on.x(now), x2: on.x(now), y1: on.top, y2: on.floor }),
      draw("path", { class: "seen", d: path(on, times.map((at, place) => [at, values[place]])) }));
    const last = known[known.length - 1][1];
    const said = ahead ? `At this pace ${ahead.says} in ${seconds(ahead.likely)} (${seconds(ahead.soonest)} to ${seconds(ahead.latest)}).`
      : `No forecast: ${why || "unknown"}.`;
    say(this.words, `Now ${this.as(last)}. ${said}`);
    this.svg.setAttribute("aria-label", `${this.title} over ${seconds(now - from)}. Now ${this.as(last)}, at most ${
      this.as(Math.max(...known.map((one) => one[1])))}. ${said}`);
  }
}

// Where it goes if it goes on so, at the fastest and at the slowest.
function cone(on, now, value, ahead, to) {
  const start = [now, value];
  const at = (when) => {
    const share = Math.min(1, (to - now) / when);
    return [now + when * share, value + (ahead.level - value) * share];
  };
  return [
    draw("path", { class: "band", d: `${path(on, [start, at(ahead.soonest), at(ahead.latest)])}Z` }),
    draw("path", { class: "likely", d: path(on, [start, at(ahead.likely)]) }),
    draw("path", { class: "limit", d: path(on, [[now, ahead.level], [to, ahead.level]]) }),
  ];
}

// The pool: a square for each so many blocks, filled as the pool is. Which block is whose vLLM does not tell.
export class BlockMap {
  constructor() {
    this.canvas = make("canvas", { class: "blocks", role: "img" });
    this.words = make("p", { class: "chart-says" });
    this.colours = ["used", "was", "free"].map((name) => make("i", { class: `colour-${name}`, hidden: true }));
    this.root = make("figure", { class: "chart-frame" }, make("figcaption", {}, "Block map"), this.canvas, ...this.colours, this.words);
    this.data = null;
    this.drawn = "";
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }

  show(data) {
    this.data = data;
    if (data.used === null) {
      say(this.words, `${data.total === null ? "" : `${count(data.total)} blocks; used: `}${data.why}`);
      this.canvas.setAttribute("aria-label", `Block map: ${data.why}`);
    } else {
      const size = data.size === null ? "" : ` of ${data.size} tokens`;
      const text = `${count(data.used)} of ${count(data.total)} blocks${size} are in use; ${count(data.most)} at most in the last half hour.`;
      say(this.words, `${text} Each square is ${count(this.per())} block${this.per() === 1 ? "" : "s"}; vLLM does not report which request holds which block.`);
      this.canvas.setAttribute("aria-label", `Block map: ${text}`);
    }
    this.paint();
  }

  per() {
    return Math.max(1, Math.ceil(this.data.total / 960));
  }

  repaint() {
    this.drawn = "";
    this.paint();
  }

  paint() {
    if (!this.data) return;
    const { total, used, most } = this.data;
    const wide = Math.floor(this.canvas.clientWidth * devicePixelRatio);
    const key = `${wide} ${total} ${used} ${most}`;
    if (!wide || key === this.drawn) return;
    this.drawn = key;
    const per = total === null ? 1 : this.per();
    const cells = total === null ? 0 : Math.ceil(total / per);
    const side = Math.max(4 * devicePixelRatio, Math.floor(wide / Math.ceil(Math.sqrt(Math.max(1, cells) * 6))));
    const columns = Math.max(1, Math.floor(wide / side));
    this.canvas.width = wide;
    this.canvas.height = Math.max(side, Math.ceil(cells / columns) * side);
    const brush = this.canvas.getContext("2d");
    const [full, was, free] = this.colours.map((one) => getComputedStyle(one).color);
    const gap = Math.max(1, Math.round(side / 8));
    for (let place = 0; place < cells; place += 1) {
      const share = used === null ? 0 : Math.max(0, Math.min(1, (used - place * per) / per));
      const [left, top] = [(place % columns) * side, Math.floor(place / columns) * side];
      brush.fillStyle = place * per < (most || 0) ? was : free;
      brush.fillRect(left, top, side - gap, side - gap);
      if (share > 0) {
        brush.fillStyle = full;
        brush.fillRect(left, top, (side - gap) * share, side - gap);
      }
    }
  }
}
