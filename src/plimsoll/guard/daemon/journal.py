"""Guard's journal: every step before and after it is done, in an SQLite file that survives any end of guard.

Each entry is one transaction, on the disk before `append` returns (write-ahead log, synchronous=FULL). SQLite keeps the file
consistent; a checksum in each row shows a changed byte. The newest ENTRIES_KEPT entries stay, and those that are still needed.
Beside the file JOURNAL there are

    JOURNAL-wal, -shm    SQLite's own, while guard runs or after it was killed: they belong to the file
    JOURNAL.lock         held by the guard that writes, so that there is never a second one
    JOURNAL.damaged-N    a damaged file (and its -wal); the next one began with its readable entries
    JOURNAL.jsonl-N      a journal of plimsoll 0.1, one line of JSON an entry; the next one began with its entries
    JOURNAL.new          the next file, not yet in its place

A file with one of these names is never overwritten; damaged and old ones are for an operator to inspect and remove.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import quote

import msgspec

from plimsoll.errors import WorldFailed
from plimsoll.guard.act.journal_entry import BEGUN, Entry, cleaned, needed

SCHEMA = "plimsoll.journal/2"
DAMAGED = "damaged"
ABSENT = "absent"
UNREADABLE = "unreadable"
ENTRIES_KEPT = 200_000
PRUNE_EVERY = 1_000  # entries
KEPT_S = 60.0
WAIT_S = 5.0  # for another process that locks the file
_TABLE = """CREATE TABLE IF NOT EXISTS entry (n INTEGER PRIMARY KEY, t REAL NOT NULL, kind TEXT NOT NULL, engine TEXT NOT NULL,
    action TEXT NOT NULL, step TEXT NOT NULL, fields TEXT NOT NULL, sum TEXT NOT NULL)"""
_INSERT = "INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class JournalProblem(NamedTuple):
    """A problem of a journal."""

    kind: str
    message: str


class JournalContents(NamedTuple):
    """The entries of a journal, and its problems."""

    entries: tuple[Entry, ...]
    wrong: tuple[JournalProblem, ...] = ()
    is_of_0_1: bool = False


def read_journal(path: Path, last: int | None = None) -> JournalContents:
    """Reads all entries of a journal, or the last ones; never raises, whatever the file is or contains.

    After damage it returns only the entries before it: some of the later ones may be missing.
    """
    entries: list[Entry] = []
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        try:
            damage = _read_table(path, last, entries)
            is_of_0_1 = False
        except sqlite3.DatabaseError as problem:
            if _code(problem) != sqlite3.SQLITE_NOTADB:
                raise OSError(errno.EIO, str(problem)) from None
            damage = _read_lines(path, entries)
            is_of_0_1 = True
    except FileNotFoundError:
        return JournalContents((), (JournalProblem(ABSENT, f"no journal at {path}"),))
    except (OSError, ValueError) as problem:
        return JournalContents((), (JournalProblem(UNREADABLE, f"{path} cannot be read: {_words(problem)}"),))
    wrong = (JournalProblem(DAMAGED, f"{path}, {damage}; this and all after it is ignored"),) if damage else ()
    return JournalContents(tuple(entries if last is None else entries[max(0, len(entries) - last) :]), wrong, is_of_0_1)


def _read_table(path: Path, last: int | None, entries: list[Entry]) -> str:
    """Adds the entries up to the first damaged one; returns what is wrong with that, "" if all are right."""
    newest = "" if last is None else f"WHERE n > (SELECT max(n) FROM entry) - {last:d}"  # noqa: S608
    checks = "PRAGMA quick_check(1)" if last is None else "SELECT 'ok'"
    damage = ""
    with contextlib.closing(_connect(path)) as database:  # not read-only: it may have to finish a killed guard's write
        database.execute("PRAGMA query_only = ON")
        try:
            if database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                return "the file holds no entries" if path.stat().st_size else ""
        except (sqlite3.DatabaseError, UnicodeDecodeError) as problem:
            damage = _damage(problem)
            database.execute("PRAGMA writable_schema = ON")  # read a file that was cut short as far as it goes
        number = 0
        try:
            for row in database.execute(f"SELECT * FROM entry {newest} ORDER BY n"):  # noqa: S608  (a number only)
                if _checksum(row[:-1]) != row[-1] or row[0] <= number:
                    return f"entry {row[0]}: its checksum is not right"
                number, at, kind, engine, action, step, fields, _ = row
                entries.append(Entry(number, at, kind, engine, action, step, json.loads(fields)))
            check = database.execute(checks).fetchone()[0]
            damage = damage or ("" if check == "ok" else check.splitlines()[-1])
        except (sqlite3.DatabaseError, UnicodeDecodeError) as problem:
            damage = damage or _damage(problem)
    return damage and f"after entry {number}: {damage}"


def _damage(problem: sqlite3.Error | UnicodeDecodeError) -> str:
    """Returns what is wrong with the file; raises the problem again if it is not the file's. SQLITE_ERROR: not our table."""
    if isinstance(problem, sqlite3.Error) and _code(problem) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
        raise problem
    return str(problem)


def _connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?mode={mode}"
    database = sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
    database.text_factory = lambda data: data.decode("utf-8", "replace")
    return database


def _code(problem: sqlite3.Error) -> int:
    return int(getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _row(entry: Entry) -> tuple[Any, ...]:
    row = (*entry[:-1], json.dumps(dict(entry.fields), separators=(",", ":"), allow_nan=False))
    return *row, _checksum(row)


def _checksum(row: tuple[Any, ...]) -> str:
    return hashlib.sha256(json.dumps(row, default=str).encode()).hexdigest()[:16]


# A journal of plimsoll 0.1: one JSON object a line, whose last member `sum` covers the bytes before it and the sum of the
# previous line. `was`: the number of the entry in an earlier file, from which it was carried over.
LINE_MAX = 256 << 10
_SUM, _SEED = ',"sum":"', "0" * 16


class _Line(msgspec.Struct):
    n: Annotated[int, msgspec.Meta(gt=0)]
    t: Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]
    kind: str = ""
    engine: str = ""
    action: str = ""
    step: str = ""
    fields: dict[str, Any] = {}
    was: Annotated[int, msgspec.Meta(ge=0)] = 0


def _read_lines(path: Path, entries: list[Entry]) -> str:
    """Does the same as `_read_table` for a journal of plimsoll 0.1; a last line that was cut off is no damage."""
    before, number = _SEED, 0
    with path.open("rb") as file:
        for count, line in enumerate(iter(lambda: file.readline(LINE_MAX), b""), 1):
            body, _, tail = line.rpartition(_SUM.encode())
            before = hashlib.sha256(before.encode() + b"\n" + body).hexdigest()[:16]
            try:
                if tail != f'{before}"}}\n'.encode():
                    raise ValueError("its checksum is not right")
                one = msgspec.json.decode(body + b"}", type=_Line)
                if number and one.n != number + 1:
                    raise ValueError(f"its number is {one.n} and should be {number + 1}")
            except (ValueError, msgspec.DecodeError) as problem:
                is_begun = count > 1 or line.startswith(b"{")
                is_cut_off = b"\n" not in line and not any(b"\n" in piece for piece in iter(lambda: file.read(LINE_MAX), b""))
                return "" if is_begun and is_cut_off else f"line {count}: {problem}"
            number = one.n
            if one.kind != BEGUN:
                entries.append(Entry(one.was or one.n, one.t, one.kind, one.engine, one.action, one.step, one.fields))
    return ""


class JournalFailed(WorldFailed):
    """The entry is not certainly on disk: its step must not be done."""


class JournalBusy(JournalFailed):
    """Another guard writes this journal."""


LEAST_FREE_BYTES = 256 << 10  # of its disk: with less, an entry and SQLite's log may not fit


class Journal:
    """An open journal; `wrong` has the problems found at opening.

    After damage `kept` may lack the newest entries: restarts that budgets should count, a pause. Check `wrong` before acting.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, most: int = ENTRIES_KEPT) -> None:
        self.path = path.absolute()
        self.wrong: tuple[JournalProblem, ...] = ()
        self._clock, self._most = clock, most
        self._mutex = threading.Lock()
        self._number = 0  # number of the last entry
        self._kept_at = (-1, 0.0)  # at which entry and when `kept` last dropped entries that are no longer needed
        self._entries: list[Entry] = []  # the needed entries, and some more
        self._database: sqlite3.Connection | None = None
        self._lock = -1
        self._opened: list[tuple[int, int]] = []
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(self.path.parent.parent)
            self._take_lock()
            self._open()
        except (OSError, sqlite3.Error) as problem:
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
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("PRAGMA journal_mode = DELETE")  # one plain file, unless another process is reading it
            self._database.close()
            self._database = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def kept(self) -> list[Entry]:
        """Returns the entries still needed: of open actions, those that budgets count, the last of each switch."""
        with self._mutex:
            now, last = self._clock(), self._kept_at
            if last[0] != self._number or not 0 <= now - last[1] < KEPT_S:  # called several times a second
                self._entries, self._kept_at = needed(self._entries, now), (self._number, now)
            return list(self._entries)

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None,
        at: float | None = None,
    ) -> Entry:  # fmt: skip
        """Writes one entry and returns it as written (without secrets) once it is on disk; JournalFailed if it is not.

        `at`: when another guard wrote it; else now.
        """
        with self._mutex:
            when = round(self._clock() if at is None else at, 3)
            entry = cleaned(Entry(self._number + 1, when, kind, engine, action, step, fields or {}))
            if self._database is None:
                raise JournalFailed(f"{self.path}: it is closed")
            try:
                if self._files() != self._opened:
                    raise JournalFailed(f"{self.path}: the file is gone, or another one is in its place")
                self._database.execute(_INSERT, _row(entry))
            except sqlite3.IntegrityError:
                raise JournalFailed(f"{self.path}: another process has written to it") from None
            except sqlite3.Error as problem:
                raise JournalFailed(f"{self.path} cannot be written: {problem}") from None
            self._number = entry.number
            self._entries.append(entry)
            if self._number % PRUNE_EVERY == 0:
                self._entries = needed(self._entries, self._clock())
                numbers = ",".join(str(one.number) for one in self._entries)
                old = f"DELETE FROM entry WHERE n <= ? AND n NOT IN ({numbers})"  # noqa: S608  (numbers of ours)
                with contextlib.suppress(sqlite3.Error):  # tried again later
                    self._database.execute(old, (self._number - self._most,))
            return entry

    def check(self) -> None:
        """Raises JournalFailed if the next entry could not be written: another file is in its place, or the disk is full."""
        with self._mutex:
            try:
                if self._files() != self._opened:
                    raise JournalFailed(f"{self.path}: the file is gone, or another one is in its place")
                disk = os.statvfs(self.path.parent)
            except OSError as problem:
                raise JournalFailed(f"{self.path}: {_words(problem)}") from None
            if disk.f_blocks and disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES:
                raise JournalFailed(f"{self.path}: less than {LEAST_FREE_BYTES >> 10} KiB are free on its disk")

    def mend(self) -> None:
        """Makes a journal that failed writable again: a damaged or lost file is replaced by one with the entries in memory.

        JournalFailed while that fails, or if somebody put another file in its place.
        """
        with self._mutex:
            try:
                path, is_there = self.path, self.path.exists()
                if is_there and self._opened and (path.lstat().st_dev, path.lstat().st_ino) != self._opened[0]:
                    raise JournalFailed(f"{path}: another file is in its place")
                contents = read_journal(path) if is_there else JournalContents(())
                if is_there and not contents.wrong and (contents.entries[-1].number if contents.entries else 0) == self._number:
                    self._reconnect()
                    return
                if any(problem.kind == UNREADABLE for problem in contents.wrong):
                    raise JournalFailed(contents.wrong[0].message)
                new = self._beside(".new")
                new.unlink(missing_ok=True)
                _write_rows(new, self._entries)
                if self._database is not None:
                    self._database.close()
                if is_there:
                    self._put_aside(DAMAGED)
                self._put_in_place(new)
                self._reconnect()
            except (OSError, sqlite3.Error) as problem:
                raise JournalFailed(f"{self.path}: {_words(problem)}") from None

    def _reconnect(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = _connect(self.path)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("SELECT n FROM entry LIMIT 1")  # opens the write-ahead log
        self._opened = self._files()

    def _put_aside(self, kind: str) -> None:
        names = (self._beside(f".{kind}-{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self.path.rename(aside)
        with contextlib.suppress(FileNotFoundError):
            self._beside("-wal").rename(f"{aside}-wal")

    def _files(self) -> list[tuple[int, int]]:
        """Returns device and inode of the files at the paths of the journal and of its write-ahead log."""
        found = []
        for path in (self.path, self._beside("-wal")):
            with contextlib.suppress(OSError):
                status = path.lstat()
                found.append((status.st_dev, status.st_ino))
        return found

    def _take_lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._lock = os.open(self._beside(".lock"), flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalBusy(f"{self.path}: another guard writes this journal") from None

    def _open(self) -> None:
        new = self._beside(".new")
        if new.exists() and not self.path.exists():  # a guard was killed between two renames
            self._put_in_place(new)
        for left in (new, self._beside(".new-journal")):
            left.unlink(missing_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
        contents = read_journal(self.path)
        if any(problem.kind != DAMAGED for problem in contents.wrong):
            raise JournalFailed(contents.wrong[0].message)
        self.path.chmod(0o600)
        self.wrong, self._entries = contents.wrong, list(contents.entries)
        kind = DAMAGED if self.wrong else "jsonl" if contents.is_of_0_1 else ""
        if kind or not self._entries:
            number, fields = self._entries[-1].number + 1 if self._entries else 1, {"schema": SCHEMA, "because": kind}
            self._entries.append(Entry(number, round(self._clock(), 3), BEGUN, fields=fields))
            _write_rows(new, self._entries)
            if kind:
                self._put_aside(kind)
            self._put_in_place(new)
        elif self._entries[-1].fields.get("because") == DAMAGED:  # a guard was killed before it could pause
            self.wrong = (JournalProblem(DAMAGED, f"{self.path} was damaged at the last start"),)
        self._number = self._entries[-1].number
        self._reconnect()

    def _put_in_place(self, new: Path) -> None:
        """Makes this file the journal; removes a write-ahead log that is there, since it belongs to another file."""
        for suffix in ("-wal", "-shm"):
            self._beside(suffix).unlink(missing_ok=True)
        new.rename(self.path)
        sync_folder(self.path.parent)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)


def _write_rows(path: Path, entries: Iterable[Entry]) -> None:
    with contextlib.closing(_connect(path, "rwc")) as database:
        path.chmod(0o600)
        database.execute("BEGIN")
        database.execute(_TABLE)
        database.executemany(_INSERT, map(_row, entries))
        database.execute("COMMIT")


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _words(problem: BaseException) -> str:
    return str(getattr(problem, "strerror", None) or problem or type(problem).__name__)
