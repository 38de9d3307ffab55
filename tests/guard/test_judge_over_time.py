"""The judge over healthy traffic and over every fault, with all data and with some lost; benchmarks/guard_*.py do more."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.guard.drops import LOST, Drops, thinned
from lab.guard.faults import CASES, Case, Scene, play
from lab.guard.looks import Sight, Watched
from lab.guard.weeks import ENGINES, KINDS, Kind, engine_for, launch, week
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.standin import StandIn
from plimsoll.unknown import Status
from tests.each import each, times
from tests.guard.acting import acting

LOOKS, LOOKS_WHEN_FULL = times(1_080, 8_640), times(360, 2_160)  # an hour and a half, or half a day


@each("kind", KINDS, ids=lambda kind: kind.name)
def test_nothing_is_done_about_a_healthy_engine(kind: Kind) -> None:
    """Hours of each kind of traffic lead to no action, whatever else is said."""
    number = KINDS.index(kind)
    judge = Judge("engine", Policy())
    acted = []
    count = LOOKS_WHEN_FULL if kind.is_full else LOOKS  # a full cache is the same all day, and much work
    for look in itertools.islice(week(kind, engine_for(kind, number), 11 + number, 1), count):
        acted += [str(change) for change in judge.see(look) if change.is_true and change.kind in GRADES]
    assert acted == []


def test_the_same_seed_is_the_same_week_and_only_these_conditions_could_lead_to_an_action() -> None:
    """What a benchmark found can be looked at again; an eighth condition must be proved quiet, too."""
    one, other = (list(itertools.islice(week(KINDS[1], ENGINES[0], 5, 1), 500)) for _ in range(2))
    assert one == other
    assert set(GRADES) == {"dead", "wedged", "hung", "exhausted", "saturated", "neighbour", "limping"}
    assert all(grade.is_action for grade in GRADES.values())


@each("seed", range(3, 3 + times(1, 5)))
@each("case", CASES, ids=lambda case: case.name)
def test_a_fault_is_found_in_time_under_its_own_name(case: Case, seed: int) -> None:
    """Within its window and three looks, and no other condition that could lead to an action holds meanwhile."""
    outcome = play(case, seed)
    assert outcome.is_in_time, outcome
    assert outcome.others == (), outcome


LIKELY = st.sampled_from([0.01, 0.05, 0.2, 0.5, 0.9])
# One to three things are lost at a time: with everything lost at once there is nothing left to be wrong about.
DROPS = st.builds(
    lambda seed, lost, at_once: Drops(seed, **lost, at_once=at_once),
    st.integers(0, 2**32), st.dictionaries(st.sampled_from(LOST), LIKELY, min_size=1, max_size=3),
    st.sampled_from([1, 1, 2, 5, 40]),
)  # fmt: skip
SICK = {"oom, port closed": 2_900.0, "oom, 503": 1_000.0, "wedge": 1_300.0, "idle-hang": 1_200.0, "neighbour": 1_700.0,
        "overload": 1_800.0, "overload, small": 2_400.0, "growth, to the end": 5_500.0}  # fmt: skip
# Without any of these nothing can be said; what one figure alone decides is told by it, whatever else is lost.
NEEDS = {
    "wedged": ("running", "waiting"), "saturated": ("running", "waiting"), "storm": ("preemptions",),
    "backlog": ("kv_cache_usage", "running", "waiting"), "prefix": ("prefix_queries",),
}  # fmt: skip
LEVEL = {"bursty", "staircase", "full cache", "full, preempts"}  # the same load at any hour: no need to wait for the day
OF_WORKERS = ("retries", "growth", "exhausted", "slack", "neighbour", "host")
OF_THE_PAGE = ("wedged", "hung", "saturated", "storm", "backlog", "prefix", *OF_WORKERS)


@functools.cache
def sick(name: str, seed: int) -> tuple[Look, ...]:
    case = next(case for case in CASES if case.name == name)
    return tuple(case.make(seed).looks(SICK[name]))


@functools.cache
def healthy(name: str) -> tuple[Look, ...]:
    """Some time of one that does not, by day: all that can be seen of it is there, and two workers."""
    number = [kind.name for kind in KINDS].index(name)
    looks = week(KINDS[number], ENGINES[3 if number % 2 else 0], 17 + number, 1)
    first = 800 if name in LEVEL else 5_000
    return tuple(itertools.islice(looks, first, first + times(500, 1_400)))


def acts_at(looks: Iterable[Look]) -> float:
    """When a condition that could lead to an action first held; infinity for never."""
    judge = Judge("engine", Policy())
    for look in looks:
        judge.see(look)
        if acting(judge):
            return look.at_s
    return math.inf


@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
@settings(max_examples=times(2, 200))
@given(drops=DROPS)
def test_losing_data_does_not_make_a_healthy_engine_sick(name: str, drops: Drops) -> None:
    """Whatever is lost, nothing is done about a healthy engine."""
    assert acts_at(thinned(healthy(name), drops)) == math.inf


@pytest.mark.parametrize("name", SICK)
@settings(max_examples=times(2, 200))
@given(drops=DROPS, seed=st.integers(1, 4))
def test_losing_data_never_makes_it_act_sooner(name: str, drops: Drops, seed: int) -> None:
    """With a part of the data, an action-grade condition holds at the same look as with all of them, or later, or never.

    Whether a queue grows is a matter of means: of a truly overloaded engine it may be said some looks sooner.
    """
    looks = sick(name, seed)
    sooner_s = Policy().number("saturated", "for") if name.startswith("overload") else 0.0
    assert acts_at(thinned(looks, drops)) >= acts_at(looks) - sooner_s


@functools.cache
def busy() -> tuple[Look, ...]:
    """Half an hour of an engine of which everything is seen."""
    scene = Scene(9, share=0.5)
    return tuple(Watched(StandIn(launch(ENGINES[0]).config), Sight(has_gate=False)).looks(1_900.0, scene.load))


@given(drops=DROPS, from_look=st.integers(0, 200), is_lying=st.booleans())
def test_what_rests_on_missing_data_says_unknown(drops: Drops, from_look: int, is_lying: bool) -> None:
    """At every look, a condition whose figures are missing, or cannot be, is unknown: neither held nor denied."""
    judge = Judge("engine", Policy())
    for seen in thinned(busy()[from_look:], drops):
        lies = {name: math.nan if len(name) % 2 else -1.0 for name in seen.figures}
        look = seen._replace(figures=lies) if is_lying else seen
        judge.see(look)
        says = {condition.kind: condition.status for condition in judge.conditions}
        usable = {name for name, value in look.figures.items() if 0 <= value < math.inf}
        missing = {kind for kind, names in NEEDS.items() if not usable.issuperset(names)}
        if not look.workers or any(worker.age_s >= 30.0 for worker in look.workers):
            missing |= set(OF_WORKERS)
        if look.canary is None or look.canary.is_answered is None:
            missing.add("hung")
        if look.reach is not Reach.ANSWERS:
            missing |= {*OF_THE_PAGE, "dead", "loop", "changed", "card"}
        assert {kind for kind in missing if says[kind] is not Status.UNKNOWN} == set()


def test_a_stale_or_an_earlier_look_changes_nothing() -> None:
    """A look that is not later than the last is no look: nothing is judged again by it."""
    looks = sick("oom, 503", 1)
    judge = Judge("engine", Policy())
    for look in looks[:100]:
        judge.see(look)
    before = judge.conditions
    assert judge.see(looks[50]) == ()
    assert judge.see(looks[99]) == ()
    assert judge.conditions == before
