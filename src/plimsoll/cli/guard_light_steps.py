"""What acting needs of one engine, and the steps that stop nothing: the lock, shedding, compaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from plimsoll.domain.look import Look, Reach
from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.guard.act_policy import ActPolicy
from plimsoll.guard.course import Course
from plimsoll.guard.grades import Grade
from plimsoll.guard.policy import GRADES
from plimsoll.guard.ports import Balancer, Door, Lock, Restarter, Sight

RENEW_S = 10.0  # a lock that does not say how long it lasts is looked after so often


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


@runtime_checkable
class Learns(Protocol):
    """A restarter that must know, after a stop, whom it stopped: it is told what it knew before."""

    async def learn(self) -> Outcome:
        """Whom it would stop, as facts."""

    def recall(self, facts: Mapping[str, Any]) -> None:
        """What an earlier guard learned."""


@runtime_checkable
class TellsEnd(Protocol):
    """A restarter that knows how an engine ended."""

    async def last_exit(self) -> Outcome:
        """Done where it has ended, with `by_hand` where somebody stopped it, and `asked` where guard itself did."""


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
    suffering: Callable[[], str] | None = None  # who of the others cannot carry its load


class LightHands:
    """Carries out the steps of one action on one engine that are over in a moment, or only wait."""

    def __init__(
        self,
        parts: Parts,
        lock: Lock,
        sight: Sight,
        policy: ActPolicy,
        *,
        pause_s: float = 1.0,
        is_off: Callable[[], str] = lambda: "",
    ) -> None:
        """`is_off` says why somebody does not want it any more, "" as long as nobody does."""
        self._parts, self._lock, self._sight, self._policy = parts, lock, sight, policy
        self._pause_s, self._is_off = pause_s, is_off
        self._has_lock, self._lock_until_s = False, float("inf")
        self._has_sent_stop = False
        self.is_lock_lost = False

    # The lock

    async def _take_lock(self, course: Course) -> Outcome:
        outcome = await self._lock.acquire(f"{course.action} on {course.engine}")
        if outcome.is_done and not isinstance(outcome.facts.get("epoch"), int):
            return unsure("the lock was taken, but its number is not known")
        self._has_lock, self.is_lock_lost = bool(outcome.is_done), not outcome.is_done
        self._note_lock(outcome)
        return outcome

    async def _unlock(self, course: Course) -> Outcome:
        del course
        self._has_lock = False
        return await self._lock.release()

    async def keep_lock(self) -> None:
        """Renew it for ever, well before it ends; one that is lost is known before the next step."""
        while True:
            left_s = self._lock_until_s - now_s()
            await asyncio.sleep(max(0.05, min(RENEW_S, left_s / 3)))
            if self._has_lock:
                outcome = await self._lock.renew()
                if self._has_lock:
                    self._note_lock(outcome)

    def _note_lock(self, outcome: Outcome) -> None:
        left_s = outcome.facts.get("left_s")
        if isinstance(left_s, int | float):
            self._lock_until_s = now_s() + left_s
        elif outcome.is_done:
            self._lock_until_s = float("inf")
        if outcome.is_done is False or now_s() >= self._lock_until_s:
            self.is_lock_lost = True

    # Without stopping anything

    async def _shed(self, course: Course) -> Outcome:
        del course
        if self._parts.door is None:
            return failed("it has no gate")
        return await self._parts.door.shed(self._policy.shed_wait_s, self._policy.shed_lease_s)

    async def _hold(self, course: Course) -> Outcome:
        """Renew while the queue grows; a guard that dies leaves it to the lease."""
        renew_s = now_s() + self._policy.shed_lease_s / 3
        while True:
            conditions = self._sight.conditions(course.engine)
            condition = conditions.get("saturated")
            if why := self._is_off():
                return done(why)
            if any(GRADES.get(kind) is Grade.RESTART and one.is_true for kind, one in conditions.items()):
                return done("something worse holds, for which shedding is no remedy")
            if condition is None or not condition.is_known:
                return done("whether the queue still grows is not known")
            if not condition.is_true:
                return done("the queue does not grow any more")
            if now_s() >= renew_s:
                outcome = await self._shed(course)
                if not outcome.is_done:
                    return done(f"it could not be renewed: {outcome.says}")
                renew_s = now_s() + self._policy.shed_lease_s / 3
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


def now_s() -> float:
    """Seconds of the loop's own clock."""
    return asyncio.get_running_loop().time()
