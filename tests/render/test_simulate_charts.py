"""The parts of the charts: round axes, true picture bytes, and shares that survive being drawn small."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.render.charts import Frame, Span, log_ticks, merged, moment_text, number, round_ticks, time_ticks
from plimsoll.render.simulate_html import MOST_COLUMNS, MOST_ROWS, STATES, Drawing, draw
from plimsoll.simulate.replay import CACHED, FREE, HELD, PARTLY_FILLED, SHARED, BlockMap


def _map(moments: int, blocks: int, seed: int = 1) -> BlockMap:
    state = np.random.default_rng(seed).integers(0, 5, (moments, blocks), dtype=np.uint8)
    return BlockMap(np.arange(moments, dtype=np.int64) * 10**9, state)


def _pixels(drawing: Drawing) -> np.typing.NDArray[np.uint8]:
    """The picture read back, every checksum checked."""
    data = base64.b64decode(drawing.png.removeprefix("data:image/png;base64,"))
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


@given(st.floats(1e-6, 1e12))
def test_round_ticks_reach_the_top(top: float) -> None:
    """The last tick is at or above the highest value, and there are few of them."""
    ticks = round_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top * 0.999999
    assert 2 <= len(ticks) <= 8


@given(st.floats(0, 1e7), st.floats(1e-3, 1e8))
def test_time_ticks_lie_in_the_span(start: float, length: float) -> None:
    """Never none of use, never a crowd."""
    span = Span(start, start + length)
    ticks = time_ticks(span)
    assert len(ticks) <= 12
    near = 1e-3 + 1e-8 * length
    assert all(start - near <= moment <= start + length + near for moment, _ in ticks)


@given(st.floats(1e-6, 1e3), st.floats(1.9, 1e7))
def test_log_ticks_lie_between_their_ends(low: float, times: float) -> None:
    """At least two of them and no crowd, however wide the axis."""
    ticks = log_ticks(low, low * times)
    assert 2 <= len(ticks) <= 5
    assert all(low <= tick <= low * times for tick in ticks)


@pytest.mark.parametrize(
    ("moment", "words"),
    [(0, "0 s"), (0.25, "0.25 s"), (45, "45 s"), (120, "2 min"), (150, "2:30 min"), (3900, "1:05 h"), (7200, "2 h"),
     (172800, "2 d")],
)  # fmt: skip
def test_moments_are_short(moment: float, words: str) -> None:
    """As a clock would say it."""
    assert moment_text(moment) == words


def test_coordinates_are_short() -> None:
    """One decimal, no trailing zero, no minus zero."""
    assert [number(value) for value in (1.0, 2.34, -0.04, 999.96)] == ["1", "2.3", "0", "1000"]


def test_a_frame_maps_shares_to_its_edges() -> None:
    """0 and 1 are the corners of the drawing."""
    frame = Frame(100, 50, 10, 5, 4, 6)
    assert (frame.across(0), frame.across(1), frame.up(0), frame.up(1)) == (10, 95, 44, 4)


def test_merged_loses_nothing() -> None:
    """The last group may be short."""
    assert merged(np.arange(5.0), 2).tolist() == [1, 5, 4]


def test_the_picture_is_the_map() -> None:
    """A small map is drawn whole: time to the right, the first block at the bottom, the null block left out."""
    blocks = _map(7, 12)
    drawing = draw(blocks)
    assert drawing is not None
    assert (drawing.columns, drawing.rows, drawing.every) == (7, 11, 1)
    assert np.array_equal(_pixels(drawing), blocks.state[:, 1:].T[::-1])


def test_a_large_map_is_drawn_small_and_true() -> None:
    """At most so many pixels; of the blocks every n-th; shares are those of all blocks."""
    blocks = _map(1000, 5001)
    drawing = draw(blocks)
    assert drawing is not None
    assert drawing.columns <= MOST_COLUMNS
    assert drawing.rows <= MOST_ROWS
    assert drawing.every == 10
    wanted = [float((blocks.state[:, 1:] == state.code).mean()) for state in STATES]
    assert drawing.shares == pytest.approx(wanted)
    drawn = [float((_pixels(drawing) == state.code).mean()) for state in STATES]
    assert drawn == pytest.approx(wanted, abs=0.01)


def test_columns_are_spaced_by_time() -> None:
    """A moment that lasted longer is drawn wider."""
    state = np.zeros((3, 2), dtype=np.uint8)
    state[:, 1] = [HELD, CACHED, SHARED]
    drawing = draw(BlockMap(np.array([0, 90, 100], dtype=np.int64), state))
    assert drawing is not None
    assert _pixels(drawing).tolist() == [[HELD, HELD, SHARED]]


@pytest.mark.parametrize("shape", [(0, 10), (5, 1), (0, 0)])
def test_nothing_to_draw_is_no_picture(shape: tuple[int, int]) -> None:
    """Without a moment or a block there is none."""
    assert draw(BlockMap(np.zeros(shape[0], dtype=np.int64), np.zeros(shape, dtype=np.uint8))) is None


def test_every_state_has_its_own_colour() -> None:
    """Five states, five names, five colours, in the order of their codes."""
    assert [state.code for state in STATES] == [FREE, CACHED, HELD, SHARED, PARTLY_FILLED]
    assert len({state.colour for state in STATES}) == len({state.name for state in STATES}) == 5
