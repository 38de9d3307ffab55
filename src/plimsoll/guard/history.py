"""What was seen of one engine lately: bounded, compact, and honest about what was not seen.

Fine: every look of the last half hour, one array of numbers for each figure, NaN for what could not be had. Coarse: the
smallest value of each two minutes for a day, for memory that creeps. A restart begins both anew, and is remembered.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from plimsoll.domain.look import Look, Reach
from plimsoll.domain.unknown import Reading, Unknown
from plimsoll.guard.figures import FINE, TOTALS, WORKERS, changes, is_resting, values_of, work_of
from plimsoll.guard.lives import Lives
from plimsoll.guard.lowest import Lowest
from plimsoll.guard.pulse import Pulse
from plimsoll.guard.table import Table, Window

FINE_LOOKS = 360
FINE_S = 1_800.0
COARSE_S = 120.0
COARSE_POINTS = 720
LONGEST_START_S = 3_600.0
RANKS_MOST = 1_024  # of whom a history is kept
RANK_GONE_S = 600.0  # one that has not been heard of for so long is not one of them any more
SURELY_S = 1_500.0  # so far back every look is surely kept
DEAD = 503
CANARIES_KEPT = 16
GAP_LOOKS = 3.5  # a hole of more looks than this: what happened in it is not known
STALE_S = 30.0  # what a worker wrote so long ago is not what it holds now
COARSE = ("held", "host_resident", "running")
_NEAR = 1e-6
_KEPT = frozenset(TOTALS)


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
        self.longest_start_s = 0.0  # from the first refusal, or its process's own start, to the next answer
        self.failed_canaries = 0
        self.canary_failures: deque[float] = deque(maxlen=CANARIES_KEPT)  # when each was asked that got no answer
        self.canary_answered_at_s = -math.inf
        self._canary_at_s = -math.inf
        self._failing_since_s: float | None = None
        self.said_dead_since_s: float | None = None  # by its own /health
        self._cpu: float | None = None
        self._cpu_since_s = -math.inf
        self.lives = Lives()
        self._pulse = Pulse()
        self._pulses: dict[str, Pulse] = {}
        self.changed: str = ""  # what the last restart changed, in words
        self.changed_at_s = -math.inf
        self.memo: dict[Any, tuple[int, Any]] = {}  # answers that hold until the next coarse point
        self.points = 0  # coarse points ever made
        self._has_recalled = False
        self._fine = Table(FINE, max(FINE_LOOKS, math.ceil(FINE_S / every_s) + 1), GAP_LOOKS * every_s)
        self._coarse = Table(COARSE, COARSE_POINTS)
        self._lowest: dict[str, float] = {}
        self._coarse_from_s = -math.inf
        self._totals: dict[str, float] = {}
        self._ranks: dict[str, float] = {}  # workers, and when each was last heard of
        self._least_others: dict[str, Lowest] = {}
        self._told: dict[str, bool] = {}  # who has told in this life whether it rests, and whether they do at the last look

    def add(self, look: Look) -> bool:
        """One more look; one that is not later than the last is none, and False."""
        if self.last is not None and look.at_s <= self.last.at_s:
            return False
        self.last = look
        self._note_canary(look)
        self._note_reach(look)
        self.lives.count(look)
        if look.reach is not Reach.ANSWERS:
            return True
        values = values_of(look, self._is_whole(look))
        if self.lives.begins(look, has_fallen=self._fell(values) >= 2):
            self._begin_anew(look)
        self._without_falls(values)
        self._note_steps(look, values)
        self._note_rest(look)
        self._note_health(look)
        self._note_others(look)
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
        return value if value == value else Unknown(f"{_said(name)}: not on the page")

    def since(self, name: str, seconds: float) -> Window:
        """What is known of a figure in the last so many seconds before the last look."""
        end = self.last.at_s if self.last is not None else 0.0
        return self._fine.since(name, end - seconds - _NEAR)

    def over(self, name: str, seconds: float) -> Window | Unknown:
        """The same, if it is known for all that time, without a hole of more than a few looks.

        It begins with what was known at the window's beginning, which may be a look before it: never with less than all.
        """
        newest, found = self.now(name), self._fine.from_before(name, self._end() - seconds + _NEAR)
        if isinstance(newest, Unknown):
            return newest
        if found is None:
            return Unknown(f"{_said(name)}: not seen for {seconds:.0f} s yet")
        if max((later - sooner for sooner, later in itertools.pairwise(found.times)), default=0.0) > GAP_LOOKS * self.every_s:
            return Unknown(f"{_said(name)}: not there at every look")
        return found

    def rise(self, name: str, seconds: float) -> Reading:
        """By how much a counter rose in that time."""
        end_s = self._end()
        start_s = end_s - seconds + _NEAR
        known = self._fine.stretch(name)
        if known is None or known.end_s < end_s:
            newest = self.now(name)
            return newest if isinstance(newest, Unknown) else Unknown(f"{_said(name)}: not known")
        if known.start_s > start_s:
            return Unknown(f"{_said(name)}: seen for {known.end_s - known.start_s:.0f} of {seconds:.0f} s")
        rose = self._fine.rise(name, start_s)
        return Unknown(f"{_said(name)}: what it was {seconds:.0f} s ago is not kept") if rose is None else rose

    def rise_within(self, name: str, seconds: float) -> float:
        """By how much it surely rose in that time: from the first to the last that is known of it."""
        return self._fine.rise_after(name, self._end() - seconds - _NEAR)

    def long(self, name: str, points: int = COARSE_POINTS) -> Window:
        """The smallest value of each two minutes, for up to a day."""
        return self._coarse.last(name, points)

    def recall(self, points: Sequence[tuple[float, Mapping[str, float]]]) -> None:
        """What somebody else saw of it before guard did, by guard's own clock: as coarse points, once.

        Whoever gives them sees to it that they are this process's.
        """
        if self._has_recalled:
            return
        self._has_recalled = True
        begin_s = min((at_s for at_s in self._coarse.times), default=self._end())
        rows = [
            (at_s, {name: values[name] for name in COARSE if 0.0 <= values.get(name, -1.0) < math.inf})
            for at_s, values in sorted(points, key=lambda point: point[0])
            if -math.inf < at_s < begin_s
        ]
        self._coarse.put_before(rows)
        self.points += len(rows)
        self.memo.clear()

    @property
    def has_workers(self) -> bool:
        """Whether a worker has told of its memory in this life."""
        return bool(self._ranks)

    def came(self, rank: str, others: float) -> float:
        """How much more others hold beside this worker than the least of the last 25 minutes."""
        kept = self._least_others.get(rank)
        return 0.0 if kept is None else others - min(others, kept.least)

    @property
    def cores(self) -> list[tuple[str, Pulse]]:
        """The pulse of every engine core at the last look, by name; one without a name where there is but one."""
        ranks = () if self.last is None else self.last.ranks
        if not ranks:
            return [("", self._pulse)]
        return [(rank.name, self._pulses[rank.name]) for rank in ranks if rank.name in self._pulses]

    def _end(self) -> float:
        return self.last.at_s if self.last is not None else 0.0

    # Restarts

    def _fell(self, values: dict[str, float]) -> int:
        """How many totals are lower than before."""
        return sum(values.get(name, math.inf) < total for name, total in self._totals.items())

    def _begin_anew(self, look: Look) -> None:
        before = self.last_answer
        self._fine.clear()
        self._coarse.clear()
        self._lowest.clear()
        self._totals.clear()
        self._told.clear()
        self.memo.clear()
        self._least_others.clear()
        self._ranks = {worker.rank: look.at_s for worker in look.workers if worker.age_s < STALE_S}
        self._pulse, self._pulses = Pulse(), {}
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
        gone = [rank for rank, heard_s in self._ranks.items() if look.at_s - heard_s > RANK_GONE_S]
        if (fresh - self._ranks.keys() and self._ranks) or (gone and fresh):
            self._fine.forget(WORKERS)
            self._coarse.forget(("held", "host_resident"))
            self._lowest.clear()
        for rank in gone if fresh else ():
            del self._ranks[rank]
            self._least_others.pop(rank, None)
        if len(fresh | self._ranks.keys()) > RANKS_MOST:
            self._ranks.clear()  # nobody has so many: what it says of them is not kept
            self._least_others.clear()
            return False
        self._ranks.update(dict.fromkeys(fresh, look.at_s))
        return bool(fresh) and len(fresh) == len(self._ranks) and all(worker.age_s < STALE_S for worker in look.workers)

    # Life

    def _note_reach(self, look: Look) -> None:
        if look.reach is Reach.ANSWERS:
            if self.refused_since_s is not None:
                took_s = look.at_s - self.refused_since_s
                if look.started_unix_s is not None and look.unix_s > look.started_unix_s:
                    # One that lay dead before somebody started it was not starting all that time.
                    took_s = min(took_s, look.unix_s - look.started_unix_s)
                if took_s <= LONGEST_START_S:  # one that was down for a night was not starting all night
                    self.longest_start_s = max(self.longest_start_s, took_s)
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
            self.canary_answered_at_s = canary.at_s
        else:
            self.failed_canaries += 1
            self.canary_failures.append(canary.at_s)
            self._failing_since_s = canary.at_s if self._failing_since_s is None else self._failing_since_s

    @property
    def failing_since_s(self) -> float | None:
        """When the first of the test requests was made that got no answer, in a row up to now."""
        return self._failing_since_s

    def _note_steps(self, look: Look, values: dict[str, float]) -> None:
        """A step was made since the last look if its counter rose, or if the gate saw one."""
        hole_s = GAP_LOOKS * self.every_s
        age_s = look.gate.last_step_age_s if look.gate is not None else None
        self._pulse.note(look.at_s, values.get("steps"), work_of(look, self._pulse), age_s, hole_s)
        rests = is_resting(look)
        if rests:
            self._pulse.rest(look.at_s)
        for rank in look.ranks[:RANKS_MOST]:
            pulse = self._pulses.get(rank.name)
            if pulse is None:
                if len(self._pulses) >= RANKS_MOST:
                    continue
                pulse = self._pulses[rank.name] = Pulse()
            work = None if rank.running is None or rank.waiting is None else rank.running + rank.waiting
            pulse.note(look.at_s, rank.steps, work, None, hole_s)
            if rests:
                pulse.rest(look.at_s)

    def _note_others(self, look: Look) -> None:
        for worker in look.workers[:RANKS_MOST]:
            if worker.age_s < STALE_S and worker.by_others is not None and worker.rank in self._ranks:
                kept = self._least_others.get(worker.rank)
                if kept is None:
                    kept = self._least_others[worker.rank] = Lowest(SURELY_S)
                kept.add(look.at_s, worker.by_others)

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
        elif look.is_rest_unknown:
            told["pause"] = False

    def _note_health(self, look: Look) -> None:
        if look.health != DEAD:
            self.said_dead_since_s = None
        elif self.said_dead_since_s is None:
            self.said_dead_since_s = look.at_s
        cpu = look.figures.get("cpu_seconds")
        if cpu is None or cpu != self._cpu:
            self._cpu, self._cpu_since_s = cpu, look.at_s

    def page_stood_still_s(self) -> float:
        """For how long the page has shown the same processor time: a server that answers uses some, so it is an old page."""
        return 0.0 if self._cpu is None else self._end() - self._cpu_since_s

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


_WORDS = {
    "success": "requests that ended", "prefix_queries": "tokens looked up in the prefix cache", "waiting": "the queue",
    "prefix_hits": "tokens found in the prefix cache", "kv_cache_usage": "the use of the KV cache",
}  # fmt: skip


def _said(name: str) -> str:
    """A figure as a reader would call it."""
    return _WORDS.get(name, name.replace("_", " "))
