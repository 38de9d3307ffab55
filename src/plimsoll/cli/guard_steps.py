"""What is done in each step of an action. Each may be done again by a guard that was killed in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from plimsoll.domain.look import Look, Reach
from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.guard.act_policy import ActPolicy
from plimsoll.guard.course import Course
from plimsoll.guard.idle import Sample, idleness
from plimsoll.guard.ports import Balancer, Door, Lock, Restarter, Sight
from plimsoll.guard.restart_checks import enough_cache, is_ready, same_trouble
from plimsoll.guard.steps import Step

LEASE_MARGIN_S = 60.0  # by so much the drain's lease outlives the longest stop


class Evidence(Protocol):
    """Who keeps what is known before it is destroyed."""

    async def take(self, engine: str, action: str) -> Outcome:
        """A folder with what could be had."""


class Memory(Protocol):
    """Who knows whether what the old engine held is free again."""

    async def note(self) -> None:
        """Before the stop: what it holds now."""

    async def wait_back(self, deadline_s: float) -> Outcome:
        """After it: until it is free."""


class Parts(NamedTuple):
    """What can be done to one engine; None is what guard was not told how to do."""

    name: str
    door: Door | None = None
    balancer: Balancer | None = None
    restarter: Restarter | None = None
    evidence: Evidence | None = None
    memory: Memory | None = None
    ask_once: Callable[[], Awaitable[Outcome]] | None = None  # one request, for warming up
    context: Callable[[], Awaitable[float | None]] | None = None  # how long a request may be, in tokens
    progress: Callable[[], Awaitable[object]] | None = None  # something that changes while a start goes on, such as its log


class Hands:
    """Carries out the steps of one action on one engine."""

    def __init__(self, parts: Parts, lock: Lock, sight: Sight, policy: ActPolicy, *, pause_s: float = 1.0) -> None:
        self._parts, self._lock, self._sight, self._policy = parts, lock, sight, policy
        self._pause_s = pause_s
        self.is_lock_lost = False
        self._deeds: Mapping[Step, Callable[[Course], Awaitable[Outcome]]] = {
            Step.EVIDENCE: self._evidence, Step.LEAVE: self._leave, Step.DRAIN: self._drain, Step.IDLE: self._idle,
            Step.STOP: self._stop, Step.GONE: self._gone, Step.START: self._start, Step.READY: self._ready,
            Step.CHECK: self._check, Step.WARM: self._warm, Step.UNDRAIN: self._undrain, Step.UNLOCK: self._unlock,
            Step.PROBATION: self._probation, Step.SHED: self._shed, Step.HOLD: self._hold, Step.UNSHED: self._unshed,
            Step.COMPACT: self._compact, Step.VERIFY: self._verify, Step.LOCK: self._take_lock,
        }  # fmt: skip

    async def do(self, step: Step, course: Course) -> Outcome:
        """One step of it."""
        if self.is_lock_lost and step not in (Step.UNDRAIN, Step.UNLOCK, Step.PROBATION, Step.HOLD, Step.UNSHED):
            return failed("the lock was lost meanwhile: somebody else may act")
        return await self._deeds[step](course)

    # The lock

    async def _take_lock(self, course: Course) -> Outcome:
        outcome = await self._lock.acquire(f"{course.action} on {course.engine}")
        if outcome.is_done and not isinstance(outcome.facts.get("epoch"), int):
            return unsure("the lock was taken, but its number is not known")
        self.is_lock_lost = not outcome.is_done
        return outcome

    async def _unlock(self, course: Course) -> Outcome:
        del course
        return await self._lock.release()

    async def _evidence(self, course: Course) -> Outcome:
        if self._parts.evidence is None:
            return done("no folder for evidence is configured")
        return await self._parts.evidence.take(course.engine, course.action)

    # Out of service

    async def _leave(self, course: Course) -> Outcome:
        """The balancer's own checks see a dead engine too: that it cannot be told is no reason to leave the engine dead."""
        del course
        balancer = self._parts.balancer
        if balancer is None:
            return done("no balancer is configured")
        outcome = await balancer.take_out()
        return outcome if outcome.is_done else done(f"{outcome.says}; it serves nobody anyway", is_out=False)

    async def _drain(self, course: Course) -> Outcome:
        door, balancer = self._parts.door, self._parts.balancer
        if door is None and balancer is None:
            return failed("it has neither a gate nor a balancer that could keep new work away")
        if door is not None:
            outcome = await door.drain(course.epoch, self._policy.lease_s)
            if not outcome.is_done:
                return outcome
        if balancer is not None:
            outcome = await balancer.take_out()
            if not outcome.is_done:
                return outcome
            if await balancer.is_out() is False:
                return failed("the balancer took the word and still sends to it")
        return done("it is out of the balancer" if door is None else "it drains, and is out of the balancer")

    async def _idle(self, course: Course) -> Outcome:
        """Wait for it, renewing the lease; when the balancer is seen to have let go, the gate refuses what still comes."""
        door, end_s = self._parts.door, _now() + self._policy.drain_within_s
        samples: list[Sample] = []
        renew_s = 0.0
        says = "it was not looked at"
        while True:
            if self.is_lock_lost:
                return failed("the lock was lost while it drained")
            if door is not None and _now() >= renew_s:
                has_left = self._parts.balancer is not None and await self._parts.balancer.is_out() is True
                outcome = await door.drain(course.epoch, self._policy.lease_s, refuse=has_left)
                if outcome.is_done is False:
                    return outcome
                renew_s = _now() + self._policy.lease_s / 3
            look = await self._sight.look(course.engine)
            if look is not None:
                samples = [*samples[-30:], Sample(look, await self._door_facts())]
                found = idleness(samples)
                says = found.says
                if found.is_idle and await self._has_let_go():
                    return done(says)
            if _now() >= end_s:
                if self._policy.stragglers == "stop":
                    return done(
                        f"not idle after {self._policy.drain_within_s:.0f} s ({says}): stopped all the same, as configured"
                    )
                return failed(f"not idle after {self._policy.drain_within_s:.0f} s: {says}")
            await asyncio.sleep(self._pause_s)

    async def _door_facts(self) -> Mapping[str, Any] | None:
        if self._parts.door is None:
            return None
        outcome = await self._parts.door.state()
        return outcome.facts if outcome.is_done else None

    async def _has_let_go(self) -> bool:
        """Whether nothing new can come: the gate refuses, or without a gate the balancer has no connection left."""
        facts = await self._door_facts()
        if facts is not None:
            return facts.get("phase") == "refusing"
        return self._parts.door is None and self._parts.balancer is not None and await self._parts.balancer.connections() == 0

    # Down and up

    async def _stop(self, course: Course) -> Outcome:
        restarter, memory = self._parts.restarter, self._parts.memory
        if restarter is None:
            return failed("guard was not told how to stop it")
        if Step.DRAIN in course.steps and not course.tries and not await self._is_still_idle(course):
            return failed("work came in at the last moment")
        if memory is not None:
            await memory.note()
        return await restarter.stop(self._policy.stop_within_s)

    async def _is_still_idle(self, course: Course) -> bool:
        """The lease must outlive the stop; without a gate there is none, and the balancer keeps work away."""
        door = self._parts.door
        if door is None or await self._is_down():
            return True
        lease_s = self._policy.stop_within_s + LEASE_MARGIN_S
        outcome = await door.drain(course.epoch, lease_s, refuse=True)
        facts = await self._door_facts()
        is_idle = facts is not None and facts.get("in_flight") == 0
        return bool(outcome.is_done) and (is_idle or self._policy.stragglers == "stop")

    async def _is_down(self) -> bool:
        return self._parts.restarter is not None and await self._parts.restarter.is_running() is False

    async def _gone(self, course: Course) -> Outcome:
        del course
        if self._parts.memory is None:
            return done("nobody here can see the device's memory")
        return await self._parts.memory.wait_back(self._policy.gone_within_s)

    async def _start(self, course: Course) -> Outcome:
        del course
        restarter = self._parts.restarter
        if restarter is None:
            return failed("guard was not told how to start it")
        if await restarter.is_running() is True:
            return done("it was started already")
        return await restarter.start()

    async def _ready(self, course: Course) -> Outcome:
        """For as long as something moves: a large model takes long, and one that hangs would for ever."""
        restarter, policy = self._parts.restarter, self._policy
        began_s = moved_s = _now()
        before: object = None
        while True:
            look = await self._sight.look(course.engine)
            ready = is_ready(look)
            if ready:
                return done(f"it answers, {_now() - began_s:.0f} s after its start", seconds=round(_now() - began_s, 1))
            if restarter is not None and await restarter.is_running() is False:
                return failed("its process ended before it was ready")
            now = await self._parts.progress() if self._parts.progress is not None else None
            if now != before:
                before, moved_s = now, _now()
            still_s = policy.start_still_s if self._parts.progress is not None else policy.start_within_s
            if _now() - moved_s > still_s or _now() - began_s > policy.start_within_s:
                return failed(f"not ready after {_now() - began_s:.0f} s, and nothing has moved for {_now() - moved_s:.0f} s")
            await asyncio.sleep(self._pause_s)

    async def _check(self, course: Course) -> Outcome:
        look = await self._sight.look(course.engine)
        context = None if self._parts.context is None else await self._parts.context()
        return enough_cache(look, context, course.facts.get("kv_tokens_before"))

    async def _warm(self, course: Course) -> Outcome:
        del course
        if self._parts.ask_once is None:
            return done("no request for warming up is configured")
        return await self._parts.ask_once()

    async def _undrain(self, course: Course) -> Outcome:
        door, balancer = self._parts.door, self._parts.balancer
        says = []
        if door is not None:
            outcome = await door.undrain(course.epoch)
            if outcome.facts.get("stale"):
                return done(f"somebody else drains it now: {outcome.says}")
            # One that is down has no drain: a new process begins without one.
            if not outcome.is_done and not await self._is_down():
                return outcome
            says.append("its gate takes work" if outcome.is_done else "it is down")
        if balancer is not None:
            outcome = await balancer.put_back()
            if not outcome.is_done:
                return outcome
            says.append("it is back in the balancer")
        return done(" and ".join(says) or "nothing had been taken out")

    async def _probation(self, course: Course) -> Outcome:
        end_s = _now() + self._policy.probation_s
        while _now() < end_s:
            await asyncio.sleep(self._pause_s)
            trouble = same_trouble(course.kind, self._sight.conditions(course.engine))
            if trouble:
                return failed(trouble)
        return done(f"no trouble of the kind in {self._policy.probation_s:.0f} s")

    # Without stopping anything

    async def _shed(self, course: Course) -> Outcome:
        del course
        if self._parts.door is None:
            return failed("it has no gate")
        return await self._parts.door.shed(self._policy.shed_wait_s, self._policy.shed_lease_s)

    async def _hold(self, course: Course) -> Outcome:
        """Renew while the queue grows; a guard that dies leaves it to the lease."""
        renew_s = _now() + self._policy.shed_lease_s / 3
        while True:
            condition = self._sight.conditions(course.engine).get("saturated")
            if condition is None or not condition.is_known:
                return done("whether the queue still grows is not known")
            if not condition.is_true:
                return done("the queue does not grow any more")
            if _now() >= renew_s:
                outcome = await self._shed(course)
                if not outcome.is_done:
                    return done(f"it could not be renewed: {outcome.says}")
                renew_s = _now() + self._policy.shed_lease_s / 3
            await asyncio.sleep(self._pause_s)

    async def _unshed(self, course: Course) -> Outcome:
        del course
        return failed("it has no gate") if self._parts.door is None else await self._parts.door.unshed()

    async def _compact(self, course: Course) -> Outcome:
        if self._parts.door is None:
            return failed("it has no gate")
        before = free_of(await self._sight.look(course.engine))
        outcome = await self._parts.door.compact()
        return outcome if before is None else outcome._replace(facts={**outcome.facts, "free_before": before})

    async def _verify(self, course: Course) -> Outcome:
        """More is free than before, at a look that is later than the probe's next figures."""
        before, after = course.facts.get("free_before"), None
        for _ in range(5):
            await asyncio.sleep(self._pause_s)
            after = free_of(await self._sight.look(course.engine))
            if isinstance(before, int | float) and after is not None and after > before:
                return done(f"{(after - before) / 2**20:.0f} MiB more are free", free_after=after)
        if before is None or after is None:
            return unsure("what is free on the device is not known")
        return failed("no more is free than before", free_after=after)


def free_of(look: Look | None) -> float | None:
    """The least that is free on any of its devices."""
    if look is None or look.reach is not Reach.ANSWERS or not look.workers:
        return None
    free = [worker.device_free for worker in look.workers]
    return None if None in free else min(value for value in free if value is not None)


def _now() -> float:
    return asyncio.get_running_loop().time()
