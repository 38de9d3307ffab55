"""The steps of an action when something happens in the middle: the lock is lost, work comes, somebody pauses it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from lab.guard.acting import Fault, State, World
from lab.guard.acting_lives import CASES, POLICY, Case, MemoryBook, live, to_the_end, unsafe
from lab.guard.acting_parts import ENGINE, FakeLock, FakeRestarter, parts_of
from lab.guard.acting_play import SERVING, ends, killed_at, meanwhile, play, says, view_of
from plimsoll.guard.act.decide import BlockedAction
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS
from plimsoll.guard.act.ports import Outcome, unsure
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.judge.tracker import Grade
from tests.each import each

# The lock


@pytest.mark.parametrize("how", ["fails", "lost"])
def test_without_the_lock_nothing_is_begun_and_the_pauses_grow(how: str) -> None:
    """Somebody else has it, or it cannot be asked: guard stands back, longer each time, and forgets that after a success."""
    world, book = World(faults={"acquire": Fault(how, 3)}), MemoryBook()
    begun: list[float] = []

    async def script(conductor: Conductor) -> None:
        while len(begun) < 4:
            await conductor.turn()
            await asyncio.sleep(1.0)
            begun.extend([world.state.now] * (len(ends(world)) - len(begun)))
        assert conductor._again == {}

    play(world, book, script, view=lambda _: view_of("exhausted", is_true=world.state.stops == 0))
    assert ends(world) == ["stood-back"] * 3 + ["done"]
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert pauses[:2] == [pytest.approx(60, abs=3), pytest.approx(120, abs=3)]
    assert unsafe(world, book) == []


def test_a_lock_lost_in_a_drain_takes_it_back() -> None:
    """Somebody else may act now: the engine goes back into service, and nothing is stopped."""
    world, book = World(faults={"idle": Fault("fails")}), MemoryBook()
    meanwhile(world, book, "idle", lambda _: setattr(world.state, "holder", 99))
    assert (world.state.stops, ends(world)) == (0, ["undone"])
    assert "lock lost" in says(world)
    assert unsafe(world, book) == []


@pytest.mark.parametrize("step", ["gone", "start", "ready", "warm"])
def test_a_lock_lost_in_a_restart_is_finished_without_a_second_stop(step: str) -> None:
    """The engine is down: only forward helps."""
    world, book = World(), MemoryBook()
    meanwhile(world, book, step, lambda _: setattr(world.state, "holder", 99))
    assert (world.state.stops, world.state.starts, ends(world)) == (1, 1, ["done"])
    assert unsafe(world, book) == []


def test_a_lock_that_cannot_be_asked_is_lost_when_its_time_is_over() -> None:
    """It is renewed by what it says of its own time, not by the drain's lease; and not known is not held for ever."""
    world, book = World(faults={"idle": Fault("fails")}, ttl_s=6.0), MemoryBook()
    asked: list[float] = []

    class Silent(FakeLock):
        async def renew(self) -> Outcome:
            asked.append(world.state.now)
            return unsure("nobody answers")

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(SERVING.plan)

    play(world, book, script, lock=Silent(world))
    assert asked[1] - asked[0] < 3.0
    assert (world.state.stops, ends(world)) == (0, ["undone"])
    assert unsafe(world, book) == []


def test_what_an_earlier_guard_left_waits_for_the_lock_and_nothing_else_is_begun_with_it() -> None:
    """While another guard has the lock an engine that is half restarted is not restarted a second time."""
    world, book = killed_at("before outcome stop", ttl_s=100.0)
    world.state.holder, world.state.held_until = 99, world.state.now + 100.0
    world.state.now += 10.0

    async def script(conductor: Conductor) -> None:
        assert [one.engine for one in await conductor.take_over()] == [ENGINE]
        await conductor.turn()
        answer = conductor.ask(Grade.RESTART, ENGINE)
        await conductor.turn()
        found = answer.result()
        assert isinstance(found, BlockedAction)
        assert found.reason == "Busy"
        await to_the_end(conductor, world, book)

    play(world, book, script, view=lambda _: view_of("dead"))
    assert (world.state.stops, world.state.starts) == (1, 1)
    assert unsafe(world, book) == []


# The stop


@each("case", [SERVING, CASES[2]])
def test_a_hung_engine_is_killed_soon_and_one_that_works_gets_its_time(case: Case) -> None:
    """What is proven to hang has nothing to finish: ten seconds; what is drained and idle gets `stop_within`."""
    world, book = World(State(case.mode)), MemoryBook()
    told: list[float] = []

    class Telling(FakeRestarter):
        async def stop(self, deadline_s: float) -> Outcome:
            told.append(deadline_s)
            return await super().stop(deadline_s)

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(case.plan)
        await to_the_end(conductor, world, book)

    play(world, book, script, parts=parts_of(world)._replace(restarter=Telling(world)))
    assert told == [10.0 if case.kind == "wedged" else POLICY.stop_within_s]
    assert unsafe(world, book) == []


# The drain


@pytest.mark.parametrize("balancer", ["told", "asks"])
def test_a_stop_that_was_only_written_down_is_done_when_the_engine_is_idle_again(balancer: str) -> None:
    """The lease ended meanwhile and work came: the next guard drains it anew, waits, and stops it once."""
    world, book = killed_at("after intent stop", SERVING._replace(balancer=balancer))
    world.state.now += 200.0
    world.state.in_flight.append(world.state.now + 9.0)
    live(world, book, None)
    assert (world.state.stops, world.state.starts, ends(world)) == (1, 1, ["done"])
    assert unsafe(world, book) == []


def test_a_balancer_that_forgets_is_told_again() -> None:
    """A reload puts the engine back in the middle of a drain: it is taken out again, and stopped only when it is idle."""
    world, book = World(), MemoryBook()

    def forget(_: Conductor) -> None:
        world.state.is_out = False
        world.state.in_flight.append(world.state.now + 25.0)

    meanwhile(world, book, "idle", forget)
    assert ends(world) == ["done"]
    assert [one for one in unsafe(world, book) if "refused" not in one] == []


def test_work_that_comes_at_the_last_moment_is_not_lost() -> None:
    """Between idle and stop: the engine goes back into service, and the restart counts for nothing."""
    world, book = World(), MemoryBook()

    def arrive(_: Conductor) -> None:
        world.state.in_flight.append(world.state.now + 50.0)

    conductor = meanwhile(world, book, "stop", arrive)
    assert (world.state.stops, ends(world), conductor.restarts) == (0, ["undone"], [])
    assert unsafe(world, book) == []


@pytest.mark.parametrize(("stragglers", "end"), [("undo", "undone"), ("stop", "done")])
def test_stragglers_end_as_it_is_configured(stragglers: str, end: str) -> None:
    """Not idle in time: taken back, or stopped all the same where somebody wants that."""
    world, book = World(faults={"idle": Fault("fails")}), MemoryBook()
    world.may_lose = stragglers == "stop"
    live(world, book, SERVING.plan, policy=replace(POLICY, stragglers=stragglers))
    assert ends(world) == [end]
    assert world.state.harm == []


@each("step", ["evidence", "drain", "idle", "stop"])
@each(("name", "engine"), [(PAUSE, ""), (PAUSE, ENGINE), (f"{RUNGS}restart", "")])
def test_a_pause_takes_back_what_has_not_stopped_anything_yet(step: str, name: str, engine: str) -> None:
    """Whoever sees guard begin and does not want it can still say so."""
    world, book = World(), MemoryBook()
    meanwhile(world, book, step, lambda conductor: conductor.switch(name, engine, is_on=True))
    assert (world.state.stops, ends(world)) == (0, ["undone"])
    assert unsafe(world, book) == []


@pytest.mark.parametrize("step", ["gone", "start", "ready"])
def test_a_pause_does_not_leave_an_engine_down(step: str) -> None:
    """What is down already is started."""
    world, book = World(), MemoryBook()
    meanwhile(world, book, step, lambda conductor: conductor.switch(PAUSE, "", is_on=True))
    assert (world.state.starts, ends(world)) == (1, ["done"])


def test_shedding_ends_when_it_is_switched_off() -> None:
    """And not only when the queue no longer grows."""
    world, book = World(), MemoryBook()
    world.full_until = 1e9
    meanwhile(world, book, "hold", lambda conductor: conductor.switch(f"{RUNGS}shed", "", is_on=True), CASES[4])
    assert (world.state.shed_until, ends(world)) == (0.0, ["done"])
