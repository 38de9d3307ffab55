"""What is kept of a part that goes into an archive: all of a small text; of a large one its start and its end.

Only plain files are opened, what is packed is unpacked, and what is no text is refused: a snapshot of memory is never copied.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from plimsoll.actuators.bundle_zstd import unpacked_zstd
from plimsoll.domain.bundle import TextFile
from plimsoll.domain.byte_blocks import BLOCK_BYTES, gunzipped, recoded
from plimsoll.errors import BadInput

HEAD_BYTES = 8 << 20
TAIL_BYTES = 24 << 20
CONTEXT_BYTES = 256 << 10  # read before the tail, so that what began there is known; never written
UNPACKED_MAX_BYTES = 4 << 30
_SAMPLE_BYTES = 64 << 10
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PACKED = (
    b"BZh",
    b"\xfd7zXZ\0",
    b"PK\x03\x04",
    b"7z\xbc\xaf",
    b"\x04\x22\x4d\x18",
    b"\x80\x02",
    b"\x80\x03",
    b"\x80\x04",
    b"\x80\x05",
)
_TEXT_BYTES = bytes([0, 7, 8, 9, 10, 11, 12, 13, 27, *range(32, 127), *range(128, 256)])


class Limits(NamedTuple):
    """How much of a text is kept."""

    head_bytes: int = HEAD_BYTES
    tail_bytes: int = TAIL_BYTES


class Kept(NamedTuple):
    """The blocks that are kept of a text, as UTF-8."""

    head: list[bytes]
    tail: list[bytes]  # begins with `context_bytes` that are not to be written; empty where the head is all
    context_bytes: int
    left_out_bytes: int


def kept(content: bytes | TextFile | Callable[[], Iterable[bytes]], limits: Limits = Limits()) -> Kept:  # noqa: B008
    """What is kept of this; BadInput where it is no text."""
    if isinstance(content, TextFile):
        return _kept_of_file(content.path, limits)
    blocks = _sliced(content) if isinstance(content, bytes) else (piece for some in content() for piece in _sliced(some))
    return _kept(_as_text(blocks), limits)


def _sliced(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), BLOCK_BYTES):
        yield data[at : at + BLOCK_BYTES]


def _kept_of_file(path: str, limits: Limits) -> Kept:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as problem:
        raise BadInput(f"could not be opened: {getattr(problem, 'strerror', None) or 'not a file name'}") from None
    try:
        what = os.fstat(descriptor)
        if not stat.S_ISREG(what.st_mode):
            raise BadInput("not a plain file")
        start = os.pread(descriptor, _SAMPLE_BYTES, 0)
        if (
            what.st_size > limits.head_bytes + limits.tail_bytes + CONTEXT_BYTES
            and _encoding(start) is None
            and not start.startswith((_GZIP, _ZSTD))
        ):
            return _ends_of(descriptor, what.st_size, limits)
        return _kept(_as_text(_read(descriptor)), limits)
    except OSError as problem:
        raise BadInput(f"could not be read: {problem.strerror or problem}") from None
    finally:
        os.close(descriptor)


def _read(descriptor: int, at: int = 0, end: int = 1 << 62) -> Iterator[bytes]:
    while at < end and (block := os.pread(descriptor, min(BLOCK_BYTES, end - at), at)):
        at += len(block)
        yield block


def _ends_of(descriptor: int, size: int, limits: Limits) -> Kept:
    """Start and end of a large plain file; the middle is not even read."""
    head = list(_as_text(_read(descriptor, 0, limits.head_bytes)))
    from_byte = size - limits.tail_bytes - CONTEXT_BYTES
    tail = list(_read(descriptor, from_byte, size))
    return Kept(head, tail, CONTEXT_BYTES, size - limits.tail_bytes - limits.head_bytes)


def _kept(blocks: Iterator[bytes], limits: Limits) -> Kept:
    head: list[bytes] = []
    tail: deque[bytes] = deque()
    in_head = in_tail = dropped = 0
    for block in blocks:
        if in_head < limits.head_bytes:
            head.append(block)
            in_head += len(block)
            continue
        tail.append(block)
        in_tail += len(block)
        while in_tail - len(tail[0]) >= limits.tail_bytes + CONTEXT_BYTES:
            dropped += len(tail[0])
            in_tail -= len(tail.popleft())
    if not dropped:
        return Kept([*head, *tail], [], 0, 0)
    context = max(0, in_tail - limits.tail_bytes)
    return Kept(head, list(tail), context, dropped + context)


def _as_text(blocks: Iterator[bytes], *, is_inside: bool = False) -> Iterator[bytes]:
    """The same as UTF-8 text, unpacked once; BadInput where it is none."""
    first = next(blocks, b"")
    while len(first) < 512 and (more := next(blocks, b"")):
        first += more
    if first.startswith((_GZIP, _ZSTD)) and not is_inside:
        again = _chained(first, blocks)
        inside = _gunzipped(again) if first.startswith(_GZIP) else unpacked_zstd(again)
        yield from _as_text(_capped(inside), is_inside=True)
        return
    encoding = _encoding(first[:_SAMPLE_BYTES])
    if encoding is None and not _is_text(first[:_SAMPLE_BYTES]):
        raise BadInput("not text; what is binary is never copied")
    yield from _chained(first, blocks) if encoding is None else recoded(_chained(first, blocks), encoding)


def _chained(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _capped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    total = 0
    for block in blocks:
        total += len(block)
        yield block
        if total > UNPACKED_MAX_BYTES:
            return


def _encoding(start: bytes) -> str | None:
    """Which UTF-16 this is; None for anything else. Read as UTF-8 it would hide its secrets from us, not from a reader."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = start[0:512:2], start[1:512:2]
    if len(odd) >= 8 and odd.count(0) > 0.6 * len(odd) and even.count(0) < 0.1 * len(even):
        return "utf-16-le"
    if len(odd) >= 8 and even.count(0) > 0.6 * len(even) and odd.count(0) < 0.1 * len(odd):
        return "utf-16-be"
    return None


def _is_text(sample: bytes) -> bool:
    if sample.startswith((*_PACKED, _GZIP, _ZSTD)) or sample[257:262] == b"ustar":
        return False
    if sample.count(0) > 0.2 * len(sample) or len(sample.translate(None, _TEXT_BYTES)) > 0.05 * len(sample):
        return False
    return sample.decode("utf-8", "replace").count("\ufffd") <= 0.2 * len(sample)


def _gunzipped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(zlib.error):  # of what cannot be unpacked nothing is kept
        yield from gunzipped(blocks)
