const wrong = [];
const check = (says, ...about) => { if (!says) wrong.push(about); };
const sizes = Array.from({ length: 600 }, (_, place) => 10 ** (place / 33 - 6) * (1 + (place % 7) / 9));
for (const size of sizes) {
  const ticks = roundTicks(size);
  check(ticks[0] === 0 && ticks.at(-1) >= size * 0.999999 && ticks.length >= 2 && ticks.length <= 8, "round", size, ticks);
  for (const start of [0, 0.3, 7, 5e3, 1e7]) {
    const moments = timeTicks(start, start + size), near = 1e-3 + 1e-8 * size;
    const isInside = moments.every((at) => at >= start - near && at <= start + size + near);
    check(moments.length <= 12 && isInside, "time", start, size, moments);
  }
  for (const times of [4, 5, 30, 1e3, 1e7]) {
    const marks = logTicks(size, size * times);
    const isInside = marks.every((at) => at >= size && at <= size * times);
    check(marks.length >= 2 && marks.length <= 5 && isInside, "log", size, times, marks);
  }
}
const on = plane({ wide: 100, high: 50, left: 10, right: 5, top: 4, bottom: 6 }, [2, 4], 8);
const corners = [on.x(2), on.x(4), on.y(0), on.y(8), on.y(9)];
const line = path(on, [[2, 0], [3, 8], [3, null], [4, 8]]);
const moments = [0, 0.25, 45, 120, 150, 3900, 7200, 172800].map(momentText);
const spans = [5e-5, 0.005, 20, 750, 4320].map(spanText);
console.log(JSON.stringify({ wrong: wrong.slice(0, 5), corners, line, moments, spans, none: roundTicks(0) }));
