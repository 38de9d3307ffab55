"""The steps of one engine core: when it last made one, for how long that is known, and since when it has had work."""

from __future__ import annotations

import math

from plimsoll.domain.unknown import Unknown

LONGEST_GAP_S = 600.0  # a step that took longer teaches nothing: three times it would be for ever
_NEAR = 1e-6


class Pulse:
    """Of one core. With data parallelism every rank has its own: one that stands still is not seen in a sum."""

    __slots__ = (
        "_had_work", "_known_at_s", "_known_from_s", "_total", "_worked_at_s", "idle_at_s", "longest_gap_s", "step_at_s",
        "work", "work_since_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step_at_s: float | None = None  # when a step was last seen to have been made
        self.longest_gap_s = 0.0  # between two steps while there was work
        self.idle_at_s = -math.inf  # when it was last seen with nothing to do, or at rest
        self.work: float | None = None  # at the last look; None if nobody tells
        self.work_since_s = math.inf  # since when every look has shown work
        self._worked_at_s = -math.inf
        self._total: float | None = None
        self._known_from_s = self._known_at_s = -math.inf
        self._had_work = False

    @property
    def has_ever_stepped(self) -> bool:
        """Whether it has made a step in its life; the first request of one may compile for minutes."""
        return self.step_at_s is not None or (self._total or 0.0) > 0

    def note(self, at_s: float, steps: float | None, work: float | None, age_s: float | None, hole_s: float) -> None:
        """One look: steps ever made, requests there, and how long ago the gate saw one. None is what nobody tells."""
        self.work = work
        self._note_work(at_s, work, hole_s)
        if steps is not None and self._total is not None and steps < self._total:
            steps = None  # a total that falls is a lie
        if steps is None and age_s is None:
            return
        if at_s - self._known_at_s > hole_s:
            self._known_from_s = at_s
        self._known_at_s = at_s
        self._note_step(at_s, steps, age_s)
        self._had_work = work is None or work > 0

    def rest(self, at_s: float) -> None:
        """It is paused or asleep: no step is due, and how long that lasts is no gap between two."""
        self.idle_at_s, self.work_since_s = at_s, math.inf

    def _note_work(self, at_s: float, work: float | None, hole_s: float) -> None:
        if work == 0:
            self.idle_at_s = at_s
        if work is None or work <= 0:
            self.work_since_s = math.inf
            return
        if self.work_since_s == math.inf or at_s - self._worked_at_s > hole_s:
            self.work_since_s = at_s
        self._worked_at_s = at_s

    def _note_step(self, at_s: float, steps: float | None, age_s: float | None) -> None:
        before = self._total
        self._total = before if steps is None else steps
        stepped_at = None if age_s is None else at_s - age_s
        if stepped_at is None and steps is not None and before is not None and steps > before:
            stepped_at = at_s
        if stepped_at is None:
            return
        if self.step_at_s is not None and stepped_at > self.step_at_s + 1e-3 and self._had_work:
            # While it had nothing to do, no step was due.
            gap_s = stepped_at - max(self.step_at_s, self.idle_at_s)
            self.longest_gap_s = max(self.longest_gap_s, min(LONGEST_GAP_S, gap_s))
        self.step_at_s = stepped_at if self.step_at_s is None else max(self.step_at_s, stepped_at)

    def has_stepped(self, now_s: float, seconds: float) -> bool | Unknown:
        """Whether a step was made in the last so many seconds, if that is known for all of them."""
        if self.step_at_s is not None and now_s - self.step_at_s < seconds - _NEAR:
            return True
        if self._known_at_s < now_s - _NEAR:
            return Unknown("how many steps it made is not on the page")
        if now_s - self._known_from_s < seconds - _NEAR:
            return Unknown(f"its steps have been seen for {now_s - self._known_from_s:.0f} s only")
        return False

    @property
    def came_after_last_step(self) -> bool:
        """Whether what is there came after the last step: the core stopped while it had nothing to do."""
        step_at_s = -math.inf if self.step_at_s is None else self.step_at_s
        return self.idle_at_s > -math.inf and step_at_s <= self.idle_at_s
