"""An action when something happens in the middle of it: a lock is lost, work comes, somebody pauses it or stops the engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lab.guard.acting import Fault, State, World
from lab.guard.acting_lives import CASES, POLICY, Case, MemoryBook, live, to_the_end, unsafe
from lab.guard.acting_parts import ENGINE, FakeBalancer, FakeLock, FakeRestarter, FakeSight, parts_of
from lab.guard.acting_play import SERVING, ends, killed_at, play, says, view_of
from plimsoll.guard.act.decide import FleetView
from plimsoll.guard.act.journal_entry import INTENT, OUTCOME
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.act.steps import SERVING as COURSE
from plimsoll.guard.act.steps import End, Step, follows
from plimsoll.guard.daemon import acting
from plimsoll.guard.daemon.acting import NO_EXIT, ExitReport, exit_report
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.tracker import Grade
from plimsoll.inside import admission as gate
from plimsoll.unknown import Condition, Status
from tests.each import each
from tests.guard.acting import reason

WEDGED, DEAD, SHED = CASES[2], CASES[3], CASES[4]
Deed = Callable[[World, Conductor], None]
UNDONE, DONE = (0, 0, "undone"), (1, 1, "done")


def acted(
    case: Case = SERVING, step: str = "", deed: Deed = lambda *_: None, *, faults: Mapping[str, Fault] | None = None,
    parts: Callable[[World], EngineAdapters] = parts_of, sight: Callable[[World], FakeSight] = FakeSight, **more: Any,
) -> tuple[World, MemoryBook, Conductor]:  # fmt: skip
    """The action of this case to its end; the deed is done when it comes to that step."""
    world, book = World(State(case.mode), dict(faults or {})), MemoryBook()

    async def script(conductor: Conductor) -> None:
        def happens() -> None:
            world.when.clear()
            deed(world, conductor)

        if step:
            world.when[step] = happens
        await conductor.carry_out(case.plan)
        await to_the_end(conductor, world, book)

    return world, book, play(world, book, script, parts=parts(world), sight=sight(world), **more)


def result(world: World) -> tuple[object, ...]:
    return world.state.stops, world.state.starts, *ends(world)


# What happens meanwhile
def loses_the_lock(world: World, _: Conductor) -> None:
    world.state.holder = 99


def forgets(world: World, _: Conductor) -> None:
    """A balancer that is reloaded: the engine is in again, and gets work."""
    world.state.is_out = False
    world.state.in_flight.append(world.state.now + 25.0)


def gets_work(world: World, _: Conductor) -> None:
    world.state.in_flight.append(world.state.now + 50.0)


def ends_by_itself(world: World, _: Conductor) -> None:
    world.state.mode, world.state.in_flight = "down", []


def is_stopped_by_hand(world: World, _: Conductor) -> None:
    world.state.mode, world.state.in_flight, world.state.by_hand = "down", [], True


def switched(name: str = PAUSE, engine: str = "") -> Deed:
    return lambda _, conductor: conductor.switch(name, engine, is_on=True)


SWITCHES = (switched(), switched(PAUSE, ENGINE), switched(f"{RUNGS}restart"))
STOPPED = "somebody stopped it: guard leaves it stopped"
MEANWHILE: list[tuple[Case, str, Deed, tuple[object, ...], str]] = [
    *((SERVING, step, loses_the_lock, DONE, "") for step in ("gone", "start", "ready", "warm")),
    *((case, "stop", loses_the_lock, UNDONE, "the lock is no longer certainly ours") for case in (SERVING, WEDGED, DEAD)),
    *((case, "stop", switched(PAUSE, ENGINE), UNDONE, "paused by an operator") for case in (SERVING, WEDGED, DEAD)),
    *((SERVING, step, deed, UNDONE, "paused") for step in ("evidence", "drain", "idle", "stop") for deed in SWITCHES),
    *((SERVING, step, switched(), DONE, "") for step in ("gone", "start", "ready")),
    (SERVING, "idle", forgets, DONE, ""),
    (SERVING, "stop", gets_work, UNDONE, "work came in at the last moment"),
    (SERVING, "idle", ends_by_itself, (0, 1, "done"), ""),
    *((case, step, is_stopped_by_hand, UNDONE, STOPPED)
      for case, step in ((SERVING, "idle"), (SERVING, "stop"), (WEDGED, "evidence"), (WEDGED, "stop"))),
]  # fmt: skip
"""Before the stop it is taken back; what is down already is started, whatever happens."""
FORGIVEN: dict[Deed, str] = {forgets: "refused", is_stopped_by_hand: "sent to an engine", ends_by_itself: "sent to an engine"}


@each(("case", "step", "deed", "wanted", "said"), MEANWHILE)
def test_what_happens_meanwhile_is_heeded(case: Case, step: str, deed: Deed, wanted: tuple[object, ...], said: str) -> None:
    """A lost lock, a pause, new work, a reload, somebody's own stop: it is undone, or finished where the engine is down."""
    world, book, conductor = acted(case, step, deed)
    assert result(world) == wanted
    assert said in says(world)
    assert [one for one in unsafe(world, book) if FORGIVEN.get(deed, "-") not in one] == []
    assert wanted is not UNDONE or conductor.restarts == [], "what was taken back counts for nothing"
    assert deed is not forgets or world.points.count("before take_out") == 3, "told at the drain, again, and before the stop"


@pytest.mark.parametrize(("step", "deed", "said"), [("idle", loses_the_lock, "lock lost"), ("", gets_work, "not idle after")])
def test_one_that_never_becomes_idle_goes_back(step: str, deed: Deed, said: str) -> None:
    """Also when the lock is lost in the drain: somebody else may act now."""
    world, book, _ = acted(SERVING, step, deed, faults={"idle": Fault("fails")})
    assert result(world) == UNDONE
    assert said in says(world)
    assert unsafe(world, book) == []


def test_stragglers_are_stopped_where_somebody_wants_that_and_shedding_ends_when_it_is_switched_off() -> None:
    """Not idle in time: stopped all the same, as configured; and not only when the queue no longer grows."""
    world, book = World(faults={"idle": Fault("fails")}), MemoryBook()
    world.may_lose = True
    live(world, book, SERVING.plan, policy=replace(POLICY, stragglers="stop"))
    assert (ends(world), world.state.harm) == (["done"], [])

    def off(world: World, conductor: Conductor) -> None:
        world.full_until = 1e9
        conductor.switch(f"{RUNGS}shed", "", is_on=True)

    world, book, _ = acted(SHED, "hold", off)
    assert (world.state.shed_until, ends(world)) == (0.0, ["done"])


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


def test_a_lock_that_cannot_be_asked_is_lost_in_its_time_and_what_was_left_open_waits_for_it() -> None:
    """Not known is not held for ever; while another guard has the lock, what is half restarted is not restarted again."""
    world, book = World(faults={"idle": Fault("fails")}, ttl_s=6.0), MemoryBook()
    asked: list[float] = []

    class Silent(FakeLock):
        async def renew(self) -> Outcome:
            asked.append(world.state.now)
            return unsure("nobody answers")

    play(world, book, lambda conductor: conductor.carry_out(SERVING.plan), lock=Silent(world))
    assert asked[1] - asked[0] < 3.0
    assert result(world) == UNDONE
    assert unsafe(world, book) == []
    world, book = killed_at("before outcome stop", ttl_s=100.0)
    world.state.holder, world.state.held_until = 99, world.state.now + 100.0
    world.state.now += 10.0

    async def script(conductor: Conductor) -> None:
        assert [one.engine for one in await conductor.take_over()] == [ENGINE]
        await conductor.turn()
        answer = conductor.ask(Grade.RESTART, ENGINE)
        await conductor.turn()
        assert reason(answer.result()) == "Busy"
        await to_the_end(conductor, world, book)

    play(world, book, script, view=lambda _: view_of("dead"))
    assert (world.state.stops, world.state.starts) == (1, 1)
    assert unsafe(world, book) == []


# The stop
@each("case", [SERVING, WEDGED])
def test_a_hung_engine_is_killed_soon_and_one_that_works_gets_its_time(case: Case) -> None:
    """What is proven to hang has nothing to finish: ten seconds; what is drained and idle gets `stop_within`."""
    told: list[float] = []

    class Telling(FakeRestarter):
        async def stop(self, deadline_s: float) -> Outcome:
            told.append(deadline_s)
            return await super().stop(deadline_s)

    world, book, _ = acted(case, parts=lambda world: parts_of(world)._replace(restarter=Telling(world)))
    assert told == [10.0 if case is WEDGED else POLICY.stop_within_s]
    assert unsafe(world, book) == []


@pytest.mark.parametrize("point", ["after stop", "before outcome stop"])
def test_what_guard_itself_stopped_is_started_whoever_finds_it(point: str) -> None:
    """A unit that a guard stopped before it was killed looks like one that somebody stopped: it is not left down."""
    world, book = killed_at(point)
    world.state.now += 10.0
    world.tick()
    world.state.by_hand = True
    live(world, book, None)
    assert result(world) == DONE
    assert unsafe(world, book) == []


@each(("case", "end"), [(SERVING, "done"), (WEDGED, "undone")])
@each("point", ["after stop", "before outcome stop"])
@each("loads_s", [0.0, 6.0])
def test_one_that_somebody_started_is_not_stopped_again(case: Case, end: str, point: str, loads_s: float) -> None:
    """A guard was killed in the stop: the new process is waited for where it still loads, goes back, and is not held.

    Of the one that hung nobody knows when it had begun: that it serves is all that is sure.
    """
    world, book = killed_at(point, case)
    world.state.now += 10.0
    world.tick()
    state = world.state
    assert state.mode == "down"
    state.mode, state.drain, state.began = "serving", tuple(gate.Drain()), state.now
    state.ready_at = state.now + loads_s
    live(world, book, None)
    assert (*result(world), state.is_out) == (1, 0, end, False)
    assert unsafe(world, book) == []


def test_a_crash_that_looks_like_a_stop_and_a_stop_that_becomes_known_late() -> None:
    """Exit code 0, of which systemd infers a stop, is overruled by a log that tells of a crash; a person's stop is heeded."""

    class Infers(FakeRestarter):
        async def last_exit(self) -> Outcome:
            return done("somebody stopped its unit", by_hand=True, inferred=True)

    class Logged(FakeSight):
        async def look(self, engine: str) -> Look | None:
            look = await super().look(engine)
            return look if look is None or look.reach is Reach.ANSWERS else look._replace(ended=ENDED_BY_LOG)

    for sight, wanted in ((FakeSight, UNDONE), (Logged, (0, 1, "done"))):
        world, book, _ = acted(DEAD, sight=sight, parts=lambda world: parts_of(world)._replace(restarter=Infers(world)))
        assert result(world) == wanted
        assert unsafe(world, book) == []

    class Slow(FakeRestarter):
        asked = 0

        async def is_running(self) -> bool | None:
            self.asked += 1
            return None if self.asked == 1 else await super().is_running()

    parts = lambda world: parts_of(world)._replace(restarter=Slow(world))  # noqa: E731
    world, book, _ = acted(DEAD, "stop", is_stopped_by_hand, parts=parts)
    assert result(world) == UNDONE
    assert STOPPED in says(world)
    assert [one for one in unsafe(world, book) if "sent to an engine" not in one] == []


class Maintained(FakeBalancer):
    """One in which an operator has put the engine into maintenance."""

    is_maint = True

    async def take_out(self) -> Outcome:
        """Refused, as HAProxy's adapter does."""
        if self.is_maint:
            return failed("an operator has it in maintenance in farm/a: it is left alone", maint=True)
        return await super().take_out()


@each("case", [SERVING, WEDGED, DEAD])
@each("step", ["", "stop"])
def test_what_is_in_maintenance_is_neither_drained_nor_restarted(case: Case, step: str) -> None:
    """Also an engine that serves nobody, and also where the operator takes it for himself while guard has it out."""
    balancers: list[Maintained] = []

    def parts(world: World) -> EngineAdapters:
        balancers.append(Maintained(world))
        balancers[0].is_maint = not step
        return parts_of(world)._replace(balancer=balancers[0])

    world, book, _ = acted(case, step, lambda *_: setattr(balancers[0], "is_maint", True), parts=parts)
    assert result(world) == UNDONE
    assert "in maintenance in farm/a" in says(world)
    assert step or unsafe(world, book) == []


class Late(FakeSight):
    """Conditions are those of the last look, which is an old one until somebody asks for another."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_watched, self.last = True, "wedged"

    async def look(self, engine: str) -> Look | None:
        self.last = self._world.state.mode
        return await super().look(engine) if self.is_watched else None

    def conditions(self, engine: str) -> Mapping[str, Condition]:
        kind = "dead" if self.last == "down" else "wedged"
        is_true = self.last in ("wedged", "down")
        return {kind: Condition(kind, Status.TRUE if is_true else Status.FALSE, "Seen", engine, 0.0)}


def test_a_broken_one_is_judged_by_a_look_of_that_moment() -> None:
    """It came to life after the last look, cannot be looked at, or only guard cannot reach it: it is not stopped."""

    def recovers(world: World, _: Conductor) -> None:
        world.state.mode, world.state.in_flight = "serving", []

    world, _, _ = acted(WEDGED, "stop", recovers, sight=Late)
    assert result(world) == UNDONE
    assert "it may serve requests again" in says(world)
    sights: list[Late] = []

    def kept(world: World) -> Late:
        sights.append(Late(world))
        return sights[0]

    assert result(acted(WEDGED, "stop", lambda *_: setattr(sights[0], "is_watched", False), sight=kept)[0]) == UNDONE
    for unproved, wanted in (("only guard's own connection says so", UNDONE), ("", DONE)):

        def told(world: World, unproved: str = unproved) -> Late:
            sight = Late(world)
            cast("Any", sight).unproved = lambda _, **__: unproved
            return sight

        assert result(acted(DEAD._replace(mode="wedged"), sight=told)[0]) == wanted


class Wrong(FakeRestarter):
    async def is_running(self) -> bool | None:
        return False


def away(_: frozenset[str]) -> FleetView:
    """Another guard has taken the others since it was decided."""
    fleet = view_of("exhausted")
    return fleet._replace(engines=[one._replace(is_away=one.name != ENGINE) for one in fleet.engines])


async def nobody() -> Outcome:
    return unsure("unknown which model it serves")


class Suffering(FakeSight):
    def suffering(self, engine: str, policy: ActPolicy) -> str:
        del engine, policy
        return "z is out of rotation"


DOUBTS: list[tuple[dict[str, Any], tuple[object, ...], str]] = [
    ({"sight": Suffering}, UNDONE, "z is out of rotation"),
    ({"restarter": Wrong}, UNDONE, "another process answers at this address"),
    ({"ask_once": nobody}, DONE, ""),
    ({}, UNDONE, "away"),
]


@each(("parts", "wanted", "said"), DOUBTS)
def test_what_speaks_against_it_after_it_was_begun(parts: dict[str, Any], wanted: tuple[object, ...], said: str) -> None:
    """Others fall away, a supervisor speaks of another process, another guard has acted; an unasked question is no doubt."""

    def given(world: World) -> EngineAdapters:
        made = {name: one(world) if isinstance(one, type) else one for name, one in parts.items() if name != "sight"}
        return parts_of(world)._replace(**made)

    more: dict[str, Any] = {} if parts else {"view": away}
    world, book, _ = acted(parts=given, sight=parts.get("sight", FakeSight), **more)
    assert result(world) == wanted
    assert said in says(world)
    assert unsafe(world, book) == []


def test_an_engine_that_its_first_request_ends_is_not_put_back() -> None:
    """Nobody knows what became of the request, but the engine is gone with it: held, and not in the balancer."""

    def parts(world: World) -> EngineAdapters:
        async def ends_it() -> Outcome:
            world.state.mode = "down"
            return unsure("warm-up request not sent: it hung up")

        return parts_of(world)._replace(ask_once=ends_it)

    world, _, _ = acted(parts=parts)
    assert ends(world) == ["held"]
    assert "the engine no longer answers" in says(world)
    for step in (Step.CHECK, Step.WARM):
        assert follows(COURSE, step, is_done=None).step is COURSE[COURSE.index(step) + 1], "not known goes on"
        assert follows(COURSE, step, is_done=False).end is End.HELD


def test_what_has_ended_is_counted_for_the_metrics() -> None:
    """By engine, rung and end; what has not happened is there with 0, so that its first time shows as a rise."""
    _, _, conductor = acted()
    counts = conductor.ended()
    assert len(counts) == len(Grade.__members__) * len(End) - len(End), "advice is no action"
    assert {one: count for one, count in counts.items() if count} == {(ENGINE, Grade.RESTART, End.DONE): 1}


DIED = "INFO vLLM API server version 0.32.0\nERROR EngineCore encountered a fatal error.\nRuntimeError: illegal memory access\n"
ENDED_BY_LOG = "its process has ended, and its log ends with 'EngineCore encountered a fatal error'"
BY_LOG, GONE = ExitReport(ENDED_BY_LOG, failure="illegal memory access"), "its restarter says that it does not run"


@each(
    ("outcome", "log", "wanted"),
    [
        (done("somebody stopped it", by_hand=True), DIED, ExitReport(stopped="somebody stopped it")),
        (done("its unit stopped", by_hand=True, inferred=True), "", ExitReport(stopped="its unit stopped")),
        (done("its unit stopped", by_hand=True, inferred=True), DIED, BY_LOG),
        (done("its unit has failed"), "", ExitReport("its unit has failed")),
        (done("it ended as it was asked to", asked=True), DIED, NO_EXIT), (failed("it has not ended"), DIED, NO_EXIT),
        (unsure("nobody knows"), "", ExitReport(gone=GONE)), (unsure("nobody knows"), DIED, BY_LOG),
        (unsure("", exit_code=139), "", ExitReport("its process ended with exit code 139", failure="SIGSEGV")),
        (unsure("", exit_code=137), "", ExitReport(gone=GONE)),
    ],
)  # fmt: skip
def test_what_ended_is_dead_and_what_was_stopped_is_observed(
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


def test_a_log_on_a_disk_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pipe without a writer: how it ended stays unknown, it is not asked twice at a time, and no crash is missed."""
    os.mkfifo(tmp_path / "log")
    monkeypatch.setattr(acting, "PAGE_S", 0.05)

    class Tells(FakeRestarter):
        async def last_exit(self) -> Outcome:
            return done("its unit has failed")

    adapters = parts_of(World(State("down")))._replace(restarter=Tells(World(State("down"))))
    before = threading.active_count()
    for _ in range(3):
        assert asyncio.run(exit_report(adapters, str(tmp_path / "log"))) == ExitReport("its unit has failed")
    assert threading.active_count() <= before + 1
    (tmp_path / "log").open("wb").close()  # the reader goes on


# A restarter that evicts, while somebody else makes the new engine

REPLACED_S = 7.0


class Evicts(FakeRestarter):
    """As an eviction: it knows its pod by a number, and the new one comes by itself."""

    said, replaces = "a pod", True

    def __init__(self, world: World, learns: Outcome | None = None) -> None:
        super().__init__(world)
        self._uid, self._learns = "", learns or done("it is pod 1", uid="1", owner="set")
        self.recalled: list[Mapping[str, Any]] = []

    async def learn(self) -> Outcome:
        self._uid = str(self._learns.facts.get("uid", ""))
        return self._learns

    def recall(self, facts: Mapping[str, Any]) -> None:
        self.recalled.append(facts)
        self._uid = str(facts.get("uid", self._uid))

    async def is_running(self) -> bool | None:
        return self._world.is_running and self._world.state.starts == 0

    async def start(self) -> Outcome:
        """Not by us: done when it is there."""
        if not self._uid:
            return unsure("who would make the new pod is not known")
        state = self._world.state
        if state.now < state.gone_at + REPLACED_S:
            return failed("there is no new pod yet", waiting=True)
        return await super().start() if not self._world.is_running else done("it is there")


def test_the_new_one_is_waited_for_and_its_predecessor_is_not_taken_for_it() -> None:
    """No new pod yet is no failure, and whom it evicts is written before; one that nobody replaces is not even drained."""
    world, book, _ = acted(parts=lambda world: parts_of(world)._replace(restarter=Evicts(world)))
    assert ends(world) == ["done"]
    assert unsafe(world, book) == []
    drained = next(number for number, one in enumerate(book.entries) if (one.kind, one.step) == (OUTCOME, "drain"))
    stopped = next(number for number, one in enumerate(book.entries) if (one.kind, one.step) == (INTENT, "stop"))
    assert book.entries[drained].fields["facts"]["learned_uid"] == "1"
    assert drained < stopped
    bare = failed("nobody would replace this pod", bare=True)
    world, _, _ = acted(parts=lambda world: parts_of(world)._replace(restarter=Evicts(world, bare)))
    assert ends(world) == ["undone"]
    assert "before take_out" not in world.points


@each("point", ["after stop", "after intent gone", "before intent start", "after intent ready"])
def test_a_later_guard_recalls_whom_it_was(point: str) -> None:
    """From the journal, before it does anything; so it knows the old one from the new, and evicts nobody else."""
    whole, world, book = World(), World(), MemoryBook()
    live(whole, MemoryBook(), SERVING.plan, parts=parts_of(whole)._replace(restarter=Evicts(whole)))
    for plan, dies_at in ((SERVING.plan, whole.points.index(point) + 1), (None, None)):
        live(world, book, plan, dies_at, parts=parts_of(world)._replace(restarter=(restarter := Evicts(world))))
    assert {tuple(one.items()) for one in restarter.recalled} == {(("uid", "1"), ("owner", "set"))}
    assert (world.state.stops, world.state.starts, unsafe(world, book)) == (1, 1, [])
