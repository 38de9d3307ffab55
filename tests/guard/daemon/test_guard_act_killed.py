"""A guard that dies anywhere: whoever starts it anew reaches a safe end, also where a step fails, also where it dies again."""

from __future__ import annotations

from itertools import product

import pytest

from lab.guard.acting import Fault, State, World
from lab.guard.acting_lives import CASES, Case, MemoryBook, live, unsafe
from plimsoll.guard.judge.tracker import Grade
from tests.each import SOAK, each, times

pytestmark = pytest.mark.once
DEEDS = {
    Grade.RESTART: (
        "acquire", "evidence", "take_out", "drain", "undrain", "put_back", "stop", "wait_back", "start", "warm", "release",
    ),
    Grade.SHED: ("acquire", "shed", "unshed", "release"),
    Grade.COMPACT: ("acquire", "compact", "release"),
}  # fmt: skip
TROUBLES = {Grade.RESTART: ("idle", "ready", "check"), Grade.SHED: (), Grade.COMPACT: ("verify",)}
HOWS = (Fault("fails"), Fault("unsure"), Fault("lost", 1))
THINNED = times(5, 1)  # of what goes wrong in two ways at once every fifth place: all of them together are too many
GAPS_S = (0.0, 200.0)  # a leases' length later: what was drained serves again, and work may have come


def world_of(case: Case, deed: str = "", fault: Fault | None = None, *, ttl_s: float = 0.0) -> World:
    """The world before anything is done."""
    return World(State(case.mode, case.balancer), {deed: fault} if fault is not None else {}, ttl_s=ttl_s)


def whole_life(case: Case, deed: str = "", fault: Fault | None = None) -> list[str]:
    """Every point of a guard that does not die; the end is safe."""
    world, book = world_of(case, deed, fault), MemoryBook()
    assert live(world, book, case.plan)
    points = world.points
    assert unsafe(world, book) == []
    return points


def check(world: World, book: MemoryBook, *where: object) -> None:
    found = unsafe(world, book)
    assert found == [], (where, world.state.told[-4:], [(one.kind, one.step) for one in book.entries][-8:])


@each("case", CASES)
@each(("gap_s", "ttl_s"), product(GAPS_S, (0.0, 25.0)) if SOAK else zip(GAPS_S, (25.0, 0.0), strict=True))
def test_a_guard_may_die_before_and_after_each_entry_and_each_deed(case: Case, gap_s: float, ttl_s: float) -> None:
    """Whatever it was about, nothing is harmed, nothing stays drained, and what was stopped runs again or somebody knows."""
    for place, name in enumerate(whole_life(case), 1):
        world, book = world_of(case, ttl_s=ttl_s), MemoryBook()
        assert not live(world, book, case.plan, place)
        world.state.now += gap_s
        assert live(world, book, None)
        check(world, book, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_guard_that_takes_over_may_die_too(case: Case) -> None:
    """The second one dies as well, at its first point, its second and so on; the third reaches a safe end."""
    for place, name in enumerate(whole_life(case), 1):
        later = 0
        while True:
            later += 1
            if (place + later) % (3 * THINNED):
                continue
            world, book = world_of(case), MemoryBook()
            live(world, book, case.plan, place)
            is_over = live(world, book, None, later)
            live(world, book, None)
            check(world, book, name, later)
            if is_over:
                break


@each("case", [one for one in CASES if one.balancer == "told"])
@each("how", HOWS, ids=lambda fault: fault.how)
def test_a_guard_may_die_anywhere_while_a_deed_goes_wrong(case: Case, how: Fault) -> None:
    """Each deed in turn fails, or nobody knows what became of it; the guard dies at each point of that."""
    for number, deed in enumerate(DEEDS[case.grade]):
        for place, name in enumerate(whole_life(case, deed, how), 1):
            if (place + number) % THINNED:
                continue
            world, book = world_of(case, deed, how), MemoryBook()
            live(world, book, case.plan, place)
            live(world, book, None)
            check(world, book, deed, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_guard_may_die_anywhere_while_the_engine_is_in_trouble(case: Case) -> None:
    """It never becomes idle, never ready, comes back with too small a cache, or gives back nothing."""
    for trouble in TROUBLES[case.grade]:
        for place, name in enumerate(whole_life(case, trouble, Fault("fails")), 1):
            world, book = world_of(case, trouble, Fault("fails")), MemoryBook()
            live(world, book, case.plan, place)
            live(world, book, None)
            check(world, book, trouble, name)


@pytest.mark.parametrize("is_blind", [False, True])
def test_an_engine_that_recovers_while_guard_is_away_is_not_stopped(is_blind: bool) -> None:
    """It was proved to be stuck, guard died, and it serves again: the next guard stops it no more, whatever was written."""
    case = Case(Grade.RESTART, "wedged", "wedged")
    for place, name in enumerate(whole_life(case), 1):
        world, book = world_of(case), MemoryBook()
        live(world, book, case.plan, place)
        was = world.state.mode
        if was == "wedged":
            world.state.mode = "serving"
            world.state.now += 20.0
        live(world, book, None, is_blind=is_blind)
        if was == "wedged":
            assert world.state.stops == 0, name
        check(world, book, name)


def test_the_points_are_those_of_the_course() -> None:
    """Each step of a course is written down before and after, and a guard can die at both."""
    for case in CASES:
        points = whole_life(case)
        for step in case.plan.steps:
            for point in (f"before intent {step}", f"after intent {step}", f"before outcome {step}", f"after outcome {step}"):
                assert points.count(point) == 1, (case, point)
        assert points[:2] == ["before opened", "after opened"]
        assert points[-2:] == ["before closed", "after closed"]
