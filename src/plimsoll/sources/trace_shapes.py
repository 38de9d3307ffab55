"""How a trace's columns and fields are called, and the cells of its CSV: what both readers of traces know, without numpy."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import NamedTuple

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
    """Some row of those given cannot be read; the reason holds for it when it is given alone."""


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
