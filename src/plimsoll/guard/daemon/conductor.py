"""Runs decided actions step by step, and journals every step before and after.

A guard that starts with the same journal finishes or undoes open actions: see `Conductor.take_over`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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
    serves_nobody,
    spent,
)
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SWITCH, Entry, cleaned
from plimsoll.guard.act.journal_replay import (
    DRAIN,
    PAUSE,
    UNDRAIN,
    failed_restarts,
    open_actions,
    read_restarts,
    read_switches,
    unknown_actions,
)
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import EngineObserver, JournalWriter, Lock, Outcome, failed
from plimsoll.guard.act.steps import BROKEN, COURSES, ActionRun, End, Step, opening_fields
from plimsoll.guard.adapters.kubernetes import PodEviction
from plimsoll.guard.daemon.approvals import Approval, Approvals, ApprovalState
from plimsoll.guard.daemon.journal import DAMAGED
from plimsoll.guard.daemon.shared_state import SharedState
from plimsoll.guard.daemon.steps import LEARNED, REPLACEMENT, ActionSteps, EngineAdapters, SharedLock
from plimsoll.guard.judge.tracker import Grade
from plimsoll.render.journal import END_TEXTS


class Announcement(NamedTuple):
    """A message about an action: what guard did, or why it did not."""

    engine: str
    message: str
    is_urgent: bool = False
    fields: Mapping[str, Any] = {}


def attention_message(engine: str, end: FailedRestarts) -> str:
    """Returns why an engine that restarts did not fix needs attention, and the command that ends that."""
    resume = f"guardctl resume {engine} once it is fixed"
    if end.end != "held":
        return f"needs attention: a restart did not help ({', '.join(sorted(end.unmended))}); {resume}"
    if end.is_out:
        return f"needs attention: down or out of rotation; guardctl undrain {engine} puts it back in rotation, {resume}"
    return f"needs attention: its restart did not finish, and it was put back in rotation by hand; {resume}"


class ActionPorts(NamedTuple):
    """Ports of the action runner. An entry that cannot be written raises WorldFailed."""

    journal: JournalWriter
    lock: Lock
    observer: EngineObserver
    view: Callable[[frozenset[str]], FleetView]  # the fleet now; the argument names engines with an open action
    tell: Callable[[Announcement], None]
    wall: Callable[[], float]
    name: Callable[[], str] = lambda: secrets.token_hex(4)
    is_quiet: Callable[[], bool] = lambda: False  # no condition calls for an action: the view is not needed
    paused: Callable[[], str] = lambda: ""  # why all acting is off from outside; "" where it is not
    shared: SharedState | None = None  # state that outlives guard's node
    incident: Callable[[str], str] = lambda _: ""  # the id of an engine's open incident

    def write(self, kind: str, run: ActionRun, fields: Mapping[str, Any], step: str = "") -> None:
        self.journal.append(kind, engine=run.engine, action=run.action, step=step, fields=fields)

    def write_end(self, run: ActionRun, end: End, why: str) -> None:
        start = {"start_s": run.facts["seconds"]} if "seconds" in run.facts else {}
        replaced = {"replaced_by": run.facts[REPLACEMENT]} if REPLACEMENT in run.facts else {}
        self.write(CLOSED, run, {"end": str(end), "grade": str(run.grade), "kind": run.kind, "why": why, **start, **replaced})

    async def step(
        self, run: ActionRun, do: Callable[[ActionRun], Awaitable[Outcome]], show: Callable[[ActionRun], None]
    ) -> tuple[ActionRun, Outcome]:
        """Runs the next step, journaled before and after; `show` gets the action as begun, and as it is afterwards."""
        step = run.step
        assert step is not None
        self.write(INTENT, run, {"epoch": run.epoch, "undo": run.is_undoing}, str(step))
        if step is Step.STOP and not run.tries:
            died = {name: str(run.facts[name]) for name in ("failure", "requests") if name in run.facts}
            self.write(RESTART, run, {"own": True, **died})
        show(run.begun())
        is_saved = self.shared is not None and step in (Step.LEAVE, Step.DRAIN, Step.STOP) and not run.is_undoing
        unsaved = await self.shared.save() if self.shared is not None and is_saved else ""
        outcome = failed(f"the next guard could not know of it: {unsaved}", untouched=True) if unsaved else await do(run)
        fields = {"done": outcome.is_done, "says": outcome.message, "facts": dict(outcome.facts)}
        self.write(OUTCOME, run, fields, str(step))
        run = run.after(is_done=outcome.is_done, facts=outcome.facts)
        show(run)
        return run, outcome


MEND_EVERY_S = 10.0  # how often a journal that failed is tried again
AGAIN_S = 60.0  # after an action that changed nothing, doubled each time up to half an hour
LONGEST_AGAIN_S = 1_800.0


async def finish_without_journal(
    run: ActionRun, do: Callable[[ActionRun], Awaitable[Outcome]], tell: Callable[[Announcement], None]
) -> ActionRun:
    """Ends an action whose journal failed, as the next guard would: brings the engine back, and begins nothing new."""
    run = run.taken_over()
    while run.step is not None and run.step is not Step.PROBATION:
        outcome = await do(run)
        tell(Announcement(run.engine, f"{run.step}: {outcome.message}", fields={"done": outcome.is_done}))
        run = run.after(is_done=outcome.is_done, facts=outcome.facts)
    if run.end is End.HELD:
        says = f"{run.grade} needs attention: the journal cannot be written, and the engine could not be brought back"
        tell(Announcement(run.engine, says, is_urgent=True, fields={"end": str(End.HELD)}))
    return run


OLDER = (
    "the gate of {engine} has seen a greater epoch than {epoch}, the one of this guard's lock ({lock}): another guard acts"
    " under another lock, or this lock was lost and counts from one again; give all guards one lock, then start {engine} anew"
)
URGENT = frozenset({"CrashLoop", "SickCard", "BudgetSpent", "Unproved", "CutOff", "SameFailure"})
"""Reasons that block an action and that a person must hear of."""
QUIET_STEPS = frozenset({Step.PROBATION, Step.HOLD, Step.UNSHED})
"""Steps that need no lock and run alongside other actions."""
END_S = 20.0  # for undoing what is in progress when guard stops
_LEFT = ""  # the retry key of the actions that an earlier guard left


class Conductor:
    """Runs at most one disruptive action at a time; probation and shedding run alongside."""

    def __init__(
        self,
        adapters: Mapping[str, EngineAdapters],
        policy: ActPolicy,
        ports: ActionPorts,
        *,
        pause_s: float = 1.0,
        restore: Callable[[ActionRun], EngineAdapters | None] = lambda _: None,
    ) -> None:
        """`adapters` may change; `restore` makes those of an engine that has gone and on which an earlier guard was acting.

        BadInput if two engines have the same name in the journal, which redacts secrets in names.
        """
        self._adapters, self._policy, self._ports, self._pause_s, self._restore = adapters, policy, ports, pause_s, restore
        # By the name in the journal; pods that come later have no password in their names.
        self._names = {cleaned(Entry(0, 0.0, "", engine=name)).engine: name for name in adapters}
        if len(self._names) < len(adapters):
            raise BadInput("two engine names differ only in a password: give each its own name")
        self._again: dict[str, tuple[float, float]] = {}  # by engine: when it may be tried again, and the pause then
        self._beside: dict[str, asyncio.Task[None]] = {}  # by engine: probation, shedding
        self._at_work = ""
        self._blocked: dict[str, BlockedAction] = {}
        self.lock_trouble = ""  # why the fleet's lock could not be requested
        self.epoch_trouble = ""  # a gate has seen a greater epoch than that of our lock
        self._request: tuple[Grade, str, asyncio.Future[Decision]] | None = None
        self._is_looked_at = False  # whether the journal was checked for damage
        self._left: list[ActionRun] = []  # of an earlier guard, still waiting for the lock
        self._unwritten: dict[str, ActionRun] = {}  # by id: ended actions that could not be journaled
        self._ended: Counter[tuple[str, Grade, End]] = Counter()  # in this life, by engine
        self.stopped_acting = ""  # why guard does not act for now, such as a full disk
        self._mend_at = 0.0
        self._lock = SharedLock(ports.lock)
        self.runs: dict[str, ActionRun] = {}

        def tell(one: Approval, text: str) -> None:
            ports.tell(Announcement(one.engine, text, one.state is ApprovalState.ASKED, {"action": one.id}))

        self.approvals = Approvals(ports.journal, self.kept, policy, ports.wall, ports.name, tell)

    def needs(self) -> dict[str, str]:
        """Returns engines that need attention, and why: restarts did not fix them, or a restart they need stays blocked."""
        blocked = {
            engine: f"needs attention: restart blocked: {decision.message}"
            for engine, decision in self._blocked.items() if decision.reason in URGENT
        }  # fmt: skip
        unfixed = {engine: attention_message(engine, end) for engine, end in self.last_ends().items()}
        return {**blocked, **self.approvals.needs(), **unfixed}

    @property
    def is_draining(self) -> bool:
        """True while an engine that serves is being taken out of rotation."""
        return any(run.step in (Step.DRAIN, Step.IDLE) for run in self.runs.values())

    def ended(self) -> dict[tuple[str, Grade, End], int]:
        """Returns counts of ended actions since guard started, with zeros, so that the first one shows as an increase."""
        return {(name, rung, end): self._ended[name, rung, end] for name in self._adapters for rung in COURSES for end in End}

    def switch(self, name: str, engine: str, *, is_on: bool, who: str = "") -> None:
        """Pauses (`is_on`) or resumes; if that cannot be journaled, guard stops acting."""
        try:
            self._ports.journal.append(SWITCH, engine=engine, step=name, fields={"on": is_on, "who": who})
        except PlimsollError as error:
            self.stop_acting(error)
            raise
        if not is_on:
            self._again = {one: when for one, when in self._again.items() if engine and one != engine}

    # Earlier actions, by the journal

    @property
    def switches(self) -> Switches:
        found, why = read_switches(self.kept()), self._ports.paused()
        return found._replace(is_paused=True, why=why) if why else found

    @property
    def restarts(self) -> list[Restart]:
        return read_restarts(self.kept(), self._ports.wall())

    def last_ends(self) -> dict[str, FailedRestarts]:
        """Returns engines that restarts did not fix, until an operator resumes them."""
        return failed_restarts(self.kept())

    def kept(self) -> list[Entry]:
        """Returns the entries still needed, with the engines' real names instead of the redacted ones."""
        names = {written: name for written, name in self._names.items() if written != name}
        entries = self._ports.journal.kept()
        return [one._replace(engine=names.get(one.engine, one.engine)) for one in entries] if names else entries

    def is_off(self, engine: str) -> bool:
        """True if an operator has paused guard, this engine or restarts."""
        return bool(self._off(engine, Grade.RESTART))

    def _off(self, engine: str, grade: Grade) -> str:
        """Returns that an operator has paused this, else ""; an action in progress is then undone if still possible."""
        off = self.switches
        return "paused by an operator" if off.is_paused or engine in off.paused or grade in off.rungs_off else ""

    def _may_try(self, engine: str) -> bool:
        left_s = self._again.get(engine, (0.0, 0.0))[0] - self._ports.wall()
        return left_s <= 0 or left_s > LONGEST_AGAIN_S  # no wait because of a clock that was set back

    def _try_later(self, engine: str) -> None:
        pause_s = min(LONGEST_AGAIN_S, 2 * self._again.get(engine, (0.0, AGAIN_S / 2))[1])
        self._again[engine] = (self._ports.wall() + pause_s, pause_s)

    # Decisions and actions

    async def turn(self) -> None:
        """Runs one round: actions an earlier guard left, then requests of operators, then actions that conditions call for."""
        if self.stopped_acting and not self._mend():
            return
        with self.stopping():
            if self._left and self._may_try(_LEFT):
                await self.take_over()
            request, self._request = self._request, None
            if request is not None and not request[2].done():  # nothing is done for a caller that has gone
                plan = self._consider_request(request[0], request[1])
                request[2].set_result(plan)
                if isinstance(plan, ActionPlan):
                    await self.carry_out(plan)
            if request is not None:
                return
            decisions = self.decisions()
            self._tell_blocked(decisions)
            plans = self._due(decisions)
            if broken := [plan for plan in plans if plan.is_broken]:
                for problem in await asyncio.gather(*map(self.carry_out, broken), return_exceptions=True):
                    if isinstance(problem, BaseException):
                        raise problem
            elif plans:
                await self.carry_out(plans[0])

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Stops acting if the journal fails inside the block."""
        try:
            yield
        except PlimsollError as error:
            self.stop_acting(error)

    def stop_acting(self, error: PlimsollError) -> None:
        """Stops acting until the journal can be written again, and answers a waiting request."""
        # No action without its entry.
        if self.stopped_acting != str(error):
            self._ports.tell(Announcement("", f"guard stopped acting: {error}", is_urgent=True))
        self.stopped_acting, self._mend_at = str(error), self._ports.wall() + MEND_EVERY_S
        if self._request is not None and not self._request[2].done():
            self._request[2].set_result(self._busy(*self._request[:2]))

    def _mend(self) -> bool:
        """Tries from time to time to mend the journal; True once it can be written, and guard resumes its open actions."""
        now = self._ports.wall()
        if now < self._mend_at <= now + MEND_EVERY_S:
            return False
        self._mend_at = now + MEND_EVERY_S
        try:
            mend = getattr(self._ports.journal, "mend", None)
            if mend is not None:
                mend()
            self._ports.journal.append(NOTE, fields={"acts": "again", "stopped": self.stopped_acting})
            for run in open_actions(self.kept()):
                if run.action in self._unwritten:
                    self._close(self._unwritten[run.action], "it ended while the journal could not be written")
        except PlimsollError:
            return False
        self._ports.tell(Announcement("", f"guard acts again: its journal can be written ({self.stopped_acting})"))
        self.stopped_acting = ""
        self._left = [run for run in open_actions(self.kept()) if run.engine not in self.runs]
        return True

    def ask(self, grade: Grade, engine: str) -> asyncio.Future[Decision]:
        """Requests an action: decided at the next turn, blocked at once while guard is busy."""
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        if self.stopped_acting or self._at_work or self._request is not None:
            answer.set_result(self._busy(grade, engine))
        else:
            self._request = (grade, engine, answer)
        return answer

    def _busy(self, grade: Grade, engine: str) -> BlockedAction:
        if self.stopped_acting:
            return BlockedAction(engine, grade, ASKED, "StoppedActing", f"guard stopped acting: {self.stopped_acting}")
        why = f"guard is working on {self._at_work}" if self._at_work else "another request is being decided"
        return BlockedAction(engine, grade, ASKED, "Busy", why)

    def _consider_request(self, grade: Grade, engine: str) -> Decision:
        view = self._view()
        found = next((one for one in view.engines if one.name == engine), None)
        if found is None:
            return BlockedAction(engine, grade, ASKED, "NotWatched", "no engine of that name is watched")
        if engine in self.engines_at_work():
            step = self.runs[engine].step if engine in self.runs else "what an earlier guard left"
            return BlockedAction(engine, grade, ASKED, "Busy", f"an action on it is in progress: {step}")
        why = "an operator asked for it"
        if grade is Grade.RESTART and found.unproved and serves_nobody(found, ASKED):
            why += "; nothing proves that it serves nobody, and requests there are lost"
        return consider(view, self._policy, found, grade, ASKED, why)

    def decisions(self) -> list[Decision]:
        """Returns the actions that are called for now, planned or blocked."""
        return [] if self._ports.is_quiet() else decide(self._view(), self._policy)

    def help_broken(self) -> None:
        """Begins the restart of every engine that serves nobody, beside any other action: it takes no capacity away."""
        if self.stopped_acting or self._left:
            return
        for plan in self._due(self.decisions()):
            if plan.is_broken:
                self._begin_beside(plan)

    def _begin_beside(self, plan: ActionPlan) -> None:
        run = self.runs[plan.engine] = self._run_of(plan)
        self._beside[plan.engine] = asyncio.create_task(self._alone(plan.engine, lambda: self._begin(plan, run)))

    async def _alone(self, engine: str, work: Callable[[], Awaitable[None]]) -> None:
        with self.stopping():
            try:
                await work()
            except PlimsollError:
                self.runs.pop(engine, None)
                raise

    def _due(self, decisions: Sequence[Decision]) -> list[ActionPlan]:
        is_open = self.engines_at_work()
        due = [
            plan for plan in decisions
            if isinstance(plan, ActionPlan) and plan.engine not in is_open and self._may_try(plan.engine)
        ]  # fmt: skip
        return self.approvals.allowed(due, decisions)

    def _view(self, without: str = "") -> FleetView:
        """Returns the fleet now; counts restarts that are about to stop an engine, except that of `without`."""
        now = self._ports.wall()
        begun = [
            Restart(now, run.engine, True, str(run.facts.get("failure", "")), str(run.facts.get("requests", "")))  # noqa: FBT003
            for run in self.runs.values()
            if run.engine != without and Step.STOP in run.steps and not run.is_over and not run.is_down and not run.is_undoing
            and run.kind not in (DRAIN, UNDRAIN)
        ]  # fmt: skip
        view = self._ports.view(self.engines_at_work() - {without})
        busy = "" if without else self._at_work
        return view._replace(restarts=[*self.restarts, *begun], switches=self.switches, busy=busy, now=now)

    def engines_at_work(self) -> frozenset[str]:
        """Returns engines with an open action, and their replacements: no other action begins on them."""
        runs = [*self.runs.values(), *self._left]
        return (
            frozenset(self.runs) | {run.engine for run in runs} | {str(run.facts.get(REPLACEMENT, "")) for run in runs} - {""}
        )

    def _tell_blocked(self, decisions: Sequence[Decision]) -> None:
        before, self._blocked = self._blocked, {
            decision.engine: decision for decision in decisions
            if isinstance(decision, BlockedAction) and decision.engine not in self.runs
        }  # fmt: skip
        for engine, blocked in self._blocked.items():
            if engine not in before or before[engine].reason != blocked.reason:
                fields = {"reason": blocked.reason, "kind": blocked.kind}
                text = f"{blocked.grade} blocked: {blocked.message}"
                self._ports.tell(Announcement(engine, text, blocked.reason in URGENT, fields))

    def why_not_start(self, engine: str, *, is_counted: bool = False) -> str:
        """Returns why guard's own server, which does not run, is not started now; "" if it can be.

        `is_counted`: it ended while guard watched, so the restart budget and the cooldown apply.
        """
        if self.stopped_acting:
            return f"guard stopped acting: {self.stopped_acting}"
        if engine in self.engines_at_work() or not self._may_try(engine):
            return "an action on it is in progress"
        if self._off(engine, Grade.RESTART):
            return "it is paused (guardctl resume)"
        card = self._ports.observer.conditions(engine).get("card")
        if card is not None and card.is_true:
            return f"its GPU is faulty: {card.message}"
        if is_counted and (budget := spent(self.restarts, engine, self._policy, self._ports.wall())):
            return budget
        end = self.last_ends().get(engine)
        return "" if end is None else attention_message(engine, end)

    def start(self, engine: str, why: str) -> None:
        """Starts an ended server as a restart, with lock and memory check, beside any other action."""
        self._begin_beside(ActionPlan(engine, Grade.RESTART, START, why, BROKEN))

    def pauses(self) -> dict[str, tuple[float, str]]:
        """Returns the paused engines ("" for all), since when and by whom."""
        last = {entry.engine: entry for entry in self.kept() if entry.kind == SWITCH and entry.step == PAUSE}
        return {
            engine: (entry.at, str(entry.fields.get("who", ""))) for engine, entry in last.items() if entry.fields.get("on")
        }

    async def carry_out(self, plan: ActionPlan) -> None:
        """Runs one action up to its step that only waits."""
        run = self._run_of(plan)
        self.runs[plan.engine] = run  # before the first await
        if not plan.is_broken:
            self._at_work = plan.engine
        await self._begin(plan, run)

    def _run_of(self, plan: ActionPlan) -> ActionRun:
        return ActionRun(plan.action or self._ports.name(), plan.engine, plan.grade, plan.kind, plan.steps, plan.steps[0])

    async def _begin(self, plan: ActionPlan, run: ActionRun) -> None:
        look = await self._ports.observer.look(plan.engine) if plan.grade is Grade.RESTART else None
        facts: dict[str, Any] = {"kv_tokens_before": kv_tokens(look)}
        restarter: object = adapters.restarter if (adapters := self._adapters.get(plan.engine)) is not None else None
        if isinstance(restarter, PodEviction):
            facts |= {LEARNED + name: value for name, value in restarter.identity().items()}
        if look is not None:
            had_ended = bool(look.ended or look.gone) or None
            facts |= {"started_before": look.started_unix_s, "failure": look.failure or None, "had_ended": had_ended}
            facts["requests"] = look.requests or None
        run = run._replace(facts={name: value for name, value in facts.items() if value is not None})
        try:
            incident = {"incident": id_} if (id_ := self._ports.incident(plan.engine)) else {}
            self._ports.write(OPENED, run, {**opening_fields(run), "why": plan.why, "facts": dict(run.facts), **incident})
        except PlimsollError:
            self.runs.pop(plan.engine, None)
            self._at_work = "" if self._at_work == plan.engine else self._at_work
            raise
        self._ports.tell(Announcement(plan.engine, f"{plan.grade} because {plan.why}", fields={"action": run.action}))
        await self._go(run)

    # Actions of an earlier guard

    async def take_over(self) -> list[ActionRun]:
        """Finishes or undoes the actions that an earlier guard left open; returns those that still wait for the lock.

        Those are retried at later turns; until then no other action begins on their engines.
        """
        wrong = () if self._is_looked_at else getattr(self._ports.journal, "wrong", ())
        self._is_looked_at = True
        if damage := [str(one.message) for one in wrong if one.kind == DAMAGED]:
            # Actions may be missing from the journal: none is repeated until an operator resumes.
            self.switch(PAUSE, "", is_on=True, who="guard: its journal was damaged")
            says = f"guard is paused (guardctl resume): its journal was damaged: {damage[0]}"
            self._ports.tell(Announcement("", says, is_urgent=True))
        for entry in unknown_actions(self.kept()):
            kind = str(entry.fields.get("kind", ""))
            run = ActionRun(entry.action, entry.engine, Grade.RESTART, kind, BROKEN, None, end=End.HELD)
            self._close(run, "another version of guard began it, with steps that this one does not know")
        self._left = [run for run in open_actions(self.kept()) if run.engine not in self.runs]
        for run in list(self._left):
            steps = self._steps_for(run)
            if steps is None:
                self._close(run._replace(end=End.HELD), "it is no longer watched")
            elif run.engine in self.runs or not await self._take_over_one(run, steps):
                continue
            self._left.remove(run)
        if self._left:
            self._try_later(_LEFT)
        else:
            self._again.pop(_LEFT, None)
        return list(self._left)

    async def _take_over_one(self, run: ActionRun, steps: ActionSteps) -> bool:
        turned = run.taken_over()
        if turned.step not in QUIET_STEPS and turned.step is not None:
            # With a new lock: the earlier guard's is gone, or is refused as older.
            lock = await steps.do(Step.LOCK, turned)
            try:
                self._ports.write(NOTE, run, {"take-over": lock.message, "done": lock.is_done})
                if lock.is_done and self._ports.shared is not None:  # the lock's last holder may have ended it since
                    self._ports.shared.absorb()
            except PlimsollError:
                await steps.do(Step.UNLOCK, turned)  # else it would be held, not renewed, and never taken again
                raise
            if not lock.is_done:
                return False
            if self._ports.shared is not None and run.action not in {one.action for one in open_actions(self.kept())}:
                await steps.do(Step.UNLOCK, turned)
                return True
            turned = turned._replace(epoch=int(lock.facts["epoch"]), facts={**turned.facts, "epoch": lock.facts["epoch"]})
        says = f"taking over from an earlier guard that stopped in {run.step}: continues with {turned.step}"
        self._ports.tell(Announcement(run.engine, says))
        await self._go(turned, steps)
        return True

    # One action

    async def _go(self, run: ActionRun, steps: ActionSteps | None = None) -> None:
        steps = steps or self._steps_for(run)
        assert steps is not None, "an engine with a plan is watched"
        if Step.LEAVE not in run.steps:  # an engine that serves nobody is restarted beside other actions
            self._at_work = run.engine
        self.runs[run.engine] = run
        keeper = asyncio.create_task(steps.lock.keep())
        try:
            while run.step is not None and run.step not in QUIET_STEPS:
                run = await self._step(run, steps)
        except PlimsollError:
            steps.lock.is_lost = True  # so that no more engine is stopped
            run = await finish_without_journal(
                self.runs.pop(run.engine), lambda one: self._perform(one, steps), self._ports.tell
            )
            if run.step is None:
                self._unwritten[run.action] = run
            await steps.lock.release()
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, PlimsollError):
                async with asyncio.timeout(END_S):
                    # An action that can be undone is undone now; an engine that is down is left to the next guard.
                    back = self.runs[run.engine].taken_over()
                    while back.is_undoing and back.step is not None:
                        back = await self._step(back, steps)
                    if back.step is None:
                        self._close(back, "guard stopped")
            left = self.runs.pop(run.engine, None)
            if left is not None and left.is_down and left.step is not Step.PROBATION:
                says = f"guard stopped while the engine is down, in {left.step}: the next guard finishes it"
                self._ports.tell(Announcement(run.engine, says, is_urgent=True))
            raise
        except BaseException:
            self.runs.pop(run.engine, None)
            raise
        finally:
            self._at_work = "" if self._at_work == run.engine else self._at_work
            steps.lock.drop()
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        if run.step is None:
            self._close(run, "")
        else:
            self._beside[run.engine] = asyncio.create_task(self._alone(run.engine, lambda: self._wait_out(run, steps)))

    async def _wait_out(self, run: ActionRun, steps: ActionSteps) -> None:
        while run.step is not None:
            run = await self._step(run, steps)
        self._close(run, "")

    async def _step(self, run: ActionRun, steps: ActionSteps) -> ActionRun:
        step = run.step
        if run.tries:
            await asyncio.sleep(self._pause_s * 2.0**run.tries)
        run, outcome = await self._ports.step(
            run, lambda one: self._perform(one, steps), lambda one: self.runs.update({one.engine: one})
        )
        if step is Step.LOCK:
            self.lock_trouble = outcome.message if outcome.is_done is None else ""
        elif step is Step.DRAIN:
            is_older = bool(outcome.facts.get("stale"))
            self.epoch_trouble = OLDER.format(engine=run.engine, epoch=run.epoch, lock=self._lock.label) if is_older else ""
        fields = {"action": run.action, "done": outcome.is_done}
        self._ports.tell(Announcement(run.engine, f"{step}: {outcome.message}", fields=fields))
        return run

    async def _perform(self, run: ActionRun, steps: ActionSteps) -> Outcome:
        assert run.step is not None
        if run.step in (Step.DRAIN, Step.LEAVE) and not run.is_undoing and run.kind != START:
            # The lock is ours only now: another guard may have acted since the decision.
            view = self._view(without=run.engine)
            found = next((one for one in view.engines if one.name == run.engine), None)
            decision = None if found is None else consider(view, self._policy, found, run.grade, run.kind, "")
            if isinstance(decision, BlockedAction):
                return failed(decision.message)
        return await steps.do(run.step, run)

    def _close(self, run: ActionRun, why: str) -> None:
        end = run.end or End.DONE
        # Announced before it is journaled: a guard that dies in between announces it twice rather than never.
        says = f"{run.grade} {END_TEXTS[end]}" + (f": {why}" if why else "")
        self._ports.tell(Announcement(run.engine, says, end in (End.HELD, End.FAILED), {"action": run.action, "end": str(end)}))
        self.runs.pop(run.engine, None)
        self._beside.pop(run.engine, None)
        self._unwritten[run.action] = run
        self._ports.write_end(run, end, why)
        del self._unwritten[run.action]
        self._ended[run.engine, run.grade, end] += 1
        if end in (End.STOOD_BACK, End.UNDONE, End.FAILED):
            self._try_later(run.engine)
        else:
            self._again.pop(run.engine, None)

    def _steps_for(self, run: ActionRun) -> ActionSteps | None:
        adapters = self._adapters.get(run.engine) or self._restore(run)
        if adapters is None:
            return None
        return ActionSteps(
            adapters, self._lock, self._ports.observer, self._policy, pause_s=self._pause_s,
            is_off=lambda: self._off(run.engine, run.grade), adapters_of=self._adapters.get,
        )  # fmt: skip

    async def close(self) -> None:
        """Stops at once; open actions are left to the next guard, or to their leases."""
        for task in self._beside.values():
            task.cancel()
        await asyncio.gather(*self._beside.values(), return_exceptions=True)
