"""Reads any text as lines: a server's log, kernel lines, the output of a tool, however wrapped, packed, cut or mixed.

    log = read_log("vllm.log.gz", deadline=time.monotonic() + 30)

A small input is read whole. Of a huge one the end, the start, and what is telling in between are kept (`text_keep`), with
exact line numbers, in bounded memory. In `Log.skipped` a count of 0 means that it is not known how many lines were left out:
time ran out there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from plimsoll.domain.log import LONGEST, Line, Log
from plimsoll.sources.text_clock import Clock
from plimsoll.sources.text_keep import Kept, kept_of_file
from plimsoll.sources.text_middle import Chunk
from plimsoll.sources.text_prefix import LEVELS, Said, apart, said
from plimsoll.sources.text_shown import shown, without_colours
from plimsoll.sources.text_wrapping import Bare, Habits, habits_of, inside, unwrapped

_SAMPLE = 400  # lines at either end that show this file's habits
_SAMPLE_BYTES = 64 << 10
_LONGEST_RAW = 64 * LONGEST  # a line of progress bars may be long and end in the error


def read_log(path: str, *, source: str = "", deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> Log:
    """The lines of this file; BadInput where it is not text, TimedOut where nothing came before the deadline."""
    return _log(source or path, kept_of_file(path, deadline, clock))


def _log(source: str, kept: Kept) -> Log:
    reader = _Reader(habits_of(_sample(kept.chunks)))
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


def _is_newest_first(lines: Sequence[Line]) -> bool:
    """Whether a console showed the last line on top: nearly every stamp is older than the one above it."""
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

    def __init__(self, habits: Habits) -> None:
        self.lines: list[Line] = []
        self._habits = habits
        self._clock = Clock()
        self._begun: dict[str, tuple[int | None, Bare]] = {}  # by server: the start of a line the runtime cut

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
        for bare in unwrapped(text, self._habits, up_to_record=bool(self._begun)):
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
        """Give up waiting for the rest of lines the runtime cut."""
        for number, bare in self._begun.values():
            self._add_whole(number, bare)
        self._begun.clear()

    def _add_whole(self, number: int | None, bare: Bare) -> None:
        for inner in unwrapped(without_colours(bare.text), self._habits):
            self._add(number, inside(inner, bare))

    def _add(self, number: int | None, bare: Bare) -> None:
        text = bare.text
        if "\x1b" in text:  # spelled out in JSON, cut in two by a runtime, or none of a terminal's
            text = without_colours(text).replace("\x1b", "")
        if text.startswith("```"):
            text = text.lstrip("`")
            if len(text) < 20 and " " not in text:
                return  # the fence of a code block, with or without its language
        level = "" if self._habits.one_level else LEVELS.get(bare.level.upper(), "")
        first = said(text)
        if "\r" not in text and len(parts := apart(first.text)) == 1:
            self._append(number, bare, first, level)
            return
        speaker = first.process
        pieces = shown(first.text)
        for piece in pieces:
            one = first._replace(text=piece) if piece is pieces[0] else said(piece)
            parts = apart(one.text)
            for part in parts:
                now = one._replace(text=part) if part is parts[0] else said(part)
                # What follows a carriage return is the same process's, unless it says otherwise.
                speaker = now.process or (speaker if part is parts[0] else "")
                if now.text or len(parts) == len(pieces) == 1:
                    self._append(number, bare, now._replace(process=speaker), level)

    def _append(self, number: int | None, bare: Bare, one: Said, level: str) -> None:
        at = bare.at
        if at is None and bare.stamp:
            at = self._clock.seconds(bare.stamp)
        if at is None and one.stamp:
            at = self._clock.seconds(one.stamp)
        self.lines.append(Line(number, one.process, one.level or level, at, one.text[:LONGEST], bare.server))


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
