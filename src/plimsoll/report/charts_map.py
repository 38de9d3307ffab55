"""The block map as a small picture: a PNG of five colours, written by hand because it is thirty lines."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plimsoll.simulate.result import CACHED, FREE, HELD, PARTLY_FILLED, SHARED, BlockMap

MOST_COLUMNS, MOST_ROWS = 900, 512
_CLEAR = 0
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE_KIND = 3

Pixels = npt.NDArray[np.uint8]


class State(NamedTuple):
    """How one state of a block is named and coloured."""

    code: int
    name: str
    means: str
    colour: str


STATES = (
    State(FREE, "free", "holds nothing", "#8c959f"),
    State(CACHED, "cached", "free, but the prefix cache can still use it", "#a9c9f2"),
    State(HELD, "held", "by one request", "#2f6fd0"),
    State(SHARED, "shared", "by several requests", "#8a55cf"),
    State(PARTLY_FILLED, "partly filled", "held and not full: its empty slots are the waste", "#e69a2e"),
)


class Drawing(NamedTuple):
    """The picture, and by what rule it was made smaller."""

    png: str
    """As a data URI."""
    columns: int
    rows: int
    every: int
    """One block in so many is drawn."""
    shares: tuple[float, ...]
    """Of each state, over all blocks and moments, drawn or not."""


def draw(blocks: BlockMap) -> Drawing | None:
    """Time from left to right, blocks from bottom to top, without the null block; None where there is nothing to draw.

    Taking every n-th block keeps the shares of the states true, which the most common state of n neighbours would not.
    """
    pool = blocks.state[:, 1:]
    if pool.size == 0:
        return None
    columns = min(MOST_COLUMNS, len(pool))
    every = -(-pool.shape[1] // MOST_ROWS)
    moments = np.linspace(int(blocks.at_ns[0]), int(blocks.at_ns[-1]), columns)
    shown = np.clip(np.searchsorted(blocks.at_ns, moments, side="right") - 1, 0, len(pool) - 1)
    pixels = np.ascontiguousarray(pool[shown, ::every].T[::-1])
    counts = np.bincount(pool.ravel(), minlength=len(STATES))[: len(STATES)]
    data = base64.b64encode(_png(pixels)).decode("ascii")
    return Drawing(
        f"data:image/png;base64,{data}", columns, pixels.shape[0], every, tuple(float(share) for share in counts / pool.size)
    )


def _png(pixels: Pixels) -> bytes:
    """An indexed picture; what is free lets the page shine through, so that it suits light and dark."""
    rows, columns = pixels.shape
    palette = b"".join(bytes.fromhex(state.colour[1:]) for state in STATES)
    seen = bytes(_CLEAR if state.code == FREE else 255 for state in STATES)
    with_filter = np.zeros((rows, columns + 1), dtype=np.uint8)  # each line begins with its filter: 0, as it is
    with_filter[:, 1:] = pixels
    return _SIGNATURE + b"".join(
        (
            _chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, _PALETTE_KIND, 0, 0, 0)),
            _chunk(b"PLTE", palette),
            _chunk(b"tRNS", seen),
            _chunk(b"IDAT", zlib.compress(with_filter.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
