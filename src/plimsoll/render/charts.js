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
  return said.join("\n");
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
