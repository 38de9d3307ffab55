"""Reads guard's journal from a file, piece by piece, as far as it can be believed.

A last line without its newline is torn: it was being written when the power went, or is just being written now. Any other
line that is not right is damage: what stands before it holds, and what comes after is not read, since nobody can say what
is missing in between.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plimsoll.domain.journal_entry import LINE_MAX, Entry, LineReader

PIECE = 64 << 10
TORN = "torn"
DAMAGED = "damaged"
ABSENT = "absent"
UNREADABLE = "unreadable"


class Wrong(NamedTuple):
    """What is wrong with a journal, and from where on it is not read."""

    kind: str
    says: str
    at_byte: int = 0
    lines_after: int = 0  # line ends in what is not read


class Reading(NamedTuple):
    """What a journal says, and what is wrong with it."""

    entries: tuple[Entry, ...]
    wrong: tuple[Wrong, ...] = ()


def read_journal(path: Path) -> Reading:
    """Its entries; never raises for what the file is or holds."""
    entries: list[Entry] = []
    wrong: list[Wrong] = []
    for item in stream_journal(path):
        if isinstance(item, Entry):
            entries.append(item)
        else:
            wrong.append(item)
    return Reading(tuple(entries), tuple(wrong))


def read_history(path: Path, last: int) -> Reading:
    """The last so many entries, each once, also from the files that were full before this one."""
    files = [path, *reversed(beside(path, "old"))]
    found: list[Entry] = []
    wrong: list[Wrong] = []
    for file in files:
        reading = read_journal(file)
        before = found[0].number if found else 2**62
        found[:0] = [entry for entry in reading.entries if entry.number < before and not entry.was]
        wrong[:0] = reading.wrong
        if len(found) >= last:
            break
    return Reading(tuple(found[-last:]) if last > 0 else (), tuple(wrong))


def stream_journal(path: Path) -> Iterator[Entry | Wrong]:
    """Its entries one by one; what is wrong, if anything is, comes last."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        yield Wrong(ABSENT, f"there is no journal at {path}")
        return
    except (OSError, ValueError) as problem:
        yield Wrong(UNREADABLE, f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}")
        return
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            yield from stream_descriptor(descriptor, LineReader(), str(path))
        else:
            yield Wrong(UNREADABLE, f"{path} is not a regular file")
    finally:
        os.close(descriptor)


def stream_descriptor(descriptor: int, reader: LineReader, name: str) -> Iterator[Entry | Wrong]:
    """The same of an open file, from its beginning; `reader` knows afterwards where the next line would go on."""
    at = line = 0
    held = b""
    for piece in _pieces(descriptor, 0):
        if isinstance(piece, Wrong):
            yield piece._replace(says=f"{name} {piece.says}", at_byte=at)
            return
        *whole, held = (held + piece).split(b"\n")
        for one in whole:
            line += 1
            found = reader.read(one)
            if isinstance(found, str):
                yield Wrong(DAMAGED, _damage(name, line, found), at, _line_ends(descriptor, at))
                return
            at += len(one) + 1
            yield found
        if len(held) > LINE_MAX:
            break
    if held and (after := _line_ends(descriptor, at)):
        yield Wrong(DAMAGED, _damage(name, line + 1, "it is far too long"), at, after)
    elif held:
        yield Wrong(TORN, f"{name}, line {line + 1}: the last line is not whole (cut off, or just being written)", at)


def _damage(name: str, line: int, why: str) -> str:
    return f"{name}, line {line}: {why}; neither it nor what comes after it is read"


def _line_ends(descriptor: int, at: int) -> int:
    return sum(piece.count(b"\n") for piece in _pieces(descriptor, at) if isinstance(piece, bytes))


def _pieces(descriptor: int, at: int) -> Iterator[bytes | Wrong]:
    """The file from here on; by place, so that several may read one descriptor."""
    while True:
        try:
            piece = os.pread(descriptor, PIECE, at)
        except OSError as problem:
            yield Wrong(UNREADABLE, f"cannot be read further: {problem.strerror or problem}")
            return
        if not piece:
            return
        at += len(piece)
        yield piece


def beside(path: Path, kind: str) -> list[Path]:
    """The files of this kind beside a journal (JOURNAL.old-1, ...), the oldest first."""
    pattern = re.compile(re.escape(f"{path.name}.{kind}-") + r"([1-9][0-9]{0,8})")
    try:
        names = os.listdir(path.parent)  # noqa: PTH208  (only the names)
    except OSError:
        return []
    numbered = sorted((int(found[1]), name) for name in names if (found := pattern.fullmatch(name)))
    return [path.with_name(name) for _, name in numbered]
