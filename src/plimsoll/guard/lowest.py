"""The least of the last so many seconds, in a few numbers: only those that could still become it are kept."""

from __future__ import annotations

import math
from collections import deque


class Lowest:
    """A least that forgets."""

    __slots__ = ("_kept", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, at_s: float, value: float) -> None:
        """One more."""
        kept = self._kept
        while kept and kept[-1][1] >= value:
            kept.pop()
        kept.append((at_s, value))
        while kept[0][0] < at_s - self._seconds:
            kept.popleft()

    @property
    def least(self) -> float:
        """Of those that were added lately."""
        return self._kept[0][1] if self._kept else math.inf
