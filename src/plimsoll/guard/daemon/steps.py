"""What is done in each step of an action. Each may be done again by a guard that was killed in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from plimsoll.errors import PlimsollError
from plimsoll.guard.act.decide import BROKEN_KINDS, enough_cache, is_ready, same_trouble, troubles, was_restarted
from plimsoll.guard.act.idle import IdleSample, idleness
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Balancer, EngineObserver, GateClient, Lock, Outcome, Restarter, done, failed, unsure
from plimsoll.guard.act.steps import TRIES, ActionRun, Step
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from plimsoll.unknown import Condition

# What acting needs of one engine, and the steps that stop nothing: the lock, shedding, compaction.

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
class RemembersStop(Protocol):
    """A restarter that must know, after a stop, whom it stopped: it is told what it knew before."""

    async def learn(self) -> Outcome:
        """Whom it would stop, as facts."""

    def recall(self, facts: Mapping[str, Any]) -> None:
        """What an earlier guard learned."""


@runtime_checkable
class KnowsExit(Protocol):
    """A restarter that knows how an engine ended."""

    async def last_exit(self) -> Outcome:
        """Done where it has ended, with `by_hand` where somebody stopped it, and `asked` where guard itself did."""


class EngineAdapters(NamedTuple):
    """What can be done to one engine; None is what guard was not told how to do."""

    name: str
    door: GateClient | None = None
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
        parts: EngineAdapters,
        lock: Lock,
        sight: EngineObserver,
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

    async def _take_lock(self, course: ActionRun) -> Outcome:
        outcome = await self._lock.acquire(f"{course.action} on {course.engine}")
        if outcome.is_done and not isinstance(outcome.facts.get("epoch"), int):
            return unsure("the lock was taken, but its number is not known")
        self._has_lock, self.is_lock_lost = bool(outcome.is_done), not outcome.is_done
        self._note_lock(outcome)
        return outcome

    async def _unlock(self, course: ActionRun) -> Outcome:
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

    async def _shed(self, course: ActionRun) -> Outcome:
        del course
        if self._parts.door is None:
            return failed("it has no gate")
        return await self._parts.door.shed(self._policy.shed_wait_s, self._policy.shed_lease_s)

    async def _hold(self, course: ActionRun) -> Outcome:
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
                    return done(f"it could not be renewed: {outcome.message}")
                renew_s = now_s() + self._policy.shed_lease_s / 3
            await asyncio.sleep(self._pause_s)

    async def _unshed(self, course: ActionRun) -> Outcome:
        del course
        return failed("it has no gate") if self._parts.door is None else await self._parts.door.unshed()

    async def _compact(self, course: ActionRun) -> Outcome:
        if self._parts.door is None:
            return failed("it has no gate")
        before = free_of(await self._sight.look(course.engine))
        outcome = await self._parts.door.compact()
        return outcome if before is None else outcome._replace(facts={**outcome.facts, "free_before": before})

    async def _verify(self, course: ActionRun) -> Outcome:
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


# The steps that bring an engine up again: its memory is back, it is started, ready, large enough, warm, and stays well.

OLD_TROUBLE_S = 120.0  # by then what was said of the process before is over, or it is of this one, too


class UpHands(LightHands):
    """Carries out the steps after a stop; each may be done again by a guard that was killed in it."""

    async def _gone(self, course: ActionRun) -> Outcome:
        del course
        restarter = self._parts.restarter
        if restarter is not None and not restarter.replaces and await restarter.is_running() is True:
            return done("it was started already: what the old one held is gone, or the start would have failed")
        if self._parts.memory is None:
            return done("nobody here can see the device's memory")
        return await self._parts.memory.wait_back(self._policy.gone_within_s)

    async def _start(self, course: ActionRun) -> Outcome:
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

    async def _ready(self, course: ActionRun) -> Outcome:
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

    async def _check(self, course: ActionRun) -> Outcome:
        look = await self._sight.look(course.engine)
        context = None if self._parts.context is None else await self._parts.context()
        return enough_cache(look, context, course.facts.get("kv_tokens_before"))

    async def _warm(self, course: ActionRun) -> Outcome:
        if self._parts.ask_once is None:
            return done("no request for warming up is configured")
        outcome = await self._parts.ask_once()
        if outcome.is_done is None:
            # What nobody could ask is no failure. But the request may have ended the engine: then it is not put back.
            await asyncio.sleep(self._pause_s)
            if not is_ready(await self._sight.look(course.engine)):
                return failed(f"{outcome.message}; now it does not answer any more")
        return outcome

    async def _probation(self, course: ActionRun) -> Outcome:
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


STILL_SERVES_S = 10.0
LEASE_MARGIN_S = 60.0  # by so much the drain's lease outlives the longest stop
LONGEST_LEASE_S = 3_600.0  # more the gate does not give
LEARNED = "learned_"
REFUSED_ALONE = "NobodyListens"  # of a condition: connections are refused, and that is all that is known
_BEFORE_HARM = frozenset({Step.EVIDENCE, Step.LEAVE, Step.DRAIN, Step.IDLE, Step.SHED, Step.COMPACT})
"""Only with the lock, and not while somebody has switched it off. A stop asks for both itself; after it only forward helps."""


class Hands(UpHands):
    """Carries out the steps of one action on one engine."""

    @property
    def _deeds(self) -> Mapping[Step, Callable[[ActionRun], Awaitable[Outcome]]]:
        return {
            Step.EVIDENCE: self._evidence, Step.LEAVE: self._leave, Step.DRAIN: self._drain, Step.IDLE: self._idle,
            Step.STOP: self._stop, Step.GONE: self._gone, Step.START: self._start, Step.READY: self._ready,
            Step.CHECK: self._check, Step.WARM: self._warm, Step.UNDRAIN: self._undrain, Step.UNLOCK: self._unlock,
            Step.PROBATION: self._probation, Step.SHED: self._shed, Step.HOLD: self._hold, Step.UNSHED: self._unshed,
            Step.COMPACT: self._compact, Step.VERIFY: self._verify, Step.LOCK: self._take_lock,
        }  # fmt: skip

    async def do(self, step: Step, course: ActionRun) -> Outcome:
        """One step of it; after a mistake of ours in it the table says what follows, as after any other failure."""
        try:
            return await self._do(step, course)
        except PlimsollError:
            raise
        except Exception as problem:
            return unsure(f"a mistake of ours: {type(problem).__name__}")

    async def _do(self, step: Step, course: ActionRun) -> Outcome:
        if step in _BEFORE_HARM and self.is_lock_lost:
            return failed("the lock was lost meanwhile: somebody else may act")
        if step in _BEFORE_HARM and (why := self._is_off()):
            return failed(why)
        restarter: object = self._parts.restarter
        if course.is_taken_over and isinstance(restarter, RemembersStop):
            known = {name.removeprefix(LEARNED): value for name, value in course.facts.items() if name.startswith(LEARNED)}
            restarter.recall(known)
        if hasattr(self._parts.balancer, "epoch"):  # a hook passes it on, to whoever can refuse an older one
            setattr(self._parts.balancer, "epoch", course.epoch)  # noqa: B010  (not of every balancer)
        return await self._deeds[step](course)

    async def _evidence(self, course: ActionRun) -> Outcome:
        if self._parts.evidence is None:
            return done("no folder for evidence is configured")
        return await self._parts.evidence.take(course.engine, course.action)

    # Out of service

    async def _leave(self, course: ActionRun) -> Outcome:
        """The balancer's own checks see a dead engine too: that it cannot be told is no reason to leave the engine dead."""
        del course
        learned = await self._learn()
        if learned.is_done is False:
            return learned
        balancer = self._parts.balancer
        if balancer is None:
            return done("no balancer is configured", **learned.facts)
        outcome = await balancer.take_out()
        if outcome.is_done:
            return outcome._replace(facts={**outcome.facts, **learned.facts})
        if outcome.facts.get("maint"):
            return outcome
        return done(f"{outcome.message}; it serves nobody anyway", is_out=False, **learned.facts)

    async def _learn(self) -> Outcome:
        """Whom the restarter would stop: it stands in the journal before anything is done."""
        restarter: object = self._parts.restarter
        if not isinstance(restarter, RemembersStop):
            return done("nothing is to be learned")
        outcome = await restarter.learn()
        return outcome._replace(facts={LEARNED + name: value for name, value in outcome.facts.items()})

    async def _drain(self, course: ActionRun) -> Outcome:
        door, balancer = self._parts.door, self._parts.balancer
        if door is None and balancer is None:
            return failed("it has neither a gate nor a balancer that could keep new work away")
        learned = await self._learn()
        if not learned.is_done:
            return learned
        # The balancer first: its checks may see a gate that is not ready, and then it no longer knows who is the last one up.
        if balancer is not None:
            outcome = await balancer.take_out()
            if not outcome.is_done:
                return outcome
            if await balancer.is_out() is False:
                return failed("the balancer took the word and still sends to it")
        if door is not None:
            outcome = await door.drain(course.epoch, self._policy.lease_s)
            if not outcome.is_done:
                return outcome
        says = "it is out of the balancer" if door is None else "it drains, and is out of the balancer"
        return done(says, **learned.facts)

    async def _idle(self, course: ActionRun) -> Outcome:
        """Wait for it, renewing the lease; when the balancer is seen to have let go, the gate refuses what still comes."""
        end_s = now_s() + self._policy.drain_within_s
        samples: list[IdleSample] = []
        renew_s = 0.0
        says = "it was not looked at"
        while True:
            if self.is_lock_lost:
                return failed("the lock was lost while it drained")
            if why := self._is_off():
                return failed(why)
            if await self._is_down():
                who = await self._stopped_by_hand(course)
                return failed(who) if who else done("it is down: nothing is in flight any more")
            if self._parts.suffering is not None and (who := self._parts.suffering()):
                return failed(who)
            if now_s() >= renew_s:
                outcome = await self._keep_out(course)
                if outcome.is_done is False:
                    return outcome
                renew_s = now_s() + self._policy.lease_s / 3 if outcome.is_done else 0.0
            look = await self._sight.look(course.engine)
            if look is not None:
                samples = [*samples[-30:], IdleSample(look, await self._door_facts())]
                found = idleness(samples)
                says = found.message
                if found.is_idle and await self._has_let_go():
                    return done(says)
            if now_s() >= end_s:
                if self._policy.stragglers == "stop":
                    return done(
                        f"not idle after {self._policy.drain_within_s:.0f} s ({says}): stopped all the same, as configured"
                    )
                return failed(f"not idle after {self._policy.drain_within_s:.0f} s: {says}")
            await asyncio.sleep(self._pause_s)

    async def _keep_out(self, course: ActionRun) -> Outcome:
        """Out of the balancer, also where that forgot it (a reload), and drained a while longer."""
        door, balancer = self._parts.door, self._parts.balancer
        is_out = None if balancer is None else await balancer.is_out()
        if balancer is not None and is_out is False:
            outcome = await balancer.take_out()
            if not outcome.is_done:
                return outcome
            is_out = await balancer.is_out()
        if door is None:
            return done("it is out of the balancer")
        # Who cannot say that the balancer has let go leaves it to the gate when to refuse: it sees what still comes.
        return await door.drain(course.epoch, self._policy.lease_s, refuse=is_out is True)

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

    async def _stop(self, course: ActionRun) -> Outcome:
        """Only what is certainly idle or broken; `untouched` where nothing was done to it, so that it can be put back."""
        restarter, memory = self._parts.restarter, self._parts.memory
        if restarter is None:
            return failed("guard was not told how to stop it", untouched=True)
        why = await self._why_not_ours()
        if why and self._is_first(course):
            return failed(why, untouched=True)
        if await self._is_down():
            if who := await self._stopped_by_hand(course):
                return failed(who, untouched=True)
            if self.is_lock_lost:
                return done("it is down already", was_running=False)
        else:
            await self._wait_while_it_loads(course)
            if await self._began_anew(course):
                return done("it was started anew since then: there is nothing left to stop", was_running=False)
            if why := why or await self._why_not_stop(course):
                if await self._began_anew(course):  # a while has passed
                    return done("it was started anew meanwhile: there is nothing left to stop", was_running=False)
                return failed(why, untouched=await self._is_untouched(course))
        if memory is not None:
            await memory.note()
        self._has_sent_stop = True
        outcome = await restarter.stop(self._policy.stop_within_s)
        is_refused = outcome.is_done is False and (outcome.facts.get("budget") is True or await self._goes_on_serving(course))
        return outcome._replace(facts={**outcome.facts, "untouched": True}) if is_refused else outcome

    def _is_first(self, course: ActionRun) -> bool:
        """Whether nothing was stopped yet, neither by this guard nor by one before it."""
        return not course.is_taken_over and not self._has_sent_stop

    async def _why_not_ours(self) -> str:
        """Who else may act, or wants it off; whether it is down or not."""
        if why := self._is_off():
            return why
        # Nothing but this protects a process from two guards at once; a gate refuses the older one, a signal does not.
        if self.is_lock_lost or not (await self._lock.renew()).is_done:
            return "the lock is not certainly ours any more"
        balancer = self._parts.balancer
        told = None if balancer is None else await balancer.take_out()
        return told.message if told is not None and told.facts.get("maint") else ""  # it is an operator's since it left

    async def _stopped_by_hand(self, course: ActionRun) -> str:
        """Who stopped it where it was not guard: what a person stops, guard does not start."""
        restarter: object = self._parts.restarter
        if not self._is_first(course) or not isinstance(restarter, KnowsExit):
            return ""
        outcome = await restarter.last_exit()
        return f"{outcome.message}: it is left so" if outcome.is_done and outcome.facts.get("by_hand") else ""

    async def _began_anew(self, course: ActionRun) -> bool:
        """Whether another process is there than the one that was to be stopped."""
        if not course.is_taken_over:
            return False
        return was_restarted(await self._sight.look(course.engine), course.facts.get("started_before"))

    async def _wait_while_it_loads(self, course: ActionRun) -> None:
        """One that served, runs and does not answer: somebody has started it anew, or it ends. Either shows soon."""
        if not course.is_taken_over or Step.DRAIN not in course.steps:
            return
        look = await self._sight.look(course.engine)
        if look is None or look.reach is not Reach.ANSWERS:
            await self._ready(course)

    async def _why_not_stop(self, course: ActionRun) -> str:
        """What speaks against it at the last moment."""
        restarter = self._parts.restarter
        if restarter is not None and not restarter.replaces and await restarter.is_running() is False:
            look = await self._sight.look(course.engine)
            if look is not None and look.reach is Reach.ANSWERS:
                return "it answers, and whoever runs it says that it does not run: that is another process"
        if Step.DRAIN not in course.steps:
            return "" if await self._is_broken_or_down(course) else "it is not certain any more that it serves nobody"
        if course.is_taken_over and not course.tries:
            # The lease may have ended meanwhile, and work may have come.
            outcome = await self._idle(course)
            if not outcome.is_done:
                return outcome.message
        if self._parts.suffering is not None and (who := self._parts.suffering()):
            return who
        return "" if await self._is_down() else await self._why_not_idle(course)

    async def _is_broken_or_down(self, course: ActionRun) -> bool:
        """As it is judged now. An earlier guard may have stopped it a moment ago: then it is given the time to end."""
        end_s = now_s() + (self._policy.stop_within_s if course.is_taken_over else 0.0)
        while True:
            look = await self._sight.look(course.engine)  # what is judged is of this very moment
            conditions = self._sight.conditions(course.engine)
            held = [conditions[kind] for kind in BROKEN_KINDS & conditions.keys() if conditions[kind].is_true]
            if (look is not None and held and not await self._is_reached(held)) or await self._is_down():
                return True
            if now_s() >= end_s or await self._serves(course):
                return False
            await asyncio.sleep(self._pause_s)

    async def _is_reached(self, held: Sequence[Condition]) -> bool:
        """Whether only guard itself finds nobody there: a rule between the two, or another port; and others still reach it."""
        if any(one.reason != REFUSED_ALONE for one in held) or self._parts.balancer is None:
            return False
        return (await self._parts.balancer.connections() or 0) > 0

    async def _why_not_idle(self, course: ActionRun) -> str:
        """The lease must outlive the stop; without a gate there is none, and the balancer keeps work away."""
        door = self._parts.door
        if door is None:
            return ""
        facts = await self._door_facts()
        if facts is None:
            return "" if self._has_sent_stop else "its gate does not answer"
        lease_s = min(LONGEST_LEASE_S, self._policy.stop_within_s + LEASE_MARGIN_S)
        outcome = await door.drain(course.epoch, lease_s, refuse=facts.get("phase") == "refusing")
        if not outcome.is_done:
            return outcome.message
        facts = await self._door_facts() or {}
        is_idle = facts.get("phase") == "refusing" and facts.get("in_flight") == 0
        return "" if is_idle or self._policy.stragglers == "stop" else "work came in at the last moment"

    async def _is_untouched(self, course: ActionRun) -> bool:
        """Whether it runs as it did before: by what this guard did, or by what is seen of it."""
        # What was broken before goes back to where it was, also when it is ending by now: then it is found dead.
        is_sure = Step.DRAIN not in course.steps or not course.is_taken_over
        return (is_sure and not self._has_sent_stop) or await self._serves(course)

    async def _goes_on_serving(self, course: ActionRun) -> bool:
        """Whether the stop had no effect: one that ends still answers for a while, so it is watched for longer than that."""
        end_s = now_s() + STILL_SERVES_S
        while await self._serves(course):
            if now_s() >= end_s:
                return True
            await asyncio.sleep(self._pause_s)
        return False

    async def _serves(self, course: ActionRun) -> bool:
        restarter = self._parts.restarter
        is_running = restarter is not None and await restarter.is_running() is True
        return is_running and is_ready(await self._sight.look(course.engine))

    async def _is_down(self) -> bool:
        """Not by the word of whoever runs it alone: that may be of another process than the one that serves."""
        if self._parts.restarter is None or await self._parts.restarter.is_running() is not False:
            return False
        look = await self._sight.look(self._parts.name)
        return look is None or look.reach is not Reach.ANSWERS

    async def _undrain(self, course: ActionRun) -> Outcome:
        door, balancer = self._parts.door, self._parts.balancer
        says = []
        if door is not None:
            outcome = await door.undrain(course.epoch)
            if outcome.facts.get("stale"):
                state = await door.state()
                if state.facts.get("phase") != "serving":
                    return done(f"somebody else drains it now: {outcome.message}") if state.is_done else state
                # Whoever drained it later has ended that. A take-out of ours that came late would keep it out for ever.
                outcome = done("its gate takes work")
            # One that is down has no drain: a new process begins without one. And one that was never drained needs no end.
            if not outcome.is_done and Step.DRAIN in course.steps and not await self._is_down():
                if not course.is_undoing or course.tries + 1 < TRIES[Step.UNDRAIN]:
                    return outcome
                await asyncio.sleep(
                    min(LONGEST_LEASE_S, max(self._policy.lease_s, self._policy.stop_within_s + LEASE_MARGIN_S))
                )
            says.append(
                "its gate takes work" if outcome.is_done else "its gate does not answer, and no lease of ours runs there"
            )
        if balancer is not None:
            outcome = await balancer.put_back()
            if not outcome.is_done:
                return outcome
            says.append("it is back in the balancer")
        return done(" and ".join(says) or "nothing had been taken out")
