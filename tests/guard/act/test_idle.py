"""Idleness: two witnesses who agree, and nothing missing; whatever is lost, an engine only becomes less idle."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.idle import APART_S, STALE_S, IdleSample, idleness
from plimsoll.guard.judge.look import CoreFigures, Look, Reach
from tests.each import cases, each

GATE: dict[str, Any] = {
    "in_flight": 0, "background": 0, "engine_requests": 0, "begun": 41, "steps": 900, "epoch": 7, "api_servers": 2,
    "idle": True, "is_dead": False, "is_wedged": False, "phase": "refusing",
}  # fmt: skip
PAGE = {"running": 0.0, "waiting": 0.0, "steps": 900.0}
COUNTS = ("in_flight", "background", "engine_requests")
BETWEEN = ("begun", "steps", "epoch", "api_servers")
NEEDED = (*COUNTS, *BETWEEN, "idle", "is_dead", "is_wedged")


def sample(at_s: float, gate: dict[str, Any] | None = None, page: dict[str, float] | None = None, **look: Any) -> IdleSample:
    """One look at an engine with nothing to do, but for what is said otherwise."""
    seen = {"health": 200, **look, "reach": Reach(look.get("reach", "answers"))}
    figures = {name: value for name, value in {**PAGE, **(page or {})}.items() if value is not None}
    facts = {name: value for name, value in {**GATE, **(gate or {})}.items() if value is not None}
    return IdleSample(Look(at_s, 1e9 + at_s, figures=figures, **seen), facts)


def test_two_samples_without_work_are_idle_and_every_rank_has_to_be_seen() -> None:
    """A while apart; work outweighs what is missing; the sum of a page in which one rank says nothing is no sum."""
    assert idleness([sample(0.0), sample(APART_S)]).is_done is True
    assert idleness([sample(0.0), sample(0.5), sample(1.0), sample(APART_S)]).is_done is True
    assert idleness([sample(0.0, gate={"in_flight": 3, "idle": None}, health=None)]).is_done is False
    whole = (CoreFigures("0", 5.0, 0.0, 0.0), CoreFigures("1", 5.0, 0.0, 0.0))
    assert idleness([sample(0.0, ranks=whole), sample(APART_S, ranks=whole)]).is_done is True
    odd = (CoreFigures("1", 5.0, None, 0.0), CoreFigures("1", None, 0.0, 0.0), whole[0])
    for part in (whole[:1], *((whole[0], other) for other in odd)):
        assert idleness([sample(0.0, ranks=whole), sample(APART_S, ranks=part)]).is_done is not True
    stepped = (whole[0], CoreFigures("1", 6.0, 0.0, 0.0))
    assert idleness([sample(0.0, ranks=whole), sample(APART_S, ranks=stepped)]).is_done is False


@each("times", [[], [0.0], [0.0, APART_S - 0.1], [0.0, STALE_S + 0.1], [5.0, 0.0]])
def test_one_witness_is_none(times: list[float]) -> None:
    """Never looked at, once, twice in a moment, too long ago, or not in order: not known."""
    assert idleness([sample(at_s) for at_s in times]).is_done is None


@each("place", [0, 1, 2])
@each(
    "work",
    [{"gate": {name: 1}} for name in COUNTS] + [{"page": {name: 1.0}} for name in ("running", "waiting")]
    + [{"ranks": (CoreFigures("0", 1.0, 0.0, 0.0), CoreFigures("1", 1.0, 0.0, 1.0))}] + [{"gate": {"idle": False}}],
)  # fmt: skip
def test_work_in_any_sample_is_work(work: dict[str, Any], place: int) -> None:
    """Whoever sees it, and whenever between the two witnesses."""
    seen = [sample(at_s, **(work if number == place else {})) for number, at_s in enumerate((0.0, 1.0, APART_S))]
    assert idleness(seen).is_done is not True
    assert idleness(seen[: place + 1]).is_done is False


@each("look", cases("guard", "looks that do not answer"))
def test_an_engine_that_does_not_answer_is_not_idle(look: dict[str, Any]) -> None:
    """A silent, dead or stuck one shows old figures: what it has is not known."""
    assert idleness([sample(0.0), sample(APART_S, **look)]).is_done is None
    assert idleness([sample(0.0, **look), sample(APART_S)]).is_done is None


@each("name", BETWEEN)
def test_what_came_and_went_between_the_samples_is_noticed(name: str) -> None:
    """A request let in, a step made, another epoch, another number of API servers: it begins anew."""
    changed = sample(APART_S, gate={name: GATE[name] + 1})
    assert idleness([sample(0.0), changed]).is_done is False
    assert idleness([changed, sample(2 * APART_S, gate={name: GATE[name] + 1})]).is_done is True
    assert idleness([sample(0.0), sample(APART_S, page={"steps": 901.0})]).is_done is False


@each("place", [0, 1])
@each("name", NEEDED)
def test_each_word_of_the_gate_is_needed(name: str, place: int) -> None:
    """Missing in either sample, it is not known."""
    seen = [sample(at_s, gate={name: None} if number == place else {}) for number, at_s in enumerate((0.0, APART_S))]
    assert idleness(seen).is_done is None
    assert idleness([one._replace(gate=None) if number == place else one for number, one in enumerate(seen)]).is_done is None


@each("value", [None, -1.0, float("nan"), float("inf")])
@each("name", PAGE)
def test_each_figure_of_the_page_is_needed(name: str, value: float | None) -> None:
    """Missing, or one that it cannot be: not known."""
    page: Any = {name: value}
    assert idleness([sample(0.0), sample(APART_S, page=page)]).is_done is None


SOME = st.sampled_from([0, 0, 0, 0, 0, 1])
STEP = st.sampled_from([900, 900, 900, 901])


@st.composite
def histories(draw: st.DrawFn) -> list[IdleSample]:
    """A few samples of an engine that has little to do, of one or two ranks."""
    found, at_s, has_ranks = [], 0.0, draw(st.booleans())
    for _ in range(draw(st.integers(1, 5))):
        at_s += draw(st.sampled_from([0.5, 1.0, 2.0, 2.0, 20.0]))
        gate = {name: draw(SOME) for name in COUNTS} | {"steps": draw(STEP), "idle": draw(st.booleans()) or draw(st.booleans())}
        steps = float(draw(STEP))
        ranks = tuple(CoreFigures(str(i), steps, float(draw(SOME)), float(draw(SOME))) for i in range(2)) if has_ranks else ()
        page = {"running": float(draw(SOME)), "waiting": float(draw(SOME)), "steps": steps}
        found.append(sample(at_s, gate, page, ranks=ranks, health=draw(st.sampled_from([200, 200, 200, 503]))))
    return found


def thinned(one: IdleSample, dice: random.Random) -> IdleSample:
    """The sample with something of it lost."""
    look, gate = one.look, dict(one.gate or {})
    what = dice.randrange(6)
    if what == 0:
        return one._replace(gate=None)
    if what == 1:
        return one._replace(look=look._replace(figures={k: v for k, v in look.figures.items() if dice.random() < 0.6}))
    if what == 2:
        return one._replace(gate={k: v for k, v in gate.items() if dice.random() < 0.8})
    if what == 3 and look.ranks:
        lost = {dice.choice(("steps", "running", "waiting")): None}
        return one._replace(look=look._replace(ranks=(look.ranks[0]._replace(**lost), *look.ranks[1:])))  # type: ignore[arg-type]
    if what == 4:
        return one._replace(look=look._replace(health=None))
    return one._replace(look=Look(look.at_s, look.unix_s, Reach.SILENT, "says nothing"))


@given(seen=histories(), seed=st.integers(0, 2**32), share=st.sampled_from([0.2, 0.5, 1.0]))
def test_losing_anything_never_makes_it_idle(seen: list[IdleSample], seed: int, share: float) -> None:
    """With a part of what was seen it is idle only where it is with all of it."""
    dice = random.Random(seed)
    less = [thinned(one, dice) if dice.random() < share else one for one in seen]
    if idleness(less).is_done is True:
        assert idleness(seen).is_done is True
        assert less == seen or all(
            one == two or one.look.at_s < seen[-1].look.at_s for one, two in zip(less, seen, strict=True)
        )


@given(seen=histories())
def test_idle_means_what_it_says(seen: list[IdleSample]) -> None:
    """Where it is idle, the last sample and one far enough before it show no work, nor does any between them."""
    if idleness(seen).is_done is not True:
        return
    last = seen[-1].look.at_s
    window = [one for one in seen if one.look.at_s >= last - APART_S]
    for one in window:
        assert one.gate is not None
        assert [one.gate[name] for name in COUNTS] == [0, 0, 0]
        assert (one.look.figures["running"], one.look.figures["waiting"], one.look.health) == (0.0, 0.0, 200)
    assert any(APART_S <= last - one.look.at_s <= STALE_S for one in seen)
