"""Whether the others can carry the load of one that leaves."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.capacity import EngineLoad, load_of, without
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.unknown import Unknown
from tests.each import each

MOST = 0.8
ODD = st.sampled_from([None, math.nan, math.inf, -1.0])
FIGURE = st.one_of(st.floats(0, 1), ODD)
MODELS = st.sampled_from(["m", "m", "n", None])
LOADS = st.builds(EngineLoad, st.just("b"), FIGURE, st.floats(0, 200) | ODD, st.floats(0, 50) | ODD, st.booleans(), MODELS)


def load(kv: float, running: float = 4.0, waiting: float = 0.0, *, is_well: bool = True, model: str | None = "m") -> EngineLoad:
    return EngineLoad("b", kv, running, waiting, is_well, model)


def test_others_of_the_same_model_with_room_carry_it() -> None:
    """Half full each, the third's half fits; an idle embedder neither carries nor helps."""
    assert without(load(0.5), [load(0.5), load(0.5)], MOST) == ""
    full = [load(0.9), load(0.0, 0.0, model="embedder")]
    assert "full" in str(without(load(0.3), full, MOST))
    assert isinstance(without(load(0.1, model=None), [load(0.1)], MOST), Unknown)


@each(
    ("others", "words"),
    [
        ([], "no other engine"),
        ([load(0.1, is_well=False)], "b is not well"),
        ([load(0.1), load(0.1), load(0.1, is_well=False)], "b is not well"),
        ([load(0.1, model="embedder")], "known to serve the same model"),
        ([load(0.1, model=None)], "known to serve the same model"),
        ([load(0.5)], "100% full"),
        ([load(0.1, 4.0, 3.0)], "has a queue of its own"),
    ],
)
def test_each_reason_why_they_cannot_is_said(others: list[EngineLoad], words: str) -> None:
    """In words with the figures in them."""
    assert words in str(without(load(0.5), others, MOST))


@each("value", [None, math.nan, math.inf, -0.5])
def test_a_figure_that_is_missing_or_none_is_unknown(value: float | None) -> None:
    """Of the one that leaves and of those that stay; not a number compares as nothing, and is never enough."""
    assert isinstance(without(EngineLoad("a", value, 1.0, 0.0, model="m"), [load(0.1)], MOST), Unknown)
    assert isinstance(without(load(0.1), [EngineLoad("b", 0.1, 1.0, value, model="m")], MOST), Unknown)


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


def test_a_load_is_of_an_engine_that_answers() -> None:
    """From a look that failed nothing is known, and whoever gave it is not well."""
    figures = {"kv_cache_usage": 0.5, "running": 3.0, "waiting": 1.0}
    answers = Look(0.0, 0.0, Reach.ANSWERS, figures=figures)
    assert load_of("a", answers, is_well=True, model="m") == EngineLoad("a", 0.5, 3.0, 1.0, model="m")
    for look in (None, Look(0.0, 0.0, Reach.SILENT, figures=figures)):
        assert load_of("a", look, is_well=True) == EngineLoad("a", None, None, None, is_well=False)
