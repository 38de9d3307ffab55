"""Finds an autoscaling rule that keeps a promise: replays the traffic with replicas that come and go as the rule says.

Every 15 seconds a horizontal autoscaler reads a figure summed over the replicas that serve, as of the last scrape, and wants
that sum divided by the target of one replica, rounded up. It ignores a difference of a tenth, goes up to the lowest wish of
the up window and down to the highest of the down window, and at most doubles or adds four at a time. A new replica serves
after its start; one that leaves takes no more requests and finishes those that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from plimsoll.simulate.replay import speed_up
from plimsoll.simulate.replicas import RoutedEngine, merge_replays, replay_each
from plimsoll.simulate.trace import Integers
from plimsoll.tune.capacity import find_capacity, replay_fleet
from plimsoll.tune.goodput import Job, Traffic, score

POLL_S = 15  # of KEDA's and of the autoscaler's own loop, and between two scrapes
TOLERANCE = 0.1  # the difference that the autoscaler ignores, by default
ADDED_AT_ONCE = 4  # or as many as there are: its default policy for going up
IN_FLIGHT, WAITING = "in flight", "waiting"
TARGETS = {IN_FLIGHT: (2, 4, 8, 16, 32, 64, 128, 256), WAITING: (1, 2, 4, 8, 16)}
WINDOWS = ((0, 60), (0, 600), (60, 300))  # to try beside (0, 300), with the best target
DOWN_S = 300
SPARE = 1.5  # the most replicas of a rule, as a multiple of the number that keeps the promise without one
MORE_TRAFFIC = 1.1


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The settings of an autoscaler."""

    metric: str  # IN_FLIGHT or WAITING: requests of all replicas
    target: int  # for one replica
    fewest: int
    most: int
    up_s: int = 0  # the window over which the lowest wish counts
    down_s: int = DOWN_S  # the window over which the highest wish counts


@dataclass(frozen=True, slots=True)
class ScalingTrial:
    """One replay with a rule; `rule.target` is 0 where the number of replicas never changed."""

    rule: ScalingRule
    met: int  # requests served as promised
    requests: int
    mean_replicas: float
    peak_replicas: int
    changes: int  # of the number of replicas
    speedup: float = 1.0

    @property
    def share(self) -> float:
        """The share of all requests that were served as promised."""
        return self.met / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The chosen rule, and all trials."""

    chosen: ScalingTrial | None  # keeps the promise with a tenth more traffic, too; None: no number of replicas does
    trials: tuple[ScalingTrial, ...]  # the first has a number of replicas that keeps the promise without a rule
    keep: float
    start_s: int


class _Replicas:
    """Replicas that come and go, with the times of each."""

    def __init__(self, job: Job, prefix_block: int, count: int) -> None:
        self._make: Callable[[], RoutedEngine] = lambda: RoutedEngine(job.settings, job.step_time, prefix_block)
        self.engines = [self._make() for _ in range(count)]
        self.made_ns, self.ready_ns, self.left_ns = ([0] * count, [0] * count, [-1] * count)

    @property
    def wanted(self) -> list[int]:
        """The replicas that did not leave, ready or not."""
        return [place for place, left in enumerate(self.left_ns) if left < 0]

    def serving(self, now_ns: int) -> list[int]:
        return [place for place in self.wanted if self.ready_ns[place] <= now_ns]

    def go_on(self, now_ns: int) -> None:
        for place in self.wanted:
            self.engines[place].go_on(now_ns)

    def become(self, count: int, now_ns: int, start_ns: int) -> None:
        """Adds replicas that are ready after their start, or removes the newest."""
        for _ in range(count - len(self.wanted)):
            self.engines.append(self._make())
            self.made_ns.append(now_ns)
            self.ready_ns.append(now_ns + start_ns)
            self.left_ns.append(-1)
        for place in self.wanted[count:][::-1]:
            self.left_ns[place] = now_ns


def wish(rule: ScalingRule, figure: float, current: int) -> int:
    """The number of replicas that the autoscaler wants for this sum of its figure."""
    if abs(figure / (rule.target * current) - 1) <= TOLERANCE:
        return current
    return min(rule.most, max(rule.fewest, math.ceil(figure / rule.target)))


def next_count(rule: ScalingRule, wishes: list[tuple[float, int]], now_s: float, current: int) -> int:
    """The next number of replicas from its wishes, (second, replicas) each, within the two windows and its steps."""
    if wishes[-1][1] > current:
        lowest = min(count for at, count in wishes if at >= now_s - rule.up_s)
        return min(max(current, lowest), max(2 * current, current + ADDED_AT_ONCE))
    return min(current, max(count for at, count in wishes if at >= now_s - rule.down_s))


def replay_rule(traffic: Traffic, job: Job, rule: ScalingRule, start_s: int, speedup: float = 1.0) -> ScalingTrial:
    """The traffic behind a least-load router with as many replicas as the rule makes at each moment."""
    trace, faster = traffic.trace, traffic.speedup * speedup
    arrivals = (speed_up(trace, faster) + job.step_time.front_ns).tolist()
    replicas = _Replicas(job, trace.prefix_block, rule.fewest)
    engine_of: Integers = np.zeros(trace.size, dtype=np.int64)
    wishes: list[tuple[float, int]] = []
    tick_s, scraped, peak, changes = POLL_S, 0.0, rule.fewest, 0
    for request, arrival in enumerate(arrivals):
        while tick_s * 10**9 <= arrival:
            now_ns = tick_s * 10**9
            replicas.go_on(now_ns)
            current = len(replicas.wanted)
            wishes = [one for one in wishes if one[0] >= tick_s - max(rule.up_s, rule.down_s)]
            wishes.append((tick_s, wish(rule, scraped, current)))
            count = next_count(rule, wishes, tick_s, current)
            replicas.become(count, now_ns, start_s * 10**9)
            changes, peak = changes + (count != current), max(peak, count)
            here = [replicas.engines[place] for place in replicas.serving(now_ns)]
            scraped = sum(one.run.waiting if rule.metric == WAITING else one.in_flight for one in here)
            tick_s += POLL_S
        replicas.go_on(arrival)
        serving = replicas.serving(arrival)
        engine_of[request] = min(serving, key=lambda place: replicas.engines[place].in_flight)
        replicas.engines[engine_of[request]].take(trace, request, arrival)
    runs = replay_each(trace, job.settings, job.step_time, engine_of, len(replicas.engines), speedup=faster)
    end_ns = max(1, arrivals[-1] if arrivals else 1)
    held = 0.0
    for run, made, left in zip(runs, replicas.made_ns, replicas.left_ns, strict=True):
        until = end_ns if left < 0 else max(left, int(run.finish_ns.max(initial=0)))
        held += min(until, end_ns) - min(made, end_ns)
    found = score(merge_replays(trace, runs, engine_of), traffic.slo)
    return ScalingTrial(rule, found.met, found.requests - found.rejected, held / end_ns, peak, changes, speedup)


def find_rule(
    traffic: Traffic, job: Job, keep: float, start_s: int, on_trial: Callable[[int, int], None] | None = None
) -> Autoscaling:
    """The rule with the fewest replicas on average that keeps the promise, and all trials on the way to it.

    The promise must hold for the traffic and for a tenth more of it.
    """
    fixed = find_capacity(Traffic(traffic.trace, traffic.speedup * MORE_TRAFFIC, traffic.slo), job, keep)
    if fixed.servers is None:
        return Autoscaling(None, (), keep, start_s)
    always = fixed.servers
    most = max(always + 1, math.ceil(SPARE * always))
    now = replay_fleet(traffic, job, always)
    trials = [ScalingTrial(ScalingRule("", 0, always, always), now.met, now.requests, float(always), always, 0)]
    about = sum(map(len, TARGETS.values())) + len(WINDOWS) + 1

    def tried(rule: ScalingRule, speedup: float = 1.0) -> ScalingTrial:
        trials.append(replay_rule(traffic, job, rule, start_s, speedup))
        if on_trial is not None:
            on_trial(min(len(trials), about), about)
        return trials[-1]

    for fewest in sorted({1, math.ceil(always / 2), always}):
        # A replica runs at most max_num_seqs requests in flight; the other figure counts those that wait.
        rules = [
            ScalingRule(metric, target, fewest, most)
            for metric, targets in TARGETS.items()
            for target in targets
            if metric == WAITING or target <= job.settings.max_num_seqs
        ]
        kept = [trial for rule in rules if (trial := tried(rule)).share >= keep]
        if not kept:
            continue
        best = min(kept, key=_cost)
        others = (tried(replace(best.rule, up_s=up_s, down_s=down_s)) for up_s, down_s in WINDOWS)
        kept += [trial for trial in others if trial.share >= keep]
        # A rule that only just keeps the promise breaks it with slightly more traffic.
        for trial in sorted(kept, key=_cost):
            if tried(trial.rule, MORE_TRAFFIC).share >= keep:
                return Autoscaling(trial, tuple(trials), keep, start_s)
    return Autoscaling(None, tuple(trials), keep, start_s)


def _cost(trial: ScalingTrial) -> tuple[float, int, float]:
    return round(trial.mean_replicas, 2), trial.changes, -trial.share
