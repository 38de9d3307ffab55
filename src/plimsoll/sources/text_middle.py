"""Sifts the middle of a huge text: what stands around a telling word is kept, the rest is only counted.

Of each word the first few and the last few places are kept, with the lines around them, and of the periodic lines an even
sample. Everything is bounded: a log of nothing but errors costs no more than one with none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

BLOCK_BYTES = 1 << 20
HEAD_BYTES, HEAD_LINES = 2 << 20, 30_000
LINES_BEFORE, BYTES_BEFORE = 120, 48 << 10
LINES_AFTER, BYTES_AFTER = 60, 24 << 10
FIRST_PLACES, LAST_PLACES = 4, 4  # kept of each word; of the last ones, one a block
SAMPLED_LINES, SAMPLED_BYTES = 2_000, 1 << 10

PERIODIC = b"Avg prompt throughput"
TELLING: tuple[bytes, ...] = (
    b"Traceback (most",
    b"ERROR",
    b"CRITICAL",
    b"out of memory",
    b"Out of memory",
    b"OutOfMemory",
    b"LLM engine (v",
    b"API server version",
    b"non-default args",
    b"Available KV cache memory",
    b"died unexpectedly",
    b"Killed",
    b"preempted by",
    b"[shutdown]",
    b"SIGTERM",
    b"Segmentation fault",
    b"NCCL WARN",
    b"NVRM: Xid",
    b"plimsoll: survive: ",
)


class Chunk(NamedTuple):
    """Lines that follow each other, and the number of the first; None where it cannot be known."""

    first: int | None
    data: bytes


class _Region(NamedTuple):
    start: int  # in the whole text
    first: int  # the number of its first line
    data: bytes


class _Span(NamedTuple):
    start: int  # in the buffer
    end: int


class Middle:
    """Takes the text block by block, in order, from its first byte."""

    def __init__(self) -> None:
        self._head: list[bytes] = []
        self._head_is_full = False
        self._buffer = bytearray()
        self._base = 0  # where the buffer begins in the whole text
        self._base_lines = 0  # newlines before the buffer
        self._searched = 0  # everything before this place was looked through
        self._left = dict.fromkeys(TELLING, FIRST_PLACES)
        self._firsts: list[_Region] = []
        self._lasts: dict[bytes, deque[_Region]] = {word: deque(maxlen=LAST_PLACES) for word in TELLING}
        self._samples: list[_Region] = []
        self._stride = 0
        self._next_sample = 0

    def feed(self, block: bytes) -> None:
        """Take the next bytes."""
        self._buffer += block if self._head_is_full else self._fill_head(block)
        if len(self._buffer) >= BLOCK_BYTES + BYTES_BEFORE + BYTES_AFTER:
            self._search(len(self._buffer) - BYTES_AFTER)

    @property
    def newlines(self) -> int:
        """How many line ends there were in all that was fed."""
        return self._base_lines + self._buffer.count(b"\n")

    def _fill_head(self, block: bytes) -> bytes:
        """Keep the start whole; returns what is no longer part of it."""
        lines = block.count(b"\n")
        if len(block) <= HEAD_BYTES - self._base and self._base_lines + lines <= HEAD_LINES:
            self._head.append(block)
            self._base += len(block)
            self._base_lines += lines
            return b""
        self._head_is_full = True
        data = b"".join([*self._head, block])
        cut = data.rfind(b"\n", 0, HEAD_BYTES) + 1 or min(HEAD_BYTES, len(data))
        if data.count(b"\n", 0, cut) > HEAD_LINES:
            cut = 0
            for _ in range(HEAD_LINES):
                cut = data.find(b"\n", cut) + 1
        self._head = [data[:cut]]
        self._base = self._searched = self._next_sample = cut
        self._base_lines = data.count(b"\n", 0, cut)
        return data[cut:]

    def chunks(self) -> list[Chunk]:
        """All that is kept, in order; nothing may be fed after this."""
        self._search(len(self._buffer))
        kept = {region.start: region for region in self._samples}
        for region in [*self._firsts, *(region for some in self._lasts.values() for region in some)]:
            if region.start not in kept or len(kept[region.start].data) < len(region.data):
                kept[region.start] = region
        found = [Chunk(1, b"".join(self._head))] if self._head else []
        reached = self._base_of_head()
        for start in sorted(kept):
            region = kept[start]
            skip = max(0, reached - start)
            if skip >= len(region.data):
                continue
            found.append(Chunk(region.first + region.data.count(b"\n", 0, skip), region.data[skip:]))
            reached = start + len(region.data)
        return found

    def _base_of_head(self) -> int:
        return sum(map(len, self._head))

    def _search(self, high: int) -> None:
        """Look through the buffer up to here, then let go of what no later place can want as context."""
        low = self._searched - self._base
        firsts: set[_Span] = set()
        lasts: dict[bytes, _Span] = {}
        for word in TELLING:
            last = self._buffer.rfind(word, low, high + len(word) - 1)
            if last < 0:
                continue
            if self._left[word]:
                firsts |= self._first_places(word, low, high, firsts)
            lasts[word] = self._near(last, lasts.values()) or self._around(last)
        samples = self._sampled(low, high)
        drop = max(0, high - BYTES_BEFORE)
        regions = self._regions(sorted({*firsts, *lasts.values(), *samples}), drop)
        self._firsts += [regions[span] for span in firsts]
        for word, span in lasts.items():
            self._lasts[word].append(regions[span])
        self._keep_samples([regions[span] for span in samples])
        self._searched = self._base + high
        self._base += drop
        del self._buffer[:drop]

    def _first_places(self, word: bytes, low: int, high: int, known: set[_Span]) -> set[_Span]:
        spans: set[_Span] = set()
        at = low
        while self._left[word] and (at := self._buffer.find(word, at, high + len(word) - 1)) >= 0:
            self._left[word] -= 1
            span = self._near(at, known) or self._around(at)
            spans.add(span)
            at = max(span.end, at + 1)
        return spans

    def _near(self, at: int, spans: Iterable[_Span]) -> _Span | None:
        """The lines around another word that are around this place as well."""
        return next((span for span in spans if span.start <= at < span.end), None)

    def _around(self, at: int) -> _Span:
        """The lines around this place."""
        floor, ceiling = max(0, at - BYTES_BEFORE), min(len(self._buffer), at + BYTES_AFTER)
        before = self._buffer[floor:at].rsplit(b"\n", LINES_BEFORE + 1)
        after = self._buffer[at:ceiling].split(b"\n", LINES_AFTER + 1)
        # The first and the last piece are what is not wanted, or cut by the limit in bytes: begin and end with a whole line,
        # unless this very line is longer than that.
        start = floor + len(before[0]) + 1 if len(before) > 1 else floor
        end = ceiling - len(after[-1]) if len(after) > 1 else ceiling
        return _Span(start, end)

    def _sampled(self, low: int, high: int) -> list[_Span]:
        """The periodic lines that are due, one a stride."""
        spans = []
        at = max(low, self._next_sample - self._base)
        while at < high and (at := self._buffer.find(PERIODIC, at, high + len(PERIODIC) - 1)) >= 0:
            start = self._buffer.rfind(b"\n", max(0, at - SAMPLED_BYTES), at) + 1
            end = self._buffer.find(b"\n", at, at + SAMPLED_BYTES) + 1
            if end > 0 and start > 0:
                spans.append(_Span(start, end))
            at += max(self._stride, 1)
            self._next_sample = self._base + at
        return spans

    def _regions(self, spans: list[_Span], drop: int) -> dict[_Span, _Region]:
        """These places as bytes, with the numbers of their lines; moves the count of lines on to where the buffer will begin.

        Line ends are the one thing that is counted in every byte of the text, so they are counted once.
        """
        found: dict[_Span, _Region] = {}
        lines, reached, at_drop = self._base_lines, 0, None
        for span in spans:
            if at_drop is None and span.start >= drop:
                lines += self._buffer.count(b"\n", reached, drop)
                reached, at_drop = drop, lines
            lines += self._buffer.count(b"\n", reached, span.start)
            reached = span.start
            found[span] = _Region(self._base + span.start, lines + 1, bytes(self._buffer[span.start : span.end]))
        self._base_lines = lines + self._buffer.count(b"\n", reached, drop) if at_drop is None else at_drop
        return found

    def _keep_samples(self, samples: list[_Region]) -> None:
        """Keep these periodic lines; when they are too many, every second one of all."""
        self._samples += samples
        while len(self._samples) > SAMPLED_LINES:
            self._samples = self._samples[::2]
            self._stride = max(2 * self._stride, (self._samples[-1].start - self._samples[0].start) // SAMPLED_LINES)
