"""The parts of the charts: round axes, true picture bytes, and shares that survive being drawn small."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import zlib

import numpy as np
import pytest
from playwright._impl._driver import compute_driver_executable

from plimsoll.render.html import TEMPLATES
from plimsoll.render.simulate_html import MOST_COLUMNS, MOST_ROWS, STATES, Drawing, draw, moment_text
from plimsoll.simulate.replay import CACHED, FREE, HELD, PARTLY_FILLED, SHARED, BlockMap


def _map(moments: int, blocks: int, seed: int = 1) -> BlockMap:
    state = np.random.default_rng(seed).integers(0, 5, (moments, blocks), dtype=np.uint8)
    return BlockMap(np.arange(moments, dtype=np.int64) * 10**9, state)


def _pixels(drawing: Drawing) -> np.typing.NDArray[np.uint8]:
    """The picture read back, every checksum checked."""
    data = base64.b64decode(str(drawing.drawn["image"]).removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + size
    assert list(chunks) == [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"]
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


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


def test_the_picture_is_the_map() -> None:
    """Time to the right, wider where a moment lasted longer, the first block at the bottom, the null block left out."""
    blocks = _map(7, 12)
    drawing = draw(blocks)
    assert drawing is not None
    assert (drawing.pool, drawing.every) == (11, 1)
    assert np.array_equal(_pixels(drawing), blocks.state[:, 1:].T[::-1])
    state = np.zeros((3, 2), dtype=np.uint8)
    state[:, 1] = [HELD, CACHED, SHARED]
    drawing = draw(BlockMap(np.array([0, 90, 100], dtype=np.int64), state))
    assert drawing is not None
    assert _pixels(drawing).tolist() == [[HELD, HELD, SHARED]]


def test_a_large_map_is_drawn_small_and_true() -> None:
    """At most so many pixels; of the blocks every n-th; shares are those of all blocks."""
    blocks = _map(1000, 5001)
    drawing = draw(blocks)
    assert drawing is not None
    pixels = _pixels(drawing)
    assert pixels.shape <= (MOST_ROWS, MOST_COLUMNS)
    assert drawing.every == 10
    wanted = [float((blocks.state[:, 1:] == code).mean()) for code in range(len(STATES))]
    assert drawing.shares == pytest.approx(wanted)
    drawn = [float((pixels == code).mean()) for code in range(len(STATES))]
    assert drawn == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize("shape", [(0, 10), (5, 1), (0, 0)])
def test_nothing_to_draw_is_no_picture(shape: tuple[int, int]) -> None:
    """Without a moment or a block there is none."""
    assert draw(BlockMap(np.zeros(shape[0], dtype=np.int64), np.zeros(shape, dtype=np.uint8))) is None


def test_every_state_has_its_own_colour() -> None:
    """Five states, five names, five colours, in the order of their codes."""
    by_code = {code: STATES[code][0] for code in (FREE, CACHED, HELD, SHARED, PARTLY_FILLED)}
    assert list(by_code.values()) == ["free", "cached", "held", "shared", "partly filled"]
    assert len({colour for _, _, colour in STATES}) == 5
