// Draws every chart of a report from its data-chart. What it holds is made by render/simulate_html.py and render/html.py:
// {x: [low, high] | names, scale: "time" | "log" | "names", step, top, unit, marks, dots, limit}.
const text = (value, unit) => value.toLocaleString("en") + unit;

function show(svg) {
  const chart = JSON.parse(svg.dataset.chart);
  const { width: wide, height: high } = svg.viewBox.baseVal;
  const most = chart.top || Math.max(chart.least || 0, ...chart.marks.flatMap((mark) => mark.values));
  const ticks = roundTicks(most).filter((tick) => !chart.whole || Number.isInteger(tick));
  const range = chart.names ? [0, chart.names.length] : chart.x;
  const on = plane({ wide, high, left: 64, right: 8, top: 30, bottom: 34 }, range, ticks.at(-1),
    chart.scale === "log" ? Math.log : undefined);
  const across = chart.names ? chart.names.map((name, place) => [place + 0.5, name])
    : chart.scale === "log" ? logTicks(...range).map((one) => [one, spanText(one)]) : timeTicks(...range).map((one) => [one, momentText(one)]);
  svg.append(...axes(on, across, ticks.map((tick) => [tick, text(tick, chart.unit)])));
  for (const mark of chart.marks) svg.append(...(mark.labels || mark.bars ? bars : line)(on, chart, mark, range[0]));
  if (chart.limit) {
    svg.append(draw("path", { class: "limit", d: `M${on.left} ${on.y(most)}H${on.end}` }),
      draw("text", { class: "tick", x: on.end, y: on.y(most) - 9, "text-anchor": "end" }, chart.limit));
  }
  for (const dot of chart.dots || []) svg.append(...label(on, chart, dot));
  const cursor = draw("line", { class: "cursor", y1: on.top, y2: on.floor, visibility: "hidden" });
  svg.append(cursor);
  return { svg, chart, on, range, cursor };
}

function line(on, chart, mark, first) {
  const points = chart.scale === "log" ? steps(mark.values, chart.x)
    : mark.values.map((value, place) => [Math.min(first + (place + 0.5) * chart.step, chart.names ? Infinity : chart.x[1]), value]);
  if (!points.length) return [];
  const found = [draw("path", { class: `line ${mark.colour}`, d: path(on, points) })];
  if (mark.area) {
    const closed = `${path(on, points)}V${on.floor}H${on.x(points[0][0])}Z`;
    found.unshift(draw("path", { class: `area ${mark.colour}`, d: closed }));
  }
  return found;
}

// The share of the values that are no larger, in percent.
function steps(values, [low, high]) {
  const points = values.flatMap((value, place) => [[value, (100 * place) / values.length], [value, (100 * (place + 1)) / values.length]]);
  return [[low, 0], ...points, [high, 100]].map(([at, share]) => [Math.min(high, Math.max(low, at)), share]);
}

function bars(on, chart, mark, first) {
  const gap = mark.labels ? 0.21 : 0.04;
  return mark.values.flatMap((value, place) => {
    if (!value) return [];
    const [left, right] = [gap, 1 - gap].map((share) => on.x(first + (place + share) * chart.step));
    const found = [draw("rect", { class: `bars ${mark.colour}${mark.now !== undefined && mark.now !== place ? " soft" : ""}`,
      x: left, y: on.y(value), width: Math.max(1, Math.min(right, on.end) - left), height: on.floor - on.y(value) })];
    if (mark.labels) found.push(draw("text", { x: (left + right) / 2, y: on.y(value) - 7, "text-anchor": "middle" }, mark.labels[place]));
    return found;
  });
}

// [x, y, words, colour]: above its dot between names, else beside it with a line down to the axis.
function label(on, chart, [at, value, words, colour]) {
  const [x, y] = [on.x(at), on.y(value)];
  const dot = draw("circle", { class: `dot ${colour}`, cx: x, cy: y, r: 4 });
  if (chart.names) return [dot, draw("text", { x, y: y - 10, "text-anchor": "middle" }, words)];
  const isLeft = x - on.left < 9 * words.length;
  return [draw("path", { class: `guide ${colour}`, d: `M${x} ${y}V${on.floor}` }), dot,
    draw("text", { x: x + (isLeft ? 9 : -9), y: y + (value > 95 ? -9 : 4), "text-anchor": isLeft ? "start" : "end" }, words)];
}

const charts = [...document.querySelectorAll("svg[data-chart]")].map(show);
const timed = charts.filter(({ chart }) => chart.scale === "time" && chart.marks.length);
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("aria-hidden", "true");
document.body.append(tip);

function hide() {
  tip.style.display = "none";
  for (const { cursor } of charts) cursor.setAttribute("visibility", "hidden");
}

function tell(one, at) {
  if (one.chart.scale === "log") {
    const { values } = one.chart.marks[0];
    return [`${((100 * values.filter((value) => value <= at).length) / values.length).toFixed(1)} % within ${spanText(at)}`];
  }
  return [momentText(Number(at.toPrecision(4))), ...timed.flatMap(({ chart }) => chart.marks.map((mark) => {
    const place = Math.min(mark.values.length - 1, Math.floor((at - chart.x[0]) / chart.step));
    return `${mark.name}  ${text(mark.values[place], chart.unit)}`;
  }))];
}

for (const one of charts.filter(({ chart }) => chart.marks.length && !chart.names)) {
  one.svg.addEventListener("pointermove", (event) => {
    const box = one.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * one.on.wide;
    const share = (x - one.on.left) / (one.on.end - one.on.left);
    if (share < 0 || share > 1) { hide(); return; }
    const [low, high] = one.range;
    tip.textContent = tell(one, one.chart.scale === "log" ? low * (high / low) ** share : low + share * (high - low)).join("\n");
    for (const { cursor } of one.chart.scale === "log" ? [one] : timed) {
      for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) cursor.setAttribute(name, value);
    }
    tip.style.display = "block";
    const isRoom = event.clientX + 18 + tip.offsetWidth < innerWidth;
    tip.style.left = `${isRoom ? event.clientX + 18 : event.clientX - 18 - tip.offsetWidth}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  one.svg.addEventListener("pointerleave", hide);
}
