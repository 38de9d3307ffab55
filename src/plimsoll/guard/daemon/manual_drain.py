"""Manual drains, and the return of an engine to rotation.

In the journal a manual drain is a restart that is undone before anything is stopped: a guard that finds it open undoes it
like any other. It lasts until an operator ends it, at most an hour. The fleet's lock is held while the engine leaves and
returns, not in between, so that guard can act on other engines. A guard that acts on this engine later has a higher epoch;
the gate then refuses ours, and so this guard learns of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping

from plimsoll.errors import PlimsollError
from plimsoll.guard.act.decide import ASKED, ActionPlan, BlockedAction, Decision, Switches, consider, is_ready
from plimsoll.guard.act.journal_entry import NOTE, OPENED
from plimsoll.guard.act.journal_replay import DRAIN, PAUSE, UNDRAIN
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.act.steps import ActionRun, End, Step, open_action, opening_fields
from plimsoll.guard.daemon.conductor import QUIET_STEPS, ActionPorts, Announcement, Conductor, finish_without_journal
from plimsoll.guard.daemon.steps import ActionSteps, EngineAdapters
from plimsoll.guard.judge.look import Reach
from plimsoll.guard.judge.tracker import Grade

LONGEST_S = 3_600.0
ANSWER_S = 5.0  # how long a request waits for its result; the drain goes on
PATIENCE_S = 30.0  # for the lock, before the engine returns without it
WHY = "an operator asked for it back"
RECOVERED = "it recovered after guard gave up on it"
_NOT_ABOUT_DRAINING = ("card", "loop")  # conditions that block a restart, and not a drain


class ManualDrains:
    """Engines drained by operators. `runs` is the conductor's own table: it begins no action on engines in it."""

    def __init__(
        self,
        adapters: Mapping[str, EngineAdapters],
        policy: ActPolicy,
        ports: ActionPorts,
        runs: dict[str, ActionRun],
        *,
        longest_s: float = LONGEST_S,
        patience_s: float = PATIENCE_S,
        pause_s: float = 1.0,
    ) -> None:
        self._adapters, self._policy, self._ports, self.runs = adapters, policy, ports, runs
        self._longest_s, self._patience_s, self._pause_s = longest_s, patience_s, pause_s
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}
        self._back: dict[str, asyncio.Event] = {}

    @property
    def engines(self) -> frozenset[str]:
        return frozenset(self._tasks)

    async def drain(self, engine: str) -> Decision:
        """Takes an engine out of rotation; answers once it is out, or after a few seconds."""
        decision = self._consider(engine)
        if isinstance(decision, BlockedAction):
            return decision
        run = open_action(self._ports.name(), engine, Grade.RESTART, DRAIN, is_broken=False)
        self._ports.write(OPENED, run, {**opening_fields(run), "why": decision.why})
        self.runs[engine] = run
        self._back[engine] = asyncio.Event()
        self._tasks[engine] = task = asyncio.create_task(self._run(run))

        async def until_out() -> None:
            while engine in self.runs and self.runs[engine].step is not Step.IDLE:
                await asyncio.sleep(0.02)

        out = asyncio.create_task(until_out())
        await asyncio.wait({task, out}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        out.cancel()
        if task.done() and not task.cancelled() and task.exception() is None:
            return BlockedAction(engine, Grade.RESTART, DRAIN, "NotDone", task.result().message)
        return decision

    async def undrain(self, engine: str) -> Decision:
        task = self._tasks.get(engine)
        if task is None:
            return BlockedAction(engine, Grade.RESTART, DRAIN, "NotDrained", "no operator has drained it (guardctl actions)")
        self._back[engine].set()
        await asyncio.wait({task}, timeout=ANSWER_S)
        return ActionPlan(engine, Grade.RESTART, DRAIN, "an operator asked for it", (Step.UNDRAIN, Step.UNLOCK))

    async def close(self, limit_s: float = ANSWER_S) -> None:
        """Puts every engine back; announces those that take too long, and leaves them to the next guard and to their leases."""
        self._patience_s = min(self._patience_s, limit_s / 2)
        for back in self._back.values():
            back.set()
        tasks = dict(self._tasks)
        if tasks:
            await asyncio.wait(tasks.values(), timeout=limit_s)
        for engine, task in tasks.items():
            if not task.done():
                says = "guard stopped with the engine still drained by hand: the next guard puts it back in rotation, or you do"
                self._ports.tell(Announcement(engine, says, is_urgent=True))
                task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    # Decisions

    def _consider(self, engine: str) -> Decision:
        """Checks the rules that block its leaving, as for a restart, but not those that block a start.

        An operator may drain at any hour, whatever the budget, and also while guard is paused.
        """
        view, blocked = self._ports.view(frozenset(self.runs)), functools.partial(BlockedAction, engine, Grade.RESTART, DRAIN)
        found = next((one for one in view.engines if one.name == engine), None)
        if found is None:
            return blocked("NotWatched", "no engine of that name is watched")
        if engine in self.runs:
            return blocked("Busy", "guard is already working on it")
        adapters, policy = self._adapters.get(engine), self._policy
        if adapters is None or (adapters.gate is None and adapters.balancer is None):
            return blocked("NoGate", "neither a gate nor a balancer is configured that could drain it")
        conditions = {kind: one for kind, one in found.conditions.items() if kind not in _NOT_ABOUT_DRAINING}
        bare = found._replace(conditions=conditions, has_restarter=True, last_end=None)
        free = ActPolicy(most_away=policy.most_away, carries=policy.carries, may_be_last=policy.may_be_last, rollout_s=0.0)
        engines = [bare if one.name == engine else one for one in view.engines]
        at_work = (name for name, one in self.runs.items() if one.step not in QUIET_STEPS and one.kind != DRAIN)
        view = view._replace(engines=engines, restarts=(), switches=Switches(), busy=next(at_work, ""))
        decision = consider(view, free, bare, Grade.RESTART, ASKED, "an operator asked to drain it")
        if isinstance(decision, BlockedAction):
            return decision._replace(kind=DRAIN)
        return decision._replace(kind=DRAIN, steps=(Step.LOCK, Step.DRAIN, Step.UNLOCK))

    # Actions

    async def _run(self, run: ActionRun) -> Outcome:
        adapters = self._adapters[run.engine]
        steps = ActionSteps(adapters, self._ports.lock, self._ports.observer, self._policy, pause_s=self._pause_s)
        keeper = asyncio.create_task(steps.lock.keep())
        outcome = unsure("not started")
        try:
            while run.step is not None:
                assert run.step is not Step.STOP, "nothing is ever stopped here"
                step, undoing = run.step, run.is_undoing
                run, found = await self._ports.step(run, lambda one: self._perform(one, steps), self._show)
                outcome = found if not undoing and step in (Step.LOCK, Step.DRAIN) else outcome
            self._close(run, outcome)
        except PlimsollError as error:
            outcome, mine = unsure(str(error)), self.runs.get(run.engine)
            if mine is not None and mine.action == run.action:  # if not, the conductor has begun an action on it
                # The engine returns, with the lock if possible; if another guard owns it by now, its gate refuses.
                says = f"the drain by hand ends and the engine goes back in rotation: {error}"
                self._ports.tell(Announcement(run.engine, says, is_urgent=True))
                await steps.lock.acquire(f"{run.action} on {run.engine}")
                await finish_without_journal(mine, lambda one: self._perform(one, steps), self._ports.tell)
                await steps.lock.release()
        finally:
            keeper.cancel()
            steps.lock.drop()
            self._tasks.pop(run.engine, None)
            self._back.pop(run.engine, None)
            if (mine := self.runs.get(run.engine)) is not None and mine.action == run.action:
                del self.runs[run.engine]
        return outcome

    async def _perform(self, run: ActionRun, steps: ActionSteps) -> Outcome:
        assert run.step is not None
        if run.step is Step.EVIDENCE:
            return done("no evidence is saved for a drain by hand")
        return await (self._hold(run, steps) if run.step is Step.IDLE else steps.do(run.step, run))

    async def _hold(self, run: ActionRun, steps: ActionSteps) -> Outcome:
        """Renews the drain until the engine is wanted back; ends as failed, which leads to the undo steps."""
        engine, gate = run.engine, self._adapters[run.engine].gate
        if steps.lock.is_lost:
            return failed("lock lost: another guard may act")
        released = await steps.do(Step.UNLOCK, run)
        self._ports.write(NOTE, run, {"lock released": released.message, "done": released.is_done})
        told = f"drained by hand, for {self._longest_s / 60:.0f} min at most (guardctl undrain)"
        self._ports.tell(Announcement(engine, told))
        loop, says = asyncio.get_running_loop(), WHY
        end_s, renew_s = loop.time() + self._longest_s, loop.time() + self._policy.lease_s / 3
        waits_since_s: float | None = None  # for the lock
        while True:
            why = ""
            if loop.time() >= renew_s:
                renewed = await self._renew(run)
                if renewed.facts.get("stale"):
                    return failed(f"another guard acts on it now: {renewed.message}")
                why = renewed.message if renewed.is_done is False else ""
                renew_s = loop.time() + self._policy.lease_s / 3
            if not self._back[engine].is_set() and not why:  # does it return although no operator asked for it?
                if loop.time() >= end_s:
                    why = f"{self._longest_s / 60:.0f} min have passed"
                elif who := self._ports.observer.suffering(engine, self._policy):
                    # An engine that does not answer would carry no load.
                    why = who if is_ready(await self._ports.observer.look(engine)) else ""
            if why and not self._back[engine].is_set():
                says = why
                self._ports.tell(Announcement(engine, f"the drain by hand ends: {why}"))
                self._back[engine].set()
            if self._back[engine].is_set():
                taken = await steps.do(Step.LOCK, run)
                if taken.is_done:
                    self._ports.write(NOTE, run, {"lock taken again": taken.message, "done": taken.is_done})
                    return failed(says, epoch=int(taken.facts["epoch"]))
                waits_since_s = waits_since_s or loop.time()
                if gate is not None and loop.time() >= waits_since_s + self._patience_s:
                    # With our old epoch: if another guard drains it now, the gate refuses, and it is left to that guard.
                    return failed(f"{says}; without the lock: {taken.message}")
                await asyncio.sleep(self._pause_s)  # it stays out and is renewed; without a gate only the lock shows the owner
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._back[engine].wait(), min(self._pause_s, max(0.01, renew_s - loop.time())))

    async def _renew(self, run: ActionRun) -> Outcome:
        """Renews the drain, also at a balancer that forgot it (a reload); failed if that is impossible."""
        gate, balancer = self._adapters[run.engine].gate, self._adapters[run.engine].balancer
        # The gate first: if another guard owns the engine by now, the balancer is that guard's, too.
        if gate is not None:
            renewed = await gate.drain(run.epoch, self._policy.lease_s)
            if renewed.facts.get("stale"):
                return renewed
        if balancer is not None and await balancer.is_out() is False:
            taken = await balancer.take_out()
            if taken.is_done is False:
                return failed(f"its balancer sends requests to it again, and cannot be told to stop: {taken.message}")
            told = f"its balancer had put it back in rotation; taken out again: {taken.message}"
            self._ports.tell(Announcement(run.engine, told))
        return done("it is out")

    def _show(self, run: ActionRun) -> None:
        mine = self.runs.get(run.engine)
        if mine is None or mine.action == run.action:
            self.runs[run.engine] = run

    def _close(self, run: ActionRun, outcome: Outcome) -> None:
        end = run.end or End.UNDONE
        self._ports.write_end(run, end, outcome.message)
        said = f"not drained: {outcome.message}"
        if end is End.HELD:
            said = "needs attention: out of rotation, and could not be put back"
        elif outcome.is_done and end is not End.STOOD_BACK:
            said = "no longer drained by hand"
        self._ports.tell(Announcement(run.engine, said, end is End.HELD, {"action": run.action, "end": str(end)}))


class ReturnToService:
    """Puts engines back in rotation that guard gave up on, once an operator has repaired them or they recovered.

    In the journal it is a restart that is undone before anything is drained: a guard that finds it open puts the engine back,
    too. `guardctl resume ENGINE` states that the engine is fixed, or its own answers do if it recovered.
    """

    def __init__(
        self, adapters: Mapping[str, EngineAdapters], policy: ActPolicy, ports: ActionPorts, conductor: Conductor
    ) -> None:
        self._adapters, self._policy, self._ports, self._conductor = adapters, policy, ports, conductor
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}

    def is_held(self, engine: str) -> bool:
        """True if guard gave up on it, and it is still out of rotation."""
        end = self._conductor.last_ends().get(engine)
        return end is not None and end.is_out

    async def put_back(self, engine: str, *, is_recovered: bool = False) -> Decision:
        """Puts it back. `is_recovered`: nobody asked, so it must hold its context and answer a request first."""
        adapters, why = self._adapters.get(engine), RECOVERED if is_recovered else WHY
        if adapters is None:
            return BlockedAction(engine, Grade.RESTART, UNDRAIN, "NotWatched", "no engine of that name is watched")
        if engine in self._conductor.runs:
            return BlockedAction(engine, Grade.RESTART, UNDRAIN, "Busy", "guard is already working on it")
        run = open_action(self._ports.name(), engine, Grade.RESTART, UNDRAIN, is_broken=False)
        self._conductor.runs[engine] = run  # before the first await
        self._tasks[engine] = task = asyncio.create_task(self._run(run, adapters, why))
        await asyncio.wait({task}, timeout=ANSWER_S)  # the run goes on
        if task.done() and not (outcome := task.result()).is_done:
            return BlockedAction(engine, Grade.RESTART, UNDRAIN, "NotDone", outcome.message)
        return ActionPlan(engine, Grade.RESTART, UNDRAIN, why, (Step.LOCK, Step.UNDRAIN, Step.UNLOCK))

    async def close(self) -> None:
        """Waits a moment for runs in progress; the next guard does the rest."""
        tasks = set(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, run: ActionRun, adapters: EngineAdapters, why: str) -> Outcome:
        steps = ActionSteps(adapters, self._ports.lock, self._ports.observer, self._policy)
        keeper = asyncio.create_task(steps.lock.keep())
        try:
            look = await self._ports.observer.look(run.engine)
            if look is None or look.reach is not Reach.ANSWERS:
                return failed("unreachable: start it first")
            if why == RECOVERED:
                for step in (Step.CHECK, Step.WARM):
                    if not (outcome := await steps.do(step, run)).is_done:
                        return outcome
            self._ports.write(OPENED, run, {**opening_fields(run), "why": why})
            result, runs = unsure("not started"), self._conductor.runs
            while run.step is not None:
                step = run.step
                run, outcome = await self._ports.step(
                    run, lambda one: self._perform(one, steps), lambda one: runs.update({one.engine: one})
                )
                result = outcome if step in (Step.LOCK, Step.UNDRAIN) else result
            end = End.DONE if run.end is End.UNDONE else run.end or End.DONE
            self._ports.write_end(run, end, result.message)
            says = f"back in rotation, since {why}" if result.is_done else f"not put back in rotation: {result.message}"
            self._ports.tell(Announcement(run.engine, says, end is End.HELD, {"action": run.action, "end": str(end)}))
            if result.is_done and why == RECOVERED:
                self._conductor.switch(PAUSE, run.engine, is_on=False, who=f"guard: {RECOVERED}")
            return result
        except PlimsollError as error:
            await steps.lock.release()
            self._ports.tell(Announcement(run.engine, f"unknown whether it is back in rotation: {error}", is_urgent=True))
            return unsure(str(error))
        finally:
            keeper.cancel()
            steps.lock.drop()
            self._tasks.pop(run.engine, None)
            self._conductor.runs.pop(run.engine, None)

    async def _perform(self, run: ActionRun, steps: ActionSteps) -> Outcome:
        assert run.step is not None
        if run.step is Step.EVIDENCE:
            return done("no evidence is saved when an operator puts it back")
        if run.step is Step.DRAIN:
            return failed(WHY)  # leads to the undo steps
        return await steps.do(run.step, run)
