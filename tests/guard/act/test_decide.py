"""What is done about what is judged, and every reason why nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.capacity import EngineLoad
from plimsoll.guard.act.decide import (
    ASKED,
    BROKEN_KINDS,
    ActionPlan,
    BlockedAction,
    Decision,
    EngineStatus,
    FailedRestarts,
    FleetView,
    Restart,
    Switches,
    consider,
    decide,
)
from plimsoll.guard.act.policy import ActPolicy, Hours
from plimsoll.guard.act.steps import BROKEN, SERVING
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from plimsoll.unknown import Condition, Status
from tests.each import each

NOW = 1_700_000_000.0
POLICY = ActPolicy()


def held(*kinds: str, status: Status = Status.TRUE, reason: str = "Seen") -> dict[str, Condition]:
    return {kind: Condition(kind, status, reason, f"it is {kind}", 0.0) for kind in kinds}


def engine(name: str = "a", conditions: Mapping[str, Condition] | None = None, kv: float = 0.3, **more: Any) -> EngineStatus:
    """One that is looked at and carries a little."""
    return EngineStatus(name, conditions or {}, EngineLoad(name, kv, 2.0, 0.0, model="m"), 1.0)._replace(**more)


def view(*engines: EngineStatus, **more: Any) -> FleetView:
    """A fleet with one more engine that is well."""
    return FleetView([*engines, engine("z")], now=NOW)._replace(**more)


EXHAUSTED, DEAD, FULL = held("exhausted"), held("dead"), held("saturated")
ONCE: list[tuple[str, FleetView, ActPolicy]] = [
    ("Paused", view(engine(conditions=DEAD), switches=Switches(is_paused=True)), POLICY),
    ("Paused", view(engine(conditions=DEAD), switches=Switches(paused=frozenset("a"))), POLICY),
    ("Paused", view(engine(conditions=DEAD), switches=Switches(rungs_off=frozenset({Grade.RESTART}))), POLICY),
    ("Busy", view(engine(conditions=EXHAUSTED), busy="b"), POLICY),
    ("Unproved", view(engine(conditions=DEAD, unproved="only guard's own connection says so")), POLICY),
    ("CutOff", view(engine(conditions=DEAD, has_local_proof=False), cut_off="guard is cut off: 2 of 2 engines"), POLICY),
    ("RungOff", view(engine(conditions=DEAD)), replace(POLICY, rungs=(Grade.SHED,))),
    ("OnlyObserved", view(engine(conditions=DEAD, only_observed="it has a KV connector")), POLICY),
    ("Unknown", view(engine(conditions=DEAD, age_s=120.0)), POLICY),
    ("Unknown", view(engine(conditions=DEAD | held("hung", status=Status.UNKNOWN, reason="SeveralServers"))), POLICY),
    ("NoGate", view(engine(conditions=FULL, has_gate=False)), POLICY),
    ("NoGate", view(engine(conditions=EXHAUSTED, has_gate=False)), POLICY),
    ("NoRestarter", view(engine(conditions=DEAD, has_restarter=False)), POLICY),
    ("SickCard", view(engine(conditions=DEAD | held("card"))), POLICY),
    ("CrashLoop", view(engine(conditions=DEAD | held("loop"))), POLICY),
    ("CrashLoop", view(engine(conditions=DEAD, last_end=FailedRestarts("dead", "failed", frozenset({"broken"})))), POLICY),
    ("CrashLoop", view(engine(conditions=DEAD, last_end=FailedRestarts("wedged", "held"))), POLICY),
    ("BudgetSpent", view(engine(conditions=DEAD), restarts=[Restart(NOW - 900, "a", is_own=False)] * 2), POLICY),
    ("Hours", view(engine(conditions=DEAD), minute=600), replace(POLICY, hours=(Hours(1320, 360),))),
    ("Rollout", FleetView([engine(conditions=DEAD), engine("z", changed_s=60.0)], now=NOW), POLICY),
    ("TooManyAway", FleetView([engine(conditions=EXHAUSTED), engine("z", is_away=True)], now=NOW), POLICY),
    ("OthersCannotCarry", FleetView([engine(conditions=EXHAUSTED)], now=NOW), POLICY),
    ("OthersCannotCarry", view(engine(conditions=EXHAUSTED, kv=0.7)), POLICY),
    ("OthersCannotCarry", view(engine(conditions=EXHAUSTED, load=EngineLoad("a", None, None, None, model="m"))), POLICY),
]


@each(("reason", "fleet", "policy"), ONCE)
def test_every_reason_refuses_with_a_word_and_a_sentence(reason: str, fleet: FleetView, policy: ActPolicy) -> None:
    """The word is for a program, the sentence for a person."""
    found = decide(fleet, policy)[0]
    assert isinstance(found, BlockedAction), str(found)
    assert found.reason == reason
    assert len(found.message) > 10
    assert str(found).startswith("a: no ")


@pytest.mark.parametrize("kind", GRADES)
def test_every_condition_leads_to_its_rung(kind: str) -> None:
    """With nothing against it: the plan names the rung, the reason and the steps, each explained."""
    found = decide(view(engine(conditions=held(kind))), POLICY)[0]
    assert isinstance(found, ActionPlan), str(found)
    assert (found.grade, found.kind, found.why) == (GRADES[kind], kind, f"it is {kind}")
    assert len(found.lines()) == len(found.steps)
    if found.grade is Grade.RESTART:
        assert found.steps == (BROKEN if kind in BROKEN_KINDS else SERVING)


def test_the_most_harmed_comes_first_and_one_at_a_time() -> None:
    """A dead engine before an exhausted one before a full one; the others wait for their turn."""
    fleet = view(engine("a", FULL), engine("b", EXHAUSTED), engine("c", DEAD))
    found = decide(fleet, POLICY)
    assert [one.engine for one in found] == ["c", "b", "a"]
    assert [isinstance(one, ActionPlan) for one in found] == [True, False, False]
    assert [one.reason for one in found if isinstance(one, BlockedAction)] == ["Busy", "Busy"]


def test_two_that_died_at_once_are_brought_back_together_within_the_budget() -> None:
    """Each is away for the other, and neither carries anything: neither waits for the other's start."""
    fleet = FleetView([engine(name, DEAD, is_away=True) for name in "abc"], now=NOW)
    assert [type(decision) for decision in decide(fleet, POLICY)] == [ActionPlan] * 3
    last = decide(fleet, replace(POLICY, fleet_restarts_per_hour=2))[-1]
    assert isinstance(last, BlockedAction)
    assert last.reason == "BudgetSpent"


def test_a_second_one_of_a_group_that_ends_the_same_way_is_not_started() -> None:
    """One request may end both; with another failure, of another group, or with other requests it is started."""
    failure, requests = "illegal memory access", "prompt 8000, max_tokens 1; prompt 12"

    def decisions(*others: EngineStatus) -> list[Decision]:
        first = engine("a", DEAD, failure=others[0].failure or failure, requests=requests)
        return decide(FleetView([first, *others], now=NOW), POLICY)

    def ends(*others: EngineStatus) -> list[str]:
        return [found.reason if isinstance(found, BlockedAction) else "started" for found in decisions(*others)]

    assert ends(engine("b", DEAD, failure="illegal memory access")) == ["started", "SameFailure"]
    assert ends(engine("b", DEAD)) == ["started", "started"]
    assert ends(engine("b", DEAD, failure=failure, group="other")) == ["started", "started"]
    assert ends(engine("b", DEAD, failure="collectives")) == ["started", "started"], "what they share failed, and no request"
    assert ends(engine("b", DEAD, failure=failure, requests="prompt 13")) == ["started", "started"], "nothing in common"
    blocked = decisions(engine("b", DEAD, failure=failure, requests="prompt 8000, max_tokens 1; prompt 9"))[1]
    assert isinstance(blocked, BlockedAction)
    assert "both had begun a request with prompt 8000, max_tokens 1; keep it away" in blocked.message
    blocked = decisions(engine("b", DEAD, failure=failure))[1]
    assert isinstance(blocked, BlockedAction)
    assert "which requests they had begun is unknown" in blocked.message


def test_whoever_asks_for_a_start_is_not_told_of_those_before_it() -> None:
    """A loop stops guard, not a person who has mended it; one that guard holds must be resumed first all the same."""
    looping = engine(conditions=DEAD | held("loop"))
    assert isinstance(consider(view(looping), POLICY, looping, Grade.RESTART, ASKED, "somebody asked"), ActionPlan)
    kept = looping._replace(last_end=FailedRestarts("dead", "held"))
    refused = consider(view(kept), POLICY, kept, Grade.RESTART, ASKED, "somebody asked")
    assert isinstance(refused, BlockedAction)
    assert refused.reason == "CrashLoop"


@pytest.mark.parametrize("kind", GRADES)
def test_nothing_is_done_about_what_is_about_to_be_over(kind: str) -> None:
    """The last look did not show it: no compaction after the one that helped, no stop of an engine that answers again."""
    ending = {name: replace(one, is_ending=True) for name, one in held(kind).items()}
    assert decide(view(engine(conditions=ending)), POLICY) == []
    asked = consider(view(engine(conditions=ending)), POLICY, engine(conditions=ending), Grade.RESTART, ASKED, "asked")
    assert isinstance(asked, ActionPlan)
    assert asked.steps == SERVING, "it serves: it is drained first"


def test_the_hours_go_past_midnight() -> None:
    """From ten in the evening to six in the morning, the first minute in and the last one out."""
    hours = replace(POLICY, hours=(Hours(22 * 60, 6 * 60), Hours(12 * 60, 13 * 60)))
    allowed = {22 * 60, 23 * 60 + 59, 0, 5 * 60 + 59, 12 * 60}
    refused = {22 * 60 - 1, 6 * 60, 13 * 60, 10 * 60}
    for minute in allowed | refused:
        found = decide(view(engine(conditions=DEAD), minute=minute), hours)[0]
        assert isinstance(found, ActionPlan) is (minute in allowed), minute
    any_time = replace(hours, broken_any_time=True)
    assert isinstance(decide(view(engine(conditions=DEAD), minute=600), any_time)[0], ActionPlan)
    assert isinstance(decide(view(engine(conditions=EXHAUSTED), minute=600), any_time)[0], BlockedAction)


def test_the_last_one_is_restarted_only_where_that_is_configured() -> None:
    """And a dead one is nobody's last."""
    alone = FleetView([engine(conditions=EXHAUSTED)], now=NOW)
    assert isinstance(decide(alone, POLICY)[0], BlockedAction)
    assert isinstance(decide(alone, replace(POLICY, may_be_last=True))[0], ActionPlan)
    assert isinstance(decide(FleetView([engine(conditions=DEAD)], now=NOW), POLICY)[0], ActionPlan)


def test_a_person_who_asks_meets_the_same_rules() -> None:
    """The budget, the hours, the load of the others; but a condition is not needed."""

    def asked(one: EngineStatus, **more: Any) -> ActionPlan | BlockedAction:
        return consider(view(one, **more), POLICY, one, Grade.RESTART, ASKED, "an operator asked for it")

    well = asked(engine())
    assert isinstance(well, ActionPlan)
    assert well.steps == SERVING
    dead = asked(engine(conditions=DEAD))
    assert isinstance(dead, ActionPlan)
    assert dead.steps == BROKEN, "one that is dead cannot be drained"
    for refused in (
        asked(engine(age_s=1e9)), asked(engine(kv=0.9)), asked(engine(), switches=Switches(is_paused=True)),
        asked(engine(), restarts=[Restart(NOW, "a")]), asked(engine(last_end=FailedRestarts("dead", "held"))),
    ):  # fmt: skip
        assert isinstance(refused, BlockedAction)


STATUSES = st.sampled_from(list(Status))
FIGURES = st.one_of(st.none(), st.floats(0, 1.2))
CONDITIONS = st.dictionaries(st.sampled_from([*GRADES, "card", "loop", "creep"]), STATUSES, max_size=4).map(
    lambda found: {kind: Condition(kind, status, "Seen", "so it is", 0.0) for kind, status in found.items()}
)
ENGINES = st.builds(
    lambda name, conditions, kv, running, age_s, away, well, group, model: EngineStatus(
        name, conditions, EngineLoad(name, kv, running, 0.0, is_well=well, model=model), age_s, is_away=away, group=group
    ),
    st.sampled_from("abcd"), CONDITIONS, FIGURES, st.one_of(st.none(), st.floats(0, 50)), st.floats(0, 100), st.booleans(),
    st.booleans(), st.sampled_from(["", "g"]), st.sampled_from(["m", "n", None]),
)  # fmt: skip
NAMES, RUNGS = (st.frozensets(st.sampled_from(values), max_size=1) for values in (list("abcd"), list(Grade)))
SWITCHES = st.builds(Switches, st.booleans(), NAMES, RUNGS)


@given(st.lists(ENGINES, max_size=4, unique_by=lambda one: one.name), SWITCHES, st.integers(0, 3))
def test_no_plan_without_sure_knowledge(engines: list[EngineStatus], switches: Switches, restarts: int) -> None:
    """At most one plan; its condition holds for certain, the look is fresh, no switch is off, and the others carry the load."""
    fleet = FleetView(engines, [Restart(NOW - 2_000, "a", is_own=False)] * restarts, switches, now=NOW)
    plans = [one for one in decide(fleet, POLICY) if isinstance(one, ActionPlan)]
    assert len(plans) <= 1
    for plan in plans:
        one = next(one for one in engines if one.name == plan.engine)
        assert one.conditions[plan.kind].status is Status.TRUE
        assert one.age_s <= 30.0
        assert not switches.is_paused
        assert one.name not in switches.paused
        assert plan.grade not in switches.rungs_off
        if plan.grade is Grade.RESTART:
            assert not (one.name == "a" and restarts >= POLICY.restarts_per_hour)
            assert restarts < POLICY.fleet_restarts_per_hour
        if plan.steps == SERVING:
            others = [two.load for two in engines if two.group == one.group and two is not one and not two.is_away]
            same = [load for load in others if load.model == one.load.model is not None]
            assert same
            assert all(load.is_well for load in same)
            assert sum(load.kv_usage or 0.0 for load in (one.load, *same)) <= POLICY.carries * len(same) + 1e-9
