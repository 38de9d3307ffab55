"""What speaks against an action after it was begun: others that fall away, a word that is not so, a question nobody answers."""

from __future__ import annotations

import pytest

from lab.guard.acting import World
from lab.guard.acting_lives import MemoryBook, to_the_end, unsafe
from lab.guard.acting_parts import ENGINE, FakeRestarter, parts_of
from lab.guard.acting_play import SERVING, ends, play, says, view_of
from plimsoll.guard.act.decide import FleetView
from plimsoll.guard.act.ports import Outcome, unsure
from plimsoll.guard.act.steps import SERVING as COURSE
from plimsoll.guard.act.steps import End, Step, follows
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.judge.tracker import Grade


async def carried_out(conductor: Conductor, world: World, book: MemoryBook) -> None:
    """One restart of an engine that serves, to its end."""
    await conductor.carry_out(SERVING.plan)
    await to_the_end(conductor, world, book)


def test_one_that_falls_away_meanwhile_keeps_the_other_in_service() -> None:
    """While it drains another cannot carry its load any more: it is taken back, and nothing is stopped."""
    world, book = World(), MemoryBook()
    parts = parts_of(world)._replace(suffering=lambda: "z is out of rotation")
    play(world, book, lambda conductor: carried_out(conductor, world, book), parts=parts)
    assert (world.state.stops, ends(world)) == (0, ["undone"])
    assert "z is out of rotation" in says(world)
    assert unsafe(world, book) == []


def test_under_the_lock_it_is_considered_once_more() -> None:
    """What another guard has done since it was decided is seen: a second engine does not leave."""
    world, book = World(), MemoryBook()

    def view(_: frozenset[str]) -> FleetView:
        fleet = view_of("exhausted")
        return fleet._replace(engines=[one._replace(is_away=one.name != ENGINE) for one in fleet.engines])

    play(world, book, lambda conductor: carried_out(conductor, world, book), view=view)
    assert (world.state.stops, ends(world)) == (0, ["undone"])
    assert "away" in says(world)
    assert unsafe(world, book) == []


def test_the_word_of_whoever_runs_it_alone_does_not_make_it_idle() -> None:
    """It says that the engine does not run, and the engine answers: then it is another process, and has requests."""
    world, book = World(), MemoryBook()

    class Wrong(FakeRestarter):
        async def is_running(self) -> bool | None:
            return False

    play(
        world,
        book,
        lambda conductor: carried_out(conductor, world, book),
        parts=parts_of(world)._replace(restarter=Wrong(world)),
    )
    assert "it is down: nothing is in flight" not in says(world)
    assert [one for one in unsafe(world, book) if "in flight" in one] == []


def test_a_question_that_nobody_answers_keeps_no_engine_out_of_service() -> None:
    """The first request could not be sent: the engine answers all the same, and goes back."""
    world, book = World(), MemoryBook()

    async def nobody() -> Outcome:
        return unsure("unknown which model it serves")

    play(world, book, lambda conductor: carried_out(conductor, world, book), parts=parts_of(world)._replace(ask_once=nobody))
    assert ends(world) == ["done"]


def test_an_engine_that_its_first_request_ends_is_not_put_back() -> None:
    """Nobody knows what became of the request, but the engine is gone with it: held, and not in the balancer."""
    world, book = World(), MemoryBook()

    async def ends_it() -> Outcome:
        world.state.mode = "down"
        return unsure("warm-up request not sent: it hung up")

    play(world, book, lambda conductor: carried_out(conductor, world, book), parts=parts_of(world)._replace(ask_once=ends_it))
    assert ends(world) == ["held"]
    assert "the engine no longer answers" in says(world)


def test_what_has_ended_is_counted_for_the_metrics() -> None:
    """By engine, rung and end; what has not happened is there with 0, so that its first time shows as a rise."""
    world, book = World(), MemoryBook()
    counts: list[dict[tuple[str, Grade, End], int]] = []

    async def script(conductor: Conductor) -> None:
        counts.append(conductor.ended())
        await carried_out(conductor, world, book)
        counts.append(conductor.ended())

    play(world, book, script)
    before, after = counts
    assert set(before.values()) == {0}
    assert len(before) == len(Grade.__members__) * len(End) - len(End), "advice is no action"
    assert {one: count for one, count in after.items() if count} == {(ENGINE, Grade.RESTART, End.DONE): 1}


@pytest.mark.parametrize("step", [Step.CHECK, Step.WARM])
def test_only_a_real_no_holds_it_back(step: Step) -> None:
    """Not known goes on; no is held, for a person."""
    assert follows(COURSE, step, is_done=None).step is COURSE[COURSE.index(step) + 1]
    assert follows(COURSE, step, is_done=False).end is End.HELD
