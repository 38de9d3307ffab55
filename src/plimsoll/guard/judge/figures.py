"""What one look holds, as numbers by name: every figure that can be one, and nothing else."""

from __future__ import annotations

import math

from plimsoll.guard.judge.look import Look, Worker
from plimsoll.unknown import Unknown

# The steps of one engine core: when it last made one, for how long that is known, and since when it has had work.

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


COUNTERS = ("steps", "preemptions", "prompt_tokens", "generation_tokens", "success", "prefix_queries", "prefix_hits")
GAUGES = ("running", "waiting", "kv_cache_usage")
WORKERS = ("held", "releasable", "device_free", "room", "retries", "ooms", "host_resident")
OWN = ("expected_wait", "engine_requests", "in_flight", "contained", *WORKERS)
TOTALS = (*COUNTERS, "contained")  # what only rises while one process lives
FINE = (*COUNTERS, *GAUGES, *OWN)
_PAGE = (*COUNTERS, *GAUGES)
_MOST = 1e18
MEASURED = ("kv_cache_max_concurrency", "kv_cache_size_tokens", "num_gpu_blocks")  # of vllm:cache_config_info
MEASURED_RATIO = 0.01  # two starts of one command: 0.03 % apart on a CPU and on an H200 (docs/learn.md)


def values_of(look: Look, is_whole: bool) -> dict[str, float]:  # noqa: FBT001
    """Every figure that is a number such a figure can be. `is_whole`: all workers are there, so that they can be added up."""
    figures = look.figures
    found: dict[str, float] = {}
    for name in _PAGE:
        value = figures.get(name)
        if value is not None:
            found[name] = value
    gate = look.gate
    if gate is not None:
        found["engine_requests"], found["in_flight"] = gate.engine_requests, gate.in_flight
        if gate.expected_wait_s is not None:
            found["expected_wait"] = gate.expected_wait_s
        if gate.survival is not None and gate.survival.contained is not None:
            found["contained"] = gate.survival.contained
    if is_whole:
        _add_workers(look.workers, found)
    elif look.cards and not look.workers:
        free = [card.free for card in look.cards]
        if None not in free:
            found["device_free"] = min(value for value in free if value is not None)
    if "host_resident" in figures and not look.workers:
        found["host_resident"] = figures["host_resident"]
    wrong = [name for name, value in found.items() if not 0.0 <= value < _MOST]
    for name in wrong:
        del found[name]
    return found


def _add_workers(workers: tuple[Worker, ...], found: dict[str, float]) -> None:
    """Sums over all of them, and the least of what is free; a sum that one cannot be added to is not known."""
    sums = dict.fromkeys(("held", "releasable", "retries", "ooms", "host_resident"), 0.0)
    free = room = math.inf
    for one in workers:
        held = None if one.allocated is None or one.unreleasable is None else one.allocated + one.unreleasable
        for name, value in (
            ("held", held), ("releasable", one.releasable), ("retries", one.retries), ("ooms", one.ooms),
            ("host_resident", one.host_resident),
        ):  # fmt: skip
            sums[name] = math.nan if value is None else sums[name] + value
        free = math.nan if one.device_free is None or free != free else min(free, one.device_free)
        # Card by card: what one worker could give back is of no use to another.
        left = math.nan if one.device_free is None or one.releasable is None else one.device_free + one.releasable
        room = math.nan if left != left or room != room else min(room, left)
    found.update({name: value for name, value in (*sums.items(), ("device_free", free), ("room", room)) if value == value})


def work_of(look: Look, pulse: Pulse) -> float | None:
    """Requests that are with the engine: the gate's own count, else what the page says; None if neither tells.

    Where one of them may be a test request of guard's own, it is what it was, as long as there was no step meanwhile.
    """
    gate = look.gate
    if gate is None:
        running, waiting = look.figures.get("running"), look.figures.get("waiting")
        return None if running is None or waiting is None else running + waiting
    others = gate.engine_requests - gate.ours
    if gate.ours and others <= 0 < gate.engine_requests:
        return pulse.work
    return float(max(0, others))


def is_resting(look: Look) -> bool:
    """Whether it says that it is paused or asleep."""
    is_asleep = look.gate is not None and bool(look.gate.asleep)
    return is_asleep or bool(look.is_paused) or look.figures.get("asleep", 0.0) > 0


def _differs(name: str, before: Look, now: Look) -> bool:
    """Whether a setting is another one; what vLLM measures at its start is never quite the same twice."""
    one, other = before.config[name], now.config[name]
    if one == other or name not in MEASURED:
        return one != other
    try:
        sizes = float(one), float(other)
    except ValueError:
        return True
    return not abs(sizes[0] - sizes[1]) <= MEASURED_RATIO * max(sizes)


def changes(before: Look, now: Look) -> str:
    """What is another one after a restart, in words."""
    parts = []
    if before.vllm and now.vllm and before.vllm != now.vllm:
        parts.append(f"vLLM {before.vllm} became {now.vllm}")
    names = sorted(name for name in before.config.keys() & now.config.keys() if _differs(name, before, now))
    parts += [f"{name} {before.config[name]} became {now.config[name]}" for name in names[:6]]
    return "; ".join(parts)
