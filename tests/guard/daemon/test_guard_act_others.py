"""What other people do while guard is at it: what they stop, keep for themselves or start is theirs, and a pause is heeded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from lab.guard.acting import State, World
from lab.guard.acting_lives import CASES, Case, MemoryBook, live, to_the_end, unsafe
from lab.guard.acting_parts import ENGINE, FakeBalancer, FakeRestarter, FakeSight, parts_of
from lab.guard.acting_play import SERVING, ends, killed_at, meanwhile, play, says
from plimsoll.guard.act.journal_replay import PAUSE
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.daemon.acting import NO_EXIT, ExitReport, exit_report
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.judge.look import Look
from plimsoll.inside import admission as gate
from plimsoll.unknown import Condition, Status
from tests.each import each

WEDGED, DEAD = CASES[2], CASES[3]


def stopped_by_hand(world: World) -> None:
    world.state.mode, world.state.in_flight, world.state.by_hand = "down", [], True


# What a person stops


@pytest.mark.parametrize(("case", "step"), [(SERVING, "idle"), (SERVING, "stop"), (WEDGED, "evidence"), (WEDGED, "stop")])
def test_what_somebody_stops_meanwhile_is_not_started(case: Case, step: str) -> None:
    """Guard waits or saves evidence, and a person stops the engine: it stays stopped, and the restart counts for nothing."""
    world, book = World(State(case.mode)), MemoryBook()
    conductor = meanwhile(world, book, step, lambda _: stopped_by_hand(world), case)
    assert (world.state.stops, world.state.starts, ends(world), conductor.restarts) == (0, 0, ["undone"], [])
    assert "somebody stopped it: guard leaves it stopped" in says(world)
    assert [one for one in unsafe(world, book) if "sent to an engine" not in one] == []


def test_what_ends_by_itself_meanwhile_is_started() -> None:
    """It was to be restarted anyway, and nobody wanted it down."""
    world, book = World(), MemoryBook()

    def ends_by_itself(_: Conductor) -> None:
        world.state.mode, world.state.in_flight = "down", []

    meanwhile(world, book, "idle", ends_by_itself)
    assert (world.state.starts, ends(world)) == (1, ["done"])


@pytest.mark.parametrize("point", ["after stop", "before outcome stop"])
def test_what_guard_itself_stopped_is_started_whoever_finds_it(point: str) -> None:
    """A unit that a guard stopped before it was killed looks like one that somebody stopped: it is not left down."""
    world, book = killed_at(point)
    world.state.now += 10.0
    world.tick()
    world.state.by_hand = True
    live(world, book, None)
    assert (world.state.stops, world.state.starts, ends(world)) == (1, 1, ["done"])
    assert unsafe(world, book) == []


# What an operator keeps in maintenance


class Maintained(FakeBalancer):
    """One in which an operator has put the engine into maintenance."""

    is_maint = True

    async def take_out(self) -> Outcome:
        """Refused, as HAProxy's adapter does."""
        if self.is_maint:
            return failed("an operator has it in maintenance in farm/a: it is left alone", maint=True)
        return await super().take_out()


@pytest.mark.parametrize("case", [SERVING, WEDGED, DEAD], ids=str)
def test_what_is_in_maintenance_is_neither_drained_nor_restarted(case: Case) -> None:
    """Also an engine that serves nobody: the operator is at work on it."""
    world, book = World(State(case.mode)), MemoryBook()
    live(world, book, case.plan, parts=parts_of(world)._replace(balancer=Maintained(world)))
    assert (world.state.stops, world.state.starts, ends(world)) == (0, 0, ["undone"])
    assert "in maintenance in farm/a" in says(world)
    assert unsafe(world, book) == []


@pytest.mark.parametrize("case", [SERVING, WEDGED, DEAD], ids=str)
def test_a_maintenance_that_begins_in_the_middle_is_heeded_before_the_stop(case: Case) -> None:
    """An operator takes the server for himself while guard has it out, whether it is down or not."""
    world, book = World(State(case.mode)), MemoryBook()
    balancer = Maintained(world)
    balancer.is_maint = False

    async def script(conductor: Conductor) -> None:
        world.when["stop"] = lambda: setattr(balancer, "is_maint", True)
        await conductor.carry_out(case.plan)

    play(world, book, script, parts=parts_of(world)._replace(balancer=balancer))
    assert (world.state.stops, world.state.starts, ends(world)) == (0, 0, ["undone"])


# A pause, and the lock


@pytest.mark.parametrize("case", [SERVING, WEDGED, DEAD], ids=str)
@pytest.mark.parametrize("how", ["pause", "lock"])
def test_a_pause_or_a_lost_lock_is_heeded_before_the_stop_whether_it_is_down_or_not(case: Case, how: str) -> None:
    """Nothing was stopped by guard yet, so there is something to take back."""
    world, book = World(State(case.mode)), MemoryBook()

    def happens(conductor: Conductor) -> None:
        if how == "pause":
            conductor.switch(PAUSE, ENGINE, is_on=True)
        else:
            world.state.holder = 99

    meanwhile(world, book, "stop", happens, case)
    assert (world.state.stops, world.state.starts, ends(world)) == (0, 0, ["undone"])
    assert unsafe(world, book) == []


# Knowledge at the last moment


class Late(FakeSight):
    """Conditions are those of the last look, which is an old one until somebody asks for another."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_watched, self.last = True, "wedged"
        self.reason = "Seen"

    async def look(self, engine: str) -> Look | None:
        self.last = self._world.state.mode
        return await super().look(engine) if self.is_watched else None

    def conditions(self, engine: str) -> Mapping[str, Condition]:
        kind = "dead" if self.last == "down" or self.reason != "Seen" else "wedged"
        is_true = self.last in ("wedged", "down")
        return {kind: Condition(kind, Status.TRUE if is_true else Status.FALSE, self.reason, engine, 0.0)}


def test_a_broken_one_is_judged_by_a_look_of_that_moment() -> None:
    """It came to life after the last look: it is not stopped."""
    world, book = World(State("wedged")), MemoryBook()
    sight = Late(world)

    async def script(conductor: Conductor) -> None:
        def recovers() -> None:
            world.state.mode, world.state.in_flight = "serving", []

        world.when["stop"] = recovers
        await conductor.carry_out(WEDGED.plan)

    play(world, book, script, sight=sight)
    assert (world.state.stops, ends(world)) == (0, ["undone"])
    assert "it may serve requests again" in says(world)


def test_without_a_look_nothing_broken_is_stopped() -> None:
    """What cannot be looked at is not known to be broken."""
    world, book = World(State("wedged")), MemoryBook()
    sight = Late(world)

    async def script(conductor: Conductor) -> None:
        world.when["stop"] = lambda: setattr(sight, "is_watched", False)
        await conductor.carry_out(WEDGED.plan)

    play(world, book, script, sight=sight)
    assert (world.state.stops, ends(world)) == (0, ["undone"])


@pytest.mark.parametrize("unproved", ["only guard's own connection says so", ""])
def test_one_that_only_guard_cannot_reach_is_not_stopped(unproved: str) -> None:
    """A rule stands between, or guard asks at another port: without a witness beside guard it is left as it is."""
    world, book = World(State("wedged")), MemoryBook()
    sight = Late(world)
    cast("Any", sight).unproved = lambda _, **__: unproved

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(DEAD.plan)
        await to_the_end(conductor, world, book)

    play(world, book, script, sight=sight)
    assert world.state.stops == (0 if unproved else 1)
    assert ends(world) == ["undone" if unproved else "done"]


def test_one_that_answers_is_not_stopped_through_somebody_who_says_that_it_does_not_run() -> None:
    """He speaks of another process: his stop would do nothing, and his start would make a second engine."""
    world, book = World(), MemoryBook()

    class Wrong(FakeRestarter):
        async def is_running(self) -> bool | None:
            return False

    live(world, book, SERVING.plan, parts=parts_of(world)._replace(restarter=Wrong(world)))
    assert (world.state.stops, world.state.starts, ends(world)) == (0, 0, ["undone"])
    assert "another process answers at this address" in says(world)
    assert unsafe(world, book) == []


@pytest.mark.parametrize(("case", "end"), [(SERVING, "done"), (WEDGED, "undone")])
@pytest.mark.parametrize("point", ["after stop", "before outcome stop"])
def test_one_that_somebody_started_and_that_still_loads_is_waited_for(case: Case, end: str, point: str) -> None:
    """A guard was killed in the stop, and the new process does not answer yet: it comes up and goes back, and is not held.

    Of the one that hung nobody knows when it had begun: that it serves is all that is sure.
    """
    world, book = killed_at(point, case)
    world.state.now += 10.0
    world.tick()
    state = world.state
    assert state.mode == "down"
    state.mode, state.drain, state.began = "serving", tuple(gate.Drain()), state.now
    state.ready_at = state.now + 6.0
    live(world, book, None)
    assert (state.stops, state.starts, ends(world), state.is_out) == (1, 0, [end], False)
    assert unsafe(world, book) == []


# Between two actions


DIED = "INFO vLLM API server version 0.32.0\nERROR EngineCore encountered a fatal error.\nRuntimeError: illegal memory access\n"
ENDED_BY_LOG = "its process has ended, and its log ends with 'EngineCore encountered a fatal error'"


@each(
    ("outcome", "log", "wanted"),
    [
        (done("somebody stopped it", by_hand=True), DIED, ExitReport(stopped="somebody stopped it")),
        (done("its unit stopped", by_hand=True, inferred=True), "", ExitReport(stopped="its unit stopped")),
        (
            done("its unit stopped", by_hand=True, inferred=True),
            DIED,
            ExitReport(ENDED_BY_LOG, failure="illegal memory access"),
        ),
        (done("its unit has failed"), "", ExitReport("its unit has failed")),
        (done("it ended as it was asked to", asked=True), DIED, NO_EXIT),
        (failed("it has not ended"), DIED, NO_EXIT),
        (unsure("nobody knows"), "", ExitReport(gone="its restarter says that it does not run")),
        (unsure("nobody knows"), DIED, ExitReport(ENDED_BY_LOG, failure="illegal memory access")),
        (unsure("", exit_code=139), "", ExitReport("its process ended with exit code 139", failure="SIGSEGV")),
        (unsure("", exit_code=137), "", ExitReport(gone="its restarter says that it does not run")),
    ],
)
def test_what_ended_by_itself_is_dead_and_what_somebody_stopped_is_only_observed(
    outcome: Outcome, log: str, wanted: ExitReport, tmp_path: Path
) -> None:
    """Its supervisor's word and the end of its log say which; what guard itself stopped, or what still runs, is neither."""
    world = World(State("down"))
    (tmp_path / "log").write_text(log)

    class Tells(FakeRestarter):
        async def last_exit(self) -> Outcome:
            return outcome

    adapters = parts_of(world)._replace(restarter=Tells(world))
    assert asyncio.run(exit_report(adapters, str(tmp_path / "log"))) == wanted
    world.state.mode = "serving"
    if outcome.is_done is None:
        assert asyncio.run(exit_report(adapters, str(tmp_path / "log"))) == NO_EXIT, "it runs"
