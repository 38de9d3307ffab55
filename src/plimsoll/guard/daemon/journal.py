"""Guard's journal: every step before and after it is done, in an append-only file that survives whatever ends guard.

Each entry is one line, written with one write and on the disk before `append` returns. Beside the file JOURNAL lie

    JOURNAL.lock         held by the guard that writes, so that there is never a second one
    JOURNAL.old-N        full files; what was still needed of them is in the next one
    JOURNAL.torn-N       a last line that was incomplete at the next start, cut off there
    JOURNAL.damaged-N    a file with an invalid line; the next one begins with what was read before that line
    JOURNAL.new          a next file that is not complete yet

A file at one of these names is never written over. The newest OLD_KEPT full files and TORN_KEPT torn lines are kept; damaged
files are for an operator to inspect and remove.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from plimsoll.errors import WorldFailed
from plimsoll.guard.act.journal_entry import BEGUN, LINE_MAX, SCHEMA, CarryOver, Entry, LineReader, cleaned, encode

# A last line without its newline is torn: it was being written when the power went, or is being written now. Any other invalid
# line is damage: what stands before it counts, and what comes after is not read, since something may be missing in between.
PIECE = 64 << 10
TORN = "torn"
DAMAGED = "damaged"
ABSENT = "absent"
UNREADABLE = "unreadable"


class JournalProblem(NamedTuple):
    """What is wrong with a journal, and from where on it is ignored."""

    kind: str
    message: str
    at_byte: int = 0
    lines_after: int = 0  # line ends in the ignored part


class JournalContents(NamedTuple):
    """The entries of a journal, and what is wrong with it."""

    entries: tuple[Entry, ...]
    wrong: tuple[JournalProblem, ...] = ()


def read_journal(path: Path) -> JournalContents:
    """Reads a journal; never raises for what the file is or holds."""
    entries: list[Entry] = []
    wrong: list[JournalProblem] = []
    for item in stream_journal(path):
        if isinstance(item, Entry):
            entries.append(item)
        else:
            wrong.append(item)
    return JournalContents(tuple(entries), tuple(wrong))


def read_history(path: Path, last: int) -> JournalContents:
    """The last entries, each once, also from the full files before this one."""
    files = [path, *reversed(beside(path, "old"))]
    found: list[Entry] = []
    wrong: list[JournalProblem] = []
    for file in files:
        reading = read_journal(file)
        before = found[0].number if found else 2**62
        found[:0] = [entry for entry in reading.entries if entry.number < before and not entry.was]
        wrong[:0] = reading.wrong
        if len(found) >= last:
            break
    return JournalContents(tuple(found[-last:]) if last > 0 else (), tuple(wrong))


def stream_journal(path: Path) -> Iterator[Entry | JournalProblem]:
    """The entries one by one; a problem comes last."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        yield JournalProblem(ABSENT, f"no journal at {path}")
        return
    except (OSError, ValueError) as problem:
        yield JournalProblem(UNREADABLE, f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}")
        return
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            yield from stream_descriptor(descriptor, LineReader(), str(path))
        else:
            yield JournalProblem(UNREADABLE, f"{path} is not a regular file")
    finally:
        os.close(descriptor)


def stream_descriptor(descriptor: int, reader: LineReader, name: str) -> Iterator[Entry | JournalProblem]:
    """The entries of an open file from its beginning; `reader` then knows how the next line continues."""
    at = line = 0
    held = b""
    for piece in _pieces(descriptor, 0):
        if isinstance(piece, JournalProblem):
            yield piece._replace(message=f"{name} {piece.message}", at_byte=at)
            return
        *whole, held = (held + piece).split(b"\n")
        for one in whole:
            line += 1
            found = reader.read(one)
            if isinstance(found, str):
                yield JournalProblem(DAMAGED, _damage(name, line, found), at, _line_ends(descriptor, at))
                return
            at += len(one) + 1
            yield found
        if len(held) > LINE_MAX:
            break
    if held and (after := _line_ends(descriptor, at)):
        yield JournalProblem(DAMAGED, _damage(name, line + 1, "it is far too long"), at, after)
    elif held:
        yield JournalProblem(TORN, f"{name}, line {line + 1}: the last line is incomplete (cut off, or being written)", at)


def _damage(name: str, line: int, why: str) -> str:
    return f"{name}, line {line}: {why}; this line and all after it are ignored"


def _line_ends(descriptor: int, at: int) -> int:
    return sum(piece.count(b"\n") for piece in _pieces(descriptor, at) if isinstance(piece, bytes))


def _pieces(descriptor: int, at: int) -> Iterator[bytes | JournalProblem]:
    """The file from this offset, with pread, so that several may read one descriptor."""
    while True:
        try:
            piece = os.pread(descriptor, PIECE, at)
        except OSError as problem:
            yield JournalProblem(UNREADABLE, f"cannot be read further: {problem.strerror or problem}")
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


ROTATE_BYTES = 64 << 20
OLD_KEPT = 8
TORN_KEPT = 100
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECE = 1 << 20


class JournalFailed(WorldFailed):
    """The entry is not certainly on disk: its step must not be done."""


class JournalBusy(JournalFailed):
    """Another guard writes this journal."""


class Journal:
    """An open journal; `wrong` has the problems found at opening, `trouble` a later one that is not fatal.

    After damage `kept` may lack the newest entries: restarts that budgets should count, a pause. Check `wrong` before acting.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.path = path.absolute()
        self.wrong: tuple[JournalProblem, ...] = ()
        self.trouble = ""
        self._clock, self._rotate_bytes = clock, rotate_bytes
        self._mutex = threading.Lock()
        self._reader = LineReader()  # number and sum of the last line
        self._carry = CarryOver()
        self._file = self._lock = -1
        self._size = self._rotate_at = 0
        self._broken = ""
        try:
            _make_folder(self.path.parent)
            self._take_lock()
            self._open()
        except OSError as problem:
            self.close()
            raise JournalFailed(f"{self.path}: {_words(problem)}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file and its lock; everything appended is on disk already."""
        self._broken = self._broken or "it is closed"
        for name in ("_file", "_lock"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def kept(self) -> list[Entry]:
        """The entries still needed: of open actions, those that budgets count, the last of each switch."""
        with self._mutex:
            return self._carry.entries(self._clock())

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        """Writes one entry and returns it as written (without secrets) once it is on disk; JournalFailed if it is not."""
        with self._mutex:
            number = self._reader.number + 1
            entry = cleaned(Entry(number, round(self._clock(), 3), kind, engine, action, step, fields or {}))
            line, checksum = encode(entry, self._reader.sum)
            self._write(line)
            self._reader.number, self._reader.sum = number, checksum
            self._size += len(line)
            self._carry.note(entry)
            if self._size >= self._rotate_at:
                self._rotate()
            return entry

    def _write(self, line: bytes) -> None:
        self._check()
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "no space for the whole line")
        except BaseException as problem:
            self._take_back()
            if isinstance(problem, OSError):
                raise JournalFailed(f"{self.path} cannot be written: {_words(problem)}") from None
            raise
        try:
            os.fsync(self._file)
        except BaseException as problem:
            self._take_back()
            # The kernel may have dropped what it could not write, and report no error the next time.
            self._broken = f"not written to disk: {_words(problem)}"
            if isinstance(problem, OSError):
                raise JournalFailed(f"{self.path}: {self._broken}") from None
            raise

    def _check(self) -> None:
        """Raises unless the file is still the one at its path, as guard left it."""
        if not self._broken:
            try:
                found = self.path.stat(follow_symlinks=False)
                if not os.path.samestat(found, os.fstat(self._file)):
                    self._broken = "another file is in its place"
                elif found.st_size != self._size:
                    self._broken = "another process has written to it"
            except OSError as problem:
                self._broken = f"the file is gone: {_words(problem)}"
        if self._broken:
            raise JournalFailed(f"{self.path}: {self._broken}")

    def _take_back(self) -> None:
        """Removes a partly written line."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError as problem:
            self._broken = f"half a line could not be removed: {_words(problem)}"

    def _take_lock(self) -> None:
        path = self.path.with_name(self.path.name + ".lock")
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalBusy(f"{self.path}: another guard writes this journal") from None

    def _open(self) -> None:
        self._new().unlink(missing_ok=True)  # left by a guard that was killed
        try:
            self._file = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            self._begin("")
            return
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        os.fchmod(self._file, 0o600)
        for item in stream_descriptor(self._file, self._reader, str(self.path)):
            if isinstance(item, Entry):
                self._carry.note(item)
            else:
                self.wrong += (item,)
        self._size = os.fstat(self._file).st_size
        self._rotate_at = max(self._rotate_bytes, self._size)
        for wrong in self.wrong:
            self._mend(wrong)
        if self._size == 0:
            self._begin("")

    def _mend(self, wrong: JournalProblem) -> None:
        if wrong.kind == UNREADABLE:
            raise OSError(errno.EIO, wrong.message)
        if wrong.kind == DAMAGED:
            self._reader.number += wrong.lines_after  # a number is never used twice
            self._begin(DAMAGED)
        if wrong.kind == TORN:
            _copy(self._file, wrong.at_byte, self._free_name(TORN, TORN_KEPT))
            os.ftruncate(self._file, wrong.at_byte)
            os.fsync(self._file)
            self._size = wrong.at_byte

    def _rotate(self) -> None:
        try:
            self._begin("old")
        except OSError as problem:  # the old file still takes entries; retried later
            self.trouble = f"{self.path}: cannot start the next file: {_words(problem)}"
            self._rotate_at = self._size + self._rotate_bytes // 16
            with contextlib.suppress(OSError):
                self._new().unlink(missing_ok=True)

    def _begin(self, kind: str) -> None:
        """Starts the next file with what is still needed, and keeps the one before under a name by kind.

        There is a complete journal at the path at every moment.
        """
        now = self._clock()
        fields = {"schema": SCHEMA, "because": kind, "after": self._reader.sum if self._reader.number else ""}
        reader, lines = LineReader(), []
        reader.number = self._reader.number
        kept = self._carry.entries(now)
        for entry in [Entry(0, round(now, 3), BEGUN, fields=fields), *kept]:
            reader.number += 1
            was = 0 if entry.kind == BEGUN else entry.first_number
            line, reader.sum = encode(entry._replace(number=reader.number, was=was), reader.sum)
            lines.append(line)
        data = b"".join(lines)
        file = os.open(self._new(), _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(file, data)
            os.fsync(file)
            if kind:
                self._keep_aside(self._free_name(kind, OLD_KEPT if kind == "old" else None))
            os.rename(self._new(), self.path)  # noqa: PTH104  (its twin os.link is beside it)
            sync_folder(self.path.parent)
        except BaseException:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._reader = file, len(data), reader
        self._rotate_at = max(self._rotate_bytes, 2 * len(data))  # never one full file right after another

    def _keep_aside(self, name: Path) -> None:
        try:
            os.link(self.path, name, follow_symlinks=False)
        except OSError:  # a file system without hard links
            _copy(self._file, 0, name)

    def _new(self) -> Path:
        return self.path.with_name(self.path.name + ".new")

    def _free_name(self, kind: str, most: int | None) -> Path:
        """The next name of this kind; beyond `most` the oldest are removed."""
        there = beside(self.path, kind)
        if most is not None:
            for old in there[: max(0, len(there) - most + 1)]:
                old.unlink(missing_ok=True)
        number = int(there[-1].name.rpartition("-")[2]) + 1 if there else 1
        return self.path.with_name(f"{self.path.name}.{kind}-{number}")


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(source: int, at: int, name: Path) -> None:
    """Copies the rest of an open file into a new one."""
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while piece := os.pread(source, _PIECE, at):
            _write_all(target, piece)
            at += len(piece)
        os.fsync(target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    finally:
        os.close(target)
    sync_folder(name.parent)


def _write_all(descriptor: int, data: bytes) -> None:
    at = 0
    while at < len(data):
        at += os.write(descriptor, data[at : at + _PIECE])


def _words(problem: BaseException) -> str:
    return str(getattr(problem, "strerror", None) or problem or type(problem).__name__)
