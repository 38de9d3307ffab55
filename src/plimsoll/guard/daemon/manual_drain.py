"""An engine that a person takes out of service: drained until it is asked back, or for an hour, and never without an owner.

In the journal it is a restart that turns back before anything is stopped: a guard that finds it open undoes it like any other.
The fleet's lock is held while the engine is taken out and while it is put back, not in between: others may be helped meanwhile,
and an engine that is out counts as away for everybody. Whoever acts on this engine later has a higher number, and the gate then
refuses ours: so it is known that it is somebody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from plimsoll.errors import PlimsollError
from plimsoll.guard.act.decide import (
    ASKED,
    ActionPlan,
    BlockedAction,
    Decision,
    EngineStatus,
    FleetView,
    Switches,
    consider,
    is_ready,
)
from plimsoll.guard.act.journal_entry import NOTE, OPENED
from plimsoll.guard.act.journal_replay import DRAIN, UNDRAIN
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Lock, Outcome, done, failed, unsure
from plimsoll.guard.act.steps import ActionRun, End, Step, open_action, opening_fields
from plimsoll.guard.daemon.conductor import QUIET_STEPS, Announcement, Conductor, finish_without_journal
from plimsoll.guard.daemon.conductor import ActionPorts as Ports
from plimsoll.guard.daemon.steps import EngineAdapters, Hands
from plimsoll.guard.judge.look import Reach
from plimsoll.guard.judge.tracker import Grade

LONGEST_S = 3_600.0
ANSWER_S = 5.0  # how long whoever asked waits for how it went; it goes on all the same
PATIENCE_S = 30.0  # for a lock, before it is put back without
_NOT_ABOUT_DRAINING = ("card", "loop")  # conditions that speak against a restart alone


class SharedLock:
    """A lock that two parts of one guard share: who has it keeps the other out, as it keeps other guards out.

    The locks themselves know guards and not parts of them: one that is held already would be given to both.
    """

    def __init__(self, lock: Lock, turn: list[SharedLock] | None = None) -> None:
        self._lock, self._turn = lock, [] if turn is None else turn
        self.label = lock.label

    def other(self) -> SharedLock:
        """The other part's hand on it."""
        return SharedLock(self._lock, self._turn)

    async def acquire(self, owner: str) -> Outcome:
        """Take it, unless the other part has it or is about to."""
        if self._turn and self._turn[0] is not self:
            return failed("guard itself has the lock, for another engine")
        self._turn[:] = [self]
        outcome = unsure("it was not asked for")
        try:
            outcome = await self._lock.acquire(owner)
        finally:
            if not outcome.is_done:
                self._turn.clear()
        return outcome

    async def renew(self) -> Outcome:
        """Keep it."""
        return await self._lock.renew() if self._turn and self._turn[0] is self else failed("the lock is not ours")

    async def release(self) -> Outcome:
        """Give it back; what the other part has is not ours to give."""
        if not self._turn or self._turn[0] is not self:
            return done("the lock was not ours")
        outcome = await self._lock.release()
        self._turn.clear()  # also where that is not known: then it ends by itself, and asking again finds out
        return outcome


class ManualDrains:
    """All engines that people have drained. `courses` is the conductor's own list: what stands in it, it leaves alone."""

    def __init__(
        self,
        parts: Mapping[str, EngineAdapters],
        policy: ActPolicy,
        ports: Ports,
        courses: dict[str, ActionRun],
        *,
        longest_s: float = LONGEST_S,
        patience_s: float = PATIENCE_S,
        pause_s: float = 1.0,
    ) -> None:
        self._parts, self._policy, self._ports, self.courses = parts, policy, ports, courses
        self._longest_s, self._patience_s, self._pause_s = longest_s, patience_s, pause_s
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}
        self._back: dict[str, asyncio.Event] = {}

    @property
    def engines(self) -> frozenset[str]:
        """That are drained, or on their way."""
        return frozenset(self._tasks)

    async def drain(self, engine: str) -> Decision:
        """Take it out of service; the answer comes when it is out, or after a few seconds."""
        decision = self._consider(engine)
        if isinstance(decision, BlockedAction):
            return decision
        course = open_action(self._ports.name(), engine, Grade.RESTART, DRAIN, is_broken=False)
        self._ports.write(OPENED, course, {**opening_fields(course), "why": decision.why})
        self.courses[engine] = course
        self._back[engine] = asyncio.Event()
        self._tasks[engine] = task = asyncio.create_task(self._run(course))
        out = asyncio.create_task(self._until_out(engine))
        await asyncio.wait({task, out}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        out.cancel()
        if task.done() and not task.cancelled() and task.exception() is None:
            return BlockedAction(engine, Grade.RESTART, DRAIN, "NotDone", task.result().message)
        return decision

    async def undrain(self, engine: str) -> Decision:
        """Put it back."""
        task = self._tasks.get(engine)
        if task is None:
            return BlockedAction(engine, Grade.RESTART, DRAIN, "NotDrained", "nobody has drained it by hand (guardctl actions)")
        self._back[engine].set()
        await asyncio.wait({task}, timeout=ANSWER_S)
        return ActionPlan(engine, Grade.RESTART, DRAIN, "somebody asked for it", (Step.UNDRAIN, Step.UNLOCK))

    async def close(self, limit_s: float = ANSWER_S) -> None:
        """Put back what is out; what cannot be in this time is told, and left to the next guard and to its lease."""
        self._patience_s = min(self._patience_s, limit_s / 2)
        for back in self._back.values():
            back.set()
        tasks = dict(self._tasks)
        if tasks:
            await asyncio.wait(tasks.values(), timeout=limit_s)
        for engine, task in tasks.items():
            if not task.done():
                says = "guard is stopped, and it is still drained by hand: the next guard puts it back, or you do"
                self._ports.tell(Announcement(engine, says, is_urgent=True))
                task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    # Deciding

    def _consider(self, engine: str) -> Decision:
        """What speaks against taking it away, as for a restart; but not what speaks against starting it anew."""
        view = self._ports.view(frozenset(self.courses))
        found = next((one for one in view.engines if one.name == engine), None)
        if found is None:
            return BlockedAction(engine, Grade.RESTART, DRAIN, "NotWatched", "no engine of that name is watched")
        if engine in self.courses:
            return BlockedAction(engine, Grade.RESTART, DRAIN, "Busy", "guard is at work on it already")
        parts = self._parts.get(engine)
        if parts is None or (parts.door is None and parts.balancer is None):
            return BlockedAction(
                engine, Grade.RESTART, DRAIN, "NoGate", "it has neither a gate nor a balancer that could do it"
            )
        at_work = (name for name, one in self.courses.items() if one.step not in QUIET_STEPS and one.kind != DRAIN)
        decision = _for_drain(view._replace(busy=next(at_work, "")), self._policy, found)
        if isinstance(decision, BlockedAction):
            return decision._replace(kind=DRAIN)
        return decision._replace(kind=DRAIN, steps=(Step.LOCK, Step.DRAIN, Step.UNLOCK))

    # Doing

    async def _run(self, course: ActionRun) -> Outcome:
        parts = self._parts[course.engine]
        hands = Hands(parts, self._ports.lock, self._ports.sight, self._policy, pause_s=self._pause_s)
        keeper = asyncio.create_task(hands.keep_lock())
        outcome = unsure("it was not begun")
        try:
            while course.step is not None:
                assert course.step is not Step.STOP, "nothing is ever stopped here"
                step, undoing = course.step, course.is_undoing
                course, found = await self._ports.step(course, lambda one: self._done(one, hands), self._show)
                outcome = found if not undoing and step in (Step.LOCK, Step.DRAIN) else outcome
            self._close(course, outcome)
        except PlimsollError as error:
            outcome = unsure(str(error))
            await self._put_back_unwritten(course, hands, str(error))
        finally:
            keeper.cancel()
            self._tasks.pop(course.engine, None)
            self._back.pop(course.engine, None)
            if (mine := self.courses.get(course.engine)) is not None and mine.action == course.action:
                del self.courses[course.engine]
        return outcome

    async def _done(self, course: ActionRun, hands: Hands) -> Outcome:
        assert course.step is not None
        if course.step is Step.EVIDENCE:
            return done("none is kept of an engine that a person drains")
        return await (self._hold(course, hands) if course.step is Step.IDLE else hands.do(course.step, course))

    async def _put_back_unwritten(self, course: ActionRun, hands: Hands, why: str) -> None:
        """Without its journal guard cannot answer for a drain: what is out comes back, with the lock if it can be had.

        The gate refuses where it is somebody else's by now; a balancer that has it in again then is told again by them.
        """
        mine = self.courses.get(course.engine)
        if mine is None or mine.action != course.action:
            return  # the conductor has begun something with it
        self._ports.tell(Announcement(course.engine, f"the drain by hand ends, what is out comes back: {why}", is_urgent=True))
        await self._ports.lock.acquire(f"{course.action} on {course.engine}")
        await finish_without_journal(mine, lambda one: self._done(one, hands), self._ports.tell)
        await self._ports.lock.release()

    async def _hold(self, course: ActionRun, hands: Hands) -> Outcome:
        """Renew until it is wanted back; ends as not done, which is the way back."""
        engine, door = course.engine, self._parts[course.engine].door
        if hands.is_lock_lost:
            return failed("the lock was lost meanwhile: somebody else may act")
        await self._note(course, "the lock was given back", await hands.do(Step.UNLOCK, course))
        self._ports.tell(
            Announcement(engine, f"drained by hand, for {self._longest_s / 60:.0f} min at most (guardctl undrain)")
        )
        loop = asyncio.get_running_loop()
        end_s, renew_s, says = loop.time() + self._longest_s, loop.time() + self._policy.lease_s / 3, "somebody asked it back"
        waits_since_s: float | None = None  # for the lock
        while True:
            why = ""
            if loop.time() >= renew_s:
                renewed = await self._renew(course)
                if renewed.facts.get("stale"):
                    return failed(f"somebody else acts on it now: {renewed.message}")
                why = renewed.message if renewed.is_done is False else ""
                renew_s = loop.time() + self._policy.lease_s / 3
            if not self._back[engine].is_set() and (why := why or await self._why_back(engine, end_s)):
                says = why
                self._ports.tell(Announcement(engine, f"the drain by hand ends: {why}"))
                self._back[engine].set()
            if self._back[engine].is_set():
                taken = await hands.do(Step.LOCK, course)
                if taken.is_done:
                    await self._note(course, "the lock was taken again", taken)
                    return failed(says, epoch=int(taken.facts["epoch"]))
                waits_since_s = waits_since_s or loop.time()
                if door is not None and loop.time() >= waits_since_s + self._patience_s:
                    # With our old number: where somebody else drains it now, the gate refuses, and it is left to them.
                    return failed(f"{says}; without the lock: {taken.message}")
                await asyncio.sleep(
                    self._pause_s
                )  # it stays out and is renewed; without a gate only the lock tells whose it is
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._back[engine].wait(), min(self._pause_s, max(0.01, renew_s - loop.time())))

    async def _renew(self, course: ActionRun) -> Outcome:
        """Drained a while longer, and out of a balancer that forgot it (a reload); not done where it cannot be kept out."""
        door, balancer = self._parts[course.engine].door, self._parts[course.engine].balancer
        # The gate first: where it is somebody else's by now, the balancer is theirs, too.
        if door is not None:
            renewed = await door.drain(course.epoch, self._policy.lease_s)
            if renewed.facts.get("stale"):
                return renewed
        if balancer is not None and await balancer.is_out() is False:
            taken = await balancer.take_out()
            if taken.is_done is False:
                return failed(f"its balancer sends to it again, and does not let go: {taken.message}")
            self._ports.tell(Announcement(course.engine, f"its balancer had it in again, and was told again: {taken.message}"))
        return done("it is out")

    async def _why_back(self, engine: str, end_s: float) -> str:
        """Why it does not stay out, though nobody has asked it back."""
        if asyncio.get_running_loop().time() >= end_s:
            return f"{self._longest_s / 60:.0f} min are over"
        suffering = self._parts[engine].suffering
        who = "" if suffering is None else suffering()
        # One that does not answer would carry nothing.
        return who if who and is_ready(await self._ports.sight.look(engine)) else ""

    async def _until_out(self, engine: str) -> None:
        while engine in self.courses and self.courses[engine].step is not Step.IDLE:
            await asyncio.sleep(0.02)

    async def _note(self, course: ActionRun, what: str, outcome: Outcome) -> None:
        self._ports.write(NOTE, course, {what: outcome.message, "done": outcome.is_done})

    def _show(self, course: ActionRun) -> None:
        """Unless the conductor has begun something with it, as somebody asked it to."""
        mine = self.courses.get(course.engine)
        if mine is None or mine.action == course.action:
            self.courses[course.engine] = course

    def _close(self, course: ActionRun, outcome: Outcome) -> None:
        end = course.end or End.UNDONE
        self._ports.write_end(course, end, outcome.message)
        says = {
            End.STOOD_BACK: f"it was not drained: {outcome.message}",
            End.HELD: "it is out of service and could not be put back",
        }
        said = says.get(
            end, "it is not drained by hand any more" if outcome.is_done else f"it was not drained: {outcome.message}"
        )
        self._ports.tell(Announcement(course.engine, said, end is End.HELD, {"action": course.action, "end": str(end)}))


def _for_drain(view: FleetView, policy: ActPolicy, engine: EngineStatus) -> Decision:
    """A person may do so at any hour, whatever the budget, and also while guard itself is paused."""
    conditions = {kind: one for kind, one in engine.conditions.items() if kind not in _NOT_ABOUT_DRAINING}
    bare = engine._replace(conditions=conditions, has_restarter=True, last_end=None)
    free = ActPolicy(most_away=policy.most_away, carries=policy.carries, may_be_last=policy.may_be_last, rollout_s=0.0)
    engines = [bare if one.name == engine.name else one for one in view.engines]
    view = view._replace(engines=engines, restarts=(), switches=Switches())
    return consider(view, free, bare, Grade.RESTART, ASKED, "somebody asked to drain it")


# Puts an engine back that guard has held: up again, by whoever mended it, and still out of the balancer.
#
# In the journal it is a restart that turns back before anything is drained: a guard that finds it open puts the engine
# back, too.
# What is remembered of its restart stays: that it is mended is said by `guardctl resume ENGINE`.

WHY = "somebody asked it back"


class ReturnToService:
    """Of one guard. Its lock is a hand of its own: neither the conductor's, nor that of the drains by hand."""

    def __init__(self, parts: Mapping[str, EngineAdapters], policy: ActPolicy, ports: Ports, conductor: Conductor) -> None:
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
            return BlockedAction(engine, Grade.RESTART, UNDRAIN, "NotWatched", "no engine of that name is watched")
        if engine in self._conductor.courses:
            return BlockedAction(engine, Grade.RESTART, UNDRAIN, "Busy", "guard is at work on it already")
        course = open_action(self._ports.name(), engine, Grade.RESTART, UNDRAIN, is_broken=False)
        self._conductor.courses[engine] = course  # before anything is waited for
        self._tasks[engine] = task = asyncio.create_task(self._run(course, parts))
        await asyncio.wait({task}, timeout=ANSWER_S)  # it goes on all the same
        if task.done() and not (outcome := task.result()).is_done:
            return BlockedAction(engine, Grade.RESTART, UNDRAIN, "NotDone", outcome.message)
        return ActionPlan(engine, Grade.RESTART, UNDRAIN, WHY, (Step.LOCK, Step.UNDRAIN, Step.UNLOCK))

    async def close(self) -> None:
        """Wait a moment for what is under way; what is left the next guard does."""
        tasks = set(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, course: ActionRun, parts: EngineAdapters) -> Outcome:
        hands = Hands(parts, self._ports.lock, self._ports.sight, self._policy)
        keeper = asyncio.create_task(hands.keep_lock())
        try:
            look = await self._ports.sight.look(course.engine)
            if look is None or look.reach is not Reach.ANSWERS:
                return failed("it does not answer: start it first")
            self._ports.write(OPENED, course, {**opening_fields(course), "why": WHY})
            return await self._steps(course, hands)
        except PlimsollError as error:
            await self._ports.lock.release()
            self._ports.tell(Announcement(course.engine, f"whether it was put back is not known: {error}", is_urgent=True))
            return unsure(str(error))
        finally:
            keeper.cancel()
            self._tasks.pop(course.engine, None)
            self._conductor.courses.pop(course.engine, None)

    async def _steps(self, course: ActionRun, hands: Hands) -> Outcome:
        result = unsure("it was not begun")
        while course.step is not None:
            step = course.step
            course, outcome = await self._ports.step(course, lambda one: self._done(one, hands), self._show)
            result = outcome if step in (Step.LOCK, Step.UNDRAIN) else result
        end = End.DONE if course.end is End.UNDONE else course.end or End.DONE
        self._ports.write_end(course, end, result.message)
        says = f"it was held, and is put back: {result.message}" if result.is_done else f"it was not put back: {result.message}"
        self._ports.tell(Announcement(course.engine, says, end is End.HELD, {"action": course.action, "end": str(end)}))
        return result

    async def _done(self, course: ActionRun, hands: Hands) -> Outcome:
        assert course.step is not None
        if course.step is Step.EVIDENCE:
            return done("none is kept of an engine that a person puts back")
        if course.step is Step.DRAIN:
            return failed(WHY)  # which is the way back
        return await hands.do(course.step, course)

    def _show(self, course: ActionRun) -> None:
        self._conductor.courses[course.engine] = course
