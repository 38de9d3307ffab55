"""Traces as CSV: Azure's, BurstGPT's, and files that only say how long the requests are."""

from __future__ import annotations

import numpy as np

from plimsoll.domain.trace import Integers
from plimsoll.sources.trace_columns import NOTHING, Columns, arrivals_ns, plain_columns, whole_numbers
from plimsoll.sources.trace_shapes import BadRow, CsvShape, csv_cells, whole_cell
from plimsoll.sources.trace_stamps import alike_dates_ns, dates_ns, seconds_ns


def csv_columns(shape: CsvShape, lines: list[str]) -> Columns:
    """The rows as columns, or BadRow."""
    cells = csv_cells(shape.width, lines)
    prompt = _numbers(cells[shape.prompt], shape.names[1])
    output = _numbers(cells[shape.output], shape.names[2])
    arrival = NOTHING if shape.stamp is None else _stamps(shape, cells[shape.stamp])
    if shape.kind != "burstgpt":
        return plain_columns(arrival, prompt, output)
    answered = output > 0
    return plain_columns(arrival[answered], prompt[answered], output[answered])._replace(failed=int(np.sum(~answered)))


def _numbers(cells: list[str], name: str) -> Integers:
    if "_" in "".join(cells):  # int() would take 1_000
        raise BadRow(f"{name} is not a whole number")
    try:
        return whole_numbers(list(map(int, cells)), name)
    except ValueError:
        return whole_numbers([whole_cell(cell, name) for cell in cells], name)


def _stamps(shape: CsvShape, cells: list[str]) -> Integers:
    try:
        if shape.kind == "azure":
            found = alike_dates_ns(cells)
            return arrivals_ns(dates_ns(cells)) if found is None else found
        return arrivals_ns(seconds_ns(cells))
    except ValueError:
        what = "a date like 2023-11-16 18:15:46.6805900" if shape.kind == "azure" else "a number of seconds"
        raise BadRow(f"{shape.names[0]} is not {what}") from None
