"""Series in promtool's own notation: `0+2x3` is 0 2 4 6, `5x2` is 5 5 5, `_x3` is nothing three times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def written(values: Sequence[float | None]) -> str:
    """A series, with what goes on evenly in short. Differences are of whole numbers alone: others do not add up exactly."""
    return " ".join(_runs([None if value is None else float(value) for value in values]))


def _runs(values: Sequence[float | None]) -> Iterator[str]:
    place = 0
    while place < len(values):
        first = values[place]
        step, more = _evenly(values, place)
        place += more + 1
        if first is None:
            yield f"_x{more + 1}" if more else "_"
        elif more == 0:
            yield number(first)
        elif step == 0:
            yield f"{number(first)}x{more}"
        else:
            yield f"{number(first)}{'+' if step > 0 else '-'}{number(abs(step))}x{more}"


def _evenly(values: Sequence[float | None], place: int) -> tuple[float, int]:
    """By how much it goes on from here, and how many times."""
    first, more = values[place], 0
    after = values[place + 1] if place + 1 < len(values) else math.nan
    if first is None or after is None:
        while first is None and place + more + 1 < len(values) and values[place + more + 1] is None:
            more += 1
        return 0.0, more
    step = after - first
    if math.isnan(step) or (step != 0 and not (first.is_integer() and step.is_integer())):
        return 0.0, 0
    while place + more + 1 < len(values) and values[place + more + 1] == first + (more + 1) * step:
        more += 1
    return (step, more) if more > 1 or step == 0 else (0.0, 0)


def number(value: float) -> str:
    """As promtool reads it."""
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() else repr(value)
