"""What the user named: found, and told apart by content. Names and endings say nothing; folders are walked.

with Spool(sys.stdin.buffer, deadline=deadline) as path:       "-": kept aside first, then like any file
    kind = classify(path)
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from types import TracebackType
from typing import BinaryIO, NamedTuple

from plimsoll.errors import BadInput, TimedOut
from plimsoll.sources.text_bytes import Budget, blocks_of_stream, encoding_of, is_plain, is_text, opened, unpacked

STDIN = "-"
DEEPEST_FOLDER = 8
MOST_FILES = 1_000
MOST_ENTRIES = 50_000  # looked at in all folders together
LARGEST_FILE_BYTES = 64 << 30  # of those found in a folder; a file named by the user is read whatever its size
SPOOL_MAX_BYTES = 4 << 30
_START_BYTES = 64 << 10

HOST_AND_PORT = r"[A-Za-z0-9][A-Za-z0-9.\-]{0,252}:\d{1,5}(?:/metrics)?/?"
_SAMPLE = r"[a-zA-Z_:][\w:]{0,200}(?:\{[^\n]{0,4000}\})? [-+]?(?:\d[\d.eE+\-]{0,40}|Inf|NaN)(?: \d{1,20})?\s{0,2}$"


MOST_NAMED = 8  # of the files that were passed over


_REPORT = re.compile(r'\s*\{\s*"schema":\s*"plimsoll\.doctor/')


class Kind(StrEnum):
    """What an input is; every text that is no metrics page is a log, whoever wrote it."""

    LOG = "log"
    METRICS = "metrics"
    SNAPSHOT = "snapshot"
    REPORT = "report"  # what `plimsoll doctor --json` wrote: it quotes logs, and is none
    URL = "url"


class Walked(NamedTuple):
    """The files that were found, and how many there were beyond what is looked at."""

    files: list[str]
    left_out: int = 0
    not_text: tuple[str, ...] = ()  # files of folders that are neither text nor a snapshot; the first few


def classify(path: str) -> Kind:
    """What this is, by its first bytes; BadInput where there is nothing to read."""
    if is_url(path):
        return Kind.URL
    descriptor, what = opened(path)
    try:
        if not stat.S_ISREG(what.st_mode):
            return Kind.LOG  # what is read from a pipe to look at it would be lost; a Spool keeps it
        return kind_of(os.pread(descriptor, _START_BYTES, 0))
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)


def is_url(word: str) -> bool:
    """Whether the word names a page and no file."""
    return word[:8].lower().startswith(("http://", "https://"))


def kind_of(start: bytes) -> Kind:
    """What begins like this."""
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return Kind.SNAPSHOT
    if start.startswith(b"PK\x03\x04") and b"data.pkl" in start[:512]:
        return Kind.SNAPSHOT  # torch.save
    text = _bare(start).decode("utf-8", "replace").lstrip("\ufeff")
    if _REPORT.match(text):
        return Kind.REPORT
    return Kind.METRICS if _is_exposition(text) else Kind.LOG


def _bare(start: bytes) -> bytes:
    """The start of what is packed in this, as UTF-8; nothing where it cannot be unpacked."""
    if is_plain(start):
        return start
    try:
        return next(unpacked("", iter([start])), b"")[:_START_BYTES]
    except BadInput:
        return b""


def _is_exposition(text: str) -> bool:
    lines = [line for line in text.split("\n")[:400] if line.strip()]
    if len(lines) > 1 and len(text) >= _START_BYTES // 2:
        lines.pop()  # may be cut
    if lines and lines[0].startswith("HTTP/"):  # saved with its headers
        lines = [line for line in lines if not re.match(r"HTTP/|[A-Za-z\-]{1,40}: ", line)]
    lines = lines[:100]
    about = sum(line.startswith(("# HELP ", "# TYPE ")) for line in lines)
    samples = [line for line in lines if re.match(_SAMPLE, line)]
    is_named = about > 0 or any(line.startswith("vllm:") for line in samples)
    return is_named and about + len(samples) >= 0.6 * len(lines)


def walked(paths: Iterable[str]) -> Walked:
    """The files meant, each once, in order: URLs and "-" stay as they are, a missing file is BadInput.

    Folders give what could be read in them. Hidden files are passed over there, and so is what is no text, log archive or
    snapshot; pipes, sockets and devices are never opened.
    """
    found: dict[str, None] = {}
    search = _Search()
    for path in paths:
        if path == STDIN or is_url(path):
            found[path] = None
            continue
        try:
            is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            meant = f"; a server's address begins with http://: http://{path}" if re.fullmatch(HOST_AND_PORT, path) else ""
            raise BadInput(f"{path}: no such file{meant}") from None
        except (OSError, ValueError) as problem:
            raise BadInput(f"{path}: {getattr(problem, 'strerror', None) or problem}") from None
        if not is_folder:
            found[path] = None
            continue
        inside = search.files(path)
        if not inside:
            raise BadInput(f"{path}: no log, metrics page or snapshot in this folder")
        found.update(dict.fromkeys(inside))
    return Walked(list(found), search.left_out, tuple(search.not_text))


class _Search:
    """Looks through folders, each folder and file once however many links lead to it."""

    def __init__(self) -> None:
        self.left_out = 0
        self._seen: set[tuple[int, int]] = set()
        self.not_text: list[str] = []
        self._entries = 0
        self._taken = 0

    def files(self, folder: str, depth: int = DEEPEST_FOLDER) -> list[str]:
        """What could be read in this folder, by name, files before the folders in it."""
        found: list[str] = []
        folders: list[str] = []
        for path in self._names(folder):
            try:
                what = os.stat(path)
            except OSError:
                continue  # gone, or a link to nothing
            if (what.st_dev, what.st_ino) in self._seen:
                continue
            self._seen.add((what.st_dev, what.st_ino))
            if stat.S_ISDIR(what.st_mode):
                folders.append(path)
            elif stat.S_ISREG(what.st_mode) and what.st_size:
                if what.st_size > LARGEST_FILE_BYTES or not _is_readable(path):
                    self.not_text += [path] if len(self.not_text) < MOST_NAMED else []
                elif self._taken < MOST_FILES:
                    self._taken += 1
                    found.append(path)
                else:
                    self.left_out += 1
        if depth > 0:
            for inner in folders:
                found += self.files(inner, depth - 1)
        return found

    def _names(self, folder: str) -> list[str]:
        names = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._entries += 1
                    if self._entries > MOST_ENTRIES:
                        self.left_out += 1
                        break
                    if not entry.name.startswith("."):
                        names.append(entry.path)
        except OSError:
            return []
        return sorted(names)


def named_packed(path: str) -> bool:
    """Whether the name says gzip: only there a snapshot is looked for in it, since unpacking costs time."""
    return path.endswith((".gz", ".gzip"))


def _is_readable(path: str) -> bool:
    """Whether this could be a text, a packed text or a snapshot."""
    try:
        with open(path, "rb") as file:
            start = file.read(_START_BYTES)
    except OSError:
        return False
    if kind_of(start) is not Kind.LOG or encoding_of(start):
        return True
    if start.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return (
            start.startswith(b"\x28")
            or is_text(bare := _bare(start))
            or (named_packed(path) and kind_of(bare) is Kind.SNAPSHOT)
        )
    return not start.strip(b"\0") or is_text(start)


class Spool:
    """What came on a stream, as a file that can be looked at and read from its start; gone when the block ends."""

    def __init__(self, stream: BinaryIO, *, deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        import tempfile

        budget = Budget(deadline, clock)
        self.size_bytes = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        for block in blocks_of_stream(stream, budget):
            self._file.write(block)
            self.size_bytes += len(block)
            if self.size_bytes >= SPOOL_MAX_BYTES:
                break
        self._file.flush()
        self.was_cut = budget.was_short or self.size_bytes >= SPOOL_MAX_BYTES
        if self.size_bytes == 0 and budget.was_short:
            self._file.close()
            raise TimedOut("-: nothing came in time")

    @property
    def path(self) -> str:
        """By which it can be opened, as long as this object lives."""
        return f"/dev/fd/{self._file.fileno()}"

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
