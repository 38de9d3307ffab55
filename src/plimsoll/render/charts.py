"""Charts as inline SVG: scales with round numbers, a frame with its title and description, lines, bars and shares."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from plimsoll.render.flags import clean
from plimsoll.simulate.trace import Floats

# What all HTML pages have in common: a document that loads nothing from anywhere, tables, tiles, lists, and text made safe.

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may do with a page without a script: nothing but show it."""


def text(words: str) -> str:
    """Text of anybody's: no secret, no control character, no markup."""
    return escape(clean(words), quote=True)


def document(title: str, style: str, parts: Iterable[str], *, footer: str = "", policy: str = POLICY, script: str = "") -> str:
    """The whole page."""
    end = f'</main>\n<footer class="dim"><p>{footer}</p></footer>' if footer else "</main>"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>{style}</style>\n</head>\n<body>\n<main>",
            *parts,
            end,
            *([f"<script>{script}</script>"] if script else []),
            "</body>\n</html>\n",
        ]
    )


def tiles(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Figures side by side: a name, the figure, and what else is to be said of it."""
    return [
        '<dl class="tiles">',
        *(
            f'<div><dt>{name}</dt><dd class="big">{text(value)}</dd><dd class="more">{text(more)}</dd></div>'
            for name, value, more in rows
        ),
        "</dl>",
    ]


def row(name: str, cells: Iterable[str], kind: str = "") -> str:
    """One line of a table."""
    values = "".join(f"<td>{text(cell)}</td>" for cell in cells)
    return f'<tr{f" class={kind}" if kind else ""}><th scope="row">{text(name)}</th>{values}</tr>'


def table(caption: str, head: Sequence[str], body: Iterable[str], *, ends_in_text: bool = False) -> list[str]:
    """A table that scrolls by itself on a narrow screen, also by keyboard; without a head where no column has a name.

    One whose last column is text begins its rows with a size, which stays in one line.
    """
    sizes = " sizes" if ends_in_text else ""
    kinds = [*([""] * (len(head) - 1)), ' class="text"' if ends_in_text else ""]
    columns = "".join(f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    return [
        f'<div class="scroll{sizes}" tabindex="0" role="region" aria-label="{text(caption)}"><table>',
        f"<caption>{text(caption)}</caption>",
        f"<thead><tr>{columns}</tr></thead>" if any(head) else "",
        "<tbody>",
        *body,
        "</tbody></table></div>",
    ]


def bullets(items: Iterable[str], title: str = "") -> list[str]:
    """A list of markup, with its heading where it has one; nothing where there is no item."""
    lines = [f"<li>{item}</li>" for item in items]
    return [*([f"<h2>{title}</h2>"] if title else []), "<ul>", *lines, "</ul>"] if lines else []


# How the page of a simulation looks and what its script does; the page is whole without the script.

STYLE = """
:root{color-scheme:light dark;--back:#fff;--soft:#f5f7f9;--ink:#1b1f24;--dim:#59636e;--line:#d5dbe1;--hair:#e8ecf0;
--bad:#b3261e;--use:#2f6fd0;--run:#1a8a63;--wait:#c9760c;--pre:#c8372d;--lat:#7a4fc4}
@media (prefers-color-scheme:dark){:root{--back:#0f1318;--soft:#171c23;--ink:#e7ecf2;--dim:#9aa5b1;--line:#39424d;
--hair:#232a33;--bad:#ff8f86;--use:#6ea8fe;--run:#4cc79b;--wait:#f0a94a;--pre:#ff7b72;--lat:#b191f5}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:70rem;padding:3.5rem 1.5rem 3rem;background:var(--back);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.eyebrow{margin:0;color:var(--dim);font-size:.85rem;letter-spacing:.04em}
h1{margin:.5rem 0 1rem;max-width:46rem;font-size:2.15rem;line-height:1.2;letter-spacing:-.015em;font-weight:650;
text-wrap:balance}
h2{margin:4rem 0 .3rem;font-size:1.3rem;letter-spacing:-.005em}h3{margin:0;font-size:1rem;font-weight:600}
p,li,pre,dd,td,h1{overflow-wrap:anywhere}p{max-width:46rem;margin:.4rem 0}.lead{font-size:1.1rem}.dim{color:var(--dim)}
.badge{display:inline-block;padding:.1rem .55rem;border:1px solid var(--line);border-radius:1rem;color:var(--dim);
font-size:.8rem}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);margin:2.5rem 0 0;border-top:1px solid var(--line)}
.tiles div{padding:1.1rem 1rem 1.1rem 0;border-bottom:1px solid var(--line)}
.tiles dt{color:var(--dim);font-size:.85rem}.tiles dd{margin:0}
.tiles .big{font-size:1.65rem;font-weight:600;line-height:1.35;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tiles .more{color:var(--dim);font-size:.85rem}
figure{margin:1.8rem 0 0;break-inside:avoid}figcaption{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;align-items:baseline}
figcaption h3{margin-right:auto}
.key{display:inline-flex;align-items:center;gap:.4rem;color:var(--dim);font-size:.85rem}
.key i{width:.8rem;height:.8rem;border-radius:2px;background:currentColor}
svg{display:block;width:100%;height:auto;overflow:visible;print-color-adjust:exact;-webkit-print-color-adjust:exact}
svg text{fill:var(--ink);font-size:14px}svg .tick{fill:var(--dim);font-size:13px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--hair);fill:none}.axis{stroke:var(--line);fill:none}.frame{stroke:var(--line);fill:var(--soft)}
.limit{stroke:var(--ink);stroke-dasharray:2 4;fill:none}.cursor{stroke:var(--ink);stroke-width:1;opacity:.5;pointer-events:none}
.line{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linejoin:round}.area{fill:currentColor;opacity:.16}
.bars{fill:currentColor}.soft{opacity:.38}.dot{fill:var(--back);stroke:currentColor;stroke-width:2.2}.guide{stroke:currentColor;
stroke-dasharray:2 3;opacity:.55;fill:none}
.use{color:var(--use)}.run{color:var(--run)}.wait{color:var(--wait)}.pre{color:var(--pre)}.lat{color:var(--lat)}
.three,.two{margin:0 0 1.6rem}
.three{display:grid;grid-template-columns:repeat(3,1fr);gap:2rem}.two{display:grid;grid-template-columns:5fr 6fr;gap:2.5rem;
align-items:center}
.pixels{image-rendering:pixelated}
.legend{display:flex;flex-wrap:wrap;gap:.4rem 1.6rem;margin:.9rem 0 0;padding:0;list-style:none;font-size:.9rem}
.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.45rem;border-radius:2px;vertical-align:-.05rem}
.legend .hollow{border:1px solid var(--line);background:var(--soft)!important}
.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid currentColor;outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.92rem}caption{text-align:left;color:var(--dim);padding-bottom:.4rem}
th,td{padding:.4rem .8rem .4rem 0;border-bottom:1px solid var(--hair);text-align:right;font-variant-numeric:tabular-nums}
td:not(.text){white-space:nowrap}
th{font-weight:500}thead th{color:var(--dim);font-size:.85rem;border-color:var(--line);vertical-align:bottom}
th:first-child,td.text{text-align:left}tr.now th,tr.now td{font-weight:650}
details{margin-top:.9rem}summary{cursor:pointer;color:var(--dim);font-size:.9rem}details[open] summary{margin-bottom:.6rem}
pre{white-space:pre-wrap;margin:.8rem 0 0;padding:1rem;border-radius:8px;background:var(--soft);font-size:.88rem}
.columns{columns:2;column-gap:3rem;margin:.8rem 0 0}.columns div{display:flex;justify-content:space-between;gap:1rem;
padding:.3rem 0;border-bottom:1px solid var(--hair);break-inside:avoid;font-size:.92rem}
.columns dt{color:var(--dim)}.columns dd{margin:0;text-align:right;font-variant-numeric:tabular-nums}
footer{margin-top:4rem;padding-top:1rem;border-top:1px solid var(--line);font-size:.85rem}
#tip{position:fixed;z-index:9;pointer-events:none;display:none;padding:.5rem .75rem;border:1px solid var(--line);
border-radius:8px;background:var(--back);box-shadow:0 4px 18px rgb(0 0 0/.16);font-size:.85rem;line-height:1.5;white-space:pre;
font-variant-numeric:tabular-nums}
@media (max-width:46rem){body{padding-top:2rem}h1{font-size:1.6rem}.tiles{grid-template-columns:repeat(2,1fr)}
.three,.two{grid-template-columns:1fr}.columns{columns:1}.wide{overflow-x:auto}.wide svg{min-width:44rem}}
@media print{body{max-width:none;padding:0;font-size:11pt}h2{margin-top:2rem;break-after:avoid}summary,#tip{display:none}
a{color:inherit}}
"""

SCRIPT = """
"use strict";
const all = (selector, from) => Array.from((from || document).querySelectorAll(selector));
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("aria-hidden", "true");
document.body.append(tip);
const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en");
const span = (s) => s >= 3600 ? digits(s / 3600) + " h" : s >= 600 ? digits(s / 60) + " min"
  : s >= 1 ? digits(s) + " s" : digits(s * 1000) + " ms";
const clock = (s) => {
  const whole = Math.floor(s), two = (n) => String(n).padStart(2, "0");
  return (whole >= 3600 ? Math.floor(whole / 3600) + ":" : "") + two(Math.floor(whole / 60) % 60) + ":" + two(whole % 60);
};
const charts = all("svg[data-hover]").map((svg) => {
  const cursor = document.createElementNS(svg.namespaceURI, "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("visibility", "hidden");
  cursor.setAttribute("y1", svg.dataset.top);
  cursor.setAttribute("y2", svg.dataset.floor);
  svg.append(cursor);
  const lines = all("[data-values]", svg).map((line) => ({
    name: line.dataset.name, unit: line.dataset.unit, values: line.dataset.values.split(" ").map(Number)}));
  return {svg, cursor, lines, kind: svg.dataset.hover, left: +svg.dataset.left, end: +svg.dataset.end,
    low: +svg.dataset.low, high: +svg.dataset.high, bin: +svg.dataset.bin};
});
const place = (chart, share) => {
  const x = chart.left + share * (chart.end - chart.left);
  chart.cursor.setAttribute("x1", x);
  chart.cursor.setAttribute("x2", x);
  chart.cursor.setAttribute("visibility", "visible");
};
const hide = () => {
  tip.style.display = "none";
  charts.forEach((chart) => chart.cursor.setAttribute("visibility", "hidden"));
};
const overTime = (share) => {
  const timed = charts.filter((chart) => chart.kind === "time");
  const at = timed[0].low + share * (timed[0].high - timed[0].low);
  const said = [timed[0].high - timed[0].low < 60 ? span(at) : clock(at)];
  timed.forEach((chart) => {
    place(chart, share);
    chart.lines.forEach((line) => {
      const value = line.values[Math.min(line.values.length - 1, Math.floor((at - chart.low) / chart.bin))];
      said.push(line.name + "  " + value.toLocaleString("en") + line.unit);
    });
  });
  return said.join("\\n");
};
const shareWithin = (chart, share) => {
  place(chart, share);
  const at = chart.low * Math.pow(chart.high / chart.low, share), values = chart.lines[0].values;
  const below = values.filter((value) => value <= at).length;
  return (100 * below / values.length).toFixed(1) + " % within " + span(at);
};
charts.forEach((chart) => {
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.svg.viewBox.baseVal.width;
    const share = (x - chart.left) / (chart.end - chart.left);
    if (share < 0 || share > 1) { hide(); return; }
    tip.textContent = chart.kind === "time" ? overTime(share) : shareWithin(chart, share);
    tip.style.display = "block";
    const right = event.clientX + 18 + tip.offsetWidth < window.innerWidth;
    tip.style.left = (right ? event.clientX + 18 : event.clientX - 18 - tip.offsetWidth) + "px";
    tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
  });
  chart.svg.addEventListener("pointerleave", hide);
});
"""


def policy() -> str:
    """What the browser may do: nothing from anywhere, our own styles, pictures that are in the page, and this one script."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


Tick = tuple[float, str]
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_LOG_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), tuple(n / 4 for n in range(4, 40)))


class Frame(NamedTuple):
    """Where the drawing lies in its SVG, in SVG units."""

    width: int = 1000
    height: int = 240
    left: int = 64
    right: int = 4
    top: int = 16
    bottom: int = 34

    @property
    def end(self) -> int:
        """The right edge of the drawing."""
        return self.width - self.right

    @property
    def floor(self) -> int:
        """The lower edge of the drawing."""
        return self.height - self.bottom

    def across(self, share: float) -> float:
        """From 0 at the left to 1 at the right."""
        return self.left + share * (self.end - self.left)

    def up(self, share: float) -> float:
        """From 0 at the floor to 1 at the top."""
        return self.floor - share * (self.floor - self.top)


class Line(NamedTuple):
    """One value over time; `kind` is its colour, an area is filled to the floor."""

    name: str
    values: Floats
    kind: str
    unit: str = ""
    is_area: bool = False


class Span(NamedTuple):
    """The time that a chart shows, in seconds."""

    start: float
    end: float

    def share(self, at: float) -> float:
        """Where a moment lies between the two ends."""
        return (at - self.start) / max(1e-9, self.end - self.start)


def number(value: float) -> str:
    """A coordinate, as short as it can be."""
    return f"{round(value, 1) + 0.0:g}"  # + 0.0: never -0


def round_ticks(top: float, about: int = 4) -> list[float]:
    """Round values from 0 to at least `top`, about so many."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= rough * 0.999)
    return [step * n for n in range(math.ceil(top / step - 1e-9) + 1)]


def time_ticks(span: Span, about: int = 8) -> list[Tick]:
    """Round moments of a span: 0 s, 30 s, 1 min, 1 h 30 min."""
    length = max(1e-9, span.end - span.start)
    rough = length / about
    if rough < 1:
        step = next(t for t in (10.0 ** math.floor(math.log10(rough)) * m for m in (1, 2, 5, 10)) if t >= rough * 0.999)
    else:
        step = next((float(t) for t in _TIME_STEPS if t >= rough), math.ceil(rough / _DAY) * float(_DAY))
    # A moment just outside counts as inside: the span's ends are sums of many small steps.
    near = min(step, length) * 1e-9
    moments = (n * step for n in range(math.floor(span.start / step), math.ceil(span.end / step) + 1))
    return [(moment, moment_text(moment)) for moment in moments if span.start - near <= moment <= span.end + near]


def moment_text(moment: float) -> str:
    """A moment of the run, short: 0.25 s, 45 s, 2 min, 2:30 min, 1:05 h, 3 d."""
    if moment < _MINUTE:
        return f"{round(moment, 6):g} s"
    whole = round(moment)
    if whole % _DAY == 0:
        return f"{whole // _DAY} d"
    if whole < _HOUR:
        minutes, rest = divmod(whole, _MINUTE)
        return f"{minutes}:{rest:02} min" if rest else f"{minutes} min"
    hours, rest = divmod(whole // _MINUTE, _MINUTE)
    return f"{hours}:{rest:02} h" if rest else f"{hours} h"


def log_ticks(low: float, high: float) -> list[float]:
    """Round values between two on a log axis: the coarsest set that has three of them, thinned where there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for times in _LOG_STEPS:
        found = [value for value in (m * 10.0**d for d in decades for m in times) if low <= value <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 5)] if found else []


def picture(name: str, title: str, says: str, frame: Frame, inner: Iterable[str], attributes: str = "") -> str:
    """An SVG that says what it shows to those who cannot see it."""
    box = f'viewBox="0 0 {frame.width} {frame.height}"'
    return "\n".join(
        [
            f'<svg {box} role="img" aria-labelledby="{name}-title {name}-says"{attributes}>',
            f'<title id="{name}-title">{text(title)}</title>',
            f'<desc id="{name}-says">{text(says)}</desc>',
            *inner,
            "</svg>",
        ]
    )


def left_axis(frame: Frame, ticks: Sequence[Tick], top: float) -> list[str]:
    """Hairlines across the drawing with their values at the left; nothing for a drawing without height."""
    lines = []
    for value, label in ticks:
        y = number(frame.up(value / top))
        lines.append(f'<path class="grid" d="M{frame.left} {y}H{frame.end}"/>')
        lines.append(f'<text class="tick" x="{frame.left - 10}" y="{y}" dy=".35em" text-anchor="end">{text(label)}</text>')
    return lines


def bottom_axis(frame: Frame, ticks: Sequence[Tick], place: Callable[[float], float]) -> list[str]:
    """Marks below the drawing; `place` gives each value its share of the width."""
    lines = [f'<path class="axis" d="M{frame.left} {frame.floor}H{frame.end}"/>']
    for value, label in ticks:
        x = frame.across(place(value))
        anchor = "end" if x > frame.end - 12 else "middle"
        lines.append(f'<path class="axis" d="M{number(x)} {frame.floor}v5"/>')
        lines.append(f'<text class="tick" x="{number(x)}" y="{frame.floor + 21}" text-anchor="{anchor}">{text(label)}</text>')
    return lines


def line_over_time(line: Line, span: Span, bin_s: float, top: float, frame: Frame) -> list[str]:
    """The line through the middle of its bins, with its values in reach of the page's script."""
    middles = span.start + (np.arange(len(line.values)) + 0.5) * bin_s
    middles = np.minimum(middles, span.end)
    points = [
        f"{number(frame.across(span.share(float(at))))} {number(frame.up(float(value) / top))}"
        for at, value in zip(middles, line.values, strict=True)
    ]
    if not points:
        return []
    values = " ".join(f"{value:.1f}".removesuffix(".0") for value in line.values)
    known = f'data-name="{text(line.name)}" data-unit="{text(line.unit)}" data-values="{values}"'
    drawn = "M" + "L".join(points)
    lines = []
    if line.is_area:
        first, last = points[0].split()[0], points[-1].split()[0]
        lines.append(f'<path class="area {line.kind}" d="{drawn}L{last} {frame.floor}L{first} {frame.floor}Z"/>')
    return [*lines, f'<path class="line {line.kind}" d="{drawn}" {known}/>']


def bars_over_time(name: str, counts: Floats, span: Span, bin_s: float, top: float, frame: Frame, kind: str) -> list[str]:
    """A bar for each bin in which something happened."""
    values = " ".join(f"{value:g}" for value in counts)
    known = f'data-name="{text(name)}" data-unit="" data-values="{values}"'
    width = max(1.0, frame.across(span.share(span.start + bin_s)) - frame.left - 1)
    pieces = []
    for place in np.flatnonzero(counts):
        x = frame.across(span.share(span.start + float(place) * bin_s))
        wide = min(width, frame.end - x)
        y = frame.up(float(counts[place]) / top)
        pieces.append(f"M{number(x)} {frame.floor}V{number(y)}h{number(wide)}V{frame.floor}Z")
    return [f'<path class="bars {kind}" d="{"".join(pieces) or "M0 0"}" {known}/>']


def merged(values: Floats, times: int) -> Floats:
    """Sums of so many neighbours each."""
    whole = np.zeros(-(-len(values) // times) * times)
    whole[: len(values)] = values
    return np.asarray(whole.reshape(-1, times).sum(axis=1), dtype=np.float64)
