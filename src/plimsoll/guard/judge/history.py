"""The recent looks at one engine: bounded, compact, and with gaps kept as gaps.

Fine: every look of the last half hour, one array of numbers for each figure, NaN where it was missing. Coarse: the smallest
value of each two minutes for a day, for memory that creeps. A restart clears both, and is itself recorded.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll.guard.judge.look import (
    FINE,
    TOTALS,
    WORKERS,
    Look,
    Reach,
    count_requests,
    describe_changes,
    is_resting,
    read_figures,
)
from plimsoll.guard.judge.witness import is_direct
from plimsoll.unknown import Reading, Unknown

LONGEST_GAP_S = 300.0  # a longer gap is a failure, and not learnt as normal
_NEAR = 1e-6


@dataclass(slots=True)
class CoreSteps:
    """The steps of one engine core. With data parallelism every rank has its own: a sum would hide a stuck one."""

    failure_s: float = LONGEST_GAP_S  # a gap of this length is a failure, which is not learnt as normal
    step_at_s: float | None = None  # time of the last known step
    longest_gap_s: float = 0.0  # between two steps while there was work
    idle_at_s: float = -math.inf  # when it last had nothing to do, or was at rest
    work: float | None = None  # requests at the last look; None if unknown
    work_since_s: float = math.inf  # since when every look has shown work
    _worked_at_s: float = -math.inf
    _total: float | None = None
    _known_from_s: float = -math.inf
    _known_at_s: float = -math.inf
    _had_work: bool = False

    @property
    def has_ever_stepped(self) -> bool:
        """True if it has made a step in its life; before that, its first request may compile for minutes."""
        return self.step_at_s is not None or (self._total or 0.0) > 0

    def note(self, at_s: float, steps: float | None, work: float | None, age_s: float | None, hole_s: float) -> None:
        """Takes one look: steps ever made, requests there, and the age of the gate's last step; None where unknown."""
        self.work = work
        if work == 0:
            self.idle_at_s = at_s
        if work is None or work <= 0:
            self.work_since_s = math.inf
        else:
            if self.work_since_s == math.inf or at_s - self._worked_at_s > hole_s:
                self.work_since_s = at_s
            self._worked_at_s = at_s
        if steps is not None and self._total is not None and steps < self._total:
            steps = None  # a total that falls is wrong
        if steps is None and age_s is None:
            return
        if at_s - self._known_at_s > hole_s:
            self._known_from_s = at_s
        self._known_at_s = at_s
        before, had_work = self._total, self._had_work
        self._total = before if steps is None else steps
        self._had_work = work is None or work > 0
        stepped_at = None if age_s is None else at_s - age_s
        if stepped_at is None and steps is not None and before is not None and steps > before:
            stepped_at = at_s
        if stepped_at is None:
            return
        if self.step_at_s is not None and stepped_at > self.step_at_s + 1e-3 and had_work:
            # No step was due while it had nothing to do.
            gap_s = stepped_at - max(self.step_at_s, self.idle_at_s)
            if gap_s < min(self.failure_s, LONGEST_GAP_S):
                self.longest_gap_s = max(self.longest_gap_s, gap_s)
        self.step_at_s = stepped_at if self.step_at_s is None else max(self.step_at_s, stepped_at)

    def rest(self, at_s: float) -> None:
        """Records that it is paused or asleep: no step is due, and the time does not count as a gap between steps."""
        self.idle_at_s, self.work_since_s = at_s, math.inf

    def has_stepped(self, now_s: float, seconds: float) -> bool | Unknown:
        """True if a step was made in the last `seconds`; Unknown where its steps are not known for all that time."""
        if self.step_at_s is not None and now_s - self.step_at_s < seconds - _NEAR:
            return True
        if self._known_at_s < now_s - _NEAR:
            return Unknown("how many steps it made is not on the page")
        if now_s - self._known_from_s < seconds - _NEAR:
            return Unknown(f"its steps have been seen for {now_s - self._known_from_s:.0f} s only")
        return False

    @property
    def came_after_last_step(self) -> bool:
        """True if its present requests came after the last step: the core stopped while it had nothing to do."""
        step_at_s = -math.inf if self.step_at_s is None else self.step_at_s
        return self.idle_at_s > -math.inf and step_at_s <= self.idle_at_s


class FigureSeries(NamedTuple):
    """The known values of a figure over some time."""

    times: Sequence[float]
    values: Sequence[float]

    @property
    def span_s(self) -> float:
        return self.times[-1] - self.times[0] if self.times else 0.0

    @property
    def rise(self) -> float:
        """The increase from the first to the last known value; 0 without values."""
        return self.values[-1] - self.values[0] if self.values else 0.0


class FigureTable:
    """Rows in the order of their times. A quarter more than `size` is kept before the oldest go, all at once."""

    def __init__(self, names: Iterable[str], size: int, hole_s: float = math.inf) -> None:
        self._size, self._hole_s = size, hole_s
        self._most = size + max(8, size // 4)
        self.times = array("d")
        self._columns = {name: array("d") for name in names}
        self._stretches: dict[str, tuple[float, float]] = {}  # begin and end of the last stretch without a hole

    def add(self, at_s: float, values: Mapping[str, float]) -> None:
        self.times.append(at_s)
        get, nan = values.get, math.nan
        for name, column in self._columns.items():
            column.append(get(name, nan))
        for name, (start_s, end_s) in self._stretches.items():
            if name in values:
                self._stretches[name] = (start_s if at_s - end_s <= self._hole_s else at_s), at_s
        if len(self.times) > self._most:
            extra = len(self.times) - self._size
            del self.times[:extra]
            for column in self._columns.values():
                del column[:extra]

    def forget(self, names: Iterable[str]) -> None:
        """Erases all values of these figures: they were not this engine's."""
        for name in names:
            self._columns[name][:] = array("d", [math.nan]) * len(self.times)
        self._stretches.clear()

    def newest(self, name: str) -> float:
        return self._columns[name][-1] if self.times else math.nan

    def since(self, name: str, from_s: float) -> FigureSeries:
        return self._known(name, bisect_left(self.times, from_s))

    def last(self, name: str, rows: int) -> FigureSeries:
        return self._known(name, max(0, len(self.times) - min(rows, self._size)))

    def from_before(self, name: str, from_s: float) -> FigureSeries | None:
        """Returns the figure's known values from the last one at or before `from_s`; None if there is none so early."""
        column, place = self._columns[name], bisect_right(self.times, from_s) - 1
        while place >= 0 and column[place] != column[place]:
            place -= 1
        return self._known(name, place) if place >= 0 else None

    def stretch(self, name: str) -> tuple[float, float]:
        """Returns begin and end of its last stretch without a hole longer than `hole_s`; the end is -inf if never known."""
        if name not in self._stretches:  # from now on it is kept up to date
            times = self._known(name, 0).times
            place = len(times) - 1
            while place > 0 and times[place] - times[place - 1] <= self._hole_s:
                place -= 1
            self._stretches[name] = (times[place], times[-1]) if times else (math.inf, -math.inf)
        return self._stretches[name]

    def _known(self, name: str, place: int) -> FigureSeries:
        times, values = self.times[place:], self._columns[name][place:]
        if math.isnan(math.fsum(values)):
            kept = [(at, value) for at, value in zip(times, values, strict=True) if value == value]
            return FigureSeries([at for at, _ in kept], [value for _, value in kept])
        return FigureSeries(times, values)


KEPT = 32
SHARED_S = 600.0
SAME_S = 1.0  # start times that differ by less are one


class ProcessLives:
    """Counts the processes that answered at one address. Times are by guard's own clock: an engine's may be hours off."""

    def __init__(self) -> None:
        self._shared_at_s = -math.inf
        self.total = 0
        """How often another process was seen to answer."""
        self._seen: deque[float] = deque(maxlen=KEPT)  # when each later life was first seen
        self._counted: deque[float] = deque(maxlen=KEPT)  # when its cluster's count was seen to rise
        self._started: float | None = None
        self._before: deque[float] = deque(maxlen=KEPT)
        self._containers: int | None = None

    def begins(self, look: Look, *, has_fallen: bool) -> bool:
        """Takes an answered look; True if another process answers than before. `has_fallen`: totals fell together."""
        started, before = look.started_unix_s, self._started
        self._started = before if started is None else started
        if started is None or before is None:
            is_another = has_fallen
            if has_fallen:
                self._started = started  # the next start time that is read is this process's
        else:
            is_another = abs(started - before) > SAME_S
            if is_another:
                if any(abs(started - earlier) <= SAME_S for earlier in self._before):
                    self._shared_at_s = look.at_s
                self._before.append(before)
        if is_another:
            self._seen.append(look.at_s)
            self.total += 1
        return is_another

    def count(self, look: Look) -> None:
        """Takes any look: its cluster also counts starts that ended before any look."""
        count, before = look.container_restarts, self._containers
        if count is None:
            return
        self._containers = count
        if before is not None:
            self._counted += [look.at_s] * min(KEPT, max(0, count - before))

    def is_shared(self, now_s: float) -> bool:
        """True if a replaced start time came back lately: several servers answer at this address, in turn.

        A rollout behind one address looks the same while it lasts; it is over once one has answered alone for a while.
        """
        return now_s - self._shared_at_s < SHARED_S

    def since(self, from_s: float) -> int:
        return max(sum(at_s >= from_s for at_s in times) for times in (self._seen, self._counted))


FINE_LOOKS = 360
FINE_S = 1_800.0
COARSE_S = 120.0
COARSE_POINTS = 720
LONGEST_START_S = 3_600.0
RANKS_MOST = 1_024  # workers whose history is kept
RANK_GONE_S = 600.0  # a worker that has not reported for so long is gone
SURELY_S = 1_500.0  # every look is surely kept for this long
DEAD = 503
CANARIES_KEPT = 16
GAP_LOOKS = 3.5  # a hole of more looks than this is unknown time
STALE_S = 30.0  # a worker's report that is older does not show what it holds now
COARSE = ("held", "host_resident", "running")


class History:
    """Recent history of one engine."""

    def __init__(self, every_s: float = 5.0, failure_s: float = LONGEST_GAP_S) -> None:
        self.every_s, self._failure_s = every_s, failure_s
        self.last: Look | None = None  # answered or not
        self.last_answer: Look | None = None
        self.first_answer_s: float | None = None
        self.refused_since_s: float | None = None
        self._refused_at_s = -math.inf
        self.unreachable_since_s: float | None = None
        self.longest_start_s = 0.0  # from the first refusal, or its process's own start, to the next answer
        self.failed_canaries = 0
        self.canary_failures: deque[float] = deque(maxlen=CANARIES_KEPT)  # when each unanswered one was sent
        self.canary_answered_at_s = -math.inf
        self._canary_at_s = -math.inf
        self.failing_since_s: float | None = None  # when the first canary of the current run of failures was sent
        self.said_dead_since_s: float | None = None  # by its own /health
        self.gone_since_s: float | None = None  # when its supervisor began to say that it does not run
        self._page_marks: tuple[float | None, ...] = ()
        self._moved_at_s = -math.inf  # when a figure of the page last moved that only a live server moves
        self.lives = ProcessLives()
        self.changed: str = ""  # what the last restart changed, in words
        self.changed_at_s = -math.inf
        self.points = 0  # coarse points ever made
        self._coarse_from_s = -math.inf
        self._begin_life()

    def _begin_life(self) -> None:
        """Clears everything that belongs to the earlier process: another one answers from now on."""
        self._fine = FigureTable(FINE, max(FINE_LOOKS, math.ceil(FINE_S / self.every_s) + 1), GAP_LOOKS * self.every_s)
        self._coarse = FigureTable(COARSE, COARSE_POINTS)
        self._lowest: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._pulse = CoreSteps(self._failure_s)
        self._pulses: dict[str, CoreSteps] = {}
        self.memo: dict[Any, tuple[int, Any]] = {}  # results that are valid until the next coarse point
        self._ranks: dict[str, float] = {}  # workers, and when each last reported
        # What others hold beside each worker in the last 25 minutes: only values that could still become the least.
        self._least_others: dict[str, deque[tuple[float, float]]] = {}
        self.pause_unanswered_since_s: float | None = None  # since when it is unknown whether it is paused
        self._told: dict[str, bool] = {}  # sources that reported on rest in this life, and whether each still does

    def add(self, look: Look) -> bool:
        """Adds a look; False, without effect, for one that is not later than the last."""
        if self.last is not None and look.at_s <= self.last.at_s:
            return False
        self.last = look
        canary = look.canary
        if canary is not None and canary.is_answered is not None and canary.at_s > self._canary_at_s:
            self._canary_at_s = canary.at_s
            if canary.is_answered:
                self.failed_canaries, self.failing_since_s = 0, None
                self.canary_answered_at_s = canary.at_s
            else:
                self.failed_canaries += 1
                self.canary_failures.append(canary.at_s)
                self.failing_since_s = canary.at_s if self.failing_since_s is None else self.failing_since_s
        self._note_reach(look)
        self.lives.count(look)
        if look.reach is not Reach.ANSWERS:
            return True
        values = read_figures(look, self._is_whole(look))
        fallen = [name for name, total in self._totals.items() if values.get(name, math.inf) < total]
        if self.lives.begins(look, has_fallen=len(fallen) >= 2):
            self._begin_life()
            self._ranks = {worker.rank: look.at_s for worker in look.workers if worker.age_s < STALE_S}
            if self.last_answer is not None and (changed := describe_changes(self.last_answer, look)):
                self.changed, self.changed_at_s = changed, look.at_s
        else:
            for name in fallen:  # a total that falls without a restart is wrong: unknown
                del values[name]
        self._note_steps(look, values)
        self._note_answer(look)
        self._fine.add(look.at_s, values)
        for name in COARSE:
            value = values.get(name)
            if value is not None and not value >= self._lowest.get(name, math.inf):
                self._lowest[name] = value
        if look.at_s - self._coarse_from_s >= COARSE_S - _NEAR:
            self._coarse.add(look.at_s, self._lowest)
            self._lowest, self._coarse_from_s = {}, look.at_s
            self.points += 1
        self._totals |= {name: values[name] for name in TOTALS if name in values}
        self.last_answer = look
        self.first_answer_s = look.at_s if self.first_answer_s is None else self.first_answer_s
        return True

    # Figures

    def now(self, name: str) -> Reading:
        last = self.last
        if last is None or last.reach is not Reach.ANSWERS:
            return Unknown("not looked at yet" if last is None else f"the engine {last.why or last.reach}")
        value = self._fine.newest(name)
        return value if value == value else Unknown(f"{_said(name)}: not on the page")

    def since(self, name: str, seconds: float) -> FigureSeries:
        """Returns the known values of a figure in the last `seconds` before the last look."""
        return self._fine.since(name, self._end() - seconds - _NEAR)

    def over(self, name: str, seconds: float) -> FigureSeries | Unknown:
        """Returns the same if it is known for all that time, without a hole of more than a few looks; else Unknown.

        It begins with the last value at or before the window's beginning, so it always covers the whole window.
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
        end_s = self._end()
        start_s = end_s - seconds + _NEAR
        known_from_s, known_to_s = self._fine.stretch(name)
        if known_to_s < end_s:
            newest = self.now(name)
            return newest if isinstance(newest, Unknown) else Unknown(f"{_said(name)}: not known")
        if known_from_s > start_s:
            return Unknown(f"{_said(name)}: seen for {known_to_s - known_from_s:.0f} of {seconds:.0f} s")
        found = self._fine.from_before(name, start_s)
        return Unknown(f"{_said(name)}: what it was {seconds:.0f} s ago is not kept") if found is None else found.rise

    def long(self, name: str, points: int = COARSE_POINTS) -> FigureSeries:
        """Returns the smallest value of each two minutes, for up to a day."""
        return self._coarse.last(name, points)

    @property
    def has_workers(self) -> bool:
        """True if a worker has reported its memory in this life."""
        return bool(self._ranks)

    def came(self, rank: str, others: float) -> float:
        """Returns how much more others hold beside this worker than the least of the last 25 minutes."""
        kept = self._least_others.get(rank)
        return 0.0 if kept is None else others - min(others, kept[0][1])

    @property
    def cores(self) -> list[tuple[str, CoreSteps]]:
        """The steps of every engine core at the last look, by name; a single core has the name ""."""
        ranks = () if self.last is None else self.last.ranks
        if not ranks:
            return [("", self._pulse)]
        return [(rank.name, self._pulses[rank.name]) for rank in ranks if rank.name in self._pulses]

    def _end(self) -> float:
        return self.last.at_s if self.last is not None else 0.0

    def _is_whole(self, look: Look) -> bool:
        """True if every worker of this life reports now: a sum over some of them is no figure of the engine.

        A new worker shows that the earlier sums were not the engine's either, and erases them.
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
            self._ranks.clear()  # no engine has so many: keep none of them
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
                    # Time before its process began was not part of the start.
                    took_s = min(took_s, look.unix_s - look.started_unix_s)
                    if took_s <= LONGEST_START_S:  # one that was down for a night was not starting all night
                        self.longest_start_s = max(self.longest_start_s, took_s)
            self.refused_since_s = self.unreachable_since_s = self.gone_since_s = None
            return
        if self.unreachable_since_s is None:
            self.unreachable_since_s = look.at_s
        if look.gone and self.gone_since_s is None:
            self.gone_since_s = look.at_s
        elif not look.gone:
            self.gone_since_s = None
        if look.reach is Reach.REFUSED:
            # A look or two without an answer between two refusals does not show that the port was open.
            if self.refused_since_s is None or look.at_s - self._refused_at_s > GAP_LOOKS * self.every_s:
                self.refused_since_s = look.at_s
            self._refused_at_s = look.at_s
        elif look.reach is Reach.NONSENSE:
            self.refused_since_s = None  # the port is open

    def _note_steps(self, look: Look, values: dict[str, float]) -> None:
        """Records a step since the last look if the counter rose, or if the gate saw one."""
        hole_s = GAP_LOOKS * self.every_s
        age_s = look.gate.last_step_age_s if look.gate is not None else None
        self._pulse.note(look.at_s, values.get("steps"), count_requests(look, self._pulse.work), age_s, hole_s)
        rests = is_resting(look)
        if rests:
            self._pulse.rest(look.at_s)
        for rank in look.ranks[:RANKS_MOST]:
            pulse = self._pulses.get(rank.name)
            if pulse is None:
                if len(self._pulses) >= RANKS_MOST:
                    continue
                pulse = self._pulses[rank.name] = CoreSteps(self._failure_s)
            work = None if rank.running is None or rank.waiting is None else rank.running + rank.waiting
            pulse.note(look.at_s, rank.steps, work, None, hole_s)
            if rests:
                pulse.rest(look.at_s)

    def _note_answer(self, look: Look) -> None:
        for worker in look.workers[:RANKS_MOST]:
            if worker.age_s < STALE_S and worker.by_others is not None and worker.rank in self._ranks:
                kept = self._least_others.setdefault(worker.rank, deque())
                while kept and kept[-1][1] >= worker.by_others:
                    kept.pop()
                kept.append((look.at_s, worker.by_others))
                while kept[0][0] < look.at_s - SURELY_S:
                    kept.popleft()
        # The sources that report whether it rests.
        told = self._told = dict.fromkeys(self._told, False)
        told |= {"page": True} if look.figures.get("asleep", -1.0) >= 0.0 else {}
        told |= {"gate": True} if look.gate is not None else {}
        told |= {"pause": look.is_paused is not None} if look.is_paused is not None or look.is_rest_unknown else {}
        if not look.is_rest_unknown:
            self.pause_unanswered_since_s = None
        elif self.pause_unanswered_since_s is None:
            self.pause_unanswered_since_s = look.at_s
        # Its own /health, and whether the page moves.
        if look.health != DEAD:
            self.said_dead_since_s = None
        elif self.said_dead_since_s is None:
            self.said_dead_since_s = look.at_s
        marks = (*(look.figures.get(name) for name in ("cpu_seconds", *TOTALS)), *(rank.steps for rank in look.ranks))
        if self._page_marks and marks != self._page_marks:
            self._moved_at_s = look.at_s
        self._page_marks = marks

    def is_page_fresh(self, within_s: float) -> bool:
        """True if the page is proved to be at most `within_s` old: a counter of it moved, or its own gate answered with it.

        A server that answers uses processor time; a page without that figure, of which nothing moves, may be an old one.
        """
        last = self.last
        if last is not None and last.gate is not None and is_direct(last) is not False:
            return True
        return self._end() - self._moved_at_s < within_s

    @property
    def lost(self) -> str:
        """The source that reported on this process before and does not at the last look: "gate", "page", "pause", or ""."""
        return next((name for name, is_there in self._told.items() if not is_there), "")

    @property
    def has_lost_gate(self) -> bool:
        return not self._told.get("gate", True)


_WORDS = {
    "success": "requests that ended", "prefix_queries": "tokens looked up in the prefix cache", "waiting": "the queue",
    "prefix_hits": "tokens found in the prefix cache", "kv_cache_usage": "the use of the KV cache",
    # No word "token" before the colon: redaction would hide the text after it.
    "ttft_sum": "first-token latency", "ttft_count": "first-token latency", "inter_token_sum": "inter-token latency",
    "inter_token_count": "inter-token latency",
}  # fmt: skip


def _said(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))
