"""Reads any text as lines: a server's log, kernel lines, the output of a tool, however wrapped, packed, cut or mixed.

    log = read_log("vllm.log.gz", deadline=time.monotonic() + 30)

A small input is read whole. Of a huge one the end, the start, and what is telling in between are kept (`text_keep`), with
exact line numbers, in bounded memory. In `Log.skipped` a count of 0 means that it is not known how many lines were left out:
time ran out there.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from itertools import pairwise
from typing import NamedTuple

from plimsoll.doctor.read.text_wrapping import (
    LEVELS,
    LineFormat,
    ParsedLine,
    UnwrappedLine,
    detect_format,
    merge_wrapping,
    said,
    shown,
    split_writers,
    unwrap,
    without_colours,
)
from plimsoll.doctor.rules.log_text import LONGEST, Log, LogLine
from plimsoll.errors import BadInput
from plimsoll.net.inputs import SAMPLE_BYTES, Budget, Descriptor, is_plain, is_text, opened, text_blocks

_MONTHS = {
    name: at for at, name in enumerate(("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1)
}
_NO_YEAR = 1972  # a leap year, for 29 February
_EPOCH = date(1970, 1, 1).toordinal()


class StampClock:
    """Reads stamps in the order of the file; a stamp without a year belongs to the year of those before it."""

    def __init__(self) -> None:
        self._year = _NO_YEAR
        self._month = 0

    def seconds(self, stamp: str) -> float | None:
        """Of "11-15 08:00:00", "2025-11-15T08:00:00.123Z", "2025-11-15 08:00:00,123" or "Nov 15 08:00:00"."""
        try:
            return self._seconds(stamp)
        except (ValueError, IndexError):
            return None

    def _seconds(self, stamp: str) -> float | None:
        has_year = stamp[4:5] == "-"
        if has_year:
            year, month, day, rest = int(stamp[:4]), int(stamp[5:7]), int(stamp[8:10]), stamp[11:]
        elif stamp[:1].isalpha():
            year, month, day, rest = self._year, _MONTHS.get(stamp[:3], 0), int(stamp[4:6]), stamp[7:]
        else:
            year, month, day, rest = self._year, int(stamp[:2]), int(stamp[3:5]), stamp[6:]
        if not has_year and self._month - month >= 6:
            year += 1  # December, then January
        if not 1970 <= year <= 2200:
            return None
        days = date(year, month, day).toordinal() - _EPOCH
        self._year, self._month = year, month
        time, offset = _split_offset(rest)
        hours, minutes, seconds = int(time[:2]), int(time[3:5]), float(time[6:].replace(",", ".") or 0)
        return days * 86400.0 + hours * 3600 + minutes * 60 + seconds - offset


def _split_offset(rest: str) -> tuple[str, int]:
    """The time of day, and by how many seconds it is ahead of UTC."""
    if rest.endswith(("Z", "z")):
        return rest[:-1], 0
    for sign, factor in (("+", 1), ("-", -1)):
        at = rest.find(sign, 8)
        if at > 0:
            digits = rest[at + 1 :].replace(":", "")
            return rest[:at], factor * (int(digits[:2]) * 3600 + int(digits[2:4] or 0) * 60)
    return rest, 0


# Of each telling word in the middle of a huge text, the first and the last few places are kept with the lines around them; of
# the periodic lines an even sample. Everything is bounded: a log of nothing but errors costs no more than one with none.
BLOCK_BYTES = 1 << 20
HEAD_BYTES, HEAD_LINES = 2 << 20, 30_000
LINES_BEFORE, BYTES_BEFORE = 120, 48 << 10
LINES_AFTER, BYTES_AFTER = 60, 24 << 10
FIRST_PLACES, LAST_PLACES = 4, 4  # kept of each word; of the last ones, one a block
SAMPLED_LINES, SAMPLED_BYTES = 2_000, 1 << 10

PERIODIC = b"Avg prompt throughput"
TELLING: tuple[bytes, ...] = (
    b"Traceback (most", b"ERROR", b"CRITICAL", b"out of memory", b"Out of memory", b"OutOfMemory", b"LLM engine (v",
    b"API server version", b"non-default args", b"Available KV cache memory", b"died unexpectedly", b"Killed", b"preempted by",
    b"[shutdown]", b"SIGTERM", b"Segmentation fault", b"NCCL WARN", b"NVRM: Xid", b"plimsoll: survive: ",
)  # fmt: skip


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


class MiddleSifter:
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
        reached = sum(map(len, self._head))
        for start in sorted(kept):
            region = kept[start]
            skip = max(0, reached - start)
            if skip >= len(region.data):
                continue
            found.append(Chunk(region.first + region.data.count(b"\n", 0, skip), region.data[skip:]))
            reached = start + len(region.data)
        return found

    def _search(self, high: int) -> None:
        """Look through the buffer up to here, then let go of what no later place can want as context."""
        low = self._searched - self._base
        firsts: set[_Span] = set()
        lasts: dict[bytes, _Span] = {}
        for word in TELLING:
            end = high + len(word) - 1
            last = self._buffer.rfind(word, low, end)
            if last < 0:
                continue
            at = low
            while self._left[word] and (at := self._buffer.find(word, at, end)) >= 0:
                self._left[word] -= 1
                span = self._near(at, firsts) or self._around(at)
                firsts.add(span)
                at = max(span.end, at + 1)
            lasts[word] = self._near(last, lasts.values()) or self._around(last)
        samples = self._sampled(low, high)
        drop = max(0, high - BYTES_BEFORE)
        regions = self._regions(sorted({*firsts, *lasts.values(), *samples}), drop)
        self._firsts += [regions[span] for span in firsts]
        for word, span in lasts.items():
            self._lasts[word].append(regions[span])
        self._samples += [regions[span] for span in samples]
        while len(self._samples) > SAMPLED_LINES:  # then every second one of all
            self._samples = self._samples[::2]
            self._stride = max(2 * self._stride, (self._samples[-1].start - self._samples[0].start) // SAMPLED_LINES)
        self._searched = self._base + high
        self._base += drop
        del self._buffer[:drop]

    def _near(self, at: int, spans: Iterable[_Span]) -> _Span | None:
        return next((span for span in spans if span.start <= at < span.end), None)

    def _around(self, at: int) -> _Span:
        floor, ceiling = max(0, at - BYTES_BEFORE), min(len(self._buffer), at + BYTES_AFTER)
        before = self._buffer[floor:at].rsplit(b"\n", LINES_BEFORE + 1)
        after = self._buffer[at:ceiling].split(b"\n", LINES_AFTER + 1)
        # The first and the last piece are what is not wanted, or cut by the limit in bytes: begin and end with a whole line,
        # unless this very line is longer than that.
        start = floor + len(before[0]) + 1 if len(before) > 1 else floor
        end = ceiling - len(after[-1]) if len(after) > 1 else ceiling
        return _Span(start, end)

    def _sampled(self, low: int, high: int) -> list[_Span]:
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


# A plain file is read tail first: if time runs out in its middle, the end and the start are there, the end without numbers.
WHOLE_BYTES, WHOLE_LINES = 8 << 20, 120_000
TAIL_BYTES, TAIL_LINES = 4 << 20, 60_000
PROBES = 16  # places of a file that are looked at to tell whether it is text


class Excerpt(NamedTuple):
    """The kept parts of a text, in order."""

    chunks: list[Chunk]
    size_bytes: int | None  # as the text lies there, packed or not
    was_short: bool  # time ran out, and the rest was not read


def kept_of_file(path: str, deadline: float | None, clock: Callable[[], float]) -> Excerpt:
    """The parts of this file that are kept."""
    budget = Budget(deadline, clock)
    descriptor, what = opened(path)
    try:
        is_file = stat.S_ISREG(what.st_mode)
        if is_file and what.st_size > WHOLE_BYTES and is_plain(os.pread(descriptor, 512, 0)):
            return Excerpt(_kept_of_huge(path, descriptor, what.st_size, budget), what.st_size, was_short=False)
        chunks = _kept(text_blocks(path, Descriptor(descriptor, budget), budget))
        return Excerpt(chunks, what.st_size if is_file else None, budget.was_short)
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)


def _kept(blocks: Iterator[bytes]) -> list[Chunk]:
    """All of it while it is small; from then on a window at its end, and the middle sifted."""
    held: deque[bytes] = deque()
    size = lines = 0
    middle: MiddleSifter | None = None
    for block in blocks:
        held.append(block)
        size += len(block)
        lines += block.count(b"\n")
        if middle is None and (size > WHOLE_BYTES or lines > WHOLE_LINES):
            middle = MiddleSifter()
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
    probes = [max(0, size - SAMPLE_BYTES), *(_next_data(descriptor, size * part // PROBES) for part in range(PROBES))]
    if not any(is_text(os.pread(descriptor, SAMPLE_BYTES, at)) for at in probes if at < size):
        raise BadInput(f"{path}: not text")
    begin = size - TAIL_BYTES
    before, tail = _split(os.pread(descriptor, TAIL_BYTES + 1, begin - 1)) if begin > 0 else (b"", b"")
    end = begin - 1 + len(before)
    middle = MiddleSifter()
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
        return 1 << 62 if problem.errno == errno.ENXIO else at


_SAMPLE = 400  # lines at either end that show this file's habits
_SAMPLE_BYTES = 64 << 10
_LONGEST_RAW = 64 * LONGEST  # a line of progress bars may be long and end in the error


def read_log(path: str, *, source: str = "", deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> Log:
    """The lines of this file; BadInput where it is not text, TimedOut where nothing came before the deadline."""
    return _log(source or path, kept_of_file(path, deadline, clock))


def _log(source: str, kept: Excerpt) -> Log:
    reader = _Reader(detect_format(_sample(kept.chunks)))
    skipped: list[tuple[int, int]] = []
    after = 1  # the number the next line would have if nothing was left out
    for chunk in kept.chunks:
        if chunk.first is None or chunk.first > after:
            skipped.append((len(reader.lines), 0 if chunk.first is None else chunk.first - after))
            reader.flush()
        after = reader.read(chunk)
    reader.flush()
    if kept.was_short:
        skipped.append((len(reader.lines), 0))
    lines = reader.lines
    if not skipped and _is_newest_first(lines):
        lines = lines[::-1]
    return Log(source, lines, tuple(skipped), kept.size_bytes)


def _is_newest_first(lines: Sequence[LogLine]) -> bool:
    """True if a console showed the last line on top: nearly every stamp is older than the one above it."""
    stamps = [line.at for line in lines if line.at is not None]
    if len(stamps) < max(8, len(lines) // 3):
        return False
    rising = sum(b > a for a, b in pairwise(stamps))
    falling = sum(b < a for a, b in pairwise(stamps))
    return falling >= 5 and falling > 9 * rising


def _sample(chunks: Sequence[Chunk]) -> Iterator[str]:
    if not chunks:
        return
    head = chunks[0].data[:_SAMPLE_BYTES]
    tail = chunks[-1].data[-_SAMPLE_BYTES:] if len(chunks) > 1 or len(head) == _SAMPLE_BYTES else b""
    for piece in (head.split(b"\n")[:_SAMPLE], tail.split(b"\n")[-_SAMPLE:]):
        for raw in piece:
            yield without_colours(raw[:400].decode("utf-8", "replace"))


class _Reader:
    """Turns raw lines into lines, remembering what one line says of the next."""

    def __init__(self, habits: LineFormat) -> None:
        self.lines: list[LogLine] = []
        self._habits = habits
        self._clock = StampClock()
        self._begun: dict[str, tuple[int | None, UnwrappedLine]] = {}  # by server: the start of a line the runtime cut

    def read(self, chunk: Chunk) -> int:
        """Read the lines of this chunk; returns the number of the line after it."""
        number = chunk.first
        count, begun, since = 0, "", 0
        for raw in _raw_lines(chunk.data):
            if self._habits.width and len(raw) == self._habits.width and len(begun) < LONGEST:
                since = since if begun else count
                begun += raw  # a terminal broke the line here
            else:
                self._line(None if number is None else number + (since if begun else count), begun + raw)
                begun = ""
            count += 1
        if begun:
            self._line(None if number is None else number + since, begun)
        return (number or 1) + count

    def _line(self, number: int | None, raw: str) -> None:
        text = without_colours(raw.rstrip("\r"))
        for bare in unwrap(text, self._habits, up_to_record=bool(self._begun)):
            if not bare.is_record or not (bare.goes_on or self._begun):
                self._add(number, bare)
                continue
            at, start = self._begun.pop(bare.server, (number, None))
            whole = bare if start is None else start._replace(text=start.text + bare.text, goes_on=bare.goes_on)
            if whole.goes_on:
                self._begun[bare.server] = at, whole._replace(text=whole.text[:_LONGEST_RAW])
            else:
                self._add_whole(at, whole)

    def flush(self) -> None:
        for number, bare in self._begun.values():
            self._add_whole(number, bare)
        self._begun.clear()

    def _add_whole(self, number: int | None, bare: UnwrappedLine) -> None:
        for inner in unwrap(without_colours(bare.text), self._habits):
            self._add(number, merge_wrapping(inner, bare))

    def _add(self, number: int | None, bare: UnwrappedLine) -> None:
        text = bare.text
        if "\x1b" in text:  # spelled out in JSON, cut in two by a runtime, or none of a terminal's
            text = without_colours(text).replace("\x1b", "")
        if text.startswith("```"):
            text = text.lstrip("`")
            if len(text) < 20 and " " not in text:
                return  # the fence of a code block, with or without its language
        level = "" if self._habits.one_level else LEVELS.get(bare.level.upper(), "")
        first = said(text)
        if "\r" not in text and len(parts := split_writers(first.text)) == 1:
            self._append(number, bare, first, level)
            return
        speaker = first.process
        pieces = shown(first.text)
        for piece in pieces:
            one = first._replace(text=piece) if piece is pieces[0] else said(piece)
            parts = split_writers(one.text)
            for part in parts:
                now = one._replace(text=part) if part is parts[0] else said(part)
                # What follows a carriage return is the same process's, unless it says otherwise.
                speaker = now.process or (speaker if part is parts[0] else "")
                if now.text or len(parts) == len(pieces) == 1:
                    self._append(number, bare, now._replace(process=speaker), level)

    def _append(self, number: int | None, bare: UnwrappedLine, one: ParsedLine, level: str) -> None:
        at = bare.at
        if at is None and bare.stamp:
            at = self._clock.seconds(bare.stamp)
        if at is None and one.stamp:
            at = self._clock.seconds(one.stamp)
        self.lines.append(LogLine(number, one.process, one.level or level, at, one.text[:LONGEST], bare.server))


def _raw_lines(data: bytes) -> Iterable[str]:
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    for raw in lines:
        if len(raw) > _LONGEST_RAW:
            raw = raw[-_LONGEST_RAW:] if b"\r" in raw else raw[:_LONGEST_RAW]  # noqa: PLW2901
        yield raw.decode("utf-8", "replace")
