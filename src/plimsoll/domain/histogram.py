"""A histogram as a server keeps it: how many values fell between two bounds, and what all of them add up to."""

from __future__ import annotations

from typing import NamedTuple


class Histogram(NamedTuple):
    """`counts` has one more than `bounds`, which rise: values from one bound to the next, and last those above all bounds."""

    name: str
    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    """Of all values."""

    @property
    def size(self) -> float:
        """How many values there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None of no values."""
        return self.total / self.size if self.size else None
