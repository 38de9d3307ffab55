"""Times and one column of numbers for each figure, the oldest forgotten; NaN for what was not known."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """A figure over some time: only what is known of it."""

    times: Sequence[float]
    values: Sequence[float]

    @property
    def span_s(self) -> float:
        """From the first to the last that is known."""
        return self.times[-1] - self.times[0] if self.times else 0.0


class Stretch(NamedTuple):
    """From when to when a figure has been known without a hole."""

    start_s: float
    end_s: float


_NEVER = Stretch(math.inf, -math.inf)


class Table:
    """Rows in the order of their times. A quarter more than `size` is kept before the oldest go, all at once."""

    def __init__(self, names: Iterable[str], size: int, hole_s: float = math.inf) -> None:
        self._size, self._hole_s = size, hole_s
        self._most = size + max(8, size // 4)
        self.times = array("d")
        self._columns = {name: array("d") for name in names}
        self._pairs = tuple(self._columns.items())
        self._stretches: dict[str, Stretch] = {}

    def add(self, at_s: float, values: Mapping[str, float]) -> None:
        """One more row."""
        self.times.append(at_s)
        get, nan = values.get, math.nan
        for name, column in self._pairs:
            column.append(get(name, nan))
        for name, known in self._stretches.items():
            if name in values:
                start_s = known.start_s if at_s - known.end_s <= self._hole_s else at_s
                self._stretches[name] = Stretch(start_s, at_s)
        if len(self.times) > self._most:
            extra = len(self.times) - self._size
            del self.times[:extra]
            for _, column in self._pairs:
                del column[:extra]

    def put_before(self, rows: Sequence[tuple[float, Mapping[str, float]]]) -> None:
        """Rows that are older than all that are there, in their order."""
        rows = rows[-max(0, self._size - len(self.times)) :] if len(self.times) < self._size else ()
        self.times[:0] = array("d", [at_s for at_s, _ in rows])
        for name, column in self._pairs:
            column[:0] = array("d", [values.get(name, math.nan) for _, values in rows])
        self._stretches.clear()

    def clear(self) -> None:
        """Forget all."""
        del self.times[:]
        self._stretches.clear()
        for _, column in self._pairs:
            del column[:]

    def forget(self, names: Iterable[str]) -> None:
        """What was known of these was not theirs."""
        for name in names:
            self._columns[name][:] = array("d", [math.nan]) * len(self.times)
        self._stretches.clear()

    def newest(self, name: str) -> float:
        """Of the last row; NaN where it is not known."""
        return self._columns[name][-1] if self.times else math.nan

    def since(self, name: str, from_s: float) -> Window:
        """What is known of it from this moment on."""
        return self._known(name, bisect_left(self.times, from_s))

    def last(self, name: str, rows: int) -> Window:
        """What is known of it in the last so many rows."""
        return self._known(name, max(0, len(self.times) - min(rows, self._size)))

    def from_before(self, name: str, from_s: float) -> Window | None:
        """What is known of it, from the last that was known at this moment; None if nothing was."""
        place = self._known_before(name, from_s)
        return None if place is None else self._known(name, place)

    def rise(self, name: str, from_s: float) -> float | None:
        """From what was last known at this moment to what is known now; None if nothing was."""
        place, column = self._known_before(name, from_s), self._columns[name]
        if place is None:
            return None
        return self._last_known(column) - column[place]

    def rise_after(self, name: str, from_s: float) -> float:
        """From the first that is known after this moment to the last; 0 where nothing is."""
        column, place = self._columns[name], bisect_left(self.times, from_s)
        while place < len(column) and column[place] != column[place]:
            place += 1
        return self._last_known(column) - column[place] if place < len(column) else 0.0

    @staticmethod
    def _last_known(column: array[float]) -> float:
        end = len(column) - 1
        while column[end] != column[end]:
            end -= 1
        return column[end]

    def stretch(self, name: str) -> Stretch | None:
        """The last time without a hole longer than `hole_s`; None if it was never known."""
        known = self._stretches.get(name)
        if known is None:  # from now on it is kept up to date
            self._stretches[name] = known = self._find_stretch(name)
        return None if known is _NEVER else known

    def _find_stretch(self, name: str) -> Stretch:
        times = self._known(name, 0).times
        if not times:
            return _NEVER
        place = len(times) - 1
        while place > 0 and times[place] - times[place - 1] <= self._hole_s:
            place -= 1
        return Stretch(times[place], times[-1])

    def _known_before(self, name: str, from_s: float) -> int | None:
        column, place = self._columns[name], bisect_right(self.times, from_s) - 1
        while place >= 0 and column[place] != column[place]:
            place -= 1
        return place if place >= 0 else None

    def _known(self, name: str, place: int) -> Window:
        times, values = self.times[place:], self._columns[name][place:]
        if math.isnan(math.fsum(values)):
            kept = [(at, value) for at, value in zip(times, values, strict=True) if value == value]
            return Window([at for at, _ in kept], [value for _, value in kept])
        return Window(times, values)
