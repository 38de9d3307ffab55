"""Bytes of a text as they come: from a file, a pipe or a stream, unpacked, as UTF-8, and never past the deadline."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from plimsoll.domain.byte_blocks import BLOCK_BYTES, gunzipped, recoded
from plimsoll.errors import BadInput, TimedOut

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
    import select

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
    again = _chained(start, blocks)
    if packing := _packing(start):
        if depth == 0:
            raise BadInput(f"{source}: packed in packed in packed; unpack it first")
        inside = _gunzipped(source, again) if packing == "gzip" else _unzstd(source, again)
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


def _chained(start: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    if start:
        yield start
    yield from blocks


def _gunzipped(source: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from gunzipped(blocks)
    except zlib.error:
        raise BadInput(f"{source}: looks like gzip and is not") from None


def _unzstd(source: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
    from plimsoll.sources.text_zstd import unpacked_zstd

    yield from unpacked_zstd(source, blocks)


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
