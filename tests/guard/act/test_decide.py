"""What is done about what is judged, every reason why nothing is, how many restarts are allowed, and who carries the load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act import decide as deciding
from plimsoll.guard.act.capacity import EngineLoad, load_of, without
from plimsoll.guard.act.decide import ActionPlan, BlockedAction, EngineStatus, FleetView, Restart, Switches, decide, spent
from plimsoll.guard.act.policy import DAY_S, HOUR_S, ActPolicy, Hours
from plimsoll.guard.act.steps import BROKEN, SERVING
from plimsoll.guard.judge.look import GateState, Look, Reach
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from plimsoll.unknown import Condition, Status, Unknown
from tests.each import cases, each

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
    (
        "CrashLoop",
        view(engine(conditions=DEAD, last_end=deciding.FailedRestarts("dead", "failed", frozenset({"broken"})))),
        POLICY,
    ),
    ("CrashLoop", view(engine(conditions=DEAD, last_end=deciding.FailedRestarts("wedged", "held"))), POLICY),
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
    found = blocked(decide(fleet, policy)[0])
    assert found.reason == reason
    assert len(found.message) > 10
    assert str(found).startswith("a: no ")


def planned(decision: deciding.Decision) -> ActionPlan:
    assert isinstance(decision, ActionPlan), str(decision)
    return decision


def blocked(decision: deciding.Decision) -> BlockedAction:
    assert isinstance(decision, BlockedAction), str(decision)
    return decision


@each("kind", GRADES)
def test_every_condition_leads_to_its_rung(kind: str) -> None:
    """With nothing against it: the plan names the rung, the reason and the steps, each explained."""
    found = planned(decide(view(engine(conditions=held(kind))), POLICY)[0])
    assert (found.grade, found.kind, found.why) == (GRADES[kind], kind, f"it is {kind}")
    assert len(found.lines()) == len(found.steps)
    if found.grade is Grade.RESTART:
        assert found.steps == (BROKEN if kind in deciding.BROKEN_KINDS else SERVING)


def test_the_most_harmed_comes_first_one_at_a_time_but_for_those_that_serve_nobody() -> None:
    """A dead engine before an exhausted one before a full one; several that serve nobody are brought back within the budget."""
    fleet = view(engine("a", FULL), engine("b", EXHAUSTED), engine("c", DEAD))
    found = decide(fleet, POLICY)
    assert [one.engine for one in found] == ["c", "b", "a"]
    assert [isinstance(one, ActionPlan) for one in found] == [True, False, False]
    assert [one.reason for one in found if isinstance(one, BlockedAction)] == ["Busy", "Busy"]
    fleet = FleetView([engine(name, DEAD, is_away=True) for name in "abc"], now=NOW)
    assert [type(decision) for decision in decide(fleet, POLICY)] == [ActionPlan] * 3
    assert blocked(decide(fleet, replace(POLICY, fleet_restarts_per_hour=2))[-1]).reason == "BudgetSpent"


def test_a_second_one_of_a_group_that_ends_the_same_way_is_not_started() -> None:
    """One request may end both; with another failure, of another group, or with other requests it is started."""
    failure, requests = "illegal memory access", "prompt 8000, max_tokens 1; prompt 12"

    def decisions(*others: EngineStatus) -> list[deciding.Decision]:
        first = engine("a", DEAD, failure=others[0].failure or failure, requests=requests)
        return decide(FleetView([first, *others], now=NOW), POLICY)

    def ends(*others: EngineStatus) -> list[str]:
        return [found.reason if isinstance(found, BlockedAction) else "started" for found in decisions(*others)]

    assert ends(engine("b", DEAD, failure="illegal memory access")) == ["started", "SameFailure"]
    assert ends(engine("b", DEAD)) == ["started", "started"]
    assert ends(engine("b", DEAD, failure=failure, group="other")) == ["started", "started"]
    assert ends(engine("b", DEAD, failure="collectives")) == ["started", "started"], "what they share failed, and no request"
    assert ends(engine("b", DEAD, failure=failure, requests="prompt 13")) == ["started", "started"], "nothing in common"
    same = "prompt 8000, max_tokens 1"
    found = blocked(decisions(engine("b", DEAD, failure=failure, requests=f"{same}; prompt 9"))[1])
    assert f"both had begun a request with {same}; keep it away" in found.message
    found = blocked(decisions(engine("b", DEAD, failure=failure))[1])
    assert "which requests they had begun is unknown" in found.message


@each("kind", GRADES)
def test_nothing_is_done_about_what_is_about_to_be_over(kind: str) -> None:
    """The last look did not show it: no compaction after the one that helped, no stop of an engine that answers again."""
    ending = {name: replace(one, is_ending=True) for name, one in held(kind).items()}
    assert decide(view(engine(conditions=ending)), POLICY) == []
    asked = deciding.consider(
        view(engine(conditions=ending)), POLICY, engine(conditions=ending), Grade.RESTART, deciding.ASKED, "asked"
    )
    assert planned(asked).steps == SERVING, "it serves: it is drained first"


def test_the_hours_the_last_one_and_a_person_who_asks_meets_the_same_rules() -> None:
    """From ten in the evening to six; the last one only where configured; a person needs no condition."""
    hours = replace(POLICY, hours=(Hours(22 * 60, 6 * 60), Hours(12 * 60, 13 * 60)))
    allowed = {22 * 60, 23 * 60 + 59, 0, 5 * 60 + 59, 12 * 60}
    refused = {22 * 60 - 1, 6 * 60, 13 * 60, 10 * 60}
    for minute in allowed | refused:
        found = decide(view(engine(conditions=DEAD), minute=minute), hours)[0]
        assert isinstance(found, ActionPlan) is (minute in allowed), minute
    any_time = replace(hours, broken_any_time=True)
    planned(decide(view(engine(conditions=DEAD), minute=600), any_time)[0])
    blocked(decide(view(engine(conditions=EXHAUSTED), minute=600), any_time)[0])
    alone = FleetView([engine(conditions=EXHAUSTED)], now=NOW)
    blocked(decide(alone, POLICY)[0])
    planned(decide(alone, replace(POLICY, may_be_last=True))[0])
    planned(decide(FleetView([engine(conditions=DEAD)], now=NOW), POLICY)[0])

    def asked(one: EngineStatus, **more: Any) -> ActionPlan | BlockedAction:
        return deciding.consider(view(one, **more), POLICY, one, Grade.RESTART, deciding.ASKED, "an operator asked for it")

    assert planned(asked(engine())).steps == SERVING
    assert planned(asked(engine(conditions=DEAD))).steps == BROKEN, "one that is dead cannot be drained"
    for found in (
        asked(engine(age_s=1e9)), asked(engine(kv=0.9)), asked(engine(), switches=Switches(is_paused=True)),
        asked(engine(), restarts=[Restart(NOW, "a")]), asked(engine(last_end=deciding.FailedRestarts("dead", "held"))),
    ):  # fmt: skip
        blocked(found)
    looping = engine(conditions=DEAD | held("loop"))
    planned(asked(looping))  # a loop stops guard, not a person who has mended it; one that guard holds must be resumed first
    assert blocked(asked(looping._replace(last_end=deciding.FailedRestarts("dead", "held")))).reason == "CrashLoop"


CONDITIONS = st.dictionaries(
    st.sampled_from([*GRADES, "card", "loop", "creep"]), st.sampled_from(list(Status)), max_size=4
).map(lambda found: {kind: Condition(kind, status, "Seen", "so it is", 0.0) for kind, status in found.items()})
ENGINES = st.builds(
    lambda name, conditions, kv, running, age_s, away, well, group, model: EngineStatus(
        name, conditions, EngineLoad(name, kv, running, 0.0, is_well=well, model=model), age_s, is_away=away, group=group
    ),
    st.sampled_from("abcd"), CONDITIONS, st.none() | st.floats(0, 1.2), st.none() | st.floats(0, 50), st.floats(0, 100),
    st.booleans(), st.booleans(), st.sampled_from(["", "g"]), st.sampled_from(["m", "n", None]),
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
            assert without(one.load, others, POLICY.carries) == "", "what that means is below"


WIDE = ActPolicy(restarts_per_hour=99, restarts_per_day=99, fleet_restarts_per_hour=99, fleet_restarts_per_day=99)


def ago(*seconds: float, engine: str = "a", is_own: bool = True) -> list[Restart]:
    return [Restart(NOW - one, engine, is_own) for one in seconds]


def test_budgets_count_the_restarts_of_a_day_and_the_pause_after_one_doubles() -> None:
    """Of engine and fleet, whoever made them, each until it is that old; a clock that jumps gives no new budget."""
    assert not spent([], "a", POLICY, NOW)
    assert spent(ago(100, 3_000, is_own=False), "a", POLICY, NOW)
    assert not spent(ago(*(DAY_S + one for one in range(50))), "a", POLICY, NOW)
    assert spent([], "a", ActPolicy(restarts_per_hour=0), NOW)
    cases = [
        (ago(100, 3_000), "of this engine in an hour", HOUR_S - 3_000),
        (ago(*(5_000 + 4_000 * one for one in range(6))), "of this engine in a day", DAY_S - 25_000),
        (ago(10, 20, 30, 40, engine="b"), "of the fleet in an hour", HOUR_S - 40),
        (ago(*(4_000 + 3_000 * one for one in range(20)), engine="b"), "of the fleet in a day", DAY_S - 61_000),
    ]
    for restarts, words, left_s in cases:
        assert words in spent(restarts, "a", POLICY, NOW + left_s - 1)
        assert words not in spent(restarts, "a", POLICY, NOW + left_s + 1)
    for count in range(1, 12):
        pause_s = min(WIDE.longest_backoff_s, WIDE.backoff_s * 2 ** (count - 1))
        others = [80_000.0 - one for one in range(count - 1)]
        assert f"the cooldown is {pause_s:.0f} s" in spent(ago(*others, pause_s - 1), "a", WIDE, NOW)
        assert not spent(ago(*others, pause_s + 1), "a", WIDE, NOW)
    for jump_s in (1.0, HOUR_S, 30 * DAY_S, 10 * 365 * DAY_S):
        restarts = ago(-jump_s, -jump_s - 5)
        assert spent(restarts, "a", POLICY, NOW)
        assert spent(restarts, "a", POLICY, NOW + jump_s)
    restarts = ago(10, 20)
    assert not spent(restarts, "a", POLICY, NOW + 365 * DAY_S)
    assert spent(restarts, "a", POLICY, NOW)


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.sampled_from("ab")), max_size=40))
def test_whoever_obeys_it_stays_within_every_budget(times: list[tuple[float, str]]) -> None:
    """Where it allows one more, there is one more in each budget, counted by hand."""
    restarts = [Restart(NOW - at, engine) for at, engine in times]
    if not spent(restarts, "a", POLICY, NOW):
        for span_s, own, fleet in (
            (HOUR_S, POLICY.restarts_per_hour, POLICY.fleet_restarts_per_hour),
            (DAY_S, POLICY.restarts_per_day, POLICY.fleet_restarts_per_day),
        ):
            recent = [one for one in restarts if one.at > NOW - span_s]
            assert len(recent) < fleet
            assert sum(one.engine == "a" for one in recent) < own


ANSWERS = Look(0.0, 0.0, Reach.ANSWERS, health=200)


@each(
    ("look", "wanted"),
    [
        (None, False), (ANSWERS, True), (ANSWERS._replace(health=503), False), (ANSWERS._replace(reach=Reach.REFUSED), False),
        (ANSWERS._replace(gate=GateState(True, "", 0, 0)), True),
        (ANSWERS._replace(gate=GateState(False, "starting", 0, 0)), False),
        (ANSWERS._replace(gate=GateState(False, "draining", 0, 0)), True),
    ],
)  # fmt: skip
def test_ready_is_what_answers_and_would_be_sent_work(look: Look | None, wanted: bool) -> None:
    """By its page, its health and its gate; a drain of guard's own is no want of readiness."""
    assert deciding.is_ready(look) is wanted


@each(("config", "wanted"), cases("guard", "sizes of a cache"))
def test_the_cache_is_as_large_as_the_engine_says(config: dict[str, str], wanted: float | None) -> None:
    """In tokens, or by blocks; what is no number is not known."""
    assert deciding.kv_tokens(ANSWERS._replace(config=config)) == wanted
    assert deciding.kv_tokens(None) is None


def test_only_a_cache_below_the_context_holds_it_back() -> None:
    """Less than at the last start is told; not known is no reason."""
    look = ANSWERS._replace(config={"kv_cache_size_tokens": "8000"})
    assert deciding.enough_cache(look, 4_000.0, 8_100.0).facts == {"kv_tokens": 8_000.0}
    assert deciding.enough_cache(look, 9_000.0, None).is_done is False
    assert deciding.enough_cache(look, None, 16_000.0).facts["is_less"] is True
    assert deciding.enough_cache(look, 4_000.0, "what?").is_done is True
    assert deciding.enough_cache(ANSWERS, 4_000.0, 8_000.0).is_done is True


@each(
    ("began", "before", "wanted"), [(100.0, 100.0, False), (103.0, 100.0, False), (120.0, 100.0, True), (None, 100.0, False),
                                    (120.0, None, False), (90.0, 100.0, False)],
)  # fmt: skip
def test_an_engine_that_began_later_was_restarted(began: float | None, before: float | None, wanted: bool) -> None:
    """A few seconds are the clock's; what is not known says nothing."""
    assert deciding.was_restarted(ANSWERS._replace(started_unix_s=began), before) is wanted
    assert not deciding.was_restarted(None, before)


def test_trouble_is_the_same_kind_again_or_one_that_is_worse() -> None:
    """The condition that led to it, a death, a hang, a crash loop; another advice is none."""
    for kind in ("exhausted", "dead", "wedged", "hung", "loop"):
        assert deciding.troubles("exhausted", held(kind)) == {kind: f"it is {kind}"}
    doubtful = held("exhausted", status=Status.UNKNOWN), held("dead", status=Status.FALSE)
    assert [deciding.troubles("exhausted", one) for one in ({}, held("creep"), held("asked"), *doubtful)] == [{}] * 5
    assert deciding.troubles("asked", held("asked", "loop")) == {}, "who asks for a start knows of those before it"
    assert deciding.troubles("asked", held("dead")) == {"dead": "it is dead"}


MOST = 0.8
ODD = st.sampled_from([None, math.nan, math.inf, -1.0])
FIGURE = st.floats(0, 1) | ODD
MODELS = st.sampled_from(["m", "m", "n", None])
LOADS = st.builds(EngineLoad, st.just("b"), FIGURE, st.floats(0, 200) | ODD, st.floats(0, 50) | ODD, st.booleans(), MODELS)


def load(kv: float, running: float = 4.0, waiting: float = 0.0, *, is_well: bool = True, model: str | None = "m") -> EngineLoad:
    return EngineLoad("b", kv, running, waiting, is_well, model)


def test_others_of_the_same_model_with_room_carry_it_and_a_load_is_of_one_that_answers() -> None:
    """Half full each, the third's half fits; an idle embedder neither carries nor helps; a look that failed tells nothing."""
    assert without(load(0.5), [load(0.5), load(0.5)], MOST) == ""
    full = [load(0.9), load(0.0, 0.0, model="embedder")]
    assert "full" in str(without(load(0.3), full, MOST))
    assert isinstance(without(load(0.1, model=None), [load(0.1)], MOST), Unknown)
    figures = {"kv_cache_usage": 0.5, "running": 3.0, "waiting": 1.0}
    answers = Look(0.0, 0.0, Reach.ANSWERS, figures=figures)
    assert load_of("a", answers, is_well=True, model="m") == EngineLoad("a", 0.5, 3.0, 1.0, model="m")
    for look in (None, Look(0.0, 0.0, Reach.SILENT, figures=figures)):
        assert load_of("a", look, is_well=True) == EngineLoad("a", None, None, None, is_well=False)


@each(("others", "words"), cases("guard", "others that cannot carry it"))
def test_each_reason_why_they_cannot_is_said(others: list[dict[str, Any]], words: str) -> None:
    """In words with the figures in them."""
    assert words in str(without(load(0.5), [load(**one) for one in others], MOST))


@given(LOADS, st.lists(LOADS, max_size=4), st.floats(0.1, 1.0))
def test_yes_means_that_the_sum_fits(leaving: EngineLoad, others: list[EngineLoad], most: float) -> None:
    """Whatever the figures are: where it says yes, all are well, and the sum over those of the same model is in bounds."""
    if without(leaving, others, most) != "":
        return
    assert all(one.is_well for one in others)
    same = [one for one in others if one.model == leaving.model is not None]
    assert same
    for one in (leaving, *same):
        assert all(value is not None and 0 <= value < math.inf for value in (one.kv_usage, one.running, one.waiting))
    assert sum(one.kv_usage or 0.0 for one in (leaving, *same)) <= most * len(same) + 1e-9
