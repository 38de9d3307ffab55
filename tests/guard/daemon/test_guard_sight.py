"""The fleet as whoever acts sees it: who is away, who carries, which process answers, and restarts by somebody else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from plimsoll.guard.act.decide import EngineStatus, FailedRestarts, FleetView
from plimsoll.guard.act.journal_entry import RESTART
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.steps import Step, open_action
from plimsoll.guard.daemon.acting import MOST_A_ROUND, ForeignRestarts
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.observer import EngineCapabilities, Fleet, FleetObserver, ProcessLife, WatchedEngine
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import GateState, Look, Reach
from plimsoll.guard.judge.policy import Policy
from plimsoll.guard.judge.tracker import Grade
from tests.guard.daemon.drain_world import Lock, World, parts_of, ports_of

FIGURES = {"kv_cache_usage": 0.1, "running": 1.0, "waiting": 0.0}
HELD = FailedRestarts("dead", "held", is_out=True)


def look(at_s: float = 0.0, **more: Any) -> Look:
    return Look(at_s, at_s, Reach.ANSWERS, health=200, figures=FIGURES, started_unix_s=5.0, model="m")._replace(**more)


class Few:
    """A fleet of those that were looked at."""

    def __init__(self, **looks: list[Look]) -> None:
        self._engines: dict[str, WatchedEngine] = {}
        for name, seen in looks.items():
            one = WatchedEngine(EngineConfig(name, "http://x:1"), Policy(), cast("Any", SimpleNamespace()), 0.0)
            for found in seen:
                one.take(found)
            self._engines[name] = one

    def names(self) -> list[str]:
        return sorted(self._engines)

    def engine(self, name: str) -> WatchedEngine | None:
        return self._engines.get(name)


def sight(fleet: Few, ends: Mapping[str, FailedRestarts] | None = None) -> FleetObserver:
    """Of a guard that was told of all of them."""
    told = EngineCapabilities(has_gate=True, has_restarter=True)
    return FleetObserver(cast("Fleet", fleet), lambda _: told, 5.0, lambda: 1.0, lambda: 0, lambda: ends or {})


def seen(found: FleetObserver) -> dict[str, EngineStatus]:
    return {one.name: one for one in found.view(frozenset()).engines}


def test_one_that_was_held_is_away_until_it_is_put_back() -> None:
    """Though it answers, idle and well: no request reaches it, so it carries nothing, and nobody else may leave."""
    fleet = Few(a=[look()], b=[look()])
    assert not seen(sight(fleet))["a"].is_away
    found = sight(fleet, {"a": HELD})
    assert seen(found)["a"].is_away
    assert found.suffering("b", ActPolicy()) == "a is out of rotation"
    back = sight(fleet, {"a": HELD._replace(is_out=False), "b": FailedRestarts("dead", "failed")})
    assert not any(one.is_away for one in seen(back).values())
    assert back.suffering("b", ActPolicy()) == ""


def test_whoever_does_not_answer_starts_or_drains_is_away() -> None:
    """And before the first look nothing is known of it."""
    drains = GateState(True, "", 0, 0, drain="draining")
    starts = GateState(False, "starting", 0, 0)
    gone = Look(1.0, 1.0, Reach.SILENT)
    fleet = Few(a=[look(gate=drains)], b=[look(gate=starts)], c=[look(), gone], d=[], e=[look(gate=GateState(True, "", 0, 0))])
    assert [name for name, one in seen(sight(fleet)).items() if one.is_away] == ["a", "b", "c", "d"]


def test_the_model_is_known_for_as_long_as_it_last_answered() -> None:
    """An engine that is gone is still one of its group; one of another model is none, and none that suffers."""
    fleet = Few(a=[look()], b=[look(), Look(1.0, 1.0, Reach.REFUSED)], c=[look(model="embedder")], d=[look(model=None)])
    assert [one.load.model for one in seen(sight(fleet)).values()] == ["m", "m", "embedder", None]
    assert sight(fleet).suffering("a", ActPolicy()) == "b is out of rotation"
    assert sight(Few(a=[look()], c=[Look(1.0, 1.0, Reach.REFUSED)])).suffering("a", ActPolicy()) == "c is out of rotation"
    others = Few(a=[look()], c=[look(model="embedder"), Look(1.0, 1.0, Reach.REFUSED)])
    assert sight(others).suffering("a", ActPolicy()) == "", "it serves something else, and a is alone as it was before"


def test_what_held_and_is_not_known_any_more_is_not_well() -> None:
    """Nobody may leave on the strength of an engine that was stuck when it was last known."""
    fleet = Few(a=[look()], b=[look()])
    assert sight(fleet).suffering("a", ActPolicy()) == ""
    for kind, says in (("saturated", "b is not well"), ("creep", "")):
        one = fleet.engine("b")
        assert one is not None
        one.reporter.doubted = {kind}
        assert sight(fleet).suffering("a", ActPolicy()) == says


def test_which_process_answers() -> None:
    """Its start as the page says, how often another one came, and what its cluster counts."""
    fleet = Few(a=[look(0.0), look(5.0, started_unix_s=9.0), look(10.0, started_unix_s=14.0, container_restarts=2)], b=[])
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
        self.foreign = ForeignRestarts(self.conductor, self.journal, sight, (counts or {}).get)

    def sees(self, **lives: ProcessLife) -> int:
        """The restarts that are counted after this round."""
        self.sight.lives |= lives
        self.foreign.note()
        return len(self.conductor.restarts)


def test_each_is_counted_once_also_those_while_guard_was_down(tmp_path: Path) -> None:
    """By the start time on the page against the last one in the journal; the same one is not counted again."""
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


def test_what_its_manager_started_again_is_counted_though_nobody_saw_it(tmp_path: Path) -> None:
    """systemd's count, or the cluster's; and the process that answers at last is not counted a second time."""
    counts = {"a": 3}
    one = Guard(tmp_path / "journal", Lives(a=ProcessLife(100.0)), counts)
    assert one.sees() == 0
    counts["a"] = 5
    assert one.sees() == 2
    assert one.sees(a=ProcessLife(300.0, total=1)) == 2
    one.journal.close()
    counts["a"] = 9
    two = Guard(tmp_path / "journal", Lives(a=ProcessLife(700.0), pod=ProcessLife(1.0, restarts=2)), counts)
    assert two.sees() == 6
    assert two.sees(pod=ProcessLife(1.0, restarts=3)) == 7
    two.journal.close()


def test_our_own_is_not_counted_twice_and_one_right_after_it_is(tmp_path: Path) -> None:
    """Not looked at while guard stops and starts it; in probation and in a drain by hand it is."""
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


def test_several_servers_at_one_address_are_no_restarts(tmp_path: Path) -> None:
    """Which of them answers changes at every look; afterwards the changes meanwhile are not counted."""
    one = Guard(tmp_path / "journal", Lives(a=ProcessLife(100.0)))
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
