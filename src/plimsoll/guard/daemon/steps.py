"""The steps of an action on one engine: shed, compact, drain and restart. A guard that was killed in a step may repeat it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from plimsoll.errors import PlimsollError
from plimsoll.guard.act.decide import ASKED, BROKEN_KINDS, enough_cache, is_active, is_ready, troubles, was_restarted
from plimsoll.guard.act.idle import IdleSample, idleness
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import (
    Balancer,
    EngineObserver,
    GateClient,
    KnowsExit,
    Lock,
    Outcome,
    RemembersStop,
    Restarter,
    SeesTraffic,
    TakesEpoch,
    done,
    failed,
    unsure,
)
from plimsoll.guard.act.steps import TRIES, ActionRun, Step
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade

RENEW_S = 10.0  # interval of renewal for a lock that does not say how long it lasts
OLD_TROUBLE_S = 120.0  # after this, a condition that is still true is the new process's own
STILL_SERVES_S = 10.0
LOOK_AGAIN_S = 2.0  # between two looks in probation
UNREADY_S = 10.0  # an engine that is not ready for this long in probation has failed
HUNG_STOP_S = 10.0  # from SIGTERM until SIGKILL, of an engine that is proven to serve nobody
HUNG_KINDS = frozenset({"wedged", "hung"})
LEASE_MARGIN_S = 60.0  # the drain's lease outlives the longest stop by this
LONGEST_LEASE_S = 3_600.0  # the longest that the gate grants
LEARNED = "learned_"
REPLACEMENT = "replacement"  # the engine that its owner started in its place, as a fact of a run
UNREPLACED = "no_replacement"  # its owner wants no replacement
_OF_REPLACEMENT = frozenset({Step.READY, Step.CHECK, Step.WARM, Step.UNDRAIN, Step.PROBATION})
_BEFORE_HARM = frozenset({Step.EVIDENCE, Step.LEAVE, Step.DRAIN, Step.IDLE, Step.SHED, Step.COMPACT})
"""Steps that need the lock and stop at a pause. A stop checks both itself; after a stop the action only goes forward."""


class EvidenceSaver(Protocol):
    """Saves evidence of an engine before it is stopped."""

    async def take(self, engine: str, action: str) -> Outcome: ...  # writes a folder with everything readable


class Memory(Protocol):
    """Knows whether the device memory of the old process is free again."""

    async def note(self) -> None: ...  # records, before the stop, what the engine holds
    async def wait_back(self, deadline_s: float) -> Outcome: ...  # waits, after the stop, until it is free


class EngineAdapters(NamedTuple):
    """The adapters by which guard acts on one engine; None where not configured."""

    name: str
    gate: GateClient | None = None
    balancer: Balancer | None = None
    restarter: Restarter | None = None
    evidence: EvidenceSaver | None = None
    memory: Memory | None = None
    ask_once: Callable[[], Awaitable[Outcome]] | None = None  # one warm-up request
    context: Callable[[], Awaitable[float | None]] | None = None  # the longest request, in tokens
    progress: Callable[[], Awaitable[object]] | None = None  # changes while a start makes progress, such as the log's size
    ask_balancer: Callable[[], Awaitable[None]] | None = None  # for the next look: an answer of a second ago may be old


@dataclass(slots=True, eq=False)
class _LockPart:
    """One part of a guard: its actions that hold the fleet's lock, and the lock's epoch."""

    holders: set[int] = field(default_factory=set)
    epoch: str | float | bool = 0
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)


class SharedLock:
    """The fleet's lock for one action. Within a guard one part has it at a time, as long as any of its actions needs it.

    The lock itself knows guards, not their parts: once held, it would be granted to all of them.
    """

    def __init__(self, lock: Lock, turn: list[_LockPart] | None = None, part: _LockPart | None = None) -> None:
        self._lock, self.label = lock, lock.label
        self._turn, self._part = [] if turn is None else turn, part or _LockPart()
        self._until_s = float("inf")
        self.is_lost = False  # it was held or asked for, and another guard may have it

    def other(self) -> SharedLock:
        """Returns the same lock for another part."""
        return SharedLock(self._lock, self._turn)

    def handle(self) -> SharedLock:
        """Returns the same lock for one more action of this part."""
        return SharedLock(self._lock, self._turn, self._part)

    async def acquire(self, owner: str) -> Outcome:
        part, turn = self._part, self._turn
        async with part.gate:
            self.is_lost = True
            if part.holders - {id(self)}:
                outcome = await self._lock.renew()
                outcome = outcome._replace(facts={**outcome.facts, "epoch": part.epoch}) if outcome.is_done else outcome
            elif turn and turn[0] is not part:
                return failed("guard itself holds the lock, for another engine")
            else:
                turn[:], outcome = [part], unsure("not requested")
                try:
                    outcome = await self._lock.acquire(owner)
                finally:
                    if not outcome.is_done:
                        turn.clear()
                part.epoch = outcome.facts.get("epoch", 0)
            if outcome.is_done:
                part.holders.add(id(self))
                self.is_lost = False
                self._note(outcome)
            return outcome

    async def renew(self) -> Outcome:
        async with self._part.gate:
            is_ours = bool(self._turn) and self._turn[0] is self._part
            return await self._lock.renew() if is_ours else failed("the lock is not ours")

    async def is_ours(self) -> bool:
        """Renews the lock; False unless it is certainly still held."""
        return not self.is_lost and bool((await self.renew()).is_done)

    async def release(self) -> Outcome:
        async with self._part.gate:
            self.drop()
            if self._part.holders:
                return done("still needed for another engine")
            if not self._turn or self._turn[0] is not self._part:
                return done("the lock was not ours")
            outcome = await self._lock.release()
            self._turn.clear()  # also if unsure: the lock then expires, and the next acquire finds out
            return outcome

    def drop(self) -> None:
        """Forgets that this action needs it, without a release: it ends with guard, or expires."""
        self._part.holders.discard(id(self))

    async def keep(self) -> None:
        """Renews the lock for ever, well before it expires; a loss is noticed before the next step."""
        while True:
            await asyncio.sleep(max(0.05, min(RENEW_S, (self._until_s - now_s()) / 3)))
            if id(self) in self._part.holders:
                outcome = await self.renew()
                if id(self) in self._part.holders:
                    self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        left_s = outcome.facts.get("left_s")
        if isinstance(left_s, int | float):
            self._until_s = now_s() + left_s
        elif outcome.is_done:
            self._until_s = float("inf")
        if outcome.is_done is False or now_s() >= self._until_s:
            self.is_lost = True


class ActionSteps:
    """Carries out the steps of one action on one engine: each step is the method of its name.

    `is_off` returns why an operator switched the action off, "" while none did; `adapters_of` returns those of another
    engine, which may have taken this one's place.
    """

    def __init__(
        self, adapters: EngineAdapters, lock: Lock, observer: EngineObserver, policy: ActPolicy, *,
        pause_s: float = 1.0, is_off: Callable[[], str] = lambda: "",
        adapters_of: Callable[[str], EngineAdapters | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.adapters, self._observer, self._policy = adapters, observer, policy
        self.lock = lock.handle() if isinstance(lock, SharedLock) else SharedLock(lock)
        self._pause_s, self._is_off, self._adapters_of = pause_s, is_off, adapters_of
        self._has_sent_stop = False

    async def do(self, step: Step, run: ActionRun) -> Outcome:
        """Runs one step. An internal error counts as an unknown outcome: the step table decides what follows."""
        try:
            return await self._do(step, run)
        except PlimsollError:
            raise
        except Exception as problem:
            return unsure(f"internal error: {type(problem).__name__}")

    async def _do(self, step: Step, run: ActionRun) -> Outcome:
        if step in _BEFORE_HARM and self.lock.is_lost:
            return failed("lock lost: another guard may act")
        if step in _BEFORE_HARM and (why := self._is_off()):
            return failed(why)
        restarter: object = self.adapters.restarter
        if run.is_taken_over and isinstance(restarter, RemembersStop):
            known = {name.removeprefix(LEARNED): value for name, value in run.facts.items() if name.startswith(LEARNED)}
            restarter.recall(known)
        balancer: object = self.adapters.balancer
        if isinstance(balancer, TakesEpoch):
            balancer.epoch = run.epoch
        steps = self
        if step in _OF_REPLACEMENT and not run.is_undoing:
            if run.facts.get(UNREPLACED):
                return done("no other engine takes its place")
            if REPLACEMENT in run.facts and step is Step.READY:
                return await self._ready_replacement(run)
            if REPLACEMENT in run.facts:
                name, steps = str(run.facts[REPLACEMENT]), copy.copy(self)
                steps.adapters, run = self._adapters_of(name) or EngineAdapters(name), run._replace(engine=name)
        method: Callable[[ActionRun], Awaitable[Outcome]] = getattr(steps, f"_{step}")
        return await method(run)

    async def _ready_replacement(self, run: ActionRun) -> Outcome:
        """Waits until the engine that took its place is discovered and ready."""
        name = str(run.facts[REPLACEMENT])
        restarter, end_s = self.adapters.restarter, now_s() + self._policy.start_within_s
        while restarter is not None:
            # The replacement may itself be replaced before it is ready: then the next one counts.
            newest = await restarter.start()
            name = str(newest.facts.get(REPLACEMENT, name))
            if newest.facts.get(UNREPLACED):
                return newest
            if is_ready(await self._observer.look(name)):
                return done(f"{name} has taken its place, and answers", **{REPLACEMENT: name})
            if now_s() >= end_s:
                return failed(f"{name}, which took its place, is not ready after {self._policy.start_within_s:.0f} s")
            await asyncio.sleep(self._pause_s)
        return unsure("who takes its place is not known")

    async def _lock(self, run: ActionRun) -> Outcome:
        outcome = await self.lock.acquire(f"{run.action} on {run.engine}")
        if outcome.is_done and not isinstance(outcome.facts.get("epoch"), int):
            return unsure("lock taken, but its number is unknown")
        return outcome

    async def _unlock(self, _: ActionRun) -> Outcome:
        return await self.lock.release()

    # Shedding: new requests that would wait too long are refused for as long as the queue grows

    async def _shed(self, _: ActionRun) -> Outcome:
        gate, policy = self.adapters.gate, self._policy
        return failed("no gate") if gate is None else await gate.shed(policy.shed_wait_s, policy.shed_lease_s)

    async def _hold(self, run: ActionRun) -> Outcome:
        """Renews while the queue grows; if guard dies, the lease ends it."""
        renew_s = now_s() + self._policy.shed_lease_s / 3
        while True:
            conditions = self._observer.conditions(run.engine)
            saturated = conditions.get("saturated")
            if why := self._is_off():
                return done(why)
            if any(GRADES.get(kind) is Grade.RESTART and condition.is_true for kind, condition in conditions.items()):
                return done("a more severe condition is active, and shedding does not help it")
            if saturated is None or not saturated.is_known:
                return done("unknown whether the queue still grows")
            if not saturated.is_true:
                return done("the queue no longer grows")
            if now_s() >= renew_s:
                outcome = await self._shed(run)
                if not outcome.is_done:
                    return done(f"not renewed: {outcome.message}")
                renew_s = now_s() + self._policy.shed_lease_s / 3
            await asyncio.sleep(self._pause_s)

    async def _unshed(self, _: ActionRun) -> Outcome:
        return failed("no gate") if self.adapters.gate is None else await self.adapters.gate.unshed()

    # Compaction: torch's free segments go back to the device

    async def _compact(self, run: ActionRun) -> Outcome:
        if self.adapters.gate is None:
            return failed("no gate")
        before = free_of(await self._observer.look(run.engine))
        outcome = await self.adapters.gate.compact()
        return outcome if before is None else outcome._replace(facts={**outcome.facts, "free_before": before})

    async def _verify(self, run: ActionRun) -> Outcome:
        """Checks that more memory is free than before, at a look after the probe's next figures."""
        before, after = run.facts.get("free_before"), None
        for _ in range(5):
            await asyncio.sleep(self._pause_s)
            after = free_of(await self._observer.look(run.engine))
            if isinstance(before, int | float) and after is not None and after > before:
                return done(f"{(after - before) / 2**20:.0f} MiB more are free", free_after=after)
        if before is None or after is None:
            return unsure("free device memory is unknown")
        return failed("no more device memory is free than before", free_after=after)

    # Out of rotation

    async def _evidence(self, run: ActionRun) -> Outcome:
        if self.adapters.evidence is None:
            return done("no evidence folder is configured")
        return await self.adapters.evidence.take(run.engine, run.action)

    async def _leave(self, _: ActionRun) -> Outcome:
        """Takes it out at the balancer. A failure does not end the action: the balancer's own checks see a dead engine."""
        learned = await self._learn()
        if learned.is_done is False:
            return learned
        balancer = self.adapters.balancer
        if balancer is None:
            return done("no balancer is configured", **learned.facts)
        outcome = await balancer.take_out()
        if outcome.is_done:
            return outcome._replace(facts={**outcome.facts, **learned.facts})
        if outcome.facts.get("maint"):
            return outcome
        return done(f"{outcome.message}; it serves no requests anyway", is_out=False, **learned.facts)

    async def _learn(self) -> Outcome:
        """Returns what the restarter would stop, as facts for the journal before anything is done."""
        restarter: object = self.adapters.restarter
        outcome = await restarter.learn() if isinstance(restarter, RemembersStop) else done("nothing to learn")
        return outcome._replace(facts={LEARNED + name: value for name, value in outcome.facts.items()})

    async def _drain(self, run: ActionRun) -> Outcome:
        gate, balancer = self.adapters.gate, self.adapters.balancer
        if gate is None and balancer is None:
            return failed("neither a gate nor a balancer is configured that could keep new work away")
        learned = await self._learn()
        if not learned.is_done:
            return learned
        # The balancer first: once its checks see a gate that is not ready, it no longer knows which server is the last one up.
        if balancer is not None:
            outcome = await balancer.take_out()
            if not outcome.is_done:
                return outcome
            if await balancer.is_out() is False:
                return failed("the balancer accepted the change and still sends requests to it")
        if gate is not None:
            outcome = await gate.drain(run.epoch, self._policy.lease_s)
            if not outcome.is_done:
                return outcome
        return done("out of rotation" if gate is None else "draining, out of rotation", **learned.facts)

    async def _idle(self, run: ActionRun) -> Outcome:
        """Waits until it is idle and renews the lease; once the balancer sends no more, the gate refuses new requests."""
        gate, balancer, policy, samples = self.adapters.gate, self.adapters.balancer, self._policy, list[IdleSample]()
        end_s, renew_s = now_s() + policy.drain_within_s, 0.0
        says = "no look yet"
        while True:
            if self.lock.is_lost:
                return failed("lock lost while draining")
            if why := self._is_off():
                return failed(why)
            if await self._is_down():
                who = await self._stopped_by_hand(run)
                return failed(who) if who else done("the engine is down: nothing is in flight")
            if who := self._observer.suffering(run.engine, self._policy):
                return failed(who)
            if now_s() >= renew_s:
                is_out, outcome = None if balancer is None else await balancer.is_out(), done("out of rotation")
                if balancer is not None and is_out is False:  # it forgot this engine (a reload)
                    outcome = await balancer.take_out()
                    is_out = await balancer.is_out() if outcome.is_done else None
                if gate is not None and outcome.is_done:
                    # If the balancer cannot tell that it sends no more, the gate decides when to refuse: it sees the requests.
                    outcome = await gate.drain(run.epoch, policy.lease_s, refuse=is_out is True)
                if outcome.is_done is False:
                    return outcome
                renew_s = now_s() + policy.lease_s / 3 if outcome.is_done else 0.0
            look = await self._observer.look(run.engine)
            if look is not None:
                samples = [*samples[-30:], IdleSample(look, await self._gate_facts())]
                found = idleness(samples)
                says = found.message
                if found.is_done and await self._has_let_go():
                    return done(says)
            if now_s() >= end_s:
                said = f"not idle after {policy.drain_within_s:.0f} s"
                if policy.stragglers == "stop":
                    return done(f"{said} ({says}): stopping anyway, as configured")
                return failed(f"{said}: {says}")
            await asyncio.sleep(self._pause_s)

    async def _gate_facts(self) -> Mapping[str, Any] | None:
        if self.adapters.gate is None:
            return None
        outcome = await self.adapters.gate.state()
        return outcome.facts if outcome.is_done else None

    async def _has_let_go(self) -> bool:
        """True if no new work can come: the gate refuses, or without a gate the balancer has no connection left."""
        if self.adapters.gate is not None:
            return ((await self._gate_facts()) or {}).get("phase") == "refusing"
        return self.adapters.balancer is not None and await self.adapters.balancer.connections() == 0

    # Down

    async def _stop(self, run: ActionRun) -> Outcome:
        """Stops it only if it is certainly idle or broken; `untouched` if nothing was done, so that it can be put back."""
        restarter = self.adapters.restarter
        if restarter is None:
            return failed("no way to stop it is configured", untouched=True)
        why = await self._why_not_ours()
        if why and self._is_first(run):
            return failed(why, untouched=True)
        if self.adapters.memory is not None:  # before the last look: a driver may be slow
            await self.adapters.memory.note()
        if await self._is_down():
            if who := await self._stopped_by_hand(run):
                return failed(who, untouched=True)
            if self.lock.is_lost:
                return done("already down", was_running=False)
        else:
            if run.is_taken_over and Step.DRAIN in run.steps:
                # An engine that served, runs and does not answer was restarted, or is ending: either shows soon.
                look = await self._observer.look(run.engine)
                if look is None or look.reach is not Reach.ANSWERS:
                    await self._ready(run)
            if await self._began_anew(run):
                return done("a new process is already running: nothing to stop", was_running=False)
            if why := why or await self._why_not_stop(run):
                if await self._began_anew(run):  # a while has passed
                    return done("a new process is already running: nothing to stop", was_running=False)
                # An engine that was broken before is put back, even if it is ending by now: then it is found dead.
                is_sure = (Step.DRAIN not in run.steps or not run.is_taken_over) and not self._has_sent_stop
                return failed(why, untouched=is_sure or await self._serves(run))
        self._has_sent_stop = True
        # A hung engine has nothing to finish: vLLM's API server waits for its core as long as it may.
        within_s = self._policy.stop_within_s
        if run.kind in HUNG_KINDS and not run.is_taken_over and not restarter.replaces:
            within_s = min(HUNG_STOP_S, within_s)
        outcome = await restarter.stop(within_s)
        is_refused = outcome.is_done is False and outcome.facts.get("budget") is True
        if outcome.is_done is False and not is_refused:
            # An ending engine still answers for a while: it serves on only if it answers for longer than that.
            end_s = now_s() + STILL_SERVES_S
            while (is_refused := await self._serves(run)) and now_s() < end_s:
                await asyncio.sleep(self._pause_s)
        return outcome._replace(facts={**outcome.facts, "untouched": True}) if is_refused else outcome

    def _is_first(self, run: ActionRun) -> bool:
        """True if nothing was stopped yet, neither by this guard nor by an earlier one."""
        return not run.is_taken_over and not self._has_sent_stop

    async def _why_not_ours(self) -> str:
        """Returns why guard may no longer act, whether the engine is down or not; "" if it may."""
        if why := self._is_off():
            return why
        # Nothing else protects a process from two guards at once: a gate refuses the older one, a signal does not.
        if not await self.lock.is_ours():
            return "the lock is no longer certainly ours"
        balancer = self.adapters.balancer
        outcome = None if balancer is None else await balancer.take_out()
        return outcome.message if outcome is not None and outcome.facts.get("maint") else ""  # an operator's maintenance since

    async def _stopped_by_hand(self, run: ActionRun) -> str:
        """Returns that an operator stopped it, else "": guard does not start such an engine."""
        restarter: object = self.adapters.restarter
        if not self._is_first(run) or not isinstance(restarter, KnowsExit):
            return ""
        outcome = await restarter.last_exit()
        if not outcome.is_done or not outcome.facts.get("by_hand"):
            return ""
        # A stop that is only inferred, from an exit code of 0, is no operator's where the log shows a crash.
        look = await self._observer.look(run.engine) if outcome.facts.get("inferred") else None
        return "" if look is not None and look.ended else f"{outcome.message}: guard leaves it stopped"

    async def _began_anew(self, run: ActionRun) -> bool:
        restarter = self.adapters.restarter
        if run.facts.get("had_ended") and restarter is not None and await restarter.is_running() is True:
            return True  # somebody has started it meanwhile
        if not run.is_taken_over:
            return False
        return was_restarted(await self._observer.look(run.engine), run.facts.get("started_before"))

    async def _why_not_stop(self, run: ActionRun) -> str:
        restarter = self.adapters.restarter
        if restarter is not None and not restarter.replaces and await restarter.is_running() is False:
            look = await self._observer.look(run.engine)
            if look is not None and look.reach is Reach.ANSWERS:
                return "it answers, but its restarter says that it is not running: another process answers at this address"
        if Step.DRAIN not in run.steps:
            return await self._why_serves(run)
        if run.is_taken_over and not run.tries:
            # The lease may have expired meanwhile, and new work come.
            outcome = await self._idle(run)
            if not outcome.is_done:
                return outcome.message
        if who := self._observer.suffering(run.engine, self._policy):
            return who
        return await self._stopped_by_hand(run) if await self._is_down() else await self._why_not_idle(run)

    async def _why_serves(self, run: ActionRun) -> str:
        """Returns why a broken engine is left alone; "" if it is down, or a witness and this very look prove it broken.

        If an earlier guard stopped it a moment ago, it gets the time to end.
        """
        end_s = now_s() + (self._policy.stop_within_s if run.is_taken_over else 0.0)
        while True:
            if await self._is_down():  # it may have ended since the first check
                return await self._stopped_by_hand(run)
            # The present counts, not the time that a condition takes to clear; looked at last, since a supervisor may be slow.
            if self.adapters.ask_balancer is not None:
                await self.adapters.ask_balancer()
            look = await self._observer.look(run.engine)
            conditions = self._observer.conditions(run.engine)
            active = {kind for kind in BROKEN_KINDS & conditions.keys() if is_active(conditions[kind])}
            if is_ready(look):
                active.discard("dead")
            unproved = self._observer.unproved(run.engine, is_asked=run.kind == ASKED)
            if look is not None and active and not unproved:
                return ""
            if self._has_sent_stop and not is_ready(look) and not await self._passes_check():
                return ""  # guard's own signal ended its answers: only the process table still shows it running
            if now_s() >= end_s or await self._serves(run):
                return f"it may serve requests: {unproved}" if active and unproved else "it may serve requests again"
            await asyncio.sleep(self._pause_s)

    async def _why_not_idle(self, run: ActionRun) -> str:
        """Returns why it is not idle, or its lease does not outlive the stop. Without a gate the balancer keeps work away."""
        gate = self.adapters.gate
        if gate is None:
            return ""
        facts = await self._gate_facts()
        if facts is None:
            return "" if self._has_sent_stop else "its gate does not answer"
        lease_s = min(LONGEST_LEASE_S, self._policy.stop_within_s + LEASE_MARGIN_S)
        outcome = await gate.drain(run.epoch, lease_s, refuse=facts.get("phase") == "refusing")
        if not outcome.is_done:
            return outcome.message
        facts = await self._gate_facts() or {}
        is_idle = facts.get("phase") == "refusing" and facts.get("in_flight") == 0
        return "" if is_idle or self._policy.stragglers == "stop" else "work came in at the last moment"

    async def _serves(self, run: ActionRun) -> bool:
        restarter = self.adapters.restarter
        is_running = restarter is not None and await restarter.is_running() is True
        return is_running and is_ready(await self._observer.look(run.engine))

    async def _passes_check(self) -> bool:
        """True if its balancer's own check passes now: guard's signal had no effect, even if guard cannot reach the engine."""
        balancer: object = self.adapters.balancer
        health = await balancer.health() if isinstance(balancer, SeesTraffic) else None
        return health is not None and health.is_down is False

    async def _is_down(self) -> bool:
        """True if restarter and look agree that it is down: the restarter alone may speak of another process."""
        if self.adapters.restarter is None or await self.adapters.restarter.is_running() is not False:
            return False
        look = await self._observer.look(self.adapters.name)
        is_lost = look is None or look.reach is not Reach.ANSWERS
        return is_lost and not self._observer.unproved(self.adapters.name, is_asked=True)

    # Up again

    async def _gone(self, _: ActionRun) -> Outcome:
        restarter = self.adapters.restarter
        if restarter is not None and not restarter.replaces and await restarter.is_running() is True:
            return done("already started: the old process's memory is free, or the start would have failed")
        if self.adapters.memory is None:
            return done("device memory cannot be read from here")
        return await self.adapters.memory.wait_back(self._policy.gone_within_s)

    async def _start(self, _: ActionRun) -> Outcome:
        restarter = self.adapters.restarter
        if restarter is None:
            return failed("no way to start it is configured")
        end_s = now_s() + self._policy.start_still_s
        while True:
            if not restarter.replaces and await restarter.is_running() is True:
                return done("already started")
            outcome = await restarter.start()
            # The controller may not have created the replacement yet.
            if not outcome.facts.get("waiting") or now_s() >= end_s:
                return outcome
            await asyncio.sleep(self._pause_s)

    async def _ready(self, run: ActionRun) -> Outcome:
        """Waits as long as there is progress: a large model takes long, and a hung one would take for ever."""
        restarter, progress, policy = self.adapters.restarter, self.adapters.progress, self._policy
        began_s = moved_s = now_s()
        before: object = None
        ended = 0
        while True:
            if is_ready(await self._observer.look(run.engine)):
                return done(f"it answers, {now_s() - began_s:.0f} s after its start", seconds=round(now_s() - began_s, 1))
            # A replaced engine has ended anyway. Two checks: a start that is slow to show is no end.
            if restarter is not None and not restarter.replaces:
                ended = ended + 1 if await restarter.is_running() is False else 0
                if ended >= 2:
                    return failed("its process exited before it was ready")
            now = await progress() if progress is not None else None
            if now != before:
                before, moved_s = now, now_s()
            still_s = policy.start_still_s if progress is not None else policy.start_within_s
            if now_s() - moved_s > still_s or now_s() - began_s > policy.start_within_s:
                return failed(f"not ready after {now_s() - began_s:.0f} s, no progress for {now_s() - moved_s:.0f} s")
            await asyncio.sleep(self._pause_s)

    async def _check(self, run: ActionRun) -> Outcome:
        look = await self._observer.look(run.engine)
        context = None if self.adapters.context is None else await self.adapters.context()
        return enough_cache(look, context, run.facts.get("kv_tokens_before"))

    async def _warm(self, run: ActionRun) -> Outcome:
        if self.adapters.ask_once is None:
            return done("no warm-up request is configured")
        outcome = await self.adapters.ask_once()
        if outcome.is_done is None:
            # A request that could not be sent is no failure. But it may have ended the engine, which then stays out.
            await asyncio.sleep(self._pause_s)
            if not is_ready(await self._observer.look(run.engine)):
                return failed(f"{outcome.message}; the engine no longer answers")
        return outcome

    async def _undrain(self, run: ActionRun) -> Outcome:
        gate, balancer = self.adapters.gate, self.adapters.balancer
        says = []
        if gate is not None:
            outcome = await gate.undrain(run.epoch)
            if outcome.facts.get("stale"):
                state = await gate.state()
                if state.facts.get("phase") != "serving":
                    return done(f"another guard drains it now: {outcome.message}") if state.is_done else state
                # The later drain has ended. A late take-out of ours would keep it out for ever.
                outcome = done("its gate admits work")
            # An engine that is down has no drain, since a new process begins without one, nor has one never drained.
            if not outcome.is_done and Step.DRAIN in run.steps and not await self._is_down():
                if not run.is_undoing or run.tries + 1 < TRIES[Step.UNDRAIN]:
                    return outcome
                longest_s = max(self._policy.lease_s, self._policy.stop_within_s + LEASE_MARGIN_S)
                await asyncio.sleep(min(LONGEST_LEASE_S, longest_s))
            says.append(
                "its gate admits work" if outcome.is_done else "its gate does not answer, and our lease there has ended"
            )
        if balancer is not None:
            outcome = await balancer.put_back()
            if not outcome.is_done:
                return outcome
            says.append("it is back in rotation")
        return done(", ".join(says) or "nothing had been taken out of rotation")

    async def _probation(self, run: ActionRun) -> Outcome:
        """Watches it: it must answer, be ready, make steps, and have neither the condition of its restart nor a graver one."""
        began_s, probation_s = now_s(), self._policy.probation_s
        old = set(troubles(run.kind, self._observer.conditions(run.engine)))  # the stopped process's, until they clear
        ready_s, next_s = began_s, began_s + LOOK_AGAIN_S
        while (
            now_s() < began_s + probation_s or (old and now_s() < began_s + OLD_TROUBLE_S) or now_s() - ready_s > LOOK_AGAIN_S
        ):
            await asyncio.sleep(self._pause_s)
            if why := self._is_off():
                return done(f"{why}: no longer watched")
            found = troubles(run.kind, self._observer.conditions(run.engine))
            old &= found.keys() if now_s() < began_s + OLD_TROUBLE_S else set()
            if new := [message for name, message in found.items() if name not in old]:
                return failed(new[0])
            if now_s() >= next_s:
                look = await self._observer.look(run.engine)
                next_s = now_s() + LOOK_AGAIN_S
                if is_ready(look) or (look is not None and look.gate is not None and look.gate.asleep):
                    ready_s = now_s()
                elif now_s() - ready_s > UNREADY_S:
                    why = "not watched any more" if look is None else look.why or "not ready"
                    return failed(f"it stopped answering {ready_s - began_s:.0f} s after it was put back in rotation: {why}")
        return done(f"no recurrence in {probation_s:.0f} s")


def free_of(look: Look | None) -> float | None:
    """Returns the least free memory on any of the engine's devices, in bytes; None if unknown."""
    if look is None or look.reach is not Reach.ANSWERS or not look.workers:
        return None
    free = [worker.device_free for worker in look.workers]
    return None if None in free else min(value for value in free if value is not None)


def now_s() -> float:
    """Returns seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()
