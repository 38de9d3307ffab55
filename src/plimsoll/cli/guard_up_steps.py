"""The steps that bring an engine up again: its memory is back, it is started, ready, large enough, warm, and stays well."""

from __future__ import annotations

import asyncio

from plimsoll.cli.guard_light_steps import LightHands, now_s
from plimsoll.domain.outcome import Outcome, done, failed
from plimsoll.guard.course import Course
from plimsoll.guard.restart_checks import enough_cache, is_ready, same_trouble, troubles

OLD_TROUBLE_S = 120.0  # by then what was said of the process before is over, or it is of this one, too


class UpHands(LightHands):
    """Carries out the steps after a stop; each may be done again by a guard that was killed in it."""

    async def _gone(self, course: Course) -> Outcome:
        del course
        restarter = self._parts.restarter
        if restarter is not None and not restarter.replaces and await restarter.is_running() is True:
            return done("it was started already: what the old one held is gone, or the start would have failed")
        if self._parts.memory is None:
            return done("nobody here can see the device's memory")
        return await self._parts.memory.wait_back(self._policy.gone_within_s)

    async def _start(self, course: Course) -> Outcome:
        del course
        restarter = self._parts.restarter
        if restarter is None:
            return failed("guard was not told how to start it")
        end_s = now_s() + self._policy.start_still_s
        while True:
            if not restarter.replaces and await restarter.is_running() is True:
                return done("it was started already")
            outcome = await restarter.start()
            # Somebody else makes the new one, and it is not there yet.
            if not outcome.facts.get("waiting") or now_s() >= end_s:
                return outcome
            await asyncio.sleep(self._pause_s)

    async def _ready(self, course: Course) -> Outcome:
        """For as long as something moves: a large model takes long, and one that hangs would for ever."""
        restarter, policy = self._parts.restarter, self._policy
        began_s = moved_s = now_s()
        before: object = None
        ended = 0
        while True:
            look = await self._sight.look(course.engine)
            ready = is_ready(look)
            if ready:
                return done(f"it answers, {now_s() - began_s:.0f} s after its start", seconds=round(now_s() - began_s, 1))
            # Of one that is replaced it is the old one that has ended. Twice: a start that is slow to show is no end.
            if restarter is not None and not restarter.replaces:
                ended = ended + 1 if await restarter.is_running() is False else 0
                if ended >= 2:
                    return failed("its process ended before it was ready")
            now = await self._parts.progress() if self._parts.progress is not None else None
            if now != before:
                before, moved_s = now, now_s()
            still_s = policy.start_still_s if self._parts.progress is not None else policy.start_within_s
            if now_s() - moved_s > still_s or now_s() - began_s > policy.start_within_s:
                return failed(f"not ready after {now_s() - began_s:.0f} s, and nothing has moved for {now_s() - moved_s:.0f} s")
            await asyncio.sleep(self._pause_s)

    async def _check(self, course: Course) -> Outcome:
        look = await self._sight.look(course.engine)
        context = None if self._parts.context is None else await self._parts.context()
        return enough_cache(look, context, course.facts.get("kv_tokens_before"))

    async def _warm(self, course: Course) -> Outcome:
        if self._parts.ask_once is None:
            return done("no request for warming up is configured")
        outcome = await self._parts.ask_once()
        if outcome.is_done is None:
            # What nobody could ask is no failure. But the request may have ended the engine: then it is not put back.
            await asyncio.sleep(self._pause_s)
            if not is_ready(await self._sight.look(course.engine)):
                return failed(f"{outcome.says}; now it does not answer any more")
        return outcome

    async def _probation(self, course: Course) -> Outcome:
        began_s = now_s()
        old = troubles(
            course.kind, self._sight.conditions(course.engine)
        )  # of the process that was stopped, until they are over
        while now_s() < began_s + self._policy.probation_s or (old and now_s() < began_s + OLD_TROUBLE_S):
            await asyncio.sleep(self._pause_s)
            conditions = self._sight.conditions(course.engine)
            old &= troubles(course.kind, conditions) if now_s() < began_s + OLD_TROUBLE_S else frozenset()
            trouble = same_trouble(course.kind, conditions, spared=old)
            if trouble:
                return failed(trouble)
        return done(f"no trouble of the kind in {self._policy.probation_s:.0f} s")
