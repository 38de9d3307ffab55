"""What goes wrong with a stand-in at a random moment, and whether the judge says so in time, under its own name, and no other.

Every case: an engine under a load it can carry, a fault at a random moment, looks every five seconds until the condition
holds or its time is over, and ten looks more. In time: within the condition's window and three looks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lab.guard.looks import CANARY_EVERY_S, CANARY_WITHIN_S, EVERY_S, Sight, Watched
from lab.guard.weeks import CHAT, DOCUMENTS, ENGINES, ESSAYS, Mix, carries, launch, lengths
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.standin import StandIn
from plimsoll.standin.faults import FOREVER, Fault

MIB = float(1 << 20)
LOOKS = 3
AFTER_LOOKS = 10
LOST = 0.01  # of all looks
L4 = ENGINES[0]


class Load:
    """Requests at a rate that may be changed."""

    def __init__(self, mix: Mix, rate: float, seed: int) -> None:
        self.mix, self.rate, self.is_spread = mix, rate, True
        self._dice = np.random.default_rng(seed)

    def __call__(self, engine: StandIn, from_s: float, to_s: float) -> None:
        """What arrives between two moments."""
        count = int(self._dice.poisson(self.rate * (to_s - from_s)))
        if count:
            prompts, outputs = lengths(self.mix, self._dice, count)
            times = from_s + (to_s - from_s) * np.sort(self._dice.random(count)) * self.is_spread
            engine.send(times.tolist(), prompts.tolist(), outputs.tolist())


class Scene:
    """One engine, its load, and when its trouble has begun."""

    def __init__(
        self, seed: int, mix: Mix = CHAT, share: float = 0.4, *, is_open: bool = False, has_gate: bool = False
    ) -> None:
        self.dice = random.Random(seed)
        self.run = StandIn(launch(L4).config)
        sight = Sight(has_gate=has_gate, keeps_door_open=is_open)
        self.watched = Watched(self.run, sight, random.Random(seed + 1))
        self.load = Load(mix, share * carries(L4, mix), seed)
        self.warm_s = 900.0
        self.window_s = 0.0
        self.onset_s: float | None = None  # None: `has_begun` says it
        self.has_begun: Callable[[Look], bool] | None = None
        self.each: Callable[[float], None] | None = None

    def looks(self, seconds: float) -> Iterator[Look]:
        """Every look of the first so many seconds; one in a hundred gets no answer in time."""
        for look in self.watched.looks(seconds, self._feed):
            is_lost = self.dice.random() < LOST
            yield Look(look.at_s, look.unix_s, Reach.SILENT, "no answer in time", canary=look.canary) if is_lost else look

    def _feed(self, engine: StandIn, from_s: float, to_s: float) -> None:
        if self.each is not None:
            self.each(from_s)
        if engine.is_up:
            self.load(engine, from_s, to_s)

    def at(self, low_s: float = 300.0, high_s: float = 900.0) -> float:
        return self.dice.uniform(low_s, high_s)


class Outcome(NamedTuple):
    """What the judge made of it."""

    fault: str
    seed: int
    found_s: float | None  # after the onset
    window_s: float
    others: tuple[str, ...]  # action-grade, and not its own
    note: str = ""

    @property
    def is_in_time(self) -> bool:
        return self.found_s is not None and self.found_s <= self.window_s + LOOKS * EVERY_S + 1e-6


def number(kind: str, name: str) -> float:
    """Of the policy that holds unless set."""
    return Policy().number(kind, name)


# The faults


def oom(seed: int, *, is_open: bool = False) -> Scene:
    """The engine dies; its port closes, or stays open and says 503."""
    scene = Scene(seed, is_open=is_open)
    scene.run.add_fault(f"oom@{scene.at()}s")
    scene.window_s = number("dead", "for") + (0.0 if is_open else number("dead", "refused"))
    scene.has_begun = lambda look: look.reach is Reach.REFUSED or look.health == 503
    return scene


def wedge(seed: int) -> Scene:
    """No step any more, with work there."""
    scene = Scene(seed, ESSAYS, 0.5, has_gate=seed % 2 == 1)
    onset_s = scene.at()

    def keep_busy(now_s: float) -> None:
        if onset_s - 60.0 < now_s < onset_s and scene.run.figures.running < 2:
            scene.run.ask(400, 2000)

    scene.each, scene.onset_s = keep_busy, onset_s
    scene.run.add_fault(f"wedge@{onset_s}s")
    scene.window_s = number("wedged", "still")
    return scene


def idle_hang(seed: int) -> Scene:
    """It stops while it has nothing to do; what comes later is not even seen on the page."""
    scene = Scene(seed, has_gate=seed % 2 == 1)
    onset_s = scene.at(600.0, 900.0)
    scene.load.rate = 0.0
    scene.onset_s = onset_s
    if seed % 3 == 0:  # work comes to the hung one
        scene.each = lambda now_s: setattr(scene.load, "rate", 0.2 if now_s > onset_s + 15.0 else 0.0)
    scene.run.add_fault(f"idle-hang@{onset_s}s")
    # The test request that is under way may have been answered already: the next one is the first to fail.
    scene.window_s = number("hung", "canaries") * CANARY_EVERY_S + CANARY_WITHIN_S
    return scene


def growth(seed: int) -> Scene:
    """A leak that fills the device within one to three hours."""
    scene = Scene(seed, share=0.2)
    onset_s = scene.at(1800.0, 9000.0)
    scene.run.add_fault(Fault("growth", onset_s, FOREVER, scene.dice.uniform(0.25, 0.6) * MIB))
    scene.onset_s, scene.window_s = onset_s, 1_800.0
    return scene


def slow_growth(seed: int) -> Scene:
    """A leak that fills the device within a day."""
    scene = Scene(seed, share=0.1)
    onset_s = scene.at(1800.0, 9000.0)
    scene.run.add_fault(Fault("growth", onset_s, FOREVER, scene.dice.uniform(0.03, 0.08) * MIB))
    scene.onset_s, scene.window_s = onset_s, 5 * 3600.0
    return scene


def exhaustion(seed: int) -> Scene:
    """The same, to its end: it must be said while the engine lives."""
    scene = Scene(seed, DOCUMENTS, 0.3)
    onset_s = scene.at(1800.0, 5400.0)
    scene.run.add_fault(Fault("growth", onset_s, FOREVER, scene.dice.uniform(0.25, 0.6) * MIB))

    def has_begun(look: Look) -> bool:
        if look.reach is Reach.REFUSED:  # it died between two looks, before any of them saw a refused allocation
            scene.window_s = number("dead", "refused") + number("dead", "for")
            return True
        return bool(look.workers) and (look.workers[0].retries or 0) >= number("exhausted", "least")

    scene.has_begun = has_begun
    return scene


def neighbour(seed: int) -> Scene:
    """Another process takes most of what is free, and torch holds much that it does not use."""
    scene = Scene(seed, DOCUMENTS, 0.4)
    onset_s, left = scene.at(900.0, 1500.0), scene.dice.uniform(20.0, 450.0) * MIB
    scene.onset_s = onset_s

    def take(now_s: float) -> None:
        if now_s >= onset_s and not scene.run.engine.faults:
            scene.run.add_fault(Fault("neighbour", now_s, FOREVER, scene.run.engine.memory.free - left))

    scene.each = take
    scene.window_s = number("neighbour", "for") + EVERY_S
    return scene


def storm(seed: int) -> Scene:
    """Requests of its own that throw one another out."""
    scene = Scene(seed, share=0.2)
    scene.load.is_spread = False  # the storm's own come in between
    scene.onset_s = scene.at()
    scene.run.add_fault(f"preemption-storm@{scene.onset_s}s")
    scene.window_s = number("storm", "over") + number("storm", "for")
    return scene


def host_growth(seed: int) -> Scene:
    scene = Scene(seed, share=0.2)
    scene.onset_s = scene.at(1800.0, 9000.0)
    scene.run.add_fault(Fault("host-growth", scene.onset_s, FOREVER, scene.dice.uniform(0.6, 5.0) * MIB))
    scene.window_s = 1_800.0
    return scene


def restart_loop(seed: int) -> Scene:
    """It starts, dies, and is started again."""
    scene = Scene(seed, share=0.3)
    scene.warm_s = scene.at()
    takes_s, lives_s = scene.dice.uniform(10.0, 100.0), scene.dice.uniform(10.0, 200.0)
    downs = [scene.warm_s + turn * (takes_s + lives_s) for turn in range(6)]

    def restart(now_s: float) -> None:
        if downs and now_s >= downs[0] and scene.run.is_up:
            downs.pop(0)
            scene.run.restart(takes_s)

    scene.each = restart
    least = int(number("loop", "starts"))
    scene.has_begun = lambda look: scene.run.restarts >= least and look.reach is Reach.ANSWERS
    return scene


def overload(seed: int, *, low: float = 2.0, high: float = 4.0, windows: float = 1.0) -> Scene:
    """More comes than it can do; it begins when a new request would wait for longer than the bound."""
    scene = Scene(seed, share=0.5, has_gate=seed % 2 == 1)
    rate, onset_s, times = carries(L4, CHAT), scene.at(), scene.dice.uniform(low, high)
    scene.each = lambda now_s: setattr(scene.load, "rate", rate * (times if now_s > onset_s else 0.5))
    scene.has_begun = lambda look: look.figures.get("waiting", 0.0) / rate > number("saturated", "wait")
    scene.window_s = windows * number("saturated", "grows") + number("saturated", "for")
    return scene


def small_overload(seed: int) -> Scene:
    """A little more than it can do: the queue grows slowly, which shows over a longer time only."""
    return overload(seed, low=1.2, high=2.0, windows=4.0)


class Case(NamedTuple):
    """One fault, the conditions that are its own, and how long it is given in all."""

    name: str
    make: Callable[[int], Scene]
    own: tuple[str, ...]
    most_s: float
    later: tuple[str, ...] = ()  # what the same trouble may become, and is no other


CASES = (
    Case("oom, port closed", oom, ("dead",), 3_600.0),
    Case("oom, 503", lambda seed: oom(seed, is_open=True), ("dead",), 1_500.0),
    Case("wedge", wedge, ("wedged",), 1_500.0),
    Case("idle-hang", idle_hang, ("hung",), 1_500.0),
    Case("growth", growth, ("growth",), 11_400.0, ("exhausted",)),
    Case("growth, slow", slow_growth, ("growth",), 27_500.0, ("exhausted",)),
    Case("growth, to the end", exhaustion, ("exhausted", "dead"), 18_000.0),
    Case("neighbour", neighbour, ("neighbour",), 2_000.0),
    Case("preemption-storm", storm, ("storm",), 1_500.0),
    Case("host-growth", host_growth, ("host",), 11_400.0),
    Case("restart loop", restart_loop, ("loop",), 3_600.0),
    Case("overload", overload, ("saturated",), 4_000.0),
    Case("overload, small", small_overload, ("saturated",), 6_000.0),
)


def play(case: Case, seed: int) -> Outcome:
    scene = case.make(seed)
    judge = Judge("engine", Policy())
    onset_s, found_s, after = scene.onset_s, None, AFTER_LOOKS
    others: dict[str, str] = {}

    for look in scene.looks(case.most_s):
        changes = judge.see(look)
        if onset_s is None and scene.has_begun is not None and scene.has_begun(look):
            onset_s = look.at_s
        for change in changes:
            kind = change.kind
            if not change.is_true:
                continue
            if kind in case.own and found_s is None:
                found_s = look.at_s
            elif kind in GRADES and kind not in (*case.own, *case.later):
                others[kind] = f"{look.at_s:.0f} s: {change.message}"
        after -= found_s is not None
        if after <= 0 or (found_s is None and onset_s is not None and look.at_s > onset_s + scene.window_s + 900.0):
            break
    if found_s is not None and (onset_s is None or found_s < onset_s - 1e-6):
        return Outcome(case.name, seed, None, scene.window_s, (*others, "early"), f"found at {found_s}, began at {onset_s}")
    latency_s = None if found_s is None or onset_s is None else found_s - onset_s
    return Outcome(case.name, seed, latency_s, scene.window_s, tuple(others), "; ".join(others.values()))
