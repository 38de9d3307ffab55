"""How the page of a simulation looks and what its script does; the page is whole without the script."""

from __future__ import annotations

import base64
import hashlib

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
