"""Puts an engine back that guard has held: up again, by whoever mended it, and still out of the balancer.

In the journal it is a restart that turns back before anything is drained: a guard that finds it open puts the engine back, too.
What is remembered of its restart stays: that it is mended is said by `guardctl resume ENGINE`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from plimsoll.cli.guard_act import Conductor
from plimsoll.cli.guard_light_steps import Parts
from plimsoll.cli.guard_said import Ports, Said
from plimsoll.cli.guard_steps import Hands
from plimsoll.domain.journal_entry import OPENED
from plimsoll.domain.look import Reach
from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.errors import PlimsollError
from plimsoll.guard.act_policy import ActPolicy
from plimsoll.guard.course import Course, opened, to_fields
from plimsoll.guard.decide import Decision, Plan, Refusal
from plimsoll.guard.grades import Grade
from plimsoll.guard.remembered import UNDRAIN
from plimsoll.guard.steps import End, Step

WHY = "somebody asked it back"
ANSWER_S = 5.0  # how long whoever asked waits for how it went


class PutBack:
    """Of one guard. Its lock is a hand of its own: neither the conductor's, nor that of the drains by hand."""

    def __init__(self, parts: Mapping[str, Parts], policy: ActPolicy, ports: Ports, conductor: Conductor) -> None:
        self._parts, self._policy, self._ports, self._conductor = parts, policy, ports, conductor
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}

    def is_held(self, engine: str) -> bool:
        """Whether it was held, and nobody has put it back since."""
        end = self._conductor.last_ends().get(engine)
        return end is not None and end.is_out

    async def put_back(self, engine: str) -> Decision:
        """Put it back, if it answers."""
        parts = self._parts.get(engine)
        if parts is None:
            return Refusal(engine, Grade.RESTART, UNDRAIN, "NotWatched", "no engine of that name is watched")
        if engine in self._conductor.courses:
            return Refusal(engine, Grade.RESTART, UNDRAIN, "Busy", "guard is at work on it already")
        course = opened(self._ports.name(), engine, Grade.RESTART, UNDRAIN, is_broken=False)
        self._conductor.courses[engine] = course  # before anything is waited for
        self._tasks[engine] = task = asyncio.create_task(self._run(course, parts))
        await asyncio.wait({task}, timeout=ANSWER_S)  # it goes on all the same
        if task.done() and not (outcome := task.result()).is_done:
            return Refusal(engine, Grade.RESTART, UNDRAIN, "NotDone", outcome.says)
        return Plan(engine, Grade.RESTART, UNDRAIN, WHY, (Step.LOCK, Step.UNDRAIN, Step.UNLOCK))

    async def close(self) -> None:
        """Wait a moment for what is under way; what is left the next guard does."""
        tasks = set(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, course: Course, parts: Parts) -> Outcome:
        hands = Hands(parts, self._ports.lock, self._ports.sight, self._policy)
        keeper = asyncio.create_task(hands.keep_lock())
        try:
            look = await self._ports.sight.look(course.engine)
            if look is None or look.reach is not Reach.ANSWERS:
                return failed("it does not answer: start it first")
            self._ports.write(OPENED, course, {**to_fields(course), "why": WHY})
            return await self._steps(course, hands)
        except PlimsollError as error:
            await self._ports.lock.release()
            self._ports.tell(Said(course.engine, f"whether it was put back is not known: {error}", is_urgent=True))
            return unsure(str(error))
        finally:
            keeper.cancel()
            self._tasks.pop(course.engine, None)
            self._conductor.courses.pop(course.engine, None)

    async def _steps(self, course: Course, hands: Hands) -> Outcome:
        result = unsure("it was not begun")
        while course.step is not None:
            step = course.step
            course, outcome = await self._ports.step(course, lambda one: self._done(one, hands), self._show)
            result = outcome if step in (Step.LOCK, Step.UNDRAIN) else result
        end = End.DONE if course.end is End.UNDONE else course.end or End.DONE
        self._ports.write_end(course, end, result.says)
        says = f"it was held, and is put back: {result.says}" if result.is_done else f"it was not put back: {result.says}"
        self._ports.tell(Said(course.engine, says, end is End.HELD, {"action": course.action, "end": str(end)}))
        return result

    async def _done(self, course: Course, hands: Hands) -> Outcome:
        assert course.step is not None
        if course.step is Step.EVIDENCE:
            return done("none is kept of an engine that a person puts back")
        if course.step is Step.DRAIN:
            return failed(WHY)  # which is the way back
        return await hands.do(course.step, course)

    def _show(self, course: Course) -> None:
        self._conductor.courses[course.engine] = course
