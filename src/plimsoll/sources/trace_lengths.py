"""Reads how long the requests of a trace are: any file that `simulate` takes, and its columns by the same names.

Apart from `traces`, which reads all of a trace and needs numpy: `plan` works without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.errors import BadInput, TooLarge
from plimsoll.sources.trace_lines import read_lines
from plimsoll.sources.trace_shapes import (
    OUTPUT_NAMES,
    PROMPT_NAMES,
    TOKENS_MAX,
    UNKNOWN,
    BadRow,
    CsvShape,
    csv_cells,
    csv_shape,
    whole_cell,
)

ROWS_MAX = 5_000_000


class _Request(NamedTuple):
    prompt: int
    output: int
    is_answered: bool = True


def read_lengths(path: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens of every request, in the file's order; one line says what is wrong with it."""
    rows = list(_rows(path))
    if not rows:
        raise BadInput(f"{path}: no request in it")
    found = [(max(1, row.prompt), max(1, row.output)) for row in rows if row.is_answered]
    if not found:
        raise BadInput(f"{path}: no request in it that was answered")
    return found


def _rows(path: str) -> Iterator[_Request]:
    shape: CsvShape | None = None
    is_first = True
    for chunk in read_lines(path):
        for number, line in zip(chunk.numbers, chunk.lines, strict=True):
            where = f"{path}, line {number}"
            if number > ROWS_MAX:
                raise TooLarge(f"{where}: longer than a trace can be")
            try:
                text = line.decode("utf-8-sig" if is_first else "utf-8").rstrip("\r")
            except UnicodeDecodeError:
                raise BadInput(f"{where}: not text") from None
            is_first = False
            try:
                if text.lstrip().startswith("{"):
                    yield _of_json(text)
                elif shape is not None:
                    yield _of_csv(text, shape)
                elif (shape := csv_shape(text, None)) is None:
                    raise BadRow(f"not {UNKNOWN}")
            except BadRow as reason:
                raise BadInput(f"{where}: {reason}") from None


def _of_csv(text: str, shape: CsvShape) -> _Request:
    """BurstGPT keeps requests that failed, as rows without an answer."""
    cells = csv_cells(shape.width, [text])
    prompt, output = _tokens(cells[shape.prompt][0], shape.names[1]), _tokens(cells[shape.output][0], shape.names[2])
    return _Request(prompt, output, is_answered=output > 0 or shape.kind != "burstgpt")


def _of_json(text: str) -> _Request:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow("not JSON") from None
    prompt, output = (next((key for key in row if key.lower() in names), None) for names in (PROMPT_NAMES, OUTPUT_NAMES))
    if prompt is None or output is None:
        raise BadRow(f"not {UNKNOWN}")
    return _Request(_tokens(str(row[prompt]), prompt), _tokens(str(row[output]), output))


def _tokens(text: str, name: str) -> int:
    number = whole_cell(text, name)
    if not 0 <= number <= TOKENS_MAX:
        raise BadRow(f"{name} is {'negative' if number < 0 else 'out of range'}")
    return number
