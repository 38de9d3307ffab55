"""The judge over healthy traffic; benchmarks/guard_quiet.py does it for a thousand days."""

from __future__ import annotations

import itertools

from lab.guard.weeks import ENGINES, KINDS, Kind, engine_for, week
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.policy import GRADES, Policy
from tests.each import each, times

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


def test_the_same_seed_is_the_same_week() -> None:
    """What a benchmark found can be looked at again: a seed gives the same looks."""
    one, other = (list(itertools.islice(week(KINDS[1], ENGINES[0], 5, 1), 500)) for _ in range(2))
    assert one == other


def test_only_these_conditions_could_lead_to_an_action() -> None:
    """What quiet means is fixed here: an eighth condition must be proved quiet, too. Nobody limps without saying so itself."""
    assert set(GRADES) == {"dead", "wedged", "hung", "exhausted", "saturated", "neighbour", "limping"}
    assert all(grade.is_action for grade in GRADES.values())
