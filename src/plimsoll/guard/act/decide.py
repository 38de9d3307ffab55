"""Decides what to do about a judged fleet: one action, or the reason why it is blocked. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from plimsoll.doctor.remedies.runtime import cache_tokens
from plimsoll.guard.act.capacity import EngineLoad, without
from plimsoll.guard.act.policy import DAY_S, HOUR_S, ActPolicy
from plimsoll.guard.act.ports import Outcome, done, failed
from plimsoll.guard.act.steps import STEP_TEXTS, Step, steps_of
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from plimsoll.unknown import Condition, Status, Unknown


class Restart(NamedTuple):
    """A past restart: when, by wall clock, of which engine, whether guard made it, and the failure it followed."""

    at: float
    engine: str
    is_own: bool = True
    failure: str = ""  # how the engine ended, as its supervisor said; "" where nothing is known
    requests: str = ""  # the shapes of those that it had begun then, separated by "; "


def spent(restarts: Sequence[Restart], engine: str, policy: ActPolicy, now: float) -> str:
    """Why the restart budget is spent, by the tightest limit or the cooldown (`backoff`) after the last restart; "" if not.

    A time in the future is not believed: journal_replay dates such a restart by its neighbours.
    """
    times = sorted(min(one.at, now) for one in restarts if one.at > now - DAY_S)
    mine = [one for one in restarts if one.at > now - DAY_S and one.engine == engine]
    own = sorted(min(one.at, now) for one in mine)
    limits = (
        (own, policy.restarts_per_hour, HOUR_S, "of this engine in an hour"),
        (own, policy.restarts_per_day, DAY_S, "of this engine in a day"),
        (times, policy.fleet_restarts_per_hour, HOUR_S, "of the fleet in an hour"),
        (times, policy.fleet_restarts_per_day, DAY_S, "of the fleet in a day"),
    )
    for when, most, span_s, words in limits:
        recent = sum(at > now - span_s for at in when)
        if recent >= most:
            return f"{recent} restarts {words}, {most} are allowed"
    # A single restart by somebody else, such as a deployment, is no failure: the first crash after it is acted on at once.
    if own and (len(own) > 1 or mine[0].is_own):
        cooldown_s = min(policy.longest_backoff_s, policy.backoff_s * 2.0 ** (len(own) - 1))
        if (ago_s := now - own[-1]) < cooldown_s:
            return f"its last restart was {ago_s:.0f} s ago; after {len(own)} in a day the cooldown is {cooldown_s:.0f} s"
    return ""


BROKEN_KINDS = frozenset({"dead", "wedged", "hung"})
"""An engine of which one of these holds serves nobody: to stop it loses nothing."""
PROBATION_KINDS = ("dead", "wedged", "hung", "stalled", "slow", "garbage", "limping", "card")
"""Conditions that no engine may have that was just put back, whatever it was restarted for."""
ASKED = "asked"  # in place of a condition: a person wants it
START = "start"  # in place of a condition: the server that guard was given does not run when guard begins
ORDER = (Grade.RESTART, Grade.COMPACT, Grade.SHED)
_STALE_LOOKS = 3.5
NOT_BY_REQUESTS = frozenset({"collectives"})  # failures of what engines share, and of no request
SAME_FAILURE_S = 300.0  # two engines of a group that end the same way within this time may have met the same request


class FailedRestarts(NamedTuple):
    """How restarts of an engine ended that did not end well, until one does or somebody resumes it."""

    kind: str  # the condition that the last of them was about
    end: str  # "failed", or "held"
    unmended: frozenset[str] = frozenset()  # the reasons for which a restart did not help
    is_out: bool = False  # it was held, and nobody has put it back since


class EngineStatus(NamedTuple):
    """Everything about one engine that decides whether guard acts on it."""

    name: str
    conditions: Mapping[str, Condition]
    load: EngineLoad
    age_s: float  # of the last look
    every_s: float = 5.0
    group: str = ""
    is_away: bool = False  # it does not answer, starts, is drained, or was held and not put back
    changed_s: float | None = None  # how long ago its version or its flags changed
    only_observed: str = ""  # why nothing may be done to it: a KV connector, several nodes, no adapter
    has_gate: bool = True
    has_restarter: bool = True
    last_end: FailedRestarts | None = None
    unproved: str = ""  # why it may serve somebody all the same; "" where a witness proves that it serves nobody
    has_local_proof: bool = True  # that witness needs no network of guard's own
    is_seen_serving: bool = False  # its gate or its balancer sees it serve, whatever guard sees
    failure: str = ""  # how its process ended, as its supervisor said
    requests: str = ""  # the shapes of those that it had begun then, separated by "; "
    leaving: str = ""  # who else is ending it: its pod is deleted, its node taken back, its owner scaled to zero
    cordoned: str = ""  # its node takes no new pods
    rollout: str = ""  # of the owner of its pod
    replicas: int | None = None  # pods that its owner wants; None where it is no pod
    missing: int = 0  # of those, not ready


class Switches(NamedTuple):
    """Actions that people have switched off; kept across guard's own restarts."""

    is_paused: bool = False
    paused: frozenset[str] = frozenset()  # engines
    rungs_off: frozenset[Grade] = frozenset()
    why: str = ""  # all of it, where no command of guardctl ends that


class FleetView(NamedTuple):
    """The fleet at one moment."""

    engines: Sequence[EngineStatus]
    restarts: Sequence[Restart] = ()
    switches: Switches = Switches()
    busy: str = ""  # the engine that guard does something about already
    now: float = 0.0  # wall clock
    minute: int = 0  # of the day, where the hours hold
    cut_off: str = ""  # why guard doubts its own way to the engines


class ActionPlan(NamedTuple):
    """An action to take on one engine, with its steps and the reason."""

    engine: str
    grade: Grade
    kind: str
    why: str
    steps: tuple[Step, ...]
    needs_approval: bool = False
    action: str = ""  # its id, where a person has approved it under that

    @property
    def is_broken(self) -> bool:
        """True if the engine serves nobody: the action takes no capacity away, and runs beside other actions."""
        return self.grade is Grade.RESTART and Step.LEAVE in self.steps

    def __str__(self) -> str:
        return f"{self.engine}: {self.grade} because {self.why}"

    def lines(self) -> list[str]:
        """Returns a line for every step, with its checks before and after and its undo."""
        return [
            f"{number}. {step}: {about.does}; before: {about.before}; after: {about.after}; undo: {about.undo}"
            for number, step in enumerate(self.steps, 1)
            for about in (STEP_TEXTS[step],)
        ]


class BlockedAction(NamedTuple):
    """An action that is not taken, and why."""

    engine: str
    grade: Grade
    kind: str
    reason: str  # one word a program can test
    message: str

    def __str__(self) -> str:
        return f"{self.engine}: no {self.grade}: {self.message}"


Decision = ActionPlan | BlockedAction


def decide(view: FleetView, policy: ActPolicy) -> list[Decision]:
    """Returns one decision for every engine with an active condition that can lead to an action; the most harmed first.

    Every engine that serves nobody may get a plan. At most one plan takes capacity away, and only if it is the only plan.
    """
    decisions: list[Decision] = []
    engines = {engine.name: engine for engine in view.engines}
    for engine in view.engines:
        # The condition that calls for the most disruptive action decides.
        held = [kind for kind, condition in engine.conditions.items() if kind in GRADES and is_active(condition)]
        if held:
            kind = min(held, key=lambda one: (ORDER.index(GRADES[one]), one not in BROKEN_KINDS))
            decisions.append(consider(view, policy, engine, GRADES[kind], kind, engine.conditions[kind].message))
    decisions.sort(key=lambda one: (ORDER.index(one.grade), one.kind not in BROKEN_KINDS, one.engine))
    is_taken = False
    restarts = list(view.restarts)
    for place, decision in enumerate(decisions):
        if not isinstance(decision, ActionPlan):
            continue
        engine = engines[decision.engine]
        if decision.is_broken and is_taken:  # those planned before it count against the budget, and as deaths of its group
            more = view._replace(restarts=restarts)
            decisions[place] = consider(more, policy, engine, decision.grade, decision.kind, decision.why)
        elif is_taken:
            message = "one engine at a time: another one goes first"
            decisions[place] = BlockedAction(decision.engine, decision.grade, decision.kind, "Busy", message)
        if isinstance(decisions[place], ActionPlan):
            is_taken = True
            if decision.grade is Grade.RESTART:
                restarts.append(Restart(view.now, engine.name, True, engine.failure, engine.requests))  # noqa: FBT003
    return decisions


def consider(view: FleetView, policy: ActPolicy, engine: EngineStatus, grade: Grade, kind: str, why: str) -> Decision:
    """Returns a plan for this action, or the first reason that blocks it."""
    if (first := next(_against(view, policy, engine, grade, kind), None)) is not None:
        return BlockedAction(engine.name, grade, kind, *first)
    # A person's request is its own approval. The only replica of an owner is never evicted without a person.
    is_only = grade is Grade.RESTART and engine.replicas is not None and engine.replicas <= 1
    needs_approval = kind != ASKED and (is_only or grade in policy.approve)
    return ActionPlan(engine.name, grade, kind, why, steps_of(grade, is_broken=serves_nobody(engine, kind)), needs_approval)


def is_active(condition: Condition) -> bool:
    """True if the condition is true and the last look still shows it: guard does not act on one that is ending."""
    return condition.is_true and not condition.is_ending


def serves_nobody(engine: EngineStatus, kind: str) -> bool:
    """True if the condition means that the engine serves nobody; for a person's request, its other conditions decide."""
    if kind in BROKEN_KINDS:
        return True
    return (
        kind == ASKED
        and not engine.is_seen_serving
        and any(is_active(engine.conditions[one]) for one in BROKEN_KINDS & engine.conditions.keys())
    )


def _against(view: FleetView, policy: ActPolicy, engine: EngineStatus, grade: Grade, kind: str) -> Iterator[tuple[str, str]]:
    """Yields the reason and the message of every rule that blocks the action, in order."""
    switches, is_broken = view.switches, serves_nobody(engine, kind)
    if switches.is_paused:
        yield "Paused", f"guard is paused: {switches.why}" if switches.why else "guard is paused (guardctl resume)"
    if engine.name in switches.paused:
        yield "Paused", "it is paused (guardctl resume ENGINE)"
    if grade in switches.rungs_off:
        yield "Paused", f"{grade} is switched off (guardctl resume --rung {grade})"
    if view.busy and not is_broken:
        yield "Busy", f"guard is acting on {view.busy}"
    if grade not in policy.rungs and kind != ASKED:
        yield "RungOff", f"{grade} is not among the rungs of its configuration"
    if engine.only_observed:
        yield "OnlyObserved", engine.only_observed
    if engine.leaving:
        yield "Leaving", f"{engine.leaving}: that is no crash, and guard leaves it alone"
    if engine.cordoned and grade is Grade.RESTART and not is_broken:  # one that serves nobody is better off elsewhere
        yield "Leaving", f"{engine.cordoned}: whoever drains it moves its pods"
    if engine.age_s > _STALE_LOOKS * engine.every_s + 10.0:
        yield "Unknown", f"the last look is {engine.age_s:.0f} s old"
    if any(kind in engine.conditions and engine.conditions[kind].reason == "SeveralServers" for kind in GRADES):
        yield "Unknown", "several servers answer at its address"
    if not engine.has_gate and grade is not Grade.RESTART:
        yield "NoGate", "it has no gate"
    if grade is Grade.RESTART:
        if not engine.has_gate and not is_broken and policy.stragglers != "stop":
            yield "NoGate", "it has no gate, and without one idleness is unknown"
        yield from _against_restart(view, policy, engine, kind, is_broken=is_broken)


def _against_restart(
    view: FleetView, policy: ActPolicy, engine: EngineStatus, kind: str, *, is_broken: bool
) -> Iterator[tuple[str, str]]:
    others = group_peers(engine, view.engines)
    if not engine.has_restarter:
        yield "NoRestarter", "no restarter is configured for it"
    # An unreadable card is usual (another host); one that was readable until now is not.
    if (card := engine.conditions.get("card")) is not None and card.status is Status.TRUE:
        yield "SickCard", f"its card is sick: {card.message}"
    # A person who asks for a start knows of the earlier ones, and what has been mended since.
    if (loop := engine.conditions.get("loop")) is not None and loop.is_true and kind != ASKED:
        yield "CrashLoop", f"it does not stay up: {loop.message}; another start would not help"
    if engine.last_end is not None and engine.last_end.end == "held":
        yield "CrashLoop", "its last restart did not finish: needs attention (guardctl resume ENGINE once fixed)"
    if engine.last_end is not None and reason_of(kind) in engine.last_end.unmended:
        yield "CrashLoop", "a restart for the same reason did not help: needs attention (guardctl resume ENGINE once fixed)"
    if budget := spent(view.restarts, engine.name, policy, view.now):
        yield "BudgetSpent", budget
    is_any_time = not policy.hours or (policy.broken_any_time and is_broken)
    if not is_any_time and not any(hours.holds(view.minute) for hours in policy.hours):
        yield "Hours", "outside the maintenance window"
    if engine.rollout:
        yield "Rollout", engine.rollout
    if fresh := [one.name for one in others if one.changed_s is not None and one.changed_s < policy.rollout_s]:
        yield "Rollout", f"a rollout is under way: {fresh[0]} has just been changed"
    if not is_broken:
        yield from _against_leaving(policy, engine, others)
    elif kind != ASKED:  # a person answers for their own request; the stop looks once more
        if view.cut_off and not engine.has_local_proof:
            yield "CutOff", view.cut_off
        if engine.unproved:
            yield "Unproved", f"it may still serve: {engine.unproved}"
        if same := _same_failure(view, engine, others):
            yield "SameFailure", same


def _against_leaving(policy: ActPolicy, engine: EngineStatus, others: Sequence[EngineStatus]) -> Iterator[tuple[str, str]]:
    """Yields why its group cannot do without it. Not called for an engine that serves nobody: it carries nothing."""
    if engine.replicas is not None and engine.replicas <= 1:
        why = "its owner has one replica, and it serves: an eviction leaves none"
        yield "OneReplica", f"{why} (kubectl rollout restart starts a new one first)"
    away = [one.name for one in others if one.is_away]
    if len(away) >= policy.most_away:
        yield "TooManyAway", f"{away[0]} is away already; at most {policy.most_away} may be"
    if engine.missing >= policy.most_away:
        few = f"{engine.missing} of the {engine.replicas} pods that its owner wants are not ready"
        yield "TooManyAway", f"{few}; at most {policy.most_away} may be"
    if others or not policy.may_be_last:
        answer = without(engine.load, [one.load for one in others if not one.is_away], policy.carries)
        if isinstance(answer, Unknown):
            yield "OthersCannotCarry", f"unknown whether the others can carry its load: {answer.reason}"
        elif answer:
            yield "OthersCannotCarry", answer


def group_peers(engine: EngineStatus, engines: Sequence[EngineStatus]) -> list[EngineStatus]:
    """Returns the other engines of its group, less those known to serve another model, whatever the configuration says."""
    mine = engine.load.model
    return [
        one for one in engines
        if one.name != engine.name and one.group == engine.group
        and (mine is None or one.load.model is None or one.load.model == mine)
    ]  # fmt: skip


def reason_of(kind: str) -> str:
    """Returns the reason for a restart; every condition of a broken engine is the same reason."""
    return "broken" if kind in BROKEN_KINDS or kind == START else kind


def _same_failure(view: FleetView, engine: EngineStatus, others: Sequence[EngineStatus]) -> str:
    """Returns why it is not started: another of its group died the same way minutes ago, perhaps of the same request.

    Where the requests that both had begun are known, the two must have one shape in common.
    """
    names, mine = {peer.name for peer in others}, _shapes(engine.requests)
    for restart in view.restarts:
        is_near = view.now - SAME_FAILURE_S < restart.at <= view.now + 1.0
        is_same = bool(restart.failure) and restart.failure == engine.failure and engine.failure not in NOT_BY_REQUESTS
        theirs = _shapes(restart.requests)
        if not (restart.is_own and is_near and restart.engine in names and is_same) or (mine and theirs and not mine & theirs):
            continue
        ago_s, common = max(0.0, view.now - restart.at), sorted(mine & theirs)
        which = "which requests they had begun is unknown"
        if common:
            which = f"both had begun a request with {' or one with '.join(common[:3])}"
        return (
            f"{restart.engine} of its group ended the same way {ago_s:.0f} s before ({engine.failure}): one request may end"
            f" them both; {which}; keep it away, then guardctl restart {engine.name}"
        )
    return ""


def _shapes(requests: str) -> frozenset[str]:
    return frozenset(requests.split("; ")) - {""}


# Checks of an engine that was just started.
HEALTHY = 200
CLOCK_S = 5.0  # how far the start of one process may seem to move when the wall clock is set
LOWER = 0.95  # share of the last start's tokens below which the result mentions it


def is_ready(look: Look | None) -> bool:
    """True if its page and /health answer, and its gate, where it has one, reports ready or draining."""
    if look is None or look.reach is not Reach.ANSWERS or look.health != HEALTHY:
        return False
    # During guard's own drain the gate says "draining"; guard ends that itself, so the engine counts as ready.
    return look.gate is None or look.gate.ready or look.gate.reason == "draining"


def kv_tokens(look: Look | None) -> float | None:
    """Returns the tokens its KV cache holds, as the engine reports it; None where it does not."""
    return None if look is None else cache_tokens(look.config)


def was_restarted(look: Look | None, before: object) -> bool:
    """True if its process started later than `before` (seconds since 1970); False where either is unknown."""
    began = None if look is None else look.started_unix_s
    return began is not None and isinstance(before, int | float) and began > before + CLOCK_S


def enough_cache(look: Look | None, context: float | None, before: object) -> Outcome:
    """Fails only if the longest request that it admits does not fit; mentions a cache smaller than at the last start."""
    tokens = kv_tokens(look)
    if tokens is None:
        return done("it does not report its KV cache size: not compared")
    if context is not None and tokens < context:
        return failed(f"its KV cache holds {tokens:,.0f} tokens, and it lets in requests of {context:,.0f}", kv_tokens=tokens)
    if isinstance(before, int | float) and tokens < LOWER * before:
        return done(f"its KV cache holds {tokens:,.0f} tokens, {before:,.0f} at its last start", kv_tokens=tokens, is_less=True)
    return done(f"its KV cache holds {tokens:,.0f} tokens", kv_tokens=tokens)


def troubles(kind: str, conditions: Mapping[str, Condition]) -> dict[str, str]:
    """Returns the true conditions, with messages, by which a restart has not helped: its own, and those that call for one."""
    # A person who asked for one more start knows that there were many.
    names = dict.fromkeys((kind, *PROBATION_KINDS, *(() if kind == ASKED else ("loop",))))
    known = (*GRADES, *PROBATION_KINDS, "loop")
    return {one: conditions[one].message for one in names if one in known and one in conditions and conditions[one].is_true}
