"""Finds, opens and unpacks the inputs that a user names, and classifies them by content; searches folders.

All files of unknown size and origin are read through here: logs, bundles, traces, pages, snapshots.

    for block in text_blocks("vllm.log.gz", Descriptor(descriptor, budget), budget):    UTF-8, at most 1 MiB a block
    unpacked("trace.csv.zst", file, whole=True).read(65536)                             bytes, an error where they are cut
    with Spool(sys.stdin.buffer, deadline=deadline) as path:                            "-": copied, then like any file
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import select
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from types import TracebackType
from typing import BinaryIO, NamedTuple, cast

from plimsoll.errors import BadInput, TimedOut

BLOCK_BYTES = 1 << 20
UNPACKED_MAX_BYTES = 8 << 30
NULS_MAX_BYTES = 64 << 20  # a stream that begins with so many NUL bytes is not text
SAMPLE_BYTES = 64 << 10
DEEPEST = 3  # packings inside each other

_MAGIC_BYTES = 512  # they show a packing, an archive or an encoding
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_TEXT_BYTES = bytes([7, 8, 9, 10, 11, 12, 13, 27, *range(32, 127), *range(128, 256)])
_PACKED = (
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"PK\x03\x04", "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"\x04\x22\x4d\x18", "lz4"),
)


class Budget:
    def __init__(self, deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.deadline = deadline
        self.clock = clock
        self.was_short = False

    def left_s(self) -> float | None:
        """Returns the seconds left; None without a deadline."""
        return None if self.deadline is None else self.deadline - self.clock()

    def is_over(self) -> bool:
        """True once the time is up; kept in `was_short`, so that a partial read is known as one."""
        left = self.left_s()
        if left is not None and left <= 0:
            self.was_short = True
        return self.was_short


def opened(path: str) -> tuple[int, os.stat_result]:
    """Returns a descriptor to read from, and its stat; refuses folders, sockets and devices without opening them."""
    try:
        what = os.stat(path)
        if stat.S_ISDIR(what.st_mode):
            raise BadInput(f"{path}: a folder, not a file")
        if not (stat.S_ISREG(what.st_mode) or stat.S_ISFIFO(what.st_mode)):
            raise BadInput(f"{path}: neither a file nor a pipe")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return descriptor, os.fstat(descriptor)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, ValueError) as problem:
        raise BadInput(f"{path}: {getattr(problem, 'strerror', None) or problem}") from None


class _Source(io.RawIOBase):
    """A stream read forwards; its first read gathers enough bytes to recognise them."""

    _is_known = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        filled = 0
        while data := self._some(len(buffer) - filled):
            buffer[filled : filled + len(data)] = data
            filled += len(data)
            if self._is_known or filled >= min(_MAGIC_BYTES, len(buffer)):
                break
        self._is_known = True
        return filled

    def _some(self, size: int) -> bytes:
        raise NotImplementedError


class Descriptor(_Source):
    """The bytes of a descriptor until its end or the deadline; waits for a pipe, but not past the deadline."""

    def __init__(self, descriptor: int, budget: Budget) -> None:
        self._descriptor, self._budget = descriptor, budget
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN | select.POLLHUP)

    def _some(self, size: int) -> bytes:
        while not self._budget.is_over():
            left = self._budget.left_s()
            if self._is_file or self._poll.poll(1000 if left is None else max(1, min(1000, int(left * 1000)))):
                try:
                    return os.read(self._descriptor, size)
                except BlockingIOError:
                    continue
        return b""


class _Unpacking(_Source):
    """The unpacked bytes of a stream. Where it is cut or damaged, it ends there, or raises BadInput if it must be `whole`."""

    def __init__(self, source: str, packed: io.BufferedReader, *, is_gzip: bool, whole: bool) -> None:
        self._errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
        self._reader: io.BufferedIOBase
        if is_gzip:
            self._reader = gzip.GzipFile(fileobj=packed)
        else:
            import zstandard  # most inputs need it not

            self._errors = (zstandard.ZstdError,)
            reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            self._reader = cast("io.BufferedIOBase", reader)
        self._kind = "gzip" if is_gzip else "zstd"
        self._source, self._whole, self._came = source, whole, False

    def _some(self, size: int) -> bytes:
        try:
            data = self._reader.read1(size)
        except self._errors as problem:
            if "too much memory" in str(problem):
                raise BadInput(f"{self._source}: zstd with a very long window; unpack it first: zstd -d --long=31") from None
            if self._whole and self._came:
                raise BadInput(f"{self._source}: cut or damaged {self._kind} data") from None
            if not self._came:
                raise BadInput(f"{self._source}: looks like {self._kind} and is not") from None
            return b""
        self._came = self._came or bool(data)
        return data


def unpacked(source: str, raw: BinaryIO | io.RawIOBase, *, whole: bool = False, depth: int = DEEPEST) -> io.BufferedReader:
    """Returns the same bytes, or those packed in them by gzip or zstd, of any amount; refuses other packings.

    Cut or damaged data ends there; if it must be `whole`, or nothing came before, reading it raises BadInput.
    """
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", raw), BLOCK_BYTES)
    start = stream.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]
    if not _is_packed(start):
        for magic, name in _PACKED:
            if start.startswith(magic):
                raise BadInput(f"{source}: packed with {name}; unpack it first")
        if start[257:262] == b"ustar":
            raise BadInput(f"{source}: a tar archive; unpack it first and name the folder")
        return stream
    if depth == 0:
        raise BadInput(f"{source}: compressed too many times over; unpack it first")
    inside = _Unpacking(source, stream, is_gzip=start.startswith(_GZIP), whole=whole)
    return unpacked(source, inside, whole=whole, depth=depth - 1)


def _is_packed(start: bytes) -> bool:
    return start.startswith((_GZIP, _ZSTD)) or (
        start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F
    )  # or a skipped frame


def is_plain(start: bytes) -> bool:
    """True if these first bytes need no unpacking and no decoding from UTF-16."""
    is_archive = start[257:262] == b"ustar" or any(start.startswith(magic) for magic, _ in _PACKED)
    return not _is_packed(start) and not is_archive and encoding_of(start) is None


def encoding_of(start: bytes) -> str | None:
    """Returns which UTF-16 this is; None for anything else."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = start[0:512:2], start[1:512:2]
    if len(odd) >= 8:  # Windows also writes it without a byte order mark
        if odd.count(0) > 0.6 * len(odd) and even.count(0) < 0.1 * len(even):
            return "utf-16-le"
        if even.count(0) > 0.6 * len(even) and odd.count(0) < 0.1 * len(odd):
            return "utf-16-be"
    return None


def is_text(sample: bytes) -> bool:
    """True if this looks like text; NUL bytes are skipped, but NUL bytes alone are no text."""
    bare = sample.replace(b"\0", b"")
    if not bare:
        return not sample
    if len(bare.translate(None, _TEXT_BYTES)) > 0.05 * len(bare):
        return False
    return bare.decode("utf-8", "replace").count("\ufffd") <= 0.3 * len(bare)


def text_blocks(source: str, raw: BinaryIO | io.RawIOBase, budget: Budget, most_bytes: int = 0) -> Iterator[bytes]:
    """Yields a text as UTF-8, unpacked, as far as time and the cap on its size allow.

    Raises BadInput where it is no text, TimedOut where nothing came in time.
    """
    stream = unpacked(source, raw)
    encoding = encoding_of(stream.peek(_MAGIC_BYTES)[:_MAGIC_BYTES])
    blocks: Iterator[bytes] = iter(lambda: stream.read1(BLOCK_BYTES), b"")
    if encoding is not None:
        blocks = (text.encode("utf-8", "replace") for text in codecs.iterdecode(blocks, encoding, "replace"))
    total = 0
    seen = False
    for block in blocks:
        total += len(block)
        if seen:
            yield block
        elif text := block.lstrip(b"\0"):
            if not is_text(text[:SAMPLE_BYTES]):
                raise BadInput(f"{source}: not text")
            seen = True
            yield text.removeprefix(b"\xef\xbb\xbf")
        elif total > NULS_MAX_BYTES:
            break
        if total >= (most_bytes or UNPACKED_MAX_BYTES):
            budget.was_short = True
        if budget.is_over():  # little packed data may unpack to much
            return
    if total and not seen:
        raise BadInput(f"{source}: not text, nothing but NUL bytes")
    if not seen and budget.was_short:
        raise TimedOut(f"{source}: nothing came in time")


STDIN = "-"
DEEPEST_FOLDER = 8
MOST_FILES = 1_000
MOST_ENTRIES = 50_000  # in all folders together
LARGEST_FILE_BYTES = 64 << 30  # of a file found in a folder; one that the user names is read at any size
SPOOL_MAX_BYTES = 4 << 30
_START_BYTES = 64 << 10

HOST_AND_PORT = r"[A-Za-z0-9][A-Za-z0-9.\-]{0,252}:\d{1,5}(?:/metrics)?/?"
_SAMPLE = r"[a-zA-Z_:][\w:]{0,200}(?:\{[^\n]{0,4000}\})? [-+]?(?:\d[\d.eE+\-]{0,40}|Inf|NaN)(?: \d{1,20})?\s{0,2}$"

MOST_NAMED = 8  # skipped files that are named
_REPORT = re.compile(r'\s*\{\s*"schema":\s*"plimsoll\.doctor/')


class InputKind(StrEnum):
    """The kind of an input; every text that is no metrics page and no report is a log."""

    LOG = "log"
    METRICS = "metrics"
    SNAPSHOT = "snapshot"
    REPORT = "report"  # of `plimsoll doctor --json`: it quotes logs, and is none
    URL = "url"


class Walked(NamedTuple):
    """The files that were found, and the number of files beyond the limits."""

    files: list[str]
    left_out: int = 0
    not_text: tuple[str, ...] = ()  # files of folders that are neither text nor a snapshot; the first few


def classify(path: str) -> InputKind:
    """Returns an input's kind by its first bytes. Raises BadInput where there is nothing to read."""
    if is_url(path):
        return InputKind.URL
    descriptor, what = opened(path)
    try:
        if not stat.S_ISREG(what.st_mode):
            return InputKind.LOG  # a look at a pipe would take bytes out of it; a Spool keeps them
        return kind_of(os.pread(descriptor, _START_BYTES, 0))
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)


def is_url(word: str) -> bool:
    return word[:8].lower().startswith(("http://", "https://"))


def kind_of(start: bytes) -> InputKind:
    """Returns the kind of an input that begins with these bytes, packed or not."""
    inside = _inside(start)
    is_pickle = inside[:1] == b"\x80" and inside[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if is_pickle or (start.startswith(b"PK\x03\x04") and b"data.pkl" in start[:512]):  # the second is torch.save's
        return InputKind.SNAPSHOT
    text = inside.decode(encoding_of(inside) or "utf-8", "replace").lstrip("\ufeff")
    if _REPORT.match(text):
        return InputKind.REPORT
    lines = [line for line in text.split("\n")[:400] if line.strip()]
    if len(lines) > 1 and len(text) >= _START_BYTES // 2:
        lines.pop()  # may be cut
    if lines and lines[0].startswith("HTTP/"):  # saved with its headers
        lines = [line for line in lines if not re.match(r"HTTP/|[A-Za-z\-]{1,40}: ", line)]
    lines = lines[:100]
    about = sum(line.startswith(("# HELP ", "# TYPE ")) for line in lines)
    samples = [line for line in lines if re.match(_SAMPLE, line)]
    is_named = about > 0 or any(line.startswith("vllm:") for line in samples)
    return InputKind.METRICS if is_named and about + len(samples) >= 0.6 * len(lines) else InputKind.LOG


def _inside(start: bytes) -> bytes:
    """Returns the first unpacked bytes of a file that begins like this; none where it cannot be unpacked."""
    try:
        return unpacked("", io.BytesIO(start)).read1(_START_BYTES)
    except BadInput:
        return b""


def walked(paths: Iterable[str]) -> Walked:
    """Returns the files of these paths, each once, in order. URLs and "-" stay as they are; a missing file raises BadInput.

    A folder is replaced by its readable files, without hidden ones and those that are no text, packed log or snapshot;
    pipes, sockets and devices in it are never opened.
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
    """A search through folders that visits each folder and file once, however many links lead to it."""

    def __init__(self) -> None:
        self.left_out = 0
        self._seen: set[tuple[int, int]] = set()
        self.not_text: list[str] = []
        self._entries = 0
        self._taken = 0

    def files(self, folder: str, depth: int = DEEPEST_FOLDER) -> list[str]:
        """Returns the readable files of this folder, sorted by name, before those of the folders in it."""
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


def _is_readable(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            start = file.read(_START_BYTES)
    except OSError:
        return False
    if kind_of(start) is not InputKind.LOG or encoding_of(start) or start.startswith(_ZSTD):
        return True
    return not start.strip(b"\0") or is_text(_inside(start) if start.startswith(_GZIP) else start)


class Spool:
    """A stream's bytes in a temporary file, which can be read from its start again; gone when the block ends."""

    def __init__(self, stream: BinaryIO, *, deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        budget = Budget(deadline, clock)
        self.size_bytes = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            raw: BinaryIO | io.RawIOBase = Descriptor(stream.fileno(), budget)
        except (OSError, AttributeError):
            raw = stream
        while self.size_bytes < SPOOL_MAX_BYTES and not budget.is_over() and (block := raw.read(BLOCK_BYTES)):
            self.size_bytes += self._file.write(block)
        self._file.flush()
        self.was_cut = budget.was_short or self.size_bytes >= SPOOL_MAX_BYTES
        if self.size_bytes == 0 and budget.was_short:
            self._file.close()
            raise TimedOut("-: nothing came in time")

    @property
    def path(self) -> str:
        """The path to open the file by, as long as this object lives."""
        return f"/dev/fd/{self._file.fileno()}"

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
