"""Shared parts of the readers of trace formats: checked columns of numbers, and ids of any kind made numbers."""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from plimsoll.errors import BadInput, TooLarge
from plimsoll.net.inputs import unpacked
from plimsoll.simulate.trace import LATEST_NS, Integers, Tuples, tuples

# The names of a trace's columns and fields, and the cells of its CSV.

TOKENS_MAX = 1_000_000_000
SIMPLEST = "TIMESTAMP,ContextTokens,GeneratedTokens"
UNKNOWN = f"a trace: neither its columns nor its fields are known; the simplest is a CSV with {SIMPLEST} (docs/traces.md)"
PROMPT_NAMES = tuple(
    "num_prefill_tokens prompt_tokens input_length input_tokens input_toks input_len prompt_len contexttokens".split()
)
OUTPUT_NAMES = tuple(
    "num_decode_tokens completion_tokens output_length output_tokens output_toks output_len generatedtokens".split()
)


class BadRow(Exception):
    """A row of those given cannot be read; the message is about that row when it is given alone."""


class CsvShape(NamedTuple):
    """The columns to read, by their place."""

    kind: str
    width: int
    names: tuple[str, str, str]
    stamp: int | None
    prompt: int
    output: int


def csv_shape(header: str, *, lengths_alone: bool = False) -> CsvShape | None:
    """The columns of a CSV with this header, or None if it has none that we know; `lengths_alone` needs no times."""
    try:
        cells = [cell.strip() for cell in next(csv.reader([header]), [])]
    except csv.Error:
        return None
    place = {cell.lower(): at for at, cell in reversed(list(enumerate(cells)))}

    def shape(name: str, stamps: Sequence[str], prompts: Sequence[str], outputs: Sequence[str]) -> CsvShape | None:
        stamp, prompt, output = (next((place[n] for n in some if n in place), None) for some in (stamps, prompts, outputs))
        if prompt is None or output is None or (stamp is None and name != "lengths"):
            return None
        said = (cells[stamp] if stamp is not None else "", cells[prompt], cells[output])
        return CsvShape(name, len(cells), said, stamp, prompt, output)

    known = (
        ("azure", ["timestamp"], ["contexttokens"], ["generatedtokens"]),
        ("burstgpt", ["timestamp"], ["request tokens"], ["response tokens"]),
        ("lengths", ["arrived_at"], PROMPT_NAMES, OUTPUT_NAMES),
    )
    wanted = reversed(known[1:]) if lengths_alone else known
    return next((found for one in wanted if (found := shape(*one)) is not None), None)


def csv_cells(width: int, lines: list[str]) -> list[list[str]]:
    """One list for each column, or BadRow."""
    if '"' not in "".join(lines):
        if any(line.count(",") != width - 1 for line in lines):
            raise BadRow(f"{lines[0].count(',') + 1} cells, and the header has {width}")
        flat = ",".join(lines).split(",")
        return [flat[at::width] for at in range(width)]
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error:
        raise BadRow("not CSV") from None
    if len(rows) != len(lines) or any(len(row) != width for row in rows):
        raise BadRow(f"{len(rows[0]) if rows else 0} cells, and the header has {width}")
    return [[row[at] for row in rows] for at in range(width)]


def whole_cell(cell: str, name: str) -> int:
    """A cell's whole number, or BadRow; 12.0 is one: spreadsheets and data frames write it where a column once had a gap."""
    whole, point, rest = cell.strip().partition(".")
    if "_" in cell or (point and rest.strip("0")):  # int() would take 1_000
        raise BadRow(f"{name} is not a whole number")
    try:
        return int(whole)
    except ValueError:
        raise BadRow(f"{name} is not a whole number") from None


# Opens a trace, packed or not, and hands out its lines by the thousand, so that a long file is never held as text.

BYTES_MAX = 8 << 30
LINE_MAX = 16 << 20
ROWS_MAX = 50_000_000
CHUNK = 1 << 20
RECORDED = "requests-*.jsonl"  # The recorder's files


class Lines(NamedTuple):
    """Lines that are not blank, without their ends; `numbers[i]` is the number of `lines[i]` in the file, from 1."""

    numbers: range | list[int]
    lines: list[bytes]


def read_lines(path: str) -> Iterator[Lines]:
    """The file's lines in order; "-" is standard input; one line of BadInput for all that cannot be read."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise BadInput("-: there is no standard input")
            buffered: io.BufferedReader = io.BufferedReader(cast("io.RawIOBase", sys.stdin.buffer), CHUNK)
            try:
                yield from _chunks(unpacked("-", buffered, whole=True), "-")
            finally:
                buffered.detach()  # or it would close standard input with itself
            return
        if path and Path(path).is_dir():
            # All files of the recorder in the folder; the last line of a file that is being written may not be whole yet.
            files = sorted(Path(path).glob(RECORDED))
            if not files:
                raise BadInput(f"{path}: a folder without a recording ({RECORDED}) in it")
            before = 0
            for one in files:
                with one.open("rb") as file:
                    last = 0
                    for chunk in _chunks(unpacked(str(one), file, whole=True), str(one), is_growing=True):
                        last = chunk.numbers[-1] if chunk.lines else last
                        yield chunk._replace(numbers=[before + number for number in chunk.numbers])
                    before += last
            return
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise BadInput(f"{path}: not a file (a pipe is read with - in place of the name)")
        with Path(path).open("rb") as file:
            yield from _chunks(unpacked(path, file, whole=True), path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _chunks(file: io.BufferedReader, path: str, *, is_growing: bool = False) -> Iterator[Lines]:
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


# Turns written times into whole nanoseconds, without a float in between.

_SECOND = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)", re.ASCII)
_REST = re.compile(r"(?:\.(\d+))?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)
_SCALE = [10 ** (9 - digits) for digits in range(10)]
_BEYOND = LATEST_NS // 10**9


def dates_ns(texts: Iterable[str]) -> list[int]:
    """ns since 1970 of dates like 2023-11-16 18:15:46.6805900 or 2024-05-10 00:00:00+00:00; ValueError if one is not a date."""
    seconds: dict[str, int] = {}
    found = []
    for text in texts:
        second = text[:19]
        at = seconds.get(second)
        if at is None:
            match = _SECOND.fullmatch(second)
            if match is None:
                raise ValueError("not a date")
            date = datetime.datetime(*(int(part) for part in match.groups()), tzinfo=datetime.UTC)  # type: ignore[misc,arg-type]
            since = date - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
            at = seconds[second] = (since.days * 86400 + since.seconds) * 10**9
        digits = text[20:]
        if text[19:20] == "." and len(digits) < 10 and digits.isdecimal():
            at += int(digits) * _SCALE[len(digits)]
        elif len(text) > 19:  # a longer fraction, of which digits after the ninth are dropped, an offset from UTC, or both
            match = _REST.fullmatch(text[19:])
            if match is None:
                raise ValueError("not a date")
            fraction, sign, hours, minutes = match.groups()
            offset = (int(hours) * 60 + int(minutes)) * 60 * 10**9 if sign else 0
            at += int((fraction or "0").ljust(9, "0")[:9]) - (-offset if sign == "-" else offset)
        found.append(at)
    return found


def seconds_ns(values: Iterable[str | int | Decimal]) -> list[int]:
    """ns of seconds written as decimal numbers; ValueError if one is not a number or lies beyond all time."""
    found = []
    for value in values:
        if isinstance(value, str) and "_" in value:  # Decimal would take 1_000
            raise ValueError("not a number")
        try:
            number = Decimal(value)
            if not -_BEYOND <= number <= _BEYOND:
                raise ValueError("out of range")
        except InvalidOperation:
            raise ValueError("not a number") from None
        found.append(int((number * 10**9).to_integral_value()))
    return found


NO_STAMP = -(1 << 63)  # A stamp that a row does not have, before the stamps are counted from the trace's zero
NOTHING = np.zeros(0, dtype=np.int64)


class Columns(NamedTuple):
    """Rows of a trace as numbers."""

    arrival: Integers  # Empty where the format has no stamps
    prompt: Integers
    output: Integers
    priority: Integers
    adapter: Integers  # LoRA adapters, each as a number; 0 for none
    images: Tuples  # Tokens of each picture or sound
    ids: Integers
    id_counts: Integers
    stamps: Integers  # (rows, 4): scheduled, first token, finished, cached tokens; no rows where the format has none
    prefix_block: int = 0  # Tokens for each id, where the rows themselves say it
    failed: int = 0  # Well-formed rows of requests that got no answer


NO_STAMPS = np.zeros((0, 4), dtype=np.int64)


def plain_columns(arrival: Integers, prompt: Integers, output: Integers) -> Columns:
    """Columns of a format without ids, priorities or stamps."""
    zeros = np.zeros(len(prompt), dtype=np.int64)
    return Columns(arrival, prompt, output, zeros, zeros.copy(), tuples([()] * len(prompt)), NOTHING, zeros, NO_STAMPS)


def whole_numbers(values: Sequence[object], name: str, most: int = TOKENS_MAX, least: int = 0) -> Integers:
    """The values as integers; BadRow if one is not a whole number from `least` to `most`. True is not 1 here."""
    if set(map(type, values)) - {int}:
        raise BadRow(f"{name} is not a whole number")
    try:
        found = np.array(values, dtype=np.int64)
    except OverflowError:
        raise BadRow(f"{name} is out of range") from None
    if len(found) and (found.min() < least or found.max() > most):
        raise BadRow(f"{name} is {'negative' if len(found) == 1 and found[0] < 0 <= least else 'out of range'}")
    return found


def arrivals_ns(values: list[int]) -> Integers:
    """Arrivals in ns; BadRow if one lies beyond all time."""
    return whole_numbers(values, "arrival", LATEST_NS, -LATEST_NS)


def ids_as_numbers(ids: list[object], name: str) -> Integers:
    """Each id as an int64, equal ids as equal numbers: small integers as they are, all else by 63 bits of its digest."""
    if not set(map(type, ids)) - {int}:
        try:
            return np.array(ids, dtype=np.int64)
        except OverflowError:
            pass
    if set(map(type, ids)) - {int, str}:
        raise BadRow(f"{name} holds something that is neither a whole number nor text")

    def number(one: object) -> int:
        if isinstance(one, int) and -(1 << 63) <= one < 1 << 63:
            return one
        # A plain number and a digest of text can only meet by chance, one in 2^63.
        text = f"{one:x}" if isinstance(one, int) else str(one)
        return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 1

    return np.fromiter(map(number, ids), dtype=np.int64, count=len(ids))


def joined(parts: Iterable[Columns]) -> Columns:
    """All rows, one part after the other."""
    parts = list(parts)
    columns = (np.concatenate(column) for column in list(zip(*parts, strict=True))[:9])
    block = next((part.prefix_block for part in parts if part.prefix_block), 0)
    return Columns._make((*columns, block, sum(part.failed for part in parts)))
