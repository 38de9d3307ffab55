"""Traces as CSV: Azure's, BurstGPT's, and files that only say how long the requests are."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.domain.trace import Integers
from plimsoll.sources.trace_columns import NOTHING, BadRow, Columns, arrivals_ns, plain_columns, whole_numbers
from plimsoll.sources.trace_stamps import alike_dates_ns, dates_ns, seconds_ns

PROMPT_NAMES = tuple(
    "num_prefill_tokens prompt_tokens input_length input_tokens input_toks input_len prompt_len contexttokens".split()
)
OUTPUT_NAMES = tuple(
    "num_decode_tokens completion_tokens output_length output_tokens output_toks output_len generatedtokens".split()
)


class CsvShape(NamedTuple):
    """Which columns matter, by their place."""

    kind: str
    width: int
    names: tuple[str, str, str]
    stamp: int | None
    prompt: int
    output: int


def csv_shape(header: str, kind: str | None) -> CsvShape | None:
    """How to read a CSV with this header, or None if it has no columns we know."""
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
    return next((found for one in known if kind in (None, one[0]) and (found := shape(*one)) is not None), None)


def csv_columns(shape: CsvShape, lines: list[str]) -> Columns:
    """The rows as columns, or BadRow."""
    cells = _cells(shape.width, lines)
    prompt = _numbers(cells[shape.prompt], shape.names[1])
    output = _numbers(cells[shape.output], shape.names[2])
    arrival = NOTHING if shape.stamp is None else _stamps(shape, cells[shape.stamp])
    if shape.kind != "burstgpt":
        return plain_columns(arrival, prompt, output)
    answered = output > 0
    return plain_columns(arrival[answered], prompt[answered], output[answered])._replace(failed=int(np.sum(~answered)))


def _cells(width: int, lines: list[str]) -> list[list[str]]:
    """One list for each column."""
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


def _numbers(cells: list[str], name: str) -> Integers:
    if "_" in "".join(cells):  # int() would take 1_000
        raise BadRow(f"{name} is not a whole number")
    try:
        return whole_numbers(list(map(int, cells)), name)
    except ValueError:
        # Spreadsheets and data frames write 12.0 where a column once had a gap.
        try:
            return whole_numbers([_whole(cell) for cell in cells], name)
        except ValueError:
            raise BadRow(f"{name} is not a whole number") from None


def _whole(cell: str) -> int:
    whole, point, rest = cell.strip().partition(".")
    if point and rest.strip("0"):
        raise ValueError("not whole")
    return int(whole)


def _stamps(shape: CsvShape, cells: list[str]) -> Integers:
    try:
        if shape.kind == "azure":
            found = alike_dates_ns(cells)
            return arrivals_ns(dates_ns(cells)) if found is None else found
        return arrivals_ns(seconds_ns(cells))
    except ValueError:
        what = "a date like 2023-11-16 18:15:46.6805900" if shape.kind == "azure" else "a number of seconds"
        raise BadRow(f"{shape.names[0]} is not {what}") from None
