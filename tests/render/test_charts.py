"""The parts of the charts: round axes, lines with holes, and moments in words."""

from __future__ import annotations

import json
import subprocess

from playwright._impl._driver import compute_driver_executable

from plimsoll.render.html import TEMPLATES
from plimsoll.render.simulate_html import moment_text

CHECKS = """
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
"""


def test_the_chart_script_keeps_its_scales() -> None:
    """Ticks are round, few and inside; 0 and 1 are the corners of the plane; what is unknown is a hole in a line."""
    node, *_ = compute_driver_executable()
    script = (TEMPLATES / "plot.js").read_text(encoding="utf-8") + CHECKS
    done = subprocess.run([node, "--input-type=module", "-e", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "wrong": [],
        "corners": [10, 95, 44, 4, 4],
        "line": "M10.0 44.0L52.5 4.0M95.0 4.0",
        "moments": ["0 s", "0.25 s", "45 s", "2 min", "2:30 min", "1:05 h", "2 h", "2 d"],
        "spans": ["0.05 ms", "5 ms", "20 s", "12.5 min", "1.2 h"],
        "none": [0, 1],
    }


def test_moments_are_short() -> None:
    """As a clock would say it."""
    moments = (0, 0.25, 45, 120, 150, 3900, 7200, 172800)
    assert [*map(moment_text, moments)] == ["0 s", "0.25 s", "45 s", "2 min", "2:30 min", "1:05 h", "2 h", "2 d"]
