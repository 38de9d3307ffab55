"""Which parts of a text are kept: a small one whole; of a huge one the end, the start, and what is telling in between.

A plain file is read tail first: if time runs out in its middle, the end and the start are there, the end without numbers.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.sources.text_bytes import (
    SAMPLE_BYTES,
    Budget,
    blocks_of_descriptor,
    checked,
    is_plain,
    is_text,
    opened,
    unpacked,
)
from plimsoll.sources.text_middle import BLOCK_BYTES, Chunk, Middle

WHOLE_BYTES, WHOLE_LINES = 8 << 20, 120_000
TAIL_BYTES, TAIL_LINES = 4 << 20, 60_000
PROBES = 16  # places of a file that are looked at to tell whether it is text


class Kept(NamedTuple):
    """What is kept, in order."""

    chunks: list[Chunk]
    size_bytes: int | None  # as the text lies there, packed or not
    was_short: bool  # time ran out, and the rest was not read


def kept_of_file(path: str, deadline: float | None, clock: Callable[[], float]) -> Kept:
    """What is kept of this file."""
    budget = Budget(deadline, clock)
    descriptor, what = opened(path)
    try:
        is_file = stat.S_ISREG(what.st_mode)
        if is_file and what.st_size > WHOLE_BYTES and is_plain(os.pread(descriptor, 512, 0)):
            return Kept(_kept_of_huge(path, descriptor, what.st_size, budget), what.st_size, was_short=False)
        blocks = blocks_of_descriptor(descriptor, budget)
        chunks = _kept(checked(path, unpacked(path, blocks), budget))
        return Kept(chunks, what.st_size if is_file else None, budget.was_short)
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)


def _kept(blocks: Iterator[bytes]) -> list[Chunk]:
    """All of it while it is small; from then on a window at its end, and the middle sifted."""
    held: deque[bytes] = deque()
    size = lines = 0
    middle: Middle | None = None
    for block in blocks:
        held.append(block)
        size += len(block)
        lines += block.count(b"\n")
        if middle is None and (size > WHOLE_BYTES or lines > WHOLE_LINES):
            middle = Middle()
        while middle is not None and size - len(held[0]) >= TAIL_BYTES:
            size -= len(held[0])
            middle.feed(held.popleft())
    data = b"".join(held)
    if middle is None:
        return [Chunk(1, data)] if data else []
    before, tail = _split(data)
    middle.feed(before)
    return [*middle.chunks(), Chunk(middle.newlines + 1, tail)]


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The tail that is kept whole, beginning with a line where there is one, and what comes before it."""
    cut = max(0, len(data) - TAIL_BYTES)
    if cut:
        cut = data.find(b"\n", cut) + 1 or cut
    if data.count(b"\n", cut) > TAIL_LINES:
        at = len(data) - 1
        for _ in range(TAIL_LINES):
            at = data.rfind(b"\n", 0, at)
        cut = at + 1
    return data[:cut], data[cut:]


def _kept_of_huge(path: str, descriptor: int, size: int, budget: Budget) -> list[Chunk]:
    if not any(is_text(os.pread(descriptor, SAMPLE_BYTES, at)) for at in _probes(descriptor, size)):
        raise BadInput(f"{path}: not text")
    begin = size - TAIL_BYTES
    before, tail = _split(os.pread(descriptor, TAIL_BYTES + 1, begin - 1)) if begin > 0 else (b"", b"")
    end = begin - 1 + len(before)
    middle = Middle()
    at = 0
    while at < end and not budget.is_over():
        at = _next_data(descriptor, at)
        block = os.pread(descriptor, min(BLOCK_BYTES, end - at), at) if at < end else b""
        if not block:
            break
        middle.feed(block)
        at += len(block)
    return [*middle.chunks(), Chunk(None if budget.was_short else middle.newlines + 1, tail)]


def _next_data(descriptor: int, at: int) -> int:
    """The next place at or after this one that is no hole; a hole holds neither text nor line ends."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA) if hasattr(os, "SEEK_DATA") else at
    except OSError as problem:
        import errno

        return 1 << 62 if problem.errno == errno.ENXIO else at


def _probes(descriptor: int, size: int) -> Iterator[int]:
    """Places to look at: the end, the first data, and evenly between."""
    yield max(0, size - SAMPLE_BYTES)
    for part in range(PROBES):
        at = _next_data(descriptor, size * part // PROBES)
        if at < size:
            yield at
