"""A world to act on, without any part that is real: one engine behind a balancer, and what harm came to its users.

Time is skipped, never waited for. A guard can be made to die at any numbered point: before and after each entry of its
journal, before and after each deed. What it should never do is written down as harm, whoever does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from plimsoll.guard.act.ports import Outcome, failed, unsure
from plimsoll.guard.act.steps import Step
from plimsoll.inside import admission as gate

REQUEST_S = 3.0
CHECKS_S = 2.0  # a balancer that asks for readiness notices a drain after so long

MAY: dict[str, frozenset[Step]] = {
    "acquire": frozenset({Step.LOCK}), "release": frozenset({Step.UNLOCK}), "evidence": frozenset({Step.EVIDENCE}),
    "take_out": frozenset({Step.LEAVE, Step.DRAIN, Step.IDLE, Step.STOP}),
    "drain": frozenset({Step.DRAIN, Step.IDLE, Step.STOP}),
    "put_back": frozenset({Step.UNDRAIN}), "undrain": frozenset({Step.UNDRAIN}),
    "stop": frozenset({Step.STOP}), "wait_back": frozenset({Step.GONE}), "start": frozenset({Step.START}),
    "warm": frozenset({Step.WARM}), "shed": frozenset({Step.SHED, Step.HOLD}), "unshed": frozenset({Step.UNSHED}),
    "compact": frozenset({Step.COMPACT}),
}  # fmt: skip
"""In which steps a deed may be done: one of them was written down before."""


class Died(KeyboardInterrupt):
    """The guard was killed. Of this kind, since a loop lets nothing else through at once."""


class Fault(NamedTuple):
    """What goes wrong with a deed: "fails", "lost" (nothing done, and nobody knows), "unsure" (done, and nobody knows)."""

    how: str
    times: int = 1_000


class State:
    """All that outlives a guard. Only plain values, so that it can be kept in a file."""

    def __init__(self, mode: str = "serving", balancer: str = "told") -> None:
        self.now = 1_000.0
        self.mode = self.first_mode = mode  # serving, wedged, ending, down
        self.balancer, self.is_out = balancer, False  # "told", or "asks" for readiness by itself
        self.began = 100.0  # the engine's process
        self.ready_at = self.gone_at = 0.0
        self.in_flight = [self.now + 2.0, self.now + 8.0] if mode != "down" else []  # when each request ends
        self.requests = self.stops = self.starts = 0
        self.last_admitted = 0.0
        self.drain: tuple[Any, ...] = tuple(gate.Drain())
        self.shed_until = 0.0
        self.free = 1.0
        self.epoch, self.holder, self.held_until = 0, 0, 0.0
        self.life = 0
        self.by_hand = False  # a person stopped it
        self.harm: list[str] = []
        self.told: list[tuple[str, str]] = []  # what guard said, and how the action ended where it said so


class World:
    """The state, and what moves it."""

    def __init__(self, state: State | None = None, faults: Mapping[str, Fault] | None = None, *, ttl_s: float = 0.0) -> None:
        """`ttl_s`: the lock of a guard that died lasts so long; 0: it ends with its guard."""
        self.state = state or State()
        self.faults, self.used = dict(faults or {}), dict.fromkeys(faults or {}, 0)
        self.ttl_s = ttl_s
        self.intent = ""  # the step that was written down and is not over, in this life
        self.points: list[str] = []
        self.die_at: int | None = None
        self.is_dying = False
        self.dies: Callable[[], None] = self._raise
        self.saves: Callable[[], None] = lambda: None
        self.full_until = self.state.now + 40.0  # the queue grows so long
        self.when: dict[str, Callable[[], None]] = {}  # what happens as soon as a step was written down
        self.needs_entries = True  # whether a deed without its entry is harm
        self.may: Mapping[str, frozenset[Step]] = MAY
        self.may_lose = False  # somebody has decided to lose requests

    def new_life(self, die_at: int | None) -> None:
        """A guard starts: it knows nothing, and dies at this point."""
        self.state.life += 1
        self.intent, self.points, self.die_at, self.is_dying = "", [], die_at, False

    def point(self, name: str) -> None:
        self.saves()
        if self.is_dying:
            raise Died
        self.points.append(name)
        if self.die_at == len(self.points):
            self.is_dying = True
            self.dies()

    def _raise(self) -> None:
        raise Died

    def hurt(self, what: str) -> None:
        if what not in self.state.harm:
            self.state.harm.append(what)

    # The engine and its users

    @property
    def is_running(self) -> bool:
        self.tick()
        return self.state.mode != "down"

    @property
    def serves(self) -> bool:
        self.tick()
        return self.state.mode == "serving" and self.state.now >= self.state.ready_at

    @property
    def phase(self) -> str:
        return gate.Drain(*self.state.drain).phase(self.state.now, self.state.last_admitted)

    def tick(self) -> None:
        """One request a second, as long as the balancer sends them here."""
        state = self.state
        if state.mode == "ending" and state.now >= state.gone_at:
            state.mode, state.in_flight = "down", []
        due = int(state.now) - 1_000
        if state.requests >= due:
            return
        drain = gate.Drain(*state.drain)
        if state.balancer == "told" and state.is_out:
            state.requests = due  # none of them is sent
            self._end_requests(1_000.0 + due)
        while state.requests < due:
            state.requests += 1
            at = 1_000.0 + state.requests
            self._end_requests(at)
            self._request(at, drain)

    def _end_requests(self, at: float) -> None:
        state = self.state
        if state.in_flight and state.mode != "wedged" and "idle" not in self.faults:
            state.in_flight = [end for end in state.in_flight if end > at]

    def _request(self, at: float, drain: gate.Drain) -> None:
        state = self.state
        is_up = state.mode == "serving" and at >= state.ready_at
        if state.balancer == "asks":
            is_sent = is_up and (not drain.is_on(at) or at - drain.since < CHECKS_S)
        else:
            is_sent = not state.is_out
        if not is_sent:
            return
        if is_up and drain.phase(at, state.last_admitted) == gate.REFUSING:
            self.hurt("a request was refused that the balancer still sent")
        elif is_up:
            state.in_flight.append(at + REQUEST_S)
            state.last_admitted = at
        elif state.first_mode == "serving":
            self.hurt("a request was sent to an engine that guard had stopped")

    # Deeds

    async def deed(self, name: str, does: Callable[[], Outcome], *, is_free: bool = False) -> Outcome:
        """Do it, unless something goes wrong; `is_free` where no entry has to come before it."""
        if self.needs_entries and not is_free and self.intent not in self.may[name]:
            self.hurt(f"{name} was done in {self.intent or 'no step'}")
        self.tick()
        self.point(f"before {name}")
        await asyncio.sleep(0.01)
        self.tick()
        fault = self.faults.get(name)
        if fault is not None and self.used[name] < fault.times:
            self.used[name] += 1
            if fault.how == "fails":
                return failed(f"{name} fails")
            if fault.how == "unsure":
                does()
                self.point(f"after {name}")
            return unsure(f"{name}: nobody knows")
        outcome = does()
        self.point(f"after {name}")
        return outcome
