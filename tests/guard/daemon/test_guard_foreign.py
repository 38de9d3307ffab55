"""Somebody else's restarts are written down as they are seen: in a hand drain, in probation, and across guard's own death."""

from __future__ import annotations

from pathlib import Path

from plimsoll.guard.act.decide import FleetView
from plimsoll.guard.act.journal_entry import RESTART
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.steps import Step, open_action
from plimsoll.guard.daemon.acting import MOST_A_ROUND, ForeignRestarts
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.observer import FleetObserver, ProcessLife
from plimsoll.guard.judge.tracker import Grade
from tests.guard.daemon.drain_world import Lock, World, parts_of, ports_of


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
