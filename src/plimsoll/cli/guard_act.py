"""Carries out what was decided, one step after the other, and writes each down before it is done and after.

Whoever starts this anew with the same journal finishes what was begun, or takes it back: see `take_over`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from plimsoll.cli.guard_steps import Hands, Parts
from plimsoll.domain.journal_entry import CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SWITCH, Entry
from plimsoll.domain.outcome import Outcome, unsure
from plimsoll.errors import PlimsollError, WorldFailed
from plimsoll.guard.act_policy import ActPolicy
from plimsoll.guard.budget import Restart
from plimsoll.guard.course import Course, open_courses, opened, to_fields
from plimsoll.guard.decide import Decision, Plan, Refusal, Switches, View, consider, decide
from plimsoll.guard.grades import Grade
from plimsoll.guard.ports import Book, Lock, Sight
from plimsoll.guard.restart_checks import kv_tokens
from plimsoll.guard.steps import End, Step

AGAIN_S = 60.0  # after an action that changed nothing, doubled each time up to half an hour
LONGEST_AGAIN_S = 1_800.0
QUIET_STEPS = frozenset({Step.PROBATION, Step.HOLD, Step.UNSHED})
"""Without the lock, and beside whatever else is done."""
PAUSE, RUNGS = "pause", "rung-"


class Said(NamedTuple):
    """One thing to tell: what guard did, or why it did not."""

    engine: str
    says: str
    is_urgent: bool = False
    fields: Mapping[str, Any] = {}


class Ports(NamedTuple):
    """What the conductor is given."""

    book: Book
    lock: Lock
    sight: Sight
    view: Callable[[frozenset[str]], View]  # the fleet now; those that are being worked on are named
    tell: Callable[[Said], None]
    wall: Callable[[], float]
    name: Callable[[], str] = lambda: secrets.token_hex(4)


class Conductor:
    """Of one guard: one engine away at a time, and what only waits beside it."""

    def __init__(self, parts: Mapping[str, Parts], policy: ActPolicy, ports: Ports, *, pause_s: float = 1.0) -> None:
        self._parts, self._policy, self._ports, self._pause_s = dict(parts), policy, ports, pause_s
        self._beside: dict[str, asyncio.Task[None]] = {}  # by engine: probation, shedding
        self._at_work = ""
        self._refused: dict[str, str] = {}
        self._again: dict[str, tuple[float, float]] = {}  # by engine: when it may be tried again, and the pause then
        self._asked: asyncio.Queue[tuple[Grade, str, asyncio.Future[Decision]]] = asyncio.Queue(16)
        self.stopped_acting = ""  # why nothing is done any more, such as a full disk
        self.courses: dict[str, Course] = {}

    # What the journal remembers

    @property
    def switches(self) -> Switches:
        """What people have switched off."""
        last = {(entry.engine, entry.step): bool(entry.fields.get("on")) for entry in self._kept(SWITCH)}
        engines = frozenset(engine for (engine, step), is_on in last.items() if is_on and engine and step == PAUSE)
        rungs = frozenset(
            Grade(step.removeprefix(RUNGS)) for (_, step), is_on in last.items()
            if is_on and step.removeprefix(RUNGS) in set(Grade) and step.startswith(RUNGS)
        )  # fmt: skip
        return Switches(last.get(("", PAUSE), False), engines, rungs)

    def switch(self, name: str, engine: str, *, is_on: bool, who: str = "") -> None:
        """Switch off and on; JournalFailed where it cannot be written down."""
        self._ports.book.append(SWITCH, engine=engine, step=name, fields={"on": is_on, "who": who})
        if not is_on:
            self._again.pop(engine, None)

    @property
    def restarts(self) -> list[Restart]:
        """All that the journal counts, everybody's."""
        return [Restart(one.at, one.engine, bool(one.fields.get("own", True))) for one in self._kept(RESTART)]

    def last_ends(self) -> dict[str, tuple[str, str]]:
        """How the last restart of each engine ended, unless somebody has resumed it since."""
        found: dict[str, tuple[str, str]] = {}
        for entry in self._ports.book.kept():
            if entry.kind == CLOSED and entry.fields.get("grade") == Grade.RESTART:
                found[entry.engine] = (str(entry.fields.get("kind", "")), str(entry.fields.get("end", "")))
            elif entry.kind == SWITCH and entry.step == PAUSE and not entry.fields.get("on"):
                found = {} if not entry.engine else {name: end for name, end in found.items() if name != entry.engine}
        return found

    def foreign_restart(self, engine: str) -> None:
        """Somebody else restarted it: it counts."""
        if engine != self._at_work and engine not in self.courses:
            self._write(RESTART, engine=engine, fields={"own": False})

    def _kept(self, kind: str) -> Iterable[Entry]:
        return (entry for entry in self._ports.book.kept() if entry.kind == kind)

    # Deciding, and doing

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.turn()
            await asyncio.sleep(self._pause_s)

    async def turn(self) -> None:
        """One round: what was asked for, then what the judge calls for."""
        if self.stopped_acting:
            return
        try:
            if not self._asked.empty():
                grade, engine, answer = self._asked.get_nowait()
                plan = self._consider_asked(grade, engine)
                answer.set_result(plan)
                if isinstance(plan, Plan):
                    await self.carry_out(plan)
                return
            await self._decide()
        except PlimsollError as error:
            # No deed without its entry: without a journal guard stands back until somebody has looked.
            self.stopped_acting = str(error)
            self._ports.tell(Said("", f"guard does not act any more: {error}", is_urgent=True))

    def ask(self, grade: Grade, engine: str) -> asyncio.Future[Decision]:
        """A person wants it: what becomes of it is decided at the next turn."""
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((grade, engine, answer))
        return answer

    def _consider_asked(self, grade: Grade, engine: str) -> Decision:
        view = self._view()
        found = next((one for one in view.engines if one.name == engine), None)
        if found is None:
            return Refusal(engine, grade, "asked", "NotWatched", "no engine of that name is watched")
        return consider(view, self._policy, found, grade, "asked", "somebody asked for it")

    async def _decide(self) -> None:
        decisions = decide(self._view(), self._policy)
        self._tell_refusals(decisions)
        for plan in decisions:
            if isinstance(plan, Plan) and self._may_try(plan.engine):
                await self.carry_out(plan)
                return

    def _view(self) -> View:
        away = frozenset(self.courses)
        return self._ports.view(away)._replace(
            restarts=self.restarts, switches=self.switches, busy=self._at_work, now=self._ports.wall()
        )

    def _may_try(self, engine: str) -> bool:
        return engine not in self.courses and self._ports.wall() >= self._again.get(engine, (0.0, 0.0))[0]

    def _tell_refusals(self, decisions: Sequence[Decision]) -> None:
        now = {one.engine: one for one in decisions if isinstance(one, Refusal) and one.engine not in self.courses}
        for engine, refusal in now.items():
            if self._refused.get(engine) != refusal.reason:
                urgent = refusal.reason in ("CrashLoop", "SickCard", "BudgetSpent")
                self._ports.tell(Said(engine, str(refusal), urgent, {"reason": refusal.reason, "kind": refusal.kind}))
        self._refused = {engine: refusal.reason for engine, refusal in now.items()}

    async def carry_out(self, plan: Plan) -> None:
        """One action, up to where it only waits."""
        course = opened(self._ports.name(), plan.engine, plan.grade, plan.kind, is_broken=plan.is_broken)
        look = await self._ports.sight.look(plan.engine) if plan.grade is Grade.RESTART else None
        before = kv_tokens(look)
        course = course._replace(facts={} if before is None else {"kv_tokens_before": before})
        fields = {**to_fields(course), "why": plan.why, "facts": dict(course.facts)}
        self._write(OPENED, engine=plan.engine, action=course.action, fields=fields)
        self._ports.tell(Said(plan.engine, str(plan), fields={"action": course.action}))
        await self._go(course)

    async def take_over(self) -> list[Course]:
        """At the start: finish or take back whatever an earlier guard left open; what had to wait for the lock stays open."""
        left = []
        for course in open_courses(self._ports.book.kept()):
            if course.engine in self.courses:
                continue
            hands = self._hands(course.engine)
            if hands is None:
                self._close(course._replace(end=End.HELD), "it is not watched any more")
                continue
            turned = course.taken_over()
            if turned.step not in QUIET_STEPS and turned.step is not None:
                # With a lock of its own: the earlier guard's is gone, or will be refused as older.
                lock = await hands.do(Step.LOCK, turned)
                self._write(
                    NOTE, engine=course.engine, action=course.action, fields={"take-over": lock.says, "done": lock.is_done}
                )
                if not lock.is_done:
                    left.append(course)
                    continue
                turned = turned._replace(epoch=int(lock.facts["epoch"]), facts={**turned.facts, "epoch": lock.facts["epoch"]})
            self._ports.tell(
                Said(course.engine, f"an earlier guard was stopped in {course.step}: it goes on with {turned.step}")
            )
            await self._go(turned, hands)
        return left

    async def _go(self, course: Course, hands: Hands | None = None) -> None:
        hands = hands or self._hands(course.engine)
        assert hands is not None, "who is planned for is watched"
        self._at_work = course.engine
        self.courses[course.engine] = course
        keeper = asyncio.create_task(self._keep_lock(hands))
        try:
            while course.step is not None and course.step not in QUIET_STEPS:
                course = await self._step(course, hands)
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

    async def _wait_out(self, course: Course, hands: Hands) -> None:
        try:
            while course.step is not None:
                course = await self._step(course, hands)
            self._close(course, "")
        except PlimsollError as error:
            self.stopped_acting = str(error)
            self.courses.pop(course.engine, None)
            self._ports.tell(Said("", f"guard does not act any more: {error}", is_urgent=True))

    async def _step(self, course: Course, hands: Hands) -> Course:
        step = course.step
        assert step is not None
        where = {"engine": course.engine, "action": course.action, "step": str(step)}
        self._write(INTENT, **where, fields={"epoch": course.epoch, "undo": course.is_undoing})
        if step is Step.STOP and not course.tries:
            self._write(RESTART, engine=course.engine, action=course.action, fields={"own": True})
        self.courses[course.engine] = course.begun()
        try:
            outcome = await hands.do(step, course)
        except PlimsollError:
            raise
        except Exception as problem:  # a mistake of ours in one step: the table says what follows, as for any other failure
            outcome = unsure(f"a mistake of ours: {type(problem).__name__}")
        self._write(OUTCOME, **where, fields=_fields(outcome))
        self._ports.tell(
            Said(course.engine, f"{step}: {outcome.says}", fields={"action": course.action, "done": outcome.is_done})
        )
        course = course.after(is_done=outcome.is_done, facts=outcome.facts)
        self.courses[course.engine] = course
        return course

    async def _keep_lock(self, hands: Hands) -> None:
        """Renew it while something is done; a lock that is lost is known before the next step."""
        while True:
            await asyncio.sleep(max(self._pause_s, self._policy.lease_s / 6))
            outcome = await self._ports.lock.renew()
            if outcome.is_done is False:
                hands.is_lock_lost = True

    def _close(self, course: Course, why: str) -> None:
        end = course.end or End.DONE
        fields = {"end": str(end), "grade": str(course.grade), "kind": course.kind, "why": why}
        self._write(CLOSED, engine=course.engine, action=course.action, fields=fields)
        self.courses.pop(course.engine, None)
        self._beside.pop(course.engine, None)
        if end in (End.STOOD_BACK, End.UNDONE, End.FAILED):
            pause_s = min(LONGEST_AGAIN_S, 2 * self._again.get(course.engine, (0.0, AGAIN_S / 2))[1])
            self._again[course.engine] = (self._ports.wall() + pause_s, pause_s)
        else:
            self._again.pop(course.engine, None)
        says = f"{course.grade} is {end}" + (f": {why}" if why else "")
        self._ports.tell(Said(course.engine, says, end in (End.HELD, End.FAILED), {"action": course.action, "end": str(end)}))

    def _hands(self, engine: str) -> Hands | None:
        parts = self._parts.get(engine)
        if parts is None:
            return None
        return Hands(parts, self._ports.lock, self._ports.sight, self._policy, pause_s=self._pause_s)

    def _write(self, kind: str, **where: Any) -> None:
        try:
            self._ports.book.append(kind, **where)
        except OSError as error:
            raise WorldFailed(f"the journal cannot be written: {error}") from None

    async def close(self) -> None:
        """Stop at once; what is under way is left to the next guard, or to its leases."""
        for task in self._beside.values():
            task.cancel()
        await asyncio.gather(*self._beside.values(), return_exceptions=True)


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {"done": outcome.is_done, "says": outcome.says, "facts": dict(outcome.facts)}
