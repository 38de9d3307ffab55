"""Opens a trace, packed or not, and hands out its lines by the thousand, so that a long file is never held as text."""

from __future__ import annotations

import gzip
import io
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from plimsoll.errors import BadInput, TooLarge

BYTES_MAX = 8 << 30
LINE_MAX = 16 << 20
ROWS_MAX = 50_000_000
CHUNK = 1 << 20
RECORDED = "requests-*.jsonl"
"""What the recorder calls its files."""


class Lines(NamedTuple):
    """Lines that are not blank, without their ends; `numbers[i]` is where `lines[i]` stands in the file, from 1."""

    numbers: range | list[int]
    lines: list[bytes]


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_lines(path: str) -> Iterator[Lines]:
    """The file's lines in order; "-" is standard input; one line of BadInput for all that cannot be read."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise BadInput("-: there is no standard input")
            yield from _of_stdin()
            return
        if path and Path(path).is_dir():
            yield from _of_recorder(path)
            return
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise BadInput(f"{path}: not a file (a pipe is read with - in place of the name)")
        with Path(path).open("rb") as file:
            yield from _chunks(_unpacked(file), path)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _of_recorder(path: str) -> Iterator[Lines]:
    """All that the recorder left in its folder; of a file that is being written the last line may not be whole yet."""
    files = sorted(Path(path).glob(RECORDED))
    if not files:
        raise BadInput(f"{path}: a folder without a recording ({RECORDED}) in it")
    before = 0
    for one in files:
        with one.open("rb") as file:
            last = 0
            for chunk in _chunks(_unpacked(file), str(one), is_growing=True):
                last = chunk.numbers[-1] if chunk.lines else last
                yield chunk._replace(numbers=[before + number for number in chunk.numbers])
            before += last


def _of_stdin() -> Iterator[Lines]:
    buffered: io.BufferedReader = io.BufferedReader(cast("io.RawIOBase", sys.stdin.buffer), CHUNK)
    try:
        yield from _chunks(_unpacked(buffered), "-")
    finally:
        buffered.detach()  # or it would close standard input with itself


def _unpacked(buffered: io.BufferedReader) -> _Bytes:
    return gzip.GzipFile(fileobj=buffered) if buffered.peek(2)[:2] == b"\x1f\x8b" else buffered


def _chunks(file: _Bytes, path: str, *, is_growing: bool = False) -> Iterator[Lines]:
    rest, number, total = b"", 1, 0
    while piece := file.read(CHUNK):
        total += len(piece)
        if total > BYTES_MAX:
            raise TooLarge(f"{path}: more than {BYTES_MAX >> 30} GiB of text")
        whole, newline, after = piece.rpartition(b"\n")
        if not newline:
            rest += piece
            if len(rest) > LINE_MAX:
                raise TooLarge(f"{path}, line {number}: longer than {LINE_MAX >> 20} MiB")
            continue
        lines = (rest + whole).split(b"\n")
        yield _kept(lines, number)
        number += len(lines)
        if number > ROWS_MAX:
            raise TooLarge(f"{path}: more than {ROWS_MAX} lines")
        rest = after
    if rest and not is_growing:
        yield _kept([rest], number)


def _kept(lines: list[bytes], number: int) -> Lines:
    kept = [line for line in lines if line and not line.isspace()]
    if len(kept) == len(lines):
        return Lines(range(number, number + len(lines)), lines)
    return Lines([number + i for i, line in enumerate(lines) if line and not line.isspace()], kept)
