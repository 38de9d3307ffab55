"""The conductor: what it begins and refuses, what it does when its own means fail, and when it dies at any point."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lab.guard.acting import Fault, State, World
from lab.guard.acting_lives import CASES, POLICY, Case, MemoryBook, live, to_the_end, unsafe
from lab.guard.acting_parts import ENGINE, FakeLock, FakeSight, parts_of
from lab.guard.acting_play import SERVING, ends, killed_at, play, says, until, view_of
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.guard.act.decide import ActionPlan, FleetView
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, NOTE, OUTCOME, RESTART, Entry
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS
from plimsoll.guard.act.steps import End
from plimsoll.guard.daemon.conductor import ActionPorts, Conductor
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.judge.tracker import Grade
from tests.each import SOAK, each, times
from tests.guard.acting import reason


class Full(MemoryBook):
    """A journal on a disk that is full from this entry on."""

    def __init__(self, kind: str, step: str) -> None:
        super().__init__()
        self._last = (kind, step)

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        if (kind, step) == self._last or self._last == ("", ""):
            self._last = ("", "")
            raise WorldFailed("no space left on device")
        return super().append(kind, engine=engine, action=action, step=step, fields=fields)


@each("kind", [INTENT, OUTCOME])
@each("step", SERVING.plan.steps)
def test_a_journal_that_fails_in_the_middle_leaves_no_engine_out_of_service(kind: str, step: str) -> None:
    """What the journal says already is brought to its end at once; then guard does nothing more, and says so."""
    world, book = World(), Full(kind, step)
    world.needs_entries = False

    async def script(conductor: Conductor) -> None:
        conductor.ask(Grade.RESTART, ENGINE)
        await conductor.turn()
        await until(lambda: bool(conductor.stopped_acting))
        answer = conductor.ask(Grade.RESTART, ENGINE)
        await conductor.turn()
        assert reason(answer.result()) == "StoppedActing"

    conductor = play(world, book, script, view=lambda _: view_of("none"))
    assert conductor.stopped_acting
    assert "guard stopped acting: no space left" in says(world)
    assert world.state.stops == world.state.starts
    assert not world.state.is_out
    assert world.state.holder == 0, "the lock is free for other guards"
    assert [one for one in unsafe(world, book) if one != "an action is still open"] == []


def test_what_ended_while_the_journal_could_not_be_written_is_over() -> None:
    """Written down once that can be: no second start beyond the budget, and what comes next is decided anew."""
    world, book = World(State("down"), faults={"ready": Fault("fails")}), Full(OUTCOME, "start")
    world.needs_entries = False

    async def writable(conductor: Conductor) -> None:
        while conductor.stopped_acting:
            await asyncio.sleep(1.0)
            await conductor.turn()

    async def held(conductor: Conductor) -> None:
        with pytest.raises(WorldFailed):
            await conductor.carry_out(CASES[3].plan)
        assert world.state.starts == 1
        world.state.mode, conductor.stopped_acting, book._last = "down", "its disk is full", ("", "none")
        await writable(conductor)

    play(world, book, held, view=lambda _: view_of("none"))
    assert (world.state.starts, set(ends(world))) == (1, {"held"})
    world, book = World(faults={"drain": Fault("fails")}), Full(CLOSED, "")

    async def undone(conductor: Conductor) -> None:
        conductor.ask(Grade.RESTART, ENGINE)
        await conductor.turn()
        assert conductor.stopped_acting
        book._last = ("", "none")
        await writable(conductor)
        assert not conductor.engines_at_work()
        conductor.ask(Grade.RESTART, ENGINE)
        await conductor.turn()

    play(world, book, undone, view=lambda _: view_of("none"))
    assert ends(world) == ["undone"] * 3, "told when it ended, when that was written, and once more"


def test_a_take_over_that_could_not_be_written_gives_the_lock_back() -> None:
    """Else nobody renews it, and this guard could never take it again: not for this action, nor for any other."""
    world, book = killed_at("before outcome stop", ttl_s=30.0)
    world.state.now += 60.0
    write, refusals = book.append, iter([WorldFailed("no space left on device")])

    def append(kind: str, **more: Any) -> Entry:
        if kind == NOTE and (refusal := next(refusals, None)) is not None:
            raise refusal
        return write(kind, **more)

    async def script(conductor: Conductor) -> None:
        with pytest.raises(WorldFailed):
            await conductor.take_over()
        assert world.state.holder == 0
        await asyncio.sleep(60.0)
        assert await conductor.take_over() == []
        await to_the_end(conductor, world, book)

    book.append = append  # type: ignore[method-assign]
    play(world, book, script)
    assert (world.state.stops, world.state.starts) == (1, 1)
    assert [one for one in unsafe(world, book) if "release was done in no step" not in one] == []


def test_after_damage_nothing_is_begun_until_somebody_resumes(tmp_path: Path) -> None:
    """What is not known to have been done is not done again; and the pause outlives that guard."""
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for _ in range(5):
            journal.append("note", fields={"x": 1})
    path.write_bytes(path.read_bytes().replace(b"note", b"nope"))
    world = World(State("down"))

    async def script(conductor: Conductor) -> None:
        await conductor.take_over()
        await conductor.turn()

    with Journal(path) as journal:
        assert [one.kind for one in journal.wrong] == ["damaged"]
        conductor = play(world, journal, script, view=lambda _: view_of("dead"))
        assert conductor.switches.is_paused
    assert "its journal was damaged" in says(world)
    with Journal(path) as journal:
        conductor = play(world, journal, script, view=lambda _: view_of("dead"))
        assert conductor.switches.is_paused
        assert world.state.starts == 0
        conductor.switch(PAUSE, "", is_on=False)
        play(world, journal, script, view=lambda _: view_of("dead"))
        assert world.state.starts == 1


def test_switches_and_names_with_a_password_survive_a_restart_of_guard(tmp_path: Path) -> None:
    """The journal hides the password; what is read back is still of that engine, and an open action is found again."""
    name = "http://user:secret@host:8000"
    world = World()
    with Journal(tmp_path / "journal") as journal:
        conductor = play(world, journal, lambda _: asyncio.sleep(0), engine=name)
        conductor.switch(PAUSE, name, is_on=True, who="me")
        conductor.switch(f"{RUNGS}compact", "", is_on=True)
        journal.append(RESTART, engine=name, fields={"own": False})
    assert b"secret" not in (tmp_path / "journal").read_bytes()
    with Journal(tmp_path / "journal") as journal:
        conductor = play(world, journal, lambda _: asyncio.sleep(0), engine=name)
        assert conductor.switches.paused == {name}
        assert conductor.switches.rungs_off == {Grade.COMPACT}
        assert [(one.engine, one.is_own) for one in conductor.restarts] == [(name, False)]
        conductor.switch(PAUSE, name, is_on=False)
        assert conductor.switches.paused == frozenset()
    parts = {f"http://user:{word}@host": parts_of(world) for word in ("one", "two")}
    ports = ActionPorts(MemoryBook(), FakeLock(world), FakeSight(world), lambda _: FleetView([]), lambda _: None, lambda: 0.0)
    with pytest.raises(BadInput, match="differ only in a password"):  # the journal could not tell them apart
        Conductor(parts, POLICY, ports)


def test_a_refusal_is_told_once_and_again_when_its_reason_changes() -> None:
    """Not at every turn."""
    world, book = World(), MemoryBook()

    async def script(conductor: Conductor) -> None:
        conductor.switch(PAUSE, "", is_on=True)
        for _ in range(5):
            await conductor.turn()
        conductor.switch(PAUSE, "", is_on=False)
        for _ in range(3):
            book.append(RESTART, engine=ENGINE, fields={"own": False})
        for _ in range(5):
            await conductor.turn()

    play(world, book, script, view=lambda _: view_of("dead"))
    assert says(world).count("guard is paused") == 1
    assert says(world).count("are allowed") == 1
    assert ends(world) == []


def test_what_a_person_asks_for_is_done_or_refused_with_a_reason() -> None:
    """Done at the next turn; refused at once while guard is at work or has been asked already; nobody waits for ever."""
    world, book = World(), MemoryBook()

    async def script(conductor: Conductor) -> None:
        answer = conductor.ask(Grade.RESTART, ENGINE)
        assert "another request is being decided" in str(conductor.ask(Grade.RESTART, ENGINE).result())
        work = asyncio.create_task(conductor.turn())
        assert isinstance(await answer, ActionPlan)
        await until(lambda: world.intent == "idle")
        third = conductor.ask(Grade.SHED, ENGINE).result()
        assert (reason(third), f"guard is working on {ENGINE}" in str(third)) == ("Busy", True)
        await work
        during = conductor.ask(Grade.RESTART, ENGINE)  # it is in probation now
        await conductor.turn()
        assert "probation" in str(during.result())
        await to_the_end(conductor, world, book)
        unknown = conductor.ask(Grade.RESTART, "nobody")
        await conductor.turn()
        assert reason(unknown.result()) == "NotWatched"
        conductor.ask(Grade.SHED, ENGINE).cancel()
        await conductor.turn()

    play(world, book, script, view=lambda _: view_of("none"))
    assert (world.state.stops, ends(world)) == (1, ["done"])
    assert unsafe(world, book) == []


@pytest.mark.parametrize("case", [SERVING, CASES[4]], ids=str)
def test_what_only_waits_is_left_open_and_taken_over_without_the_lock(case: Case) -> None:
    """Probation is begun again and shedding ended, also while another guard has the lock; nothing is stopped or started."""
    world, book = World(ttl_s=1e6), MemoryBook()

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(case.plan)
        await until(lambda: world.intent in ("probation", "hold"))
        await conductor.close()

    play(world, book, script)
    assert book.entries[-1].kind == INTENT
    was = (world.state.stops, world.state.starts)
    world.state.holder, world.state.held_until = 99, 1e9
    live(world, book, None)
    assert (world.state.stops, world.state.starts) == was
    assert book.entries[-1].kind == CLOSED
    assert unsafe(world, book) == []


def test_an_engine_that_is_not_watched_any_more_is_held_and_told() -> None:
    """Somebody took it out of the configuration in the middle of its restart."""
    world, book = killed_at("before outcome stop")

    async def script(conductor: Conductor) -> None:
        await conductor.take_over()

    play(world, book, script, engine="other")
    assert ends(world)[-1] == End.HELD
    assert "no longer watched" in says(world)


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


def wrongs(case: Case) -> Iterator[tuple[str, Fault | None, float, float, int]]:
    """What goes wrong as well, how long nobody is there, how long the lock lasts, and each how many-th point is tried."""
    times = product(GAPS_S, (0.0, 25.0)) if SOAK else zip(GAPS_S, (25.0, 0.0), strict=True)
    yield from (("", None, gap_s, ttl_s, 1) for gap_s, ttl_s in times)
    if case.balancer == "told":
        yield from ((deed, how, 0.0, 0.0, THINNED) for how in HOWS for deed in DEEDS[case.grade])
    yield from ((trouble, Fault("fails"), 0.0, 0.0, 1) for trouble in TROUBLES[case.grade])


@pytest.mark.once
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_guard_may_die_before_and_after_each_entry_and_each_deed(case: Case) -> None:
    """Also where a deed fails, or nobody knows what became of it, or the engine never becomes idle or ready: all ends well."""
    for number, (what, fault, gap_s, ttl_s, every) in enumerate(wrongs(case)):
        for place, name in enumerate(whole_life(case, what, fault), 1):
            if (place + number) % every:
                continue
            world, book = world_of(case, what, fault, ttl_s=ttl_s), MemoryBook()
            assert not live(world, book, case.plan, place) or fault
            world.state.now += gap_s
            assert live(world, book, None) or fault
            check(world, book, what, name)


@pytest.mark.once
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


@pytest.mark.once
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
