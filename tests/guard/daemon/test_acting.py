"""The fleet as whoever acts sees it, restarts by somebody else; and a guard without --act says what it would do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll.guard.act.decide import EngineStatus, FailedRestarts, FleetView
from plimsoll.guard.act.journal_entry import OPENED, RESTART, SWITCH
from plimsoll.guard.act.journal_replay import PAUSE, read_switches
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.steps import BROKEN, STEP_TEXTS, Step, open_action, opening_fields
from plimsoll.guard.adapters.command import CommandRestarter
from plimsoll.guard.config import Files, GuardConfig
from plimsoll.guard.daemon import acting as act
from plimsoll.guard.daemon.acting import MOST_A_ROUND, READ_EVERY_S, ActingSetup, ActionRunner, DryRunJournal, DryRunLock
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.observer import EngineCapabilities, Fleet, FleetObserver, Incidents, ProcessLife
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.judge.look import GateState, Look, Reach
from plimsoll.guard.judge.tracker import Grade
from tests.cli.test_guard import QUICK, config, kill_engine, url
from tests.each import cases, sure
from tests.guard.acting import LookedAt
from tests.guard.daemon.drain_world import Lock, World, parts_of, ports_of
from tests.guard.daemon.guards import guarding
from tests.standin.servers import standin

FIGURES = {"kv_cache_usage": 0.1, "running": 1.0, "waiting": 0.0}
HELD = FailedRestarts("dead", "held", is_out=True)


def look(at_s: float = 0.0, **more: Any) -> Look:
    return Look(at_s, at_s, Reach.ANSWERS, health=200, figures=FIGURES, started_unix_s=5.0, model="m")._replace(**more)


def sight(fleet: LookedAt, ends: Mapping[str, FailedRestarts] | None = None) -> FleetObserver:
    fleet.ends = ends or {}
    return fleet.observer


def seen(found: FleetObserver) -> dict[str, EngineStatus]:
    return {one.name: one for one in found.view(frozenset()).engines}


def test_who_is_away_and_how_long_its_model_is_known() -> None:
    """Held until it is put back, not answering, starting, draining or not looked at; one that is gone is still of its group."""
    fleet = LookedAt(a=[look()], b=[look()])
    assert not seen(sight(fleet))["a"].is_away
    found = sight(fleet, {"a": HELD})
    assert seen(found)["a"].is_away
    assert found.suffering("b", ActPolicy()) == "a is out of rotation"
    back = sight(fleet, {"a": HELD._replace(is_out=False), "b": FailedRestarts("dead", "failed")})
    assert not any(one.is_away for one in seen(back).values())
    assert back.suffering("b", ActPolicy()) == ""
    drains = GateState(True, "", 0, 0, drain="draining")
    starts = GateState(False, "starting", 0, 0)
    gone = Look(1.0, 1.0, Reach.SILENT)
    fleet = LookedAt(
        a=[look(gate=drains)], b=[look(gate=starts)], c=[look(), gone], d=[], e=[look(gate=GateState(True, "", 0, 0))]
    )
    assert [name for name, one in seen(sight(fleet)).items() if one.is_away] == ["a", "b", "c", "d"]
    fleet = LookedAt(a=[look()], b=[look(), Look(1.0, 1.0, Reach.REFUSED)], c=[look(model="embedder")], d=[look(model=None)])
    assert [one.load.model for one in seen(sight(fleet)).values()] == ["m", "m", "embedder", None]
    assert sight(fleet).suffering("a", ActPolicy()) == "b is out of rotation"
    assert sight(LookedAt(a=[look()], c=[Look(1.0, 1.0, Reach.REFUSED)])).suffering("a", ActPolicy()) == "c is out of rotation"
    others = LookedAt(a=[look()], c=[look(model="embedder"), Look(1.0, 1.0, Reach.REFUSED)])
    assert sight(others).suffering("a", ActPolicy()) == "", "it serves something else, and a is alone as it was before"
    fleet = LookedAt(a=[look()], b=[look()])
    assert sight(fleet).suffering("a", ActPolicy()) == ""
    for kind, says in (("saturated", "b is not well"), ("creep", "")):
        one = sure(fleet.engine("b"))
        one.reporter.doubted = {kind}
        assert sight(fleet).suffering("a", ActPolicy()) == says


def test_which_process_answers() -> None:
    """Its start as the page says, how often another one came, and what its cluster counts."""
    fleet = LookedAt(a=[look(0.0), look(5.0, started_unix_s=9.0), look(10.0, started_unix_s=14.0, container_restarts=2)], b=[])
    found = sight(fleet)
    assert (found.life("a"), found.life("b"), found.life("none")) == (ProcessLife(14.0, 2, 2), ProcessLife(), ProcessLife())


class Lives(FleetObserver):
    """Which process of each engine answers, as it is set."""

    def __init__(self, **lives: ProcessLife) -> None:
        self.lives = lives

    def engines(self) -> list[str]:
        return list(self.lives)

    def life(self, engine: str) -> ProcessLife:
        return self.lives[engine]


class Guard:
    """One that writes this journal."""

    def __init__(self, path: Path, sight: Lives, counts: dict[str, int] | None = None) -> None:
        world = World()
        self.journal, self.sight = Journal(path), sight
        ports = ports_of(world, Lock(world, "one"))._replace(journal=self.journal, view=lambda _: FleetView([]))
        self.conductor = Conductor(parts_of(world), ActPolicy(), ports)
        self.foreign = act.ForeignRestarts(self.conductor, self.journal, sight, (counts or {}).get)

    def sees(self, **lives: ProcessLife) -> int:
        """The restarts that are counted after this round."""
        self.sight.lives |= lives
        self.foreign.note()
        return len(self.conductor.restarts)


def test_each_restart_is_counted_once_also_those_that_nobody_saw(tmp_path: Path) -> None:
    """By the start time on the page against the journal's, by systemd's count or the cluster's; the same one not again."""
    path = tmp_path / "journal"
    one = Guard(path, Lives(a=ProcessLife(100.0)))
    assert [one.sees() for _ in range(3)] == [0, 0, 0]
    assert one.sees(a=ProcessLife(200.0, total=1)) == 1
    assert one.sees(a=ProcessLife(500.0, total=4)) == 4, "three more that were seen to answer between two rounds"
    assert one.sees(a=ProcessLife(None, total=4)) == 4, "it does not answer just now"
    one.journal.close()
    two = Guard(path, Lives(a=ProcessLife(900.0)))
    assert [two.sees() for _ in range(3)] == [5, 5, 5]
    two.journal.close()
    counts = {"a": 3}
    one = Guard(tmp_path / "counted", Lives(a=ProcessLife(100.0)), counts)
    assert one.sees() == 0
    counts["a"] = 5
    assert one.sees() == 2
    assert one.sees(a=ProcessLife(300.0, total=1)) == 2
    one.journal.close()
    counts["a"] = 9
    two = Guard(tmp_path / "counted", Lives(a=ProcessLife(700.0), pod=ProcessLife(1.0, restarts=2)), counts)
    assert two.sees() == 6
    assert two.sees(pod=ProcessLife(1.0, restarts=3)) == 7
    two.journal.close()


def test_our_own_is_not_counted_twice_and_several_servers_at_one_address_are_no_restarts(tmp_path: Path) -> None:
    """Not looked at while guard stops and starts it, but in probation and a drain; which of several answers is no restart."""
    one = Guard(tmp_path / "journal", Lives(a=ProcessLife(100.0), b=ProcessLife(1.0)))
    assert one.sees() == 0
    one.journal.append(RESTART, engine="a", action="x1", fields={"own": True})
    course = open_action("x1", "a", Grade.RESTART, "dead", is_broken=True)
    one.conductor.runs["a"] = course._replace(step=Step.READY)
    before = one.journal.append("note").number
    assert one.sees(a=ProcessLife(200.0, total=1)) == 1
    assert one.journal.append("note").number == before + 1, "it was not looked at"
    one.conductor.runs["a"] = course._replace(step=Step.PROBATION)
    assert one.sees(a=ProcessLife(200.0, total=1)) == 1, "this is the one that guard made"
    assert one.sees(a=ProcessLife(300.0, total=2)) == 2
    one.conductor.runs["a"] = open_action("x2", "a", Grade.RESTART, "drain", is_broken=False)._replace(step=Step.IDLE)
    assert one.sees(a=ProcessLife(400.0, total=3)) == 3
    assert [one.is_own for one in one.conductor.restarts] == [True, False, False]
    one.journal.close()
    one = Guard(tmp_path / "other", Lives(a=ProcessLife(100.0)))
    one.sees()
    assert one.sees(a=ProcessLife(200.0, total=40, is_shared=True)) == 0
    assert one.sees(a=ProcessLife(100.0, total=41)) == 1
    one.journal.close()


def test_a_large_fleet_is_written_down_in_several_rounds(tmp_path: Path) -> None:
    """Each entry is brought to the disk: no round waits for hundreds of them."""
    one = Guard(tmp_path / "journal", Lives(**{f"e{number}": ProcessLife(1.0) for number in range(MOST_A_ROUND + 5)}))
    before = one.journal.append("note").number
    one.sees()
    assert one.journal.append("note").number == before + MOST_A_ROUND + 1
    one.sees()
    assert one.journal.append("note").number == before + MOST_A_ROUND + 7
    assert one.sees() == 0
    one.journal.close()


@pytest.mark.real
def test_the_whole_plan_is_printed_and_nothing_is_done(tmp_path: Path) -> None:
    """The rung, the engine and why; then each step with what is checked before and after, and how it is undone. Once."""
    with standin() as server:
        text = f"{QUICK}[act]\njournal = 'journal'\n[[engine]]\nurl = '{url(server)}'\nname = 'one'\n"
        text += "restart = {stop = ['/bin/false'], start = ['/bin/false', 'x'], is_running = ['/bin/true']}\n"
        with guarding(tmp_path, "--config", config(tmp_path, text)) as guard:
            guard.hears("one: answers")
            kill_engine(server)
            guard.hears("probation: watches it")
            time.sleep(1.5)
            assert guard.stop() == 0
    lines = [line.rstrip("\n").partition(" one: ")[2] for line in guard.said]
    first = next(place for place, line in enumerate(lines) if line.startswith("with --act guard would restart it: "))
    texts = [(step, STEP_TEXTS[step]) for step in BROKEN]
    steps = [f"{number}. {step}: {text.does}; before: {text.before}" for number, (step, text) in enumerate(texts, 1)]
    assert len(lines[first:]) == 1 + len(steps)
    for line, step in zip(lines[first + 1 :], steps, strict=True):
        assert line.startswith(step)
        assert "; after: " in line
        assert "; undo: " in line
    assert list(tmp_path.glob("journal*")) == [], "it writes no journal and takes no lock"


LAST_S = 120
OPEN = opening_fields(open_action("x", "one", Grade.RESTART, "dead", is_broken=True))
FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    *cases("guard", "what a journal remembers"), ("guard is working on it", OPENED, {"action": "x", "fields": OPEN}),
]  # fmt: skip


class Dead(LookedAt):
    """A fleet of one that is dead."""

    every_s = 5.0

    def __init__(self) -> None:
        looks = [Look(float(at_s), float(at_s), Reach.ANSWERS, health=503, figures=FIGURES) for at_s in range(0, LAST_S + 1, 5)]
        super().__init__(one=looks)
        self.incidents = Incidents()

    def remark(self, name: str, text: str) -> None:
        """Nobody reads it here."""


def decided(folder: Path, *, is_dry: bool) -> list[str]:
    """What such a guard says of an engine that is dead, in two rounds."""
    files = Files(*(folder / name for name in Files._fields))
    parts = {"one": EngineAdapters("one", restarter=CommandRestarter(*[("/bin/false",)] * 3))}
    setup = ActingSetup(parts, {"one": EngineCapabilities(has_restarter=True)}, ActPolicy(), None)
    said: list[str] = []
    fleet = cast("Fleet", Dead())
    acting = ActionRunner(setup, GuardConfig(), files, fleet, lambda one: said.append(one.message), is_dry=is_dry)
    acting.observer._clock = lambda: float(LAST_S)

    async def story() -> None:
        for _ in range(2):
            await acting._round()
            if not is_dry:
                await acting.conductor.turn()
        await acting.close()

    asyncio.run(story())
    return said


@pytest.mark.parametrize(("says", "kind", "entry"), FIELDS)
def test_it_refuses_by_what_the_journal_remembers(says: str, kind: str, entry: dict[str, Any], tmp_path: Path) -> None:
    """A pause, the budget, the back-off, what did not help before and what was left open count, as they do with --act."""
    with Journal(tmp_path / "journal") as journal:
        journal.append(kind, **{"engine": "" if kind == SWITCH else "one", **entry})
    before = (tmp_path / "journal").read_bytes()
    (found,) = decided(tmp_path, is_dry=True)
    assert found.startswith(f"restart blocked: {says}")
    assert (tmp_path / "journal").read_bytes() == before
    if kind != OPENED:  # that one would be taken over first
        assert decided(tmp_path, is_dry=False) == [found]


async def test_a_journal_that_somebody_writes_is_read_again(tmp_path: Path) -> None:
    """Not at every round; what was noted meanwhile is then in it; damage pauses, as it would pause a guard that acts."""
    path = tmp_path / "journal"
    book, lock = DryRunJournal(path, time.time), DryRunLock()
    assert not any([(await work).is_done for work in (lock.acquire("x"), lock.renew(), lock.release())]), "it is never taken"
    await book.refresh(0.0)
    assert (book.kept(), book.trouble) == ([], "")
    book.append(RESTART, engine="a", fields={"own": False})
    assert len(book.kept()) == 1
    with Journal(path) as journal:
        journal.append(SWITCH, step=PAUSE, fields={"on": True})
        await book.refresh(READ_EVERY_S - 1)
        assert [one.kind for one in book.kept()] == [RESTART]
        await book.refresh(READ_EVERY_S)
        assert [one.kind for one in book.kept()] == [SWITCH]
        journal.append(SWITCH, step=PAUSE, fields={"on": False})
    await book.refresh(3 * READ_EVERY_S)
    assert not read_switches(book.kept()).is_paused
    path.write_bytes(path.read_bytes().replace(b'"on":true', b'"on":null'))
    await book.refresh(5 * READ_EVERY_S)
    assert read_switches(book.kept()).is_paused
    assert "checksum" in book.trouble
