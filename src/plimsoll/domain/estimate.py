"""A figure with its error band."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """A size in bytes and the band it lies in with about 90 % of what was measured; exact where low and high are equal."""

    value: int
    low: int
    high: int
    why: str = ""  # where the figure comes from, in a few words

    @classmethod
    def exact(cls, value: int, why: str = "") -> Estimate:
        """A figure that is arithmetic, not a guess."""
        return cls(value, value, value, why)

    @property
    def is_exact(self) -> bool:
        """Whether there is no band."""
        return self.low == self.high
