"""From what is judged to what is done: one action, or the reason why none. Pure; the same view gives the same answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.domain.condition import Condition, Status
from plimsoll.domain.unknown import Unknown
from plimsoll.guard.act_policy import ActPolicy
from plimsoll.guard.budget import Restart, spent
from plimsoll.guard.capacity import Load, without
from plimsoll.guard.grades import Grade
from plimsoll.guard.policy import GRADES
from plimsoll.guard.steps import ABOUT, Step, steps_of

BROKEN_KINDS = frozenset({"dead", "wedged", "hung"})
"""An engine of which one of these holds serves nobody: to stop it loses nothing."""
ASKED = "asked"  # in place of a condition: a person wants it
START = "start"  # in place of a condition: the server that guard was given does not run when guard begins
ORDER = (Grade.RESTART, Grade.COMPACT, Grade.SHED)
_STALE_LOOKS = 3.5


class LastEnd(NamedTuple):
    """How restarts of an engine ended that did not end well, until one does or somebody resumes it."""

    kind: str  # the condition that the last of them was about
    end: str  # "failed", or "held"
    unmended: frozenset[str] = frozenset()  # the reasons for which a restart did not help
    is_out: bool = False  # it was held, and nobody has put it back since


class Engine(NamedTuple):
    """What is known of one engine, as far as acting is concerned."""

    name: str
    conditions: Mapping[str, Condition]
    load: Load
    age_s: float  # of the last look
    every_s: float = 5.0
    group: str = ""
    is_away: bool = False  # it does not answer, starts, is drained, or was held and not put back
    changed_s: float | None = None  # how long ago its version or its flags changed
    only_observed: str = ""  # why nothing may be done to it: a KV connector, several nodes, no adapter
    has_gate: bool = True
    has_restarter: bool = True
    last_end: LastEnd | None = None


class Switches(NamedTuple):
    """What people have switched off; it survives guard's own restart."""

    is_paused: bool = False
    paused: frozenset[str] = frozenset()  # engines
    rungs_off: frozenset[Grade] = frozenset()


class View(NamedTuple):
    """The fleet at one moment."""

    engines: Sequence[Engine]
    restarts: Sequence[Restart] = ()
    switches: Switches = Switches()
    busy: str = ""  # the engine that guard does something about already
    now: float = 0.0  # wall clock
    minute: int = 0  # of the day, where the hours hold


class Plan(NamedTuple):
    """What is to be done, and why."""

    engine: str
    grade: Grade
    kind: str
    why: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return f"{self.engine}: {self.grade} because {self.why}"

    def lines(self) -> list[str]:
        """Every step with what is checked before and after, and how it is undone."""
        return [
            f"{number}. {step}: {about.does}; before: {about.before}; after: {about.after}; undo: {about.undo}"
            for number, step in enumerate(self.steps, 1)
            for about in (ABOUT[step],)
        ]


class Refusal(NamedTuple):
    """Why nothing is done about something that could lead to an action."""

    engine: str
    grade: Grade
    kind: str
    reason: str  # one word a program can test
    says: str

    def __str__(self) -> str:
        return f"{self.engine}: no {self.grade}: {self.says}"


Decision = Plan | Refusal


def decide(view: View, policy: ActPolicy) -> list[Decision]:
    """One decision for every engine of which something holds that could lead to an action; the most harmed first.

    At most one of them is a plan that takes an engine away: the next comes when that one is over.
    """
    found: list[Decision] = []
    for engine in view.engines:
        wanted = wanted_of(engine)
        if wanted is None:
            continue
        kind, grade = wanted
        found.append(consider(view, policy, engine, grade, kind, engine.conditions[kind].message))
    found.sort(key=lambda one: (ORDER.index(one.grade), one.kind not in BROKEN_KINDS, one.engine))
    return _one_at_a_time(found)


def _one_at_a_time(found: list[Decision]) -> list[Decision]:
    is_taken = False
    kept: list[Decision] = []
    for one in found:
        if isinstance(one, Plan):
            if is_taken:
                kept.append(Refusal(one.engine, one.grade, one.kind, "Busy", "one engine at a time: another comes first"))
                continue
            is_taken = True
        kept.append(one)
    return kept


def wanted_of(engine: Engine) -> tuple[str, Grade] | None:
    """The most harmful remedy that a condition of it calls for; None where none holds."""
    held = [(kind, GRADES[kind]) for kind, condition in engine.conditions.items() if kind in GRADES and is_there(condition)]
    return min(held, key=lambda one: (ORDER.index(one[1]), one[0] not in BROKEN_KINDS), default=None)


def consider(view: View, policy: ActPolicy, engine: Engine, grade: Grade, kind: str, why: str) -> Decision:
    """A plan for this remedy, or the first reason against it."""
    is_broken = serves_nobody(engine, kind)
    for reason, says in _against(view, policy, engine, grade, kind):
        if says:
            return Refusal(engine.name, grade, kind, reason, says)
    steps = steps_of(grade, is_broken=is_broken)
    return Plan(engine.name, grade, kind, why, steps)


def is_there(condition: Condition) -> bool:
    """Whether the last look shows it, too: nothing is done about what is about to be over."""
    return condition.is_true and not condition.is_ending


def serves_nobody(engine: Engine, kind: str) -> bool:
    """Whether it is about an engine that serves nobody; what a person asks for is not: then its conditions say it."""
    if kind in BROKEN_KINDS:
        return True
    return kind == ASKED and any(is_there(engine.conditions[one]) for one in BROKEN_KINDS & engine.conditions.keys())


def _against(view: View, policy: ActPolicy, engine: Engine, grade: Grade, kind: str) -> list[tuple[str, str]]:
    """Every rule in turn: a word, and what speaks against it, "" for nothing."""
    rules = [
        ("Paused", _paused(view.switches, engine, grade)),
        ("Busy", f"guard is at work on {view.busy}" if view.busy else ""),
        ("RungOff", "" if grade in policy.rungs else f"{grade} is not among the rungs of its configuration"),
        ("OnlyObserved", engine.only_observed),
        ("Unknown", _unknown(engine)),
        ("NoGate", _no_gate(policy, engine, grade, kind)),
    ]
    if grade is Grade.RESTART:
        rules += _against_restart(view, policy, engine, kind)
    return rules


def _no_gate(policy: ActPolicy, engine: Engine, grade: Grade, kind: str) -> str:
    if engine.has_gate:
        return ""
    if grade is not Grade.RESTART:
        return "it has no gate that could do it"
    if serves_nobody(engine, kind) or policy.stragglers == "stop":
        return ""
    return "it has no gate, and without one nobody can say when it is idle"


def _paused(switches: Switches, engine: Engine, grade: Grade) -> str:
    if switches.is_paused:
        return "guard is paused (guardctl resume)"
    if engine.name in switches.paused:
        return "it is paused (guardctl resume ENGINE)"
    return f"{grade} is switched off (guardctl resume --rung {grade})" if grade in switches.rungs_off else ""


def _unknown(engine: Engine) -> str:
    if engine.age_s > _STALE_LOOKS * engine.every_s + 10.0:
        return f"the last look is {engine.age_s:.0f} s old"
    doubted = [kind for kind in GRADES if kind in engine.conditions and engine.conditions[kind].reason == "SeveralServers"]
    return "several servers answer at its address" if doubted else ""


def others_of(engine: Engine, engines: Sequence[Engine]) -> list[Engine]:
    """The others of its group. One that is known to serve another model is none of them, whatever the configuration says."""
    mine = engine.load.model
    return [
        one for one in engines
        if one.name != engine.name and one.group == engine.group
        and (mine is None or one.load.model is None or one.load.model == mine)
    ]  # fmt: skip


def reason_of(kind: str) -> str:
    """What a restart is to mend: that an engine does not work is one reason, however it shows."""
    return "broken" if kind in BROKEN_KINDS or kind == START else kind


def _against_restart(view: View, policy: ActPolicy, engine: Engine, kind: str) -> list[tuple[str, str]]:
    others = others_of(engine, view.engines)
    away = [one.name for one in others if one.is_away]
    is_broken = serves_nobody(engine, kind)
    budget = spent(view.restarts, engine.name, policy, view.now)
    return [
        ("NoRestarter", "" if engine.has_restarter else "guard was not told how to restart it"),
        ("SickCard", _sick(engine)),
        ("CrashLoop", _loops(engine, kind)),
        ("BudgetSpent", budget.says),
        ("Hours", _hours(view, policy, is_broken=is_broken)),
        ("Rollout", _rollout(others, policy)),
        ("TooManyAway", _too_many(away, policy, is_broken=is_broken)),
        ("OthersCannotCarry", _capacity(engine, others, policy, is_broken=is_broken)),
    ]


def _sick(engine: Engine) -> str:
    card = engine.conditions.get("card")
    if card is None:
        return ""
    # Not readable is the usual case (another host); held and not readable now is not the same.
    return f"its card is sick: {card.message}" if card.status is Status.TRUE else ""


def _loops(engine: Engine, kind: str) -> str:
    loop = engine.conditions.get("loop")
    # Who asks for a start has been told of those before it, and knows what he has mended since.
    if loop is not None and loop.is_true and kind != ASKED:
        return f"it does not stay up: {loop.message}; one more start would not either"
    if engine.last_end is None:
        return ""
    if engine.last_end.end == "held":
        return "its last restart could not be finished: a person is needed (guardctl resume ENGINE when it is mended)"
    if reason_of(kind) in engine.last_end.unmended:
        return "a restart for the same reason did not help: a person is needed (guardctl resume ENGINE when it is mended)"
    return ""


def _hours(view: View, policy: ActPolicy, *, is_broken: bool) -> str:
    if not policy.hours or (policy.broken_any_time and is_broken):
        return ""
    return "" if any(hours.holds(view.minute) for hours in policy.hours) else "it is outside the hours in which it may"


def _rollout(others: Sequence[Engine], policy: ActPolicy) -> str:
    fresh = [one.name for one in others if one.changed_s is not None and one.changed_s < policy.rollout_s]
    return f"a rollout is under way: {fresh[0]} has just been changed" if fresh else ""


def _too_many(away: Sequence[str], policy: ActPolicy, *, is_broken: bool) -> str:
    # One that serves nobody is away itself: its restart takes no more. Of two that died at once, neither would ever return.
    return f"{away[0]} is away already, {policy.most_away} may be" if len(away) >= policy.most_away and not is_broken else ""


def _capacity(engine: Engine, others: Sequence[Engine], policy: ActPolicy, *, is_broken: bool) -> str:
    if is_broken:
        return ""  # it carries nothing: the others have its load already
    if policy.may_be_last and not others:
        return ""
    answer = without(engine.load, [one.load for one in others if not one.is_away], policy.carries)
    return f"whether the others can carry its load is not known: {answer.reason}" if isinstance(answer, Unknown) else answer
