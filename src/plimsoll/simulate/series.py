"""A run over time in a fixed number of bins, whatever its length: when the bins are full, each two become one."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from plimsoll.domain.trace import Integers
from plimsoll.simulate.result import STEP_COLUMNS, Series

FIRST_BIN_NS = 1_000_000
_AT = {name: place for place, name in enumerate(STEP_COLUMNS)}
_MEANS = ("running", "waiting", "used_blocks", "waste_slots")
_COUNTS = ("sched_tokens", "preempted")
_GROWING = ("hit_tokens_cum", "query_tokens_cum")


class SeriesBuilder:
    """Takes step rows as the run goes and keeps no more than `bins` bins of them."""

    def __init__(self, bins: int = 1000) -> None:
        """`bins` is rounded up to an even number, so that bins pair off."""
        self._bins: Final = max(2, bins + bins % 2)
        self._width = FIRST_BIN_NS
        self._end = 0
        self._any = False
        self._last = dict.fromkeys(_GROWING, 0)
        self._sums = {name: np.zeros(self._bins) for name in (*_MEANS, *_COUNTS, *_GROWING)}

    def add(self, rows: Integers) -> None:
        """Count in rows of STEP_COLUMNS that follow those already given."""
        if len(rows) == 0:
            return
        self._any = True
        start, end = rows[:, _AT["t_start_ns"]], rows[:, _AT["t_end_ns"]]
        self._end = max(self._end, int(end.max()))
        while self._end > self._bins * self._width:
            self._widen()
        first = np.minimum(start, max(0, self._end - 1)) // self._width  # a step without length may lie at the very end
        self._add_means(rows, start, end, first)
        for name in _COUNTS:
            self._sums[name] += np.bincount(first, rows[:, _AT[name]], self._bins)
        for name in _GROWING:
            so_far = rows[:, _AT[name]]
            self._sums[name] += np.bincount(first, np.diff(so_far, prepend=self._last[name]), self._bins)
            self._last[name] = int(so_far[-1])

    def finish(self) -> Series:
        """The run so far; the last bin's means are over the part of it that the run reached."""
        count = max(-(-self._end // self._width), int(self._any))
        lengths = np.full(count, float(self._width))
        if count:
            lengths[-1] = max(1, self._end - (count - 1) * self._width)
        means = [self._sums[name][:count] / lengths for name in _MEANS]
        return Series(self._width, *means, *(self._sums[name][:count].copy() for name in (*_COUNTS, *_GROWING)))

    def _add_means(self, rows: Integers, start: Integers, end: Integers, first: Integers) -> None:
        """A step counts in every bin it touches, for as long as it lies in it."""
        last = np.maximum(first, (end - 1) // self._width)
        crossed = last - first
        bins, lengths = first, np.minimum(end, (first + 1) * self._width) - start
        sources: npt.NDArray[np.intp] | slice = slice(None)
        if crossed.any():
            extra = np.repeat(np.arange(len(rows)), crossed)
            nth = np.arange(len(extra)) - np.repeat(np.cumsum(crossed) - crossed, crossed)
            further = first[extra] + 1 + nth
            bins = np.concatenate((first, further))
            rest = np.minimum(end[extra], (further + 1) * self._width) - further * self._width
            lengths = np.concatenate((lengths, rest))
            sources = np.concatenate((np.arange(len(rows)), extra))
        for name in _MEANS:
            values = rows[:, _AT[name]][sources]
            self._sums[name] += np.bincount(bins, values * lengths.astype(np.float64), self._bins)

    def _widen(self) -> None:
        half = self._bins // 2
        for name, sums in self._sums.items():
            merged = np.zeros(self._bins)
            merged[:half] = sums.reshape(half, 2).sum(axis=1)
            self._sums[name] = merged
        self._width *= 2
