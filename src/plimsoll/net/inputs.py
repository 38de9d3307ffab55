"""Finds and opens the inputs that a user names, and tells them apart by content; folders are walked.

with Spool(sys.stdin.buffer, deadline=deadline) as path:       "-": kept aside first, then like any file
    kind = classify(path)
"""

from __future__ import annotations

import codecs
import importlib
import os
import re
import select
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import chain
from types import TracebackType
from typing import BinaryIO, NamedTuple, Protocol, cast

from plimsoll.errors import BadInput, TimedOut, TooLarge

BLOCK_BYTES = 1 << 20


def recoded(blocks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """The same text as UTF-8; what is no letter in this encoding is replaced."""
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "replace")


def gunzipped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Every member's text; where the data is cut or spoilt, what came before, and zlib's error where nothing did."""
    unpack = zlib.decompressobj(31)
    came, is_inside = False, True
    for block in blocks:
        data = block
        while data := data if is_inside else data.lstrip(b"\0"):  # tapes and disks fill up with zeros behind a member
            is_inside = True
            try:
                text = unpack.decompress(data, BLOCK_BYTES)
            except zlib.error:
                if not came:
                    raise
                return
            if text:
                came = True
                yield text
            data = unpack.unconsumed_tail
            if unpack.eof:
                data, is_inside = unpack.unused_data, False
                unpack = zlib.decompressobj(31)


class _Reader(Protocol):
    def read(self, size: int) -> bytes: ...


class _Library(Protocol):
    """What is used of either library: they agree on nothing but the idea."""

    ZstdError: type[Exception]

    def ZstdDecompressor(self) -> object: ...  # noqa: N802


class _Pull:
    """Blocks as a file that can only be read forwards."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """At most this many bytes; empty at the end."""
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return b""
            self._rest = block
        wanted = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(wanted) :]
        return wanted


def _library() -> tuple[_Library, bool] | None:
    """The zstandard package or Python's own from 3.14, and whether it is the package."""
    for name in ("zstandard", "compression.zstd"):
        try:
            return cast("_Library", importlib.import_module(name)), name == "zstandard"
        except ImportError:
            continue
    return None


def unpacked_zstd(source: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The text of every frame; where the data is cut or spoilt, what came before."""
    found = _library()
    if found is None:
        raise BadInput(f"{source}: packed with zstd; install the zstandard package (pip install zstandard) or unpack it first")
    library, is_package = found
    came = False
    try:
        for text in _by_package(library, blocks) if is_package else _by_python(library, blocks):
            came = True
            yield text
    except (library.ZstdError, EOFError):
        if not came:
            raise BadInput(f"{source}: looks like zstd and is not") from None


def _by_package(library: _Library, blocks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = library.ZstdDecompressor()
    reader = cast("_Reader", unpack.stream_reader(_Pull(blocks), read_size=64 << 10, read_across_frames=True))  # type: ignore[attr-defined]
    while text := reader.read(BLOCK_BYTES):
        yield text


def _by_python(library: _Library, blocks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = library.ZstdDecompressor()
    for block in blocks:
        data = block
        while True:
            if text := unpack.decompress(data, max_length=BLOCK_BYTES):  # type: ignore[attr-defined]
                yield text
            if unpack.eof:  # type: ignore[attr-defined]
                data = unpack.unused_data  # type: ignore[attr-defined]
                unpack = library.ZstdDecompressor()
                if not data:
                    break
            elif unpack.needs_input:  # type: ignore[attr-defined]
                break
            else:
                data = b""


def gunzip_whole(data: bytes, most_bytes: int, shown: str) -> bytes:
    """The data itself, or what is in it if it is gzip, never more than `most_bytes`."""
    if data[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(31)
        try:
            data = unpacker.decompress(data, most_bytes + 1)
        except zlib.error:
            raise BadInput(f"{shown}: the gzip data is broken") from None
    if len(data) > most_bytes:
        raise TooLarge(f"{shown}: more than {most_bytes >> 20} MiB")
    return data


UNPACKED_MAX_BYTES = 8 << 30
NULS_MAX_BYTES = 64 << 20  # nothing else in this much of a stream: not text
SAMPLE_BYTES = 64 << 10
DEEPEST = 3  # packings inside each other

_TEXT_BYTES = bytes([7, 8, 9, 10, 11, 12, 13, 27, *range(32, 127), *range(128, 256)])
_PACKED = (
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"PK\x03\x04", "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"\x04\x22\x4d\x18", "lz4"),
)


class Budget:
    """How long reading may go on."""

    def __init__(self, deadline: float | None, clock: Callable[[], float]) -> None:
        self.deadline = deadline
        self.clock = clock
        self.was_short = False

    def left_s(self) -> float | None:
        """Seconds left; None means for ever."""
        return None if self.deadline is None else self.deadline - self.clock()

    def is_over(self) -> bool:
        """Whether the time is up; remembered, so that a partial read is known as one."""
        left = self.left_s()
        if left is not None and left <= 0:
            self.was_short = True
        return self.was_short


def opened(path: str) -> tuple[int, os.stat_result]:
    """A descriptor to read from and what it is; folders, sockets and devices are refused and never opened."""
    try:
        what = os.stat(path)
        if stat.S_ISDIR(what.st_mode):
            raise BadInput(f"{path}: a folder, not a file")
        if not (stat.S_ISREG(what.st_mode) or stat.S_ISFIFO(what.st_mode)):
            raise BadInput(f"{path}: neither a file nor a pipe")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        return descriptor, os.fstat(descriptor)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, ValueError) as problem:
        raise BadInput(f"{path}: {getattr(problem, 'strerror', None) or problem}") from None


def blocks_of_descriptor(descriptor: int, budget: Budget) -> Iterator[bytes]:
    """What can be read until the end or the deadline; waits for a pipe, but not past it."""
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    while not budget.is_over() and (is_file or _is_ready(descriptor, budget)):
        try:
            block = os.read(descriptor, BLOCK_BYTES)
        except BlockingIOError:
            continue
        if not block:
            return
        yield block


def _is_ready(descriptor: int, budget: Budget) -> bool:
    """Whether there is something to read (or the end) before the deadline."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while not budget.is_over():
        left = budget.left_s()
        if poll.poll(1000 if left is None else max(1, min(1000, int(left * 1000)))):
            return True
    return False


def blocks_of_stream(stream: BinaryIO, budget: Budget) -> Iterator[bytes]:
    """The same for an open stream that nobody has read from."""
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):
        while not budget.is_over() and (block := stream.read(BLOCK_BYTES)):
            yield block
        return
    yield from blocks_of_descriptor(descriptor, budget)


def unpacked(source: str, blocks: Iterator[bytes], depth: int = DEEPEST) -> Iterator[bytes]:
    """The text's bytes in UTF-8, whatever they were packed in."""
    start = b""
    for block in blocks:
        start += block
        if len(start) >= 512:
            break
    again = chain([start] if start else [], blocks)
    if packing := _packing(start):
        if depth == 0:
            raise BadInput(f"{source}: packed in packed in packed; unpack it first")
        inside = _gunzipped(source, again) if packing == "gzip" else unpacked_zstd(source, again)
        yield from unpacked(source, inside, depth - 1)
        return
    for magic, name in _PACKED:
        if start.startswith(magic):
            raise BadInput(f"{source}: packed with {name}; unpack it first")
    if start[257:262] == b"ustar":
        raise BadInput(f"{source}: a tar archive; unpack it first and name the folder")
    encoding = encoding_of(start)
    if encoding is None:
        yield from again
    else:
        yield from recoded(again, encoding)


def _packing(start: bytes) -> str:
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    if start.startswith(b"\x28\xb5\x2f\xfd") or (start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F):
        return "zstd"
    return ""


def is_plain(start: bytes) -> bool:
    """Whether these first bytes are a text's own: neither packed nor in another encoding."""
    is_packed = _packing(start) or start[257:262] == b"ustar" or any(start.startswith(magic) for magic, _ in _PACKED)
    return not is_packed and encoding_of(start) is None


def encoding_of(start: bytes) -> str | None:
    """Which UTF-16 this is; None for anything else."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = start[0:512:2], start[1:512:2]
    if len(odd) >= 16:  # Windows writes it without a mark, too
        if odd.count(0) > 0.8 * len(odd) and even.count(0) < 0.1 * len(even):
            return "utf-16-le"
        if even.count(0) > 0.8 * len(even) and odd.count(0) < 0.1 * len(odd):
            return "utf-16-be"
    return None


def _gunzipped(source: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from gunzipped(blocks)
    except zlib.error:
        raise BadInput(f"{source}: looks like gzip and is not") from None


def is_text(sample: bytes) -> bool:
    """Whether a person could have written or a program logged this; NUL bytes are passed over, but not alone."""
    bare = sample.replace(b"\0", b"")
    if not bare:
        return not sample
    if len(bare.translate(None, _TEXT_BYTES)) > 0.05 * len(bare):
        return False
    return bare.decode("utf-8", "replace").count("\ufffd") <= 0.3 * len(bare)


def checked(source: str, blocks: Iterator[bytes], budget: Budget) -> Iterator[bytes]:
    """The same blocks, refused where they are not text, and no more than time and the cap allow; TimedOut where none came."""
    total = 0
    seen = False
    for block in blocks:
        total += len(block)
        if seen:
            yield block
        elif block.strip(b"\0"):
            text = block.lstrip(b"\0")
            if not is_text(text[:SAMPLE_BYTES]):
                raise BadInput(f"{source}: not text")
            seen = True
            yield text.removeprefix(b"\xef\xbb\xbf")
        elif total > NULS_MAX_BYTES:
            raise BadInput(f"{source}: not text, nothing but NUL bytes")
        if total >= UNPACKED_MAX_BYTES:
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
        if start.startswith(b"\x28") or is_text(bare := _bare(start)):
            return True
        return named_packed(path) and kind_of(bare) is Kind.SNAPSHOT
    return not start.strip(b"\0") or is_text(start)


class Spool:
    """What came on a stream, as a file that can be looked at and read from its start; gone when the block ends."""

    def __init__(self, stream: BinaryIO, *, deadline: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
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
