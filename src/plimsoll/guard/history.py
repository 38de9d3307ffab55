"""What was seen of one engine lately: bounded, compact, and honest about what was not seen.

Fine: every look of the last half hour, one array of numbers for each figure, NaN for what could not be had. Coarse: the
smallest value of each two minutes for a day, for memory that creeps. A restart begins both anew, and is remembered.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any

from plimsoll.domain.look import Look, Reach
from plimsoll.domain.unknown import Reading, Unknown
from plimsoll.guard.figures import COUNTERS, FINE, WORKERS, changes, values_of, work_of
from plimsoll.guard.table import Table, Window

FINE_LOOKS = 360
FINE_S = 1_800.0
COARSE_S = 120.0
COARSE_POINTS = 720
RESTARTS_KEPT = 32
GAP_LOOKS = 3.5  # a hole of more looks than this: what happened in it is not known
STALE_S = 30.0  # what a worker wrote so long ago is not what it holds now
NO_HOLE_LOOKS = 1.5  # not one look is missing
COARSE = ("held", "host_resident", "running")
_NEAR = 1e-6
_KEPT = frozenset(COUNTERS)


class History:
    """Of one engine."""

    def __init__(self, every_s: float = 5.0) -> None:
        self.every_s = every_s
        self.last: Look | None = None  # whatever became of it
        self.last_answer: Look | None = None
        self.first_answer_s: float | None = None
        self.refused_since_s: float | None = None
        self._refused_at_s = -math.inf
        self.unreachable_since_s: float | None = None
        self.longest_start_s = 0.0  # from the first refusal to the next answer
        self.failed_canaries = 0
        self._canary_at_s = -math.inf
        self._failing_since_s: float | None = None
        self.starts: deque[float] = deque(maxlen=RESTARTS_KEPT)  # unix; the first one seen is not in it
        self._started: float | None = None
        self.step_at_s: float | None = None  # when a step was last seen to have been made
        self.longest_gap_s = 0.0  # between two steps of an engine with work
        self.idle_at_s = -math.inf  # when it was last seen with nothing to do
        self.changed: str = ""  # what the last restart changed, in words
        self.changed_at_s = -math.inf
        self.memo: dict[Any, tuple[int, Any]] = {}  # answers that hold until the next coarse point
        self.points = 0  # coarse points ever made
        self._fine = Table(FINE, max(FINE_LOOKS, math.ceil(FINE_S / every_s) + 1))
        self._coarse = Table(COARSE, COARSE_POINTS)
        self._lowest: dict[str, float] = {}
        self._coarse_from_s = -math.inf
        self._totals: dict[str, float] = {}
        self._ranks: set[str] = set()
        self._told: dict[str, bool] = {}  # who has told in this life whether it rests, and whether they do at the last look

    def add(self, look: Look) -> bool:
        """One more look; one that is not later than the last is none, and False."""
        if self.last is not None and look.at_s <= self.last.at_s:
            return False
        self.last = look
        self._note_canary(look)
        self._note_reach(look)
        if look.reach is not Reach.ANSWERS:
            return True
        values = values_of(look, self._is_whole(look))
        if self._has_restarted(look, values):
            self._begin_anew(look)
        if look.started_unix_s is not None:
            self._started = look.started_unix_s
        self._without_falls(values)
        self._note_steps(look, values)
        self._note_rest(look)
        if work_of(look) == 0:
            self.idle_at_s = look.at_s
        self._fine.add(look.at_s, values)
        self._note_coarse(look.at_s, values)
        for name in _KEPT & values.keys():
            self._totals[name] = values[name]
        self.last_answer = look
        self.first_answer_s = look.at_s if self.first_answer_s is None else self.first_answer_s
        return True

    # What is known

    def now(self, name: str) -> Reading:
        """The figure at the last look."""
        last = self.last
        if last is None or last.reach is not Reach.ANSWERS:
            return Unknown("not looked at yet" if last is None else f"the engine {last.why or last.reach}")
        value = self._fine.newest(name)
        return value if value == value else Unknown(f"{name} is not on the page")

    def since(self, name: str, seconds: float) -> Window:
        """What is known of a figure in the last so many seconds before the last look."""
        end = self.last.at_s if self.last is not None else 0.0
        return self._fine.since(name, end - seconds - _NEAR)

    def over(self, name: str, seconds: float, *, holes: float = GAP_LOOKS) -> Window | Unknown:
        """The same, if it is known for all that time, without a hole of more than so many looks.

        It begins with what was known at the window's beginning, which may be a look before it: never with less than all.
        """
        newest, found = self.now(name), self._fine.from_before(name, self._end() - seconds + _NEAR)
        if isinstance(newest, Unknown):
            return newest
        if found is None:
            return Unknown(f"{name} has not been seen for {seconds:.0f} s")
        if max((later - sooner for sooner, later in itertools.pairwise(found.times)), default=0.0) > holes * self.every_s:
            return Unknown(f"{name} was not always there")
        return found

    def rise(self, name: str, seconds: float, *, holes: float = GAP_LOOKS) -> Reading:
        """By how much a counter rose in that time."""
        end_s = self._end()
        start_s = end_s - seconds + _NEAR
        known = self._fine.stretch(name, holes * self.every_s)
        if known is None or known.end_s < end_s:
            newest = self.now(name)
            return newest if isinstance(newest, Unknown) else Unknown(f"{name} is not known")
        if known.start_s > start_s:
            return Unknown(f"{name} has been seen for {known.end_s - known.start_s:.0f} s only")
        rose = self._fine.rise(name, start_s)
        return Unknown(f"what {name} was {seconds:.0f} s ago is not kept") if rose is None else rose

    def rise_within(self, name: str, seconds: float) -> float:
        """By how much it surely rose in that time: from the first to the last that is known of it."""
        return self._fine.rise_after(name, self._end() - seconds - _NEAR)

    def long(self, name: str, points: int = COARSE_POINTS) -> Window:
        """The smallest value of each two minutes, for up to a day."""
        return self._coarse.last(name, points)

    def _end(self) -> float:
        return self.last.at_s if self.last is not None else 0.0

    # Restarts

    def _has_restarted(self, look: Look, values: dict[str, float]) -> bool:
        if self.last_answer is None:
            return False
        if look.started_unix_s is not None and self._started is not None:
            return look.started_unix_s > self._started + 1.0
        # Nothing tells when it started: all counters that fall together are a new process's.
        fell = [name for name, total in self._totals.items() if values.get(name, math.inf) < total]
        return len(fell) >= 2

    def _begin_anew(self, look: Look) -> None:
        before = self.last_answer
        self.starts.append(look.started_unix_s if look.started_unix_s is not None else look.unix_s)
        self._started = None
        self._fine.clear()
        self._coarse.clear()
        self._lowest.clear()
        self._totals.clear()
        self._told.clear()
        self.memo.clear()
        self._ranks = {worker.rank for worker in look.workers}
        self.step_at_s, self.longest_gap_s, self.idle_at_s = None, 0.0, -math.inf
        changed = changes(before, look) if before is not None else ""
        if changed:
            self.changed, self.changed_at_s = changed, look.at_s

    def _without_falls(self, values: dict[str, float]) -> None:
        """A total that falls without a restart is a lie: not known."""
        for name, total in self._totals.items():
            if values.get(name, math.inf) < total:
                del values[name]

    def _is_whole(self, look: Look) -> bool:
        """Whether every worker that this life has shown is there: a sum over some of them is no figure of the engine.

        With one that was not there before, the sums of before were not the engine's either.
        """
        fresh = {worker.rank for worker in look.workers if worker.age_s < STALE_S}
        if fresh - self._ranks:
            if self._ranks:
                self._fine.forget(WORKERS)
                self._coarse.forget(("held", "host_resident"))
                self._lowest.clear()
            self._ranks |= fresh
        return bool(fresh) and fresh == self._ranks and all(worker.age_s < STALE_S for worker in look.workers)

    # Life

    def _note_reach(self, look: Look) -> None:
        if look.reach is Reach.ANSWERS:
            if self.refused_since_s is not None:
                self.longest_start_s = max(self.longest_start_s, look.at_s - self.refused_since_s)
            self.refused_since_s = self.unreachable_since_s = None
            return
        if self.unreachable_since_s is None:
            self.unreachable_since_s = look.at_s
        if look.reach is Reach.REFUSED:
            # A look or two without an answer between two refusals is no sign that somebody listened.
            if self.refused_since_s is None or look.at_s - self._refused_at_s > GAP_LOOKS * self.every_s:
                self.refused_since_s = look.at_s
            self._refused_at_s = look.at_s
        elif look.reach is Reach.NONSENSE:
            self.refused_since_s = None  # somebody listens

    def _note_canary(self, look: Look) -> None:
        canary = look.canary
        if canary is None or canary.is_answered is None or canary.at_s <= self._canary_at_s:
            return
        self._canary_at_s = canary.at_s
        if canary.is_answered:
            self.failed_canaries, self._failing_since_s = 0, None
        else:
            self.failed_canaries += 1
            self._failing_since_s = canary.at_s if self._failing_since_s is None else self._failing_since_s

    @property
    def failing_since_s(self) -> float | None:
        """When the first of the test requests was made that got no answer, in a row up to now."""
        return self._failing_since_s

    def _note_steps(self, look: Look, values: dict[str, float]) -> None:
        """A step was made since the last look if its counter rose, or if the gate saw one."""
        before = self._totals.get("steps")
        age_s = look.gate.last_step_age_s if look.gate is not None else None
        stepped_at = None if age_s is None else look.at_s - age_s
        if stepped_at is None and before is not None and values.get("steps", before) > before:
            stepped_at = look.at_s
        if stepped_at is None:
            return
        if self.step_at_s is not None and stepped_at > self.step_at_s + 1e-3 and _may_have_work(self.last_answer):
            # While it had nothing to do, no step was due.
            self.longest_gap_s = max(self.longest_gap_s, stepped_at - max(self.step_at_s, self.idle_at_s))
        self.step_at_s = stepped_at if self.step_at_s is None else max(self.step_at_s, stepped_at)

    def _note_rest(self, look: Look) -> None:
        told = self._told
        for name in told:
            told[name] = False
        if look.figures.get("asleep", -1.0) >= 0.0:
            told["page"] = True
        if look.gate is not None:
            told["gate"] = True
        if look.is_paused is not None:
            told["pause"] = True

    @property
    def lost(self) -> str:
        """Who has told of this process before and does not at the last look: "gate", "page", "pause", or "" for nobody."""
        for name, is_there in self._told.items():
            if not is_there:
                return name
        return ""

    def has_lost(self, name: str) -> bool:
        """Whether it is this one, or this one among others."""
        return not self._told.get(name, True)

    def _note_coarse(self, at_s: float, values: dict[str, float]) -> None:
        for name in COARSE:
            value = values.get(name)
            if value is not None and not value >= self._lowest.get(name, math.inf):
                self._lowest[name] = value
        if at_s - self._coarse_from_s >= COARSE_S - _NEAR:
            self._coarse.add(at_s, self._lowest)
            self._lowest, self._coarse_from_s = {}, at_s
            self.points += 1


def _may_have_work(look: Look | None) -> bool:
    if look is None:
        return False
    work = work_of(look)
    return work is None or work > 0
