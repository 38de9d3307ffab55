"""When to ask an engine whether it is paused, and what is known of that in between.

vLLM (0.32.0, in its dev mode) hands the question to its engine core and waits without limit. A core that dies meanwhile never
answers, and the server, which must answer before it ends, then never ends: one such question keeps a crashed vLLM from being
started again (measured; docs/guard.md). A crash is over within seconds. So it is asked once of every server, and then only of
one that has had work, or a test request of ours, and made no step for longer than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from plimsoll.domain.look import Canary

STILL_S = 20.0
AGAIN_S = 60.0  # while it stands still
ABSENT_AGAIN_S = 300.0  # of a server that does not know the question
MOVES = ("steps", "generation_tokens", "prompt_tokens", "success")


class Pause:
    """What one server process has said, and shown by its steps."""

    def __init__(self) -> None:
        self._is_served = False  # whether it has ever answered the question
        self._is_absent = False  # whether it does not know it
        self._is_paused = False  # as last said, or shown
        self._answered_s = -math.inf
        self._next_s = -math.inf
        self._marks: tuple[float | None, ...] | None = None
        self._moved_s = -math.inf
        self._waits_since_s: float | None = None

    def is_due(self, figures: Mapping[str, float], canary: Canary | None, now_s: float) -> bool:
        """Take this page into account, and say whether to ask now."""
        marks = tuple(figures.get(name) for name in MOVES)
        has_moved = self._marks is not None and marks != self._marks
        if marks != self._marks:
            self._marks, self._moved_s = marks, now_s
        if has_moved:  # it makes steps: tokens come, whatever it was told
            self._is_paused, self._waits_since_s = False, None
        elif figures.get("running", 0.0) + figures.get("waiting", 0.0) > 0:
            self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
        elif canary is not None and canary.is_answered is False and canary.at_s >= self._moved_s:
            self._waits_since_s = canary.at_s
        else:
            self._waits_since_s = None
        if now_s < self._next_s:
            return False
        return not self._is_served or (self._waits_since_s is not None and now_s - self._waits_since_s >= STILL_S)

    def answered(self, now_s: float, *, is_paused: bool) -> None:
        """It has said so."""
        self._is_served, self._is_absent, self._is_paused = True, False, is_paused
        self._answered_s, self._next_s = now_s, now_s + AGAIN_S

    def lost(self, now_s: float) -> None:
        """No answer came, or an error on the way."""
        self._is_absent, self._answered_s, self._next_s = False, -math.inf, now_s + AGAIN_S

    def absent(self, now_s: float) -> None:
        """It does not know the question. One that has answered it before may do so again."""
        self._is_absent, self._answered_s, self._next_s = not self._is_served, -math.inf, now_s + ABSENT_AGAIN_S

    def told(self) -> tuple[bool | None, bool]:
        """Whether it is paused, and whether that is not known of an engine that may be."""
        if self._is_absent:
            return None, False
        is_known = self._is_served and (self._waits_since_s is None or self._answered_s >= self._waits_since_s)
        return (self._is_paused, False) if is_known else (None, True)
