"""Carries out what was decided, one step after the other, and writes each down before it is done and after.

Whoever starts this anew with the same journal finishes what was begun, or takes it back: see `take_over`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from plimsoll.errors import BadInput, PlimsollError
from plimsoll.guard.act.decide import (
    ASKED,
    START,
    ActionPlan,
    BlockedAction,
    Decision,
    FailedRestarts,
    FleetView,
    Restart,
    Switches,
    consider,
    decide,
    kv_tokens,
)
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SWITCH, Entry, cleaned
from plimsoll.guard.act.journal_replay import PAUSE, failed_restarts, open_actions, read_restarts, read_switches
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import EngineObserver, JournalWriter, Lock, Outcome, failed
from plimsoll.guard.act.steps import BROKEN, COURSES, ActionRun, End, Step, opening_fields
from plimsoll.guard.daemon.journal import DAMAGED
from plimsoll.guard.daemon.steps import EngineAdapters, Hands
from plimsoll.guard.judge.tracker import Grade

# What the one who acts is given, and what it tells.


class Announcement(NamedTuple):
    """One thing to tell: what guard did, or why it did not."""

    engine: str
    says: str
    is_urgent: bool = False
    fields: Mapping[str, Any] = {}


def attention_message(engine: str, end: FailedRestarts) -> str:
    """What is said of an engine that restarts did not mend, and what a person does then."""
    resume = f"guardctl resume {engine} when it is mended"
    if end.end != "held":
        return f"a restart did not help ({', '.join(sorted(end.unmended))}): a person is needed ({resume})"
    if end.is_out:
        return f"held: it is down or out of service: a person is needed (guardctl undrain {engine} puts it back; {resume})"
    return f"its restart could not be finished; it was put back by hand ({resume})"


class ActionPorts(NamedTuple):
    """What the conductor is given, as is whoever does a person's wish. What cannot be written down raises WorldFailed."""

    book: JournalWriter
    lock: Lock
    sight: EngineObserver
    view: Callable[[frozenset[str]], FleetView]  # the fleet now; those that are being worked on are named
    tell: Callable[[Announcement], None]
    wall: Callable[[], float]
    name: Callable[[], str] = lambda: secrets.token_hex(4)

    def write(self, kind: str, course: ActionRun, fields: Mapping[str, Any], step: str = "") -> None:
        """One entry about an action."""
        self.book.append(kind, engine=course.engine, action=course.action, step=step, fields=fields)

    def write_end(self, course: ActionRun, end: End, why: str) -> None:
        """That it is over."""
        self.write(CLOSED, course, {"end": str(end), "grade": str(course.grade), "kind": course.kind, "why": why})

    async def step(
        self, course: ActionRun, do: Callable[[ActionRun], Awaitable[Outcome]], show: Callable[[ActionRun], None]
    ) -> tuple[ActionRun, Outcome]:
        """Its next step, written down before it is done and after; it is shown as begun, and as it stands then."""
        step = course.step
        assert step is not None
        self.write(INTENT, course, {"epoch": course.epoch, "undo": course.is_undoing}, str(step))
        if step is Step.STOP and not course.tries:
            self.write(RESTART, course, {"own": True})
        show(course.begun())
        outcome = await do(course)
        fields = {"done": outcome.is_done, "says": outcome.message, "facts": dict(outcome.facts)}
        self.write(OUTCOME, course, fields, str(step))
        course = course.after(is_done=outcome.is_done, facts=outcome.facts)
        show(course)
        return course, outcome


# What one guard remembers, by its journal: what is switched off, what was restarted, and when something is tried again.

AGAIN_S = 60.0  # after an action that changed nothing, doubled each time up to half an hour
LONGEST_AGAIN_S = 1_800.0


class ActionHistory:
    """The memory of whoever acts."""

    def __init__(self, engines: Iterable[str], ports: ActionPorts) -> None:
        """BadInput where two engines have the same name in the journal, which hides what is secret in one."""
        known = list(engines)
        self._ports = ports
        self._names = {_written(name): name for name in known}
        if len(self._names) < len(known):
            raise BadInput("two engines have the same name but for a password: give each a name of its own")
        self._again: dict[str, tuple[float, float]] = {}  # by engine: when it may be tried again, and the pause then

    @property
    def switches(self) -> Switches:
        """What people have switched off."""
        return read_switches(self.kept())

    def switch(self, name: str, engine: str, *, is_on: bool, who: str = "") -> None:
        """Switch off and on; JournalFailed where it cannot be written down."""
        self._ports.book.append(SWITCH, engine=engine, step=name, fields={"on": is_on, "who": who})
        if not is_on:
            self._again = {one: when for one, when in self._again.items() if engine and one != engine}

    @property
    def restarts(self) -> list[Restart]:
        """All that the journal counts, everybody's."""
        return read_restarts(self.kept())

    def last_ends(self) -> dict[str, FailedRestarts]:
        """The engines that restarts did not mend, unless somebody has resumed them since."""
        return failed_restarts(self.kept())

    def needs(self) -> dict[str, str]:
        """Engines that guard can do no more about, and why: until somebody resumes them."""
        return {engine: attention_message(engine, end) for engine, end in self.last_ends().items()}

    def foreign_restart(self, engine: str, **seen: Any) -> None:
        """Somebody else restarted it: it counts."""
        self._ports.book.append(RESTART, engine=engine, fields={"own": False, **seen})

    def kept(self) -> list[Entry]:
        """With the engines' names as they are, not as they were fit to be written down."""
        return [one._replace(engine=self._names.get(one.engine, one.engine)) for one in self._ports.book.kept()]

    def _off(self, engine: str, grade: Grade) -> str:
        """Whether somebody has switched it off since it was begun: then it is taken back as long as it can be."""
        off = self.switches
        return "somebody has paused it meanwhile" if off.is_paused or engine in off.paused or grade in off.rungs_off else ""

    def _may_try(self, engine: str) -> bool:
        return self._ports.wall() >= self._again.get(engine, (0.0, 0.0))[0]

    def _try_later(self, engine: str) -> None:
        pause_s = min(LONGEST_AGAIN_S, 2 * self._again.get(engine, (0.0, AGAIN_S / 2))[1])
        self._again[engine] = (self._ports.wall() + pause_s, pause_s)


def _written(name: str) -> str:
    """An engine's name as the journal has it."""
    return cleaned(Entry(0, 0.0, "", engine=name)).engine


# What is done when the journal fails in the middle of an action: what is out of service is brought back, and told.


async def finish_without_journal(
    course: ActionRun, do: Callable[[ActionRun], Awaitable[Outcome]], tell: Callable[[Announcement], None]
) -> None:
    """What the next guard would do by what the journal says already is done at once, as far as `do` does it.

    An engine that is out of service, or down, is brought back. Nothing new is begun.
    """
    course = course.taken_over()
    while course.step is not None and course.step is not Step.PROBATION:
        outcome = await do(course)
        tell(Announcement(course.engine, f"{course.step}: {outcome.message}", fields={"done": outcome.is_done}))
        course = course.after(is_done=outcome.is_done, facts=outcome.facts)
    if course.end is End.HELD:
        says = f"{course.grade} is held: the journal cannot be written, and it could not be brought back"
        tell(Announcement(course.engine, says, is_urgent=True, fields={"end": str(End.HELD)}))


QUIET_STEPS = frozenset({Step.PROBATION, Step.HOLD, Step.UNSHED})
"""Without the lock, and beside whatever else is done."""
END_S = 20.0  # for taking back what is under way when guard is to end
_LEFT = ""  # in place of an engine: what an earlier guard left, and had to wait


class Conductor(ActionHistory):
    """Of one guard: one engine away at a time, and what only waits beside it."""

    def __init__(
        self, parts: Mapping[str, EngineAdapters], policy: ActPolicy, ports: ActionPorts, *, pause_s: float = 1.0
    ) -> None:
        """BadInput where two engines have the same name in the journal, which hides what is secret in one."""
        super().__init__(parts, ports)
        self._parts, self._policy, self._pause_s = dict(parts), policy, pause_s
        self._beside: dict[str, asyncio.Task[None]] = {}  # by engine: probation, shedding
        self._at_work = ""
        self._refused: dict[str, str] = {}
        self._asked: tuple[Grade, str, asyncio.Future[Decision]] | None = None
        self._is_looked_at = False  # the journal, for damage
        self._left: list[ActionRun] = []  # of an earlier guard, still waiting for the lock
        self._ended: Counter[tuple[str, Grade, End]] = Counter()  # in this life, by engine
        self.stopped_acting = ""  # why nothing is done any more, such as a full disk
        self.courses: dict[str, ActionRun] = {}

    def ended(self) -> dict[tuple[str, Grade, End], int]:
        """How often each has ended since guard began; what has not happened yet is there, so that its first time is a rise."""
        return {(name, rung, end): self._ended[name, rung, end] for name in self._parts for rung in COURSES for end in End}

    # Deciding, and doing

    async def turn(self) -> None:
        """One round: what an earlier guard left, then what was asked for, then what the judge calls for."""
        if self.stopped_acting:
            return
        try:
            if self._left and self._may_try(_LEFT):
                await self.take_over()
            asked, self._asked = self._asked, None
            if asked is None:
                await self._decide()
            elif not asked[2].done():  # whoever asked may have gone away since: then nothing is done
                plan = self._consider_asked(asked[0], asked[1])
                asked[2].set_result(plan)
                if isinstance(plan, ActionPlan):
                    await self.carry_out(plan)
        except PlimsollError as error:
            self.stop_acting(error)

    def stop_acting(self, error: PlimsollError) -> None:
        """For good, and whoever waits for an answer is told."""
        # No deed without its entry: without a journal guard stands back until somebody has looked.
        self.stopped_acting = str(error)
        self._ports.tell(Announcement("", f"guard does not act any more: {error}", is_urgent=True))
        if self._asked is not None and not self._asked[2].done():
            self._asked[2].set_result(self._busy(*self._asked[:2]))

    def ask(self, grade: Grade, engine: str) -> asyncio.Future[Decision]:
        """A person wants it: decided at the next turn, and refused at once where guard is at work."""
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        if self.stopped_acting or self._at_work or self._asked is not None:
            answer.set_result(self._busy(grade, engine))
        else:
            self._asked = (grade, engine, answer)
        return answer

    def _busy(self, grade: Grade, engine: str) -> BlockedAction:
        if self.stopped_acting:
            return BlockedAction(engine, grade, ASKED, "StoppedActing", f"guard does not act any more: {self.stopped_acting}")
        why = f"guard is at work on {self._at_work}" if self._at_work else "somebody else has just asked for something"
        return BlockedAction(engine, grade, ASKED, "Busy", why)

    def _consider_asked(self, grade: Grade, engine: str) -> Decision:
        view = self._view()
        found = next((one for one in view.engines if one.name == engine), None)
        if found is None:
            return BlockedAction(engine, grade, ASKED, "NotWatched", "no engine of that name is watched")
        if engine in self._open():
            step = self.courses[engine].step if engine in self.courses else "what an earlier guard left"
            return BlockedAction(engine, grade, ASKED, "Busy", f"an action of it is not over yet: {step}")
        return consider(view, self._policy, found, grade, ASKED, "somebody asked for it")

    def decisions(self) -> list[Decision]:
        """What is called for now, and what speaks against it."""
        return decide(self._view(), self._policy)

    async def _decide(self) -> None:
        decisions = self.decisions()
        self._tell_refusals(decisions)
        for plan in decisions:
            if isinstance(plan, ActionPlan) and plan.engine not in self._open() and self._may_try(plan.engine):
                await self.carry_out(plan)
                return

    def _view(self) -> FleetView:
        return self._ports.view(self._open())._replace(
            restarts=self.restarts, switches=self.switches, busy=self._at_work, now=self._ports.wall()
        )

    def _open(self) -> frozenset[str]:
        """Engines of which an action is not over: nothing else is begun with them."""
        return frozenset(self.courses) | {course.engine for course in self._left}

    def _tell_refusals(self, decisions: Sequence[Decision]) -> None:
        now = {one.engine: one for one in decisions if isinstance(one, BlockedAction) and one.engine not in self.courses}
        for engine, refusal in now.items():
            if self._refused.get(engine) != refusal.reason:
                urgent = refusal.reason in ("CrashLoop", "SickCard", "BudgetSpent")
                self._ports.tell(
                    Announcement(
                        engine,
                        f"no {refusal.grade}: {refusal.message}",
                        urgent,
                        {"reason": refusal.reason, "kind": refusal.kind},
                    )
                )
        self._refused = {engine: refusal.reason for engine, refusal in now.items()}

    def why_not_start(self, engine: str) -> str:
        """Why one that does not run is not started now, though guard was given it to start; "" for nothing."""
        if self.stopped_acting:
            return f"guard does not act any more: {self.stopped_acting}"
        if engine in self._open() or not self._may_try(engine):
            return "an action of it is not over yet"
        if self._off(engine, Grade.RESTART):
            return "it is paused (guardctl resume)"
        card = self._ports.sight.conditions(engine).get("card")
        if card is not None and card.is_true:
            return f"its card is sick: {card.message}"
        end = self.last_ends().get(engine)
        return "" if end is None else attention_message(engine, end)

    async def start(self, engine: str, why: str) -> None:
        """Start one that has ended: as a restart, under the lock and when its memory is back, whatever hours and budget say."""
        try:
            await self.carry_out(ActionPlan(engine, Grade.RESTART, START, why, BROKEN))
        except PlimsollError as error:
            self.stop_acting(error)

    async def carry_out(self, plan: ActionPlan) -> None:
        """One action, up to where it only waits."""
        course = ActionRun(self._ports.name(), plan.engine, plan.grade, plan.kind, plan.steps, plan.steps[0])
        self._at_work, self.courses[plan.engine] = plan.engine, course  # before anything is waited for
        look = await self._ports.sight.look(plan.engine) if plan.grade is Grade.RESTART else None
        facts = {"kv_tokens_before": kv_tokens(look), "started_before": None if look is None else look.started_unix_s}
        course = course._replace(facts={name: value for name, value in facts.items() if value is not None})
        self._ports.write(OPENED, course, {**opening_fields(course), "why": plan.why, "facts": dict(course.facts)})
        self._ports.tell(Announcement(plan.engine, f"{plan.grade} because {plan.why}", fields={"action": course.action}))
        await self._go(course)

    # What an earlier guard left

    async def take_over(self) -> list[ActionRun]:
        """At the start: finish or take back whatever an earlier guard left open; what had to wait for the lock stays open.

        That is tried again at later turns; until then nothing else is done with those engines.
        """
        self._look_for_damage()
        self._left = [course for course in open_actions(self.kept()) if course.engine not in self.courses]
        for course in list(self._left):
            hands = self._hands(course)
            if hands is None:
                self._close(course._replace(end=End.HELD), "it is not watched any more")
            elif course.engine in self.courses or not await self._take_over_one(course, hands):
                continue
            self._left.remove(course)
        if self._left:
            self._try_later(_LEFT)
        else:
            self._again.pop(_LEFT, None)
        return list(self._left)

    async def _take_over_one(self, course: ActionRun, hands: Hands) -> bool:
        turned = course.taken_over()
        if turned.step not in QUIET_STEPS and turned.step is not None:
            # With a lock of its own: the earlier guard's is gone, or will be refused as older.
            lock = await hands.do(Step.LOCK, turned)
            self._ports.write(NOTE, course, {"take-over": lock.message, "done": lock.is_done})
            if not lock.is_done:
                return False
            turned = turned._replace(epoch=int(lock.facts["epoch"]), facts={**turned.facts, "epoch": lock.facts["epoch"]})
        self._ports.tell(
            Announcement(course.engine, f"an earlier guard was stopped in {course.step}: it goes on with {turned.step}")
        )
        await self._go(turned, hands)
        return True

    def _look_for_damage(self) -> None:
        """What is not known to have been done is not done again: after damage nothing is begun until somebody resumes it."""
        wrong = () if self._is_looked_at else getattr(self._ports.book, "wrong", ())
        self._is_looked_at = True
        says = [str(one.says) for one in wrong if one.kind == DAMAGED]
        if says:
            self.switch(PAUSE, "", is_on=True, who="guard: its journal was damaged")
            self._ports.tell(
                Announcement("", f"guard is paused (guardctl resume): its journal was damaged: {says[0]}", is_urgent=True)
            )

    # One action

    async def _go(self, course: ActionRun, hands: Hands | None = None) -> None:
        hands = hands or self._hands(course)
        assert hands is not None, "who is planned for is watched"
        self._at_work = course.engine
        self.courses[course.engine] = course
        keeper = asyncio.create_task(hands.keep_lock())
        try:
            while course.step is not None and course.step not in QUIET_STEPS:
                course = await self._step(course, hands)
        except PlimsollError:
            hands.is_lock_lost = True  # so that nothing is stopped any more
            await finish_without_journal(self.courses.pop(course.engine), lambda one: self._done(one, hands), self._ports.tell)
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, PlimsollError):
                async with asyncio.timeout(END_S):
                    await self._take_back(self.courses[course.engine], hands)
            left = self.courses.pop(course.engine, None)
            if left is not None and left.is_down and left.step is not Step.PROBATION:
                says = f"guard is stopped while it is down, in {left.step}: the next guard finishes it"
                self._ports.tell(Announcement(course.engine, says, is_urgent=True))
            raise
        except BaseException:
            self.courses.pop(course.engine, None)
            raise
        finally:
            self._at_work = ""
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        if course.step is None:
            self._close(course, "")
        else:
            self._beside[course.engine] = asyncio.create_task(self._wait_out(course, hands))

    async def _take_back(self, course: ActionRun, hands: Hands) -> None:
        """Guard is to end: what can be taken back soon, is; what is down is left to the next guard."""
        course = course.taken_over()
        while course.is_undoing and course.step is not None:
            course = await self._step(course, hands)
        if course.step is None:
            self._close(course, "guard was ended")

    async def _wait_out(self, course: ActionRun, hands: Hands) -> None:
        try:
            while course.step is not None:
                course = await self._step(course, hands)
            self._close(course, "")
        except PlimsollError as error:
            self.courses.pop(course.engine, None)
            self.stop_acting(error)

    async def _step(self, course: ActionRun, hands: Hands) -> ActionRun:
        step = course.step
        if course.tries:
            await asyncio.sleep(self._pause_s * 2.0**course.tries)
        course, outcome = await self._ports.step(course, lambda one: self._done(one, hands), self._show)
        self._ports.tell(
            Announcement(course.engine, f"{step}: {outcome.message}", fields={"action": course.action, "done": outcome.is_done})
        )
        return course

    def _show(self, course: ActionRun) -> None:
        self.courses[course.engine] = course

    async def _done(self, course: ActionRun, hands: Hands) -> Outcome:
        assert course.step is not None
        if course.step in (Step.DRAIN, Step.LEAVE) and not course.is_undoing and (why := self._against(course)):
            return failed(why)
        return await hands.do(course.step, course)

    def _against(self, course: ActionRun) -> str:
        """What speaks against it now that the lock is ours: somebody else may have acted since it was decided."""
        if course.kind == START:
            return ""
        view = self._ports.view(frozenset(self.courses) - {course.engine})
        view = view._replace(restarts=self.restarts, switches=self.switches, busy="", now=self._ports.wall())
        found = next((one for one in view.engines if one.name == course.engine), None)
        if found is None:
            return ""  # nothing new is known of it: what was decided holds
        decision = consider(view, self._policy, found, course.grade, course.kind, "")
        return decision.message if isinstance(decision, BlockedAction) else ""

    def _close(self, course: ActionRun, why: str) -> None:
        end = course.end or End.DONE
        # Told first: a guard that dies in between tells it twice, and the other way round nobody would know.
        says = f"{course.grade} is {end}" + (f": {why}" if why else "")
        self._ports.tell(
            Announcement(course.engine, says, end in (End.HELD, End.FAILED), {"action": course.action, "end": str(end)})
        )
        self._ports.write_end(course, end, why)
        self._ended[course.engine, course.grade, end] += 1
        self.courses.pop(course.engine, None)
        self._beside.pop(course.engine, None)
        if end in (End.STOOD_BACK, End.UNDONE, End.FAILED):
            self._try_later(course.engine)
        else:
            self._again.pop(course.engine, None)

    def _hands(self, course: ActionRun) -> Hands | None:
        parts = self._parts.get(course.engine)
        if parts is None:
            return None
        return Hands(
            parts, self._ports.lock, self._ports.sight, self._policy, pause_s=self._pause_s,
            is_off=lambda: self._off(course.engine, course.grade),
        )  # fmt: skip

    async def close(self) -> None:
        """Stop at once; what is under way is left to the next guard, or to its leases."""
        for task in self._beside.values():
            task.cancel()
        await asyncio.gather(*self._beside.values(), return_exceptions=True)
