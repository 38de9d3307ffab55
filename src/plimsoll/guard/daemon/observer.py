"""Observes the fleet: looks at every engine every few seconds, judges each look, and reports changes.

Engines are looked at independently: none waits for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from plimsoll.doctor.rules.trend_growth import Forecast, duration
from plimsoll.errors import PlimsollError
from plimsoll.guard.act.capacity import load_of, without
from plimsoll.guard.act.decide import (
    BROKEN_KINDS,
    PROBATION_KINDS,
    EngineStatus,
    FailedRestarts,
    FleetView,
    group_peers,
    is_active,
    is_ready,
)
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.adapters.pods import PodStanding
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge import memory
from plimsoll.guard.judge.findings import PLAN, PlannedTokens, as_planned, finding, findings
from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.load import kv_forecast, queue_forecast
from plimsoll.guard.judge.look import BalancerHealth, Look, Reach
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.guard.judge.tracker import Tracker
from plimsoll.guard.judge.witness import Proof, proof
from plimsoll.net.address import address
from plimsoll.render.guard import Clock, EngineView, Event, EventKind
from plimsoll.unknown import Condition, Status, Unknown

NEVER_S = 60.0  # time without any answer since guard started before that is reported
LOOKS_GONE = 3  # failed looks before an engine is reported unreachable: one slow answer is no news
_REACH_TEXTS = {
    Reach.REFUSED: "unreachable: connection refused", Reach.SILENT: "unreachable",
    Reach.NONSENSE: "answers, but not with metrics",
}  # fmt: skip


GRAVER = {
    "stalled": ("wedged", "hung", "dead"), "slow": ("stalled", "wedged", "hung", "dead"), "wedged": ("dead",),
    "hung": ("wedged", "dead"), "growth": ("exhausted",), "retries": ("exhausted",), "contained": ("limping",),
    "backlog": ("storm",),
}  # fmt: skip
"""Conditions that may become a graver one: that is no recovery."""


NOTES = {
    "gate": ("no gate figures", "the gate answers again"),
    "canary": ("without canary requests nobody sees that an idle engine hangs", "canary requests are taken again"),
}
"""What guard may be without: what is lost by that, and what is said when it is back."""
REFUSALS = frozenset(range(400, 500)) - {429}  # a server that is only busy accepts the next one


class EventReporter:
    """Turns the looks at one engine into events: a condition becomes active or clears, the engine is unreachable or back.

    A condition that is unknown and was never active is silent: one event about the engine says why.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._held: dict[str, float] = {}  # conditions reported active, and since when
        self._begins: set[str] = set()  # conditions that became active with this look
        self.doubted: set[str] = set()  # conditions that were active and are now unknown
        self._gone_looks = 0
        self._gone_since_s: float | None = None
        self._is_gone: bool | None = None  # as reported; None: nothing yet
        self._is_never_told = False
        self.notes: dict[str, str] = {}  # problems of gate and canary, as reported
        self._note_looks: Counter[str] = Counter()
        self.has_answered = False

    def report(
        self, look: Look, changes: Sequence[Condition], answer: Look | None, notes: Mapping[str, str] = {}
    ) -> list[Event]:
        """Returns the events of these changes; `answer`: the last look with figures, `notes`: problems of gate and canary."""
        events = self._reach(look) + [
            event for subject in NOTES for event in self._noted(look, subject, notes.get(subject, ""))
        ]
        self._begins = {condition.kind for condition in changes if condition.is_true}
        return events + [event for one in changes if (event := self._condition(look, one, answer)) is not None]

    def leave(self, unix_s: float, now_s: float, conditions: Sequence[Condition], why: str = "") -> list[Event]:
        """Returns the events that close everything open when the engine is no longer watched, for `why` if known."""
        events = [
            Event(unix_s, self._engine, EventKind.OVER, "it is no longer watched", one, None, now_s - self._held[one.kind])
            for one in conditions if one.kind in self._held
        ]  # fmt: skip
        if self._is_gone:
            events.append(Event(unix_s, self._engine, EventKind.REACHED, "it is no longer watched"))
        text = f"no longer watched: {why}" if why else "no longer in the engine list"
        return [*events, Event(unix_s, self._engine, EventKind.UNLISTED, text)]

    @property
    def gone_since_s(self) -> float | None:
        """When it was reported unreachable, by guard's clock; None if it answers."""
        return self._gone_since_s if self._is_gone else None

    def _reach(self, look: Look) -> list[Event]:
        if look.reach is Reach.ANSWERS:
            gone_s = None if self._gone_since_s is None else look.at_s - self._gone_since_s
            before, self._is_gone, self._gone_looks, self._gone_since_s = self._is_gone, False, 0, None
            if before is False:
                return []
            version = f", vLLM {look.vllm}" if look.vllm else ""
            again = f" again after {duration(gone_s)}" if self.has_answered and gone_s is not None else ""
            self.has_answered = True
            return [Event(look.unix_s, self._engine, EventKind.REACHED, f"answers{again}{version}")]
        self._gone_looks += 1
        self._gone_since_s = look.at_s if self._gone_since_s is None else self._gone_since_s
        if self._is_gone and not self.has_answered and not self._is_never_told and look.at_s - self._gone_since_s >= NEVER_S:
            self._is_never_told = True
            message = "no answer since guard started: still starting, never started, or a wrong address"
            return [Event(look.unix_s, self._engine, EventKind.UNREACHABLE, message)]
        if self._is_gone or (self._is_gone is False and self._gone_looks < LOOKS_GONE):
            return []
        self._is_gone = True
        why = f" ({look.why})" if look.why and look.reach is not Reach.REFUSED else ""
        message = f"{_REACH_TEXTS[look.reach]}{why}; no metrics"
        return [Event(look.unix_s, self._engine, EventKind.UNREACHABLE, message)]

    def _noted(self, look: Look, subject: str, note: str) -> list[Event]:
        """Reports a problem of the gate or the canary that lasts: one look without the gate's answer is no news."""
        if look.reach is not Reach.ANSWERS:
            return []
        self._note_looks[subject] = self._note_looks[subject] + 1 if note else 0
        lacks, again = NOTES[subject]
        if note and subject in self.notes:
            self.notes[subject] = note
        elif note and self._note_looks[subject] >= LOOKS_GONE:
            self.notes[subject] = note
            return [Event(look.unix_s, self._engine, EventKind.TROUBLE, f"{note}; {lacks}")]
        elif subject in self.notes and not note:
            del self.notes[subject]
            return [Event(look.unix_s, self._engine, EventKind.MENDED, again)]
        return []

    def _condition(self, look: Look, condition: Condition, answer: Look | None) -> Event | None:
        kind = condition.kind
        if condition.is_true:
            self.doubted.discard(kind)
            if kind in self._held:  # it was unknown for a while: still the same condition
                return None
            self._held[kind] = condition.since_s
            return Event(look.unix_s, self._engine, EventKind.BEGINS, condition.message, condition, finding(condition, answer))
        if kind not in self._held:
            return None
        if condition.status is Status.UNKNOWN:
            if kind in self.doubted:
                return None
            self.doubted.add(kind)
            return Event(look.unix_s, self._engine, EventKind.UNKNOWN, condition.message, condition)
        self.doubted.discard(kind)
        lasted_s = look.at_s - self._held.pop(kind)
        graver = next((worse for worse in GRAVER.get(kind, ()) if worse in self._held or worse in self._begins), "")
        return Event(look.unix_s, self._engine, EventKind.OVER, condition.message, condition, None, lasted_s, graver)


class Incidents:
    """Gives one id to all events of an engine from its first trouble to its last."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, set[str]]] = {}  # by engine: the id, and the troubles that are not over

    def of(self, engine: str) -> str:
        """Returns the id of its open incident; "" if there is none."""
        return self._open.get(engine, ("", set()))[0]

    def note(self, event: Event) -> str:
        """Returns the id of the incident that an event belongs to, and tracks its begin and end."""
        key = event.condition.kind if event.condition is not None else _UNLIKE.get(event.what, "")
        if event.what in (EventKind.BEGINS, EventKind.UNREACHABLE, EventKind.NEEDS):
            seed = f"{event.engine} {event.unix_s:.3f} {key}"
            self._open.setdefault(event.engine, (hashlib.sha256(seed.encode()).hexdigest()[:8], set()))[1].add(key)
        id_, left = self._open.get(event.engine, ("", set()))
        if event.what in (EventKind.OVER, EventKind.REACHED, EventKind.MENDED):
            left.discard(key)
        if event.what is EventKind.UNLISTED or not left:
            self._open.pop(event.engine, None)
        return id_


_REACH, _NEED = "(reach)", "(needs)"
_UNLIKE = {EventKind.UNREACHABLE: _REACH, EventKind.REACHED: _REACH, EventKind.NEEDS: _NEED, EventKind.MENDED: _NEED}


MOST_AT_ONCE = 64  # looks; as many again for engines that were slow at the last one
SLOW_S = 1.0
CHANGES_KEPT = 1_000
LONGEST_LOOK_S = 20.0
SUPERVISOR_S = 4.0  # time that engines are lost before guard suspects that it is cut off itself
LONGEST_QUESTION_S = 30.0  # a restarter that has not answered by then will not answer
SAME_MOMENT_S = 30.0  # engines lost within this time have one common cause, which may be guard's own


class Watcher(Protocol):
    """Looks at one engine."""

    async def look(self, now_s: float, unix_s: float) -> Look: ...  # takes one look
    async def close(self) -> None: ...  # closes its connections


class DiscoveredFacts(NamedTuple):
    """Facts about an engine from other sources than its page, named as in a look."""

    container_restarts: int | None = None
    ended: str = ""  # why its process has ended and is not started again
    gone: str = ""  # it does not run, without a known reason
    failure: str = ""  # the kind of the failure that ended it
    requests: str = ""  # the shapes of the requests that it had begun then
    has_served: bool = False  # before guard began
    balancer: BalancerHealth | None = None


class Clocks(NamedTuple):
    """Time and randomness; a simulated world has its own."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    dice: Callable[[], float] = random.random
    name: Callable[[], str] = lambda: secrets.token_hex(4)  # of an action


SYSTEM = Clocks()


class ObserverPorts(NamedTuple):
    """Ports of the fleet's loop: looks, events, clocks and randomness."""

    watcher: Callable[[EngineConfig], Watcher]
    tell: Callable[[Event], None]
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    dice: Callable[[], float] = random.random
    facts: Callable[[str], DiscoveredFacts] = lambda _: DiscoveredFacts()


class WatchedEngine:
    """One engine with its watcher, its judge and its counters."""

    def __init__(self, target: EngineConfig, policy: Policy, watcher: Watcher, now_s: float) -> None:
        self.target = target
        self.watcher = watcher
        self.judge = Judge(target.name, policy)
        self.reporter = EventReporter(target.name)
        self.since_s = now_s
        self.looks = 0
        self.failures: Counter[str] = Counter()
        self.look_s: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_wanted = asyncio.Event()  # a caller waits for the next look
        self.waiters: list[asyncio.Future[Look | None]] = []
        self._planned = None if target.plan is None else PlannedTokens(*target.plan)
        self._plan = Tracker(PLAN, 0.0, 0.0, policy.every_s)
        self._by_kind: tuple[object, dict[str, Condition]] = (None, {})

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return self.judge.conditions if self._planned is None else (*self.judge.conditions, self._plan.condition)

    @property
    def by_kind(self) -> Mapping[str, Condition]:
        """The conditions by their kinds; cached, since they are read several times a second and change only by looks."""
        if self._by_kind[0] is not self.judge.conditions:
            self._by_kind = self.judge.conditions, {condition.kind: condition for condition in self.conditions}
        return self._by_kind[1]

    @property
    def is_slow(self) -> bool:
        """True if the last look was slow; the next may be, too."""
        return self.look_s is not None and self.look_s > SLOW_S

    def take(self, look: Look) -> list[Event]:
        self.looks += 1
        if look.reach is not Reach.ANSWERS:
            self.failures[str(look.reach)] += 1
        changes = list(self.judge.see(look))
        answer = self.judge.history.last_answer
        if self._planned is not None and look.reach is Reach.ANSWERS:
            before = self._plan.condition
            after = self._plan.see(as_planned(self._planned, look), look.at_s)
            changes += [after] if after.status is not before.status else []
        canary = look.canary
        is_refused = canary is not None and canary.is_answered is None and canary.status in REFUSALS
        notes = {
            "gate": getattr(self.watcher, "gate_note", ""),
            "canary": f"canary requests prove nothing: {canary.why}" if canary is not None and is_refused else "",
        }
        return self.reporter.report(look, changes, answer, notes)

    def view(self, now_s: float, needs: str = "", remarks: Sequence[str] = ()) -> EngineView:
        """Returns the engine as of now, without forecasts, which are expensive."""
        history = self.judge.history
        look = history.last
        return EngineView(
            self.target.name, address(self.target.url).shown, look, None if look is None else max(0.0, now_s - look.at_s),
            self.look_s, self.looks, dict(self.failures), self.conditions, findings(self.conditions, history.last_answer),
            self.since_s, None if history.last_answer is None else history.last_answer.vllm,
            unreachable_since_s=self.reporter.gone_since_s, has_answered=self.reporter.has_answered,
            needs=needs, note="; ".join((*self.reporter.notes.values(), *remarks)),
        )  # fmt: skip

    def forecasts(self) -> dict[str, Forecast | Unknown]:
        """Returns when memory will run out and when requests will wait too long."""
        history, policy = self.judge.history, self.judge.policy
        return {
            "device": memory.device_forecast(history, policy),
            "host": memory.host_forecast(history, policy),
            "queue": queue_forecast(history, policy),
            "kv": kv_forecast(history),
        }


class Fleet:
    """All watched engines."""

    def __init__(self, policy: Policy, ports: ObserverPorts, *, looks: int | None = None) -> None:
        self._policy, self._ports, self._most_looks = policy, ports, looks
        self.every_s = policy.every_s
        self._engines: dict[str, WatchedEngine] = {}
        self._closing: list[asyncio.Future[None]] = []
        self._quick, self._slow = asyncio.Semaphore(MOST_AT_ONCE), asyncio.Semaphore(MOST_AT_ONCE)
        self.changes: deque[Event] = deque(maxlen=CHANGES_KEPT)
        self.incidents = Incidents()
        self.told = 0
        self.mistakes: Counter[str] = Counter()  # internal errors by place and kind
        self.last_look_s = ports.clock()
        self.stale_after_s = max(60.0, 3 * policy.every_s + LONGEST_LOOK_S)
        self._odd: set[str] = set()  # listed engines that cannot be watched
        self.needs: Mapping[str, str] = {}  # engines that need attention, and why
        self._remarks: dict[tuple[str, str], str] = {}  # by engine and subject: set knobs, advice
        self.is_listed = False  # whether a list was read: only later changes of it are news

    # Watched engines

    def watch(self, targets: Sequence[EngineConfig], why_left: Callable[[str], str] = lambda _: "") -> None:
        """Watches exactly these; `why_left` returns why one is no longer among them."""
        wanted = {target.name: target for target in targets}
        for name in [name for name, engine in self._engines.items() if wanted.get(name) != engine.target]:
            self._leave(self._engines.pop(name), why_left(name))
        for name, target in wanted.items():
            if name not in self._engines:
                self._begin(target)
        self.is_listed = True

    def _begin(self, target: EngineConfig) -> None:
        try:
            watcher = self._ports.watcher(target)
        except Exception as error:  # one bad entry of a list must not stop the watch of the others
            is_bad_entry = isinstance(error, PlimsollError)
            if not is_bad_entry:
                self.mistakes[f"begin {type(error).__name__}"] += 1
            if target.name not in self._odd:
                self._odd.add(target.name)
                why = str(error) if is_bad_entry else f"internal error: {type(error).__name__}"
                self._tell(Event(self._ports.wall(), target.name, EventKind.LISTED, f"cannot be watched: {why}"))
            return
        engine = WatchedEngine(target, self._policy, watcher, self._ports.clock())
        self._engines[target.name] = engine
        engine.task = asyncio.create_task(self._run(engine))
        if self.is_listed:
            self._tell(Event(self._ports.wall(), target.name, EventKind.LISTED, "now watched"))

    def _leave(self, engine: WatchedEngine, why: str) -> None:
        self._closing.append(asyncio.ensure_future(_stopped(engine)))
        self._closing = [task for task in self._closing if not task.done()]
        for event in engine.reporter.leave(self._ports.wall(), self._ports.clock(), engine.conditions, why):
            self._tell(event)

    def views(self) -> list[EngineView]:
        now_s = self._ports.clock()
        return [self._view(self._engines[name], now_s) for name in sorted(self._engines)]

    def view(self, name: str) -> EngineView | None:
        if (engine := self._engines.get(name)) is None:
            return None
        return self._view(engine, self._ports.clock())._replace(forecasts=engine.forecasts())

    def _view(self, engine: WatchedEngine, now_s: float) -> EngineView:
        name = engine.target.name
        remarks = [text for (about, _), text in self._remarks.items() if about == name]
        return engine.view(now_s, self.needs.get(name, ""), remarks)

    def remark(self, engine: str, text: str, subject: str = "knobs") -> None:
        """Puts a remark beside an engine, on the page and in its status; an empty one takes it away."""
        self._remarks.pop((engine, subject), None)
        if text:
            self._remarks[engine, subject] = text

    def names(self) -> list[str]:
        return sorted(self._engines)

    def engine(self, name: str) -> WatchedEngine | None:
        return self._engines.get(name)

    async def look_now(self, name: str) -> Look | None:
        """Returns a look that begins after this moment, judged as any other; None if the engine is no longer watched."""
        engine = self._engines.get(name)
        if engine is None or engine.task is None or engine.task.done():
            return None
        waiter: asyncio.Future[Look | None] = asyncio.get_running_loop().create_future()
        engine.waiters.append(waiter)
        engine.is_wanted.set()
        return await waiter

    def hurry(self, name: str) -> None:
        """Takes the next look at an engine now."""
        if (engine := self._engines.get(name)) is not None:
            engine.is_wanted.set()

    def is_looking(self, within_s: float) -> bool:
        """True if a look has ended in the last `within_s`; always true without engines."""
        return not self._engines or self._ports.clock() - self.last_look_s < within_s

    @property
    def host_note(self) -> str:
        """The part of guard's own machine that does not answer, if engines run on it; empty if all do."""
        return next((note for engine in self._engines.values() if (note := getattr(engine.watcher, "host_note", ""))), "")

    def moment(self) -> Clock:
        return Clock(self._ports.clock(), self._ports.wall())

    def firing(self) -> list[Event]:
        """Returns events for every condition that is active, or was and is now unknown."""
        wall, found = self._ports.wall(), []
        for engine in self._engines.values():
            answer, name = engine.judge.history.last_answer, engine.target.name
            for one in engine.conditions:
                if one.is_true:
                    found.append(Event(wall, name, EventKind.BEGINS, one.message, one, finding(one, answer)))
                elif one.kind in engine.reporter.doubted:
                    found.append(Event(wall, name, EventKind.UNKNOWN, one.message, one))
            if engine.reporter.gone_since_s is not None:
                found.append(Event(wall, name, EventKind.UNREACHABLE, "unreachable"))
        found += [Event(wall, name, EventKind.NEEDS, says) for name, says in self.needs.items()]
        return [event._replace(incident=self.incidents.of(event.engine)) for event in found]

    # Looks

    async def wait(self) -> None:
        """Waits until every engine had its number of looks; for ever if there is none."""
        while self._most_looks is None:
            await asyncio.sleep(3600.0)
        while left := [engine.task for engine in self._engines.values() if engine.task is not None and not engine.task.done()]:
            await asyncio.wait(left)

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*map(_stopped, self._engines.values()), *self._closing, return_exceptions=True)

    async def _run(self, engine: WatchedEngine) -> None:
        every_s, clock, dice = self._policy.every_s, self._ports.clock, self._ports.dice
        # Spread over the first interval, so that a large fleet is not looked at all at once.
        await asyncio.sleep(dice() * every_s * min(1.0, len(self._engines) / 50))
        due_s = clock()
        while True:
            async with self._slow if engine.is_slow else self._quick:
                engine.is_wanted.clear()
                asked = len(engine.waiters)  # a caller that comes from now on wants a later look
                look = await self._look(engine)
            look = self._take(engine, look)
            waiters, engine.waiters = engine.waiters[:asked], engine.waiters[asked:]
            _answer(waiters, look)  # not before: leaving the fleet answers all waiting callers
            if self._most_looks is not None and engine.looks >= self._most_looks:
                return
            # After an early, requested look the next is due one interval later.
            due_s = max(min(due_s, clock()) + every_s * (0.975 + 0.05 * dice()), clock())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.is_wanted.wait(), max(0.0, due_s - clock()))

    async def _look(self, engine: WatchedEngine) -> Look:
        now_s, unix_s = self._ports.clock(), self._ports.wall()
        try:
            async with asyncio.timeout(LONGEST_LOOK_S):
                look = await engine.watcher.look(now_s, unix_s)
        except TimeoutError:
            look = Look(now_s, unix_s, Reach.SILENT, f"the look timed out after {LONGEST_LOOK_S:g} s")
        except Exception as problem:  # whatever one engine does, the others are still watched
            self.mistakes[f"look {type(problem).__name__}"] += 1
            look = Look(now_s, unix_s, Reach.NONSENSE, f"internal error: {type(problem).__name__}")
        engine.look_s = self._ports.clock() - now_s
        self.last_look_s = self._ports.clock()
        return look

    def _take(self, engine: WatchedEngine, look: Look) -> Look:
        """Adds the facts of other sources to the look, judges it and returns it."""
        try:
            look = look._replace(**self._ports.facts(engine.target.name)._asdict())
            events = engine.take(look)
        except Exception as problem:  # its conditions stay as they were, and the metrics show the error
            self.mistakes[f"judge {type(problem).__name__}"] += 1
            engine.looks += 1  # a judge that always fails must not make `--looks` endless
            return look
        for event in events:
            self._tell(event)
        return look

    def tell(self, engine: str, what: EventKind, message: str) -> None:
        """Keeps and reports an event that is not a judgement."""
        self._tell(Event(self._ports.wall(), engine, what, message))

    def _tell(self, event: Event) -> None:
        event = event._replace(incident=self.incidents.note(event))
        self.told += 1
        self.changes.append(event)
        try:
            self._ports.tell(event)
        except Exception as problem:  # it is in the history; a failing writer must not end the watch
            self.mistakes[f"tell {type(problem).__name__}"] += 1


async def _stopped(engine: WatchedEngine) -> None:
    if engine.task is not None:
        engine.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await engine.task
    _answer(engine.waiters, None)
    await engine.watcher.close()


def _answer(waiters: Sequence[asyncio.Future[Look | None]], look: Look | None) -> None:
    for waiter in waiters:
        if not waiter.done():  # the caller may be gone
            waiter.set_result(look)


# The judged fleet, as the action runner needs it.


class EngineCapabilities(NamedTuple):
    """Actions that guard may take on one engine, by its configuration."""

    group: str = ""
    only_observed: str = ""  # why guard may only observe it
    has_gate: bool = False
    has_restarter: bool = False
    pod: PodStanding | None = None  # its cluster's reasons for and against an action


class ProcessLife(NamedTuple):
    """Identity of the engine process that answers."""

    started: float | None = None  # by its page
    restarts: int | None = None  # by its cluster's count
    total: int = 0  # how often a new process has answered
    is_shared: bool = False  # several servers answer at its address, in turn


class FleetObserver:
    """The fleet as the action runner sees it. `ends`: the engines that restarts did not fix, by the journal."""

    def __init__(
        self, fleet: Fleet, capabilities: Callable[[str], EngineCapabilities], every_s: float, clock: Callable[[], float],
        minute: Callable[[], int], ends: Callable[[], Mapping[str, FailedRestarts]] = dict,
    ) -> None:  # fmt: skip
        self._fleet, self._capabilities, self._every_s, self._clock, self._minute = fleet, capabilities, every_s, clock, minute
        self._ends = ends
        self.maintained: Mapping[str, bool] = {}  # engines that an operator has in maintenance at the balancer
        self.asked_s: Mapping[str, float] = {}  # when each engine's restarter last said whether it runs
        self.failing: Mapping[str, bool] = {}  # engines that are down by the balancer's own checks

    async def look(self, engine: str) -> Look | None:
        return await self._fleet.look_now(engine)

    def _history(self, engine: str) -> History | None:
        watched = self._fleet.engine(engine)
        return None if watched is None else watched.judge.history

    def conditions(self, engine: str) -> Mapping[str, Condition]:
        one = self._fleet.engine(engine)
        return {} if one is None else one.by_kind

    def engines(self) -> Sequence[str]:
        return self._fleet.names()

    def is_quiet(self) -> bool:
        """True if no condition of any engine calls for an action."""
        conditions = [self.conditions(name) for name in self.engines()]
        return not any(kind in engine and is_active(engine[kind]) for engine in conditions for kind in GRADES)

    def suffering(self, engine: str, policy: ActPolicy) -> str:
        """Returns why this engine must stay: another of its group has left, or cannot carry its load; "" if it may leave."""
        view = self.view(frozenset({engine}))
        mine = next((one for one in view.engines if one.name == engine), None)
        others = [] if mine is None else group_peers(mine, view.engines)
        if mine is None or not others:
            return ""
        away = [one.name for one in others if one.is_away]
        if len(away) >= policy.most_away:
            return f"{away[0]} is out of rotation"
        for one in others:
            found = one.conditions.get("saturated")
            if found is not None and found.is_true:
                return f"{one.name} cannot carry its load: {found.message}"
        answer = without(mine.load, [one.load for one in others if not one.is_away], policy.carries)
        # Asked in the middle of a drain: an unknown load blocks the start of one (decide.py), not its end.
        return "" if isinstance(answer, Unknown) else answer

    def life(self, engine: str) -> ProcessLife:
        if (history := self._history(engine)) is None:
            return ProcessLife()
        started = None if history.last_answer is None else history.last_answer.started_unix_s
        restarts = None if history.last is None else history.last.container_restarts
        return ProcessLife(started, restarts, history.lives.total, history.lives.is_shared(self._clock()))

    def view(self, at_work: frozenset[str]) -> FleetView:
        """Returns the fleet now. Nothing is decided about engines with an open action."""
        ends, watched = self._ends(), [engine for name in self.engines() if (engine := self._fleet.engine(name))]
        engines = [
            self._engine(engine, ends.get(engine.target.name), is_at_work=engine.target.name in at_work) for engine in watched
        ]
        return FleetView(engines, minute=self._minute(), cut_off=self.cut_off())

    def proof(self, engine: str) -> Proof:
        """Returns the witness, other than guard's own connection, that proves that it serves nobody; or why there is none."""
        watched = self._fleet.engine(engine)
        if watched is None:
            return Proof(None, "it is not watched any more")
        active = frozenset(kind for kind in BROKEN_KINDS if kind in watched.by_kind and watched.by_kind[kind].is_true)
        return proof(watched.judge.history.last, active)

    def longest_start_s(self, engine: str) -> float:
        """Returns its longest start that guard has seen, in seconds; 0 if it has seen none."""
        return 0.0 if (history := self._history(engine)) is None else history.longest_start_s

    def highest_epoch(self) -> int:
        """Returns the greatest epoch that a gate of the fleet reports."""
        answers = [history.last_answer for name in self.engines() if (history := self._history(name)) is not None]
        return max((look.gate.epoch for look in answers if look is not None and look.gate is not None), default=0)

    def is_lost(self, engine: str) -> bool:
        """True if the last look at it got no answer."""
        history = self._history(engine)
        return history is not None and history.last is not None and history.last.reach is not Reach.ANSWERS

    def is_well(self, engine: str) -> bool:
        """True if the last look found it ready, and it has no condition that forbids a return to rotation."""
        watched = self._fleet.engine(engine)
        if watched is None or not is_ready(watched.judge.history.last) or self.maintained.get(engine):
            return False
        return not any(kind in watched.by_kind and watched.by_kind[kind].is_true for kind in PROBATION_KINDS)

    def unproved(self, engine: str, *, is_asked: bool = False) -> str:
        """Returns why it may still serve somebody; "" where a witness proves that it serves nobody.

        `is_asked`: an operator answers for it, so that only a witness that sees it serve counts.
        """
        proved = self.proof(engine)
        return proved.why_not if not is_asked or proved.is_contradicted else ""

    def cut_off(self) -> str:
        """Returns why guard doubts its own network: several engines, and most of all, were lost in the same moment; else ""."""
        lost = []
        for name in self.engines():
            if (history := self._history(name)) is None or history.first_answer_s is None:
                continue
            since_s, last = history.unreachable_since_s, history.last
            if since_s is None or last is None:
                continue
            # Its supervisor may know better: the last look must have its answer, unless that takes too long.
            lasts_s, asked_s = self._clock() - since_s, self.asked_s.get(name)
            is_asked = asked_s is None or since_s < asked_s <= last.at_s or lasts_s >= LONGEST_QUESTION_S
            if lasts_s >= SUPERVISOR_S and is_asked and self.proof(name).by is None:
                lost.append((since_s, name))
        lost.sort()
        if len(lost) < 2 or 2 * len(lost) < len(self.engines()) or lost[-1][0] - lost[0][0] > SAME_MOMENT_S:
            return ""
        return (
            f"guard is cut off: {len(lost)} of {len(self.engines())} engines became unreachable within"
            f" {max(1.0, lost[-1][0] - lost[0][0]):.0f} s, and nobody else says that they are down"
        )

    def _engine(self, one: WatchedEngine, last_end: FailedRestarts | None, *, is_at_work: bool) -> EngineStatus:
        history, name = one.judge.history, one.target.name
        model = None if history.last_answer is None else history.last_answer.model
        is_held = last_end is not None and last_end.is_out
        may = self._capabilities(name)
        pod = may.pod or PodStanding()
        last, now_s = history.last, self._clock()
        conditions, doubted = one.by_kind, one.reporter.doubted  # was active, now unknown
        is_active = any(kind in conditions and (kind in doubted or conditions[kind].is_true) for kind in GRADES)
        observed = "guard is working on it" if is_at_work else may.only_observed or pod.observed
        if not observed and last is not None and last.figures.get("external_prefix_queries", 0.0) > 0:
            observed = "it has a KV connector: guard only observes such engines"  # a request lives in two engines there
        gate = None if last is None else last.gate
        is_away = last is None or last.reach is not Reach.ANSWERS
        is_away = is_away or (gate is not None and (not gate.ready or gate.drain != "serving"))
        proved = self.proof(name)
        return EngineStatus(
            name, conditions, load_of(name, last, is_well=not is_active, model=model),
            math.inf if last is None else max(0.0, now_s - last.at_s), self._every_s, pod.group or may.group,
            is_away or is_at_work or is_held or self.maintained.get(name, False) or self.failing.get(name, False),
            now_s - history.changed_at_s if history.changed else None, observed,
            has_gate=may.has_gate and gate is not None, has_restarter=may.has_restarter,
            last_end=last_end, unproved=proved.why_not, has_local_proof=proved.is_local,
            is_seen_serving=proved.is_contradicted,
            failure="" if last is None else last.failure,
            requests="" if last is None else last.requests,
            leaving=pod.leaving, cordoned=pod.cordoned, rollout=pod.rollout, replicas=pod.wanted, missing=pod.missing,
        )  # fmt: skip
