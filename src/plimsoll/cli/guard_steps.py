"""What is done in each step of an action. Each may be done again by a guard that was killed in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from plimsoll.cli.guard_light_steps import Learns, TellsEnd, now_s
from plimsoll.cli.guard_up_steps import UpHands
from plimsoll.domain.condition import Condition
from plimsoll.domain.look import Reach
from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.errors import PlimsollError
from plimsoll.guard.course import Course
from plimsoll.guard.decide import BROKEN_KINDS
from plimsoll.guard.idle import Sample, idleness
from plimsoll.guard.restart_checks import is_ready, was_restarted
from plimsoll.guard.steps import TRIES, Step

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
    def _deeds(self) -> Mapping[Step, Callable[[Course], Awaitable[Outcome]]]:
        return {
            Step.EVIDENCE: self._evidence, Step.LEAVE: self._leave, Step.DRAIN: self._drain, Step.IDLE: self._idle,
            Step.STOP: self._stop, Step.GONE: self._gone, Step.START: self._start, Step.READY: self._ready,
            Step.CHECK: self._check, Step.WARM: self._warm, Step.UNDRAIN: self._undrain, Step.UNLOCK: self._unlock,
            Step.PROBATION: self._probation, Step.SHED: self._shed, Step.HOLD: self._hold, Step.UNSHED: self._unshed,
            Step.COMPACT: self._compact, Step.VERIFY: self._verify, Step.LOCK: self._take_lock,
        }  # fmt: skip

    async def do(self, step: Step, course: Course) -> Outcome:
        """One step of it; after a mistake of ours in it the table says what follows, as after any other failure."""
        try:
            return await self._do(step, course)
        except PlimsollError:
            raise
        except Exception as problem:
            return unsure(f"a mistake of ours: {type(problem).__name__}")

    async def _do(self, step: Step, course: Course) -> Outcome:
        if step in _BEFORE_HARM and self.is_lock_lost:
            return failed("the lock was lost meanwhile: somebody else may act")
        if step in _BEFORE_HARM and (why := self._is_off()):
            return failed(why)
        restarter: object = self._parts.restarter
        if course.is_taken_over and isinstance(restarter, Learns):
            known = {name.removeprefix(LEARNED): value for name, value in course.facts.items() if name.startswith(LEARNED)}
            restarter.recall(known)
        if hasattr(self._parts.balancer, "epoch"):  # a hook passes it on, to whoever can refuse an older one
            setattr(self._parts.balancer, "epoch", course.epoch)  # noqa: B010  (not of every balancer)
        return await self._deeds[step](course)

    async def _evidence(self, course: Course) -> Outcome:
        if self._parts.evidence is None:
            return done("no folder for evidence is configured")
        return await self._parts.evidence.take(course.engine, course.action)

    # Out of service

    async def _leave(self, course: Course) -> Outcome:
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
        return done(f"{outcome.says}; it serves nobody anyway", is_out=False, **learned.facts)

    async def _learn(self) -> Outcome:
        """Whom the restarter would stop: it stands in the journal before anything is done."""
        restarter: object = self._parts.restarter
        if not isinstance(restarter, Learns):
            return done("nothing is to be learned")
        outcome = await restarter.learn()
        return outcome._replace(facts={LEARNED + name: value for name, value in outcome.facts.items()})

    async def _drain(self, course: Course) -> Outcome:
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

    async def _idle(self, course: Course) -> Outcome:
        """Wait for it, renewing the lease; when the balancer is seen to have let go, the gate refuses what still comes."""
        end_s = now_s() + self._policy.drain_within_s
        samples: list[Sample] = []
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
                samples = [*samples[-30:], Sample(look, await self._door_facts())]
                found = idleness(samples)
                says = found.says
                if found.is_idle and await self._has_let_go():
                    return done(says)
            if now_s() >= end_s:
                if self._policy.stragglers == "stop":
                    return done(
                        f"not idle after {self._policy.drain_within_s:.0f} s ({says}): stopped all the same, as configured"
                    )
                return failed(f"not idle after {self._policy.drain_within_s:.0f} s: {says}")
            await asyncio.sleep(self._pause_s)

    async def _keep_out(self, course: Course) -> Outcome:
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

    async def _stop(self, course: Course) -> Outcome:
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

    def _is_first(self, course: Course) -> bool:
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
        return told.says if told is not None and told.facts.get("maint") else ""  # it is an operator's since it left

    async def _stopped_by_hand(self, course: Course) -> str:
        """Who stopped it where it was not guard: what a person stops, guard does not start."""
        restarter: object = self._parts.restarter
        if not self._is_first(course) or not isinstance(restarter, TellsEnd):
            return ""
        outcome = await restarter.last_exit()
        return f"{outcome.says}: it is left so" if outcome.is_done and outcome.facts.get("by_hand") else ""

    async def _began_anew(self, course: Course) -> bool:
        """Whether another process is there than the one that was to be stopped."""
        if not course.is_taken_over:
            return False
        return was_restarted(await self._sight.look(course.engine), course.facts.get("started_before"))

    async def _wait_while_it_loads(self, course: Course) -> None:
        """One that served, runs and does not answer: somebody has started it anew, or it ends. Either shows soon."""
        if not course.is_taken_over or Step.DRAIN not in course.steps:
            return
        look = await self._sight.look(course.engine)
        if look is None or look.reach is not Reach.ANSWERS:
            await self._ready(course)

    async def _why_not_stop(self, course: Course) -> str:
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
                return outcome.says
        if self._parts.suffering is not None and (who := self._parts.suffering()):
            return who
        return "" if await self._is_down() else await self._why_not_idle(course)

    async def _is_broken_or_down(self, course: Course) -> bool:
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

    async def _why_not_idle(self, course: Course) -> str:
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
            return outcome.says
        facts = await self._door_facts() or {}
        is_idle = facts.get("phase") == "refusing" and facts.get("in_flight") == 0
        return "" if is_idle or self._policy.stragglers == "stop" else "work came in at the last moment"

    async def _is_untouched(self, course: Course) -> bool:
        """Whether it runs as it did before: by what this guard did, or by what is seen of it."""
        # What was broken before goes back to where it was, also when it is ending by now: then it is found dead.
        is_sure = Step.DRAIN not in course.steps or not course.is_taken_over
        return (is_sure and not self._has_sent_stop) or await self._serves(course)

    async def _goes_on_serving(self, course: Course) -> bool:
        """Whether the stop had no effect: one that ends still answers for a while, so it is watched for longer than that."""
        end_s = now_s() + STILL_SERVES_S
        while await self._serves(course):
            if now_s() >= end_s:
                return True
            await asyncio.sleep(self._pause_s)
        return False

    async def _serves(self, course: Course) -> bool:
        restarter = self._parts.restarter
        is_running = restarter is not None and await restarter.is_running() is True
        return is_running and is_ready(await self._sight.look(course.engine))

    async def _is_down(self) -> bool:
        """Not by the word of whoever runs it alone: that may be of another process than the one that serves."""
        if self._parts.restarter is None or await self._parts.restarter.is_running() is not False:
            return False
        look = await self._sight.look(self._parts.name)
        return look is None or look.reach is not Reach.ANSWERS

    async def _undrain(self, course: Course) -> Outcome:
        door, balancer = self._parts.door, self._parts.balancer
        says = []
        if door is not None:
            outcome = await door.undrain(course.epoch)
            if outcome.facts.get("stale"):
                state = await door.state()
                if state.facts.get("phase") != "serving":
                    return done(f"somebody else drains it now: {outcome.says}") if state.is_done else state
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
