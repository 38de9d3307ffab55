"""An engine that guard has held is put back by whoever mended it: written down, with the lock, and killed at any entry."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from plimsoll.guard.act.decide import ActionPlan, BlockedAction
from plimsoll.guard.act.journal_entry import CLOSED, INTENT
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.api.actions import ActionDesk
from plimsoll.guard.daemon import steps
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.manual_drain import ManualDrains, ReturnToService, SharedLock
from plimsoll.guard.judge.look import Look, Reach
from tests.guard.daemon.drain_world import NEVER, POLICY, Balancer, Book, Killed, Lock, Sight, World, parts_of, ports_of


class Looks(Sight):
    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def look(self, engine: str) -> Look | None:
        del engine
        return Look(0.0, 0.0, self._reach)


def held(kind: str = "dead") -> World:
    """One engine that was held, out of the balancer."""
    world = World()
    world.is_out = True
    fields = {"end": "held", "grade": "restart", "kind": kind}
    Book(world).append(CLOSED, engine="a", action="earlier", fields=fields)
    return world


def desk_of(world: World, reach: Reach = Reach.ANSWERS, guard: str = "one") -> tuple[ActionDesk, Conductor]:
    lock = SharedLock(Lock(world, guard))
    ports = ports_of(world, lock)._replace(observer=Looks(reach))
    conductor = Conductor(parts_of(world), POLICY, ports, pause_s=0.01)
    drains = ManualDrains(parts_of(world), POLICY, ports._replace(lock=lock.other()), conductor.runs, pause_s=0.02)
    back = ReturnToService(parts_of(world), POLICY, ports._replace(lock=lock.other()), conductor)
    return ActionDesk(conductor, drains, Book(world), Path("guard.journal"), back), conductor


@pytest.mark.parametrize("kind", ["dead", "drain"])
def test_it_is_put_back_and_what_is_remembered_of_it_stays(kind: str) -> None:
    """In service again, each deed after its entry, the lock free; still no restart by itself until somebody resumes it."""
    world = held(kind)

    async def story() -> None:
        desk, conductor = desk_of(world)
        assert "guardctl undrain a puts it back" in desk.needs()["a"]
        assert isinstance(await desk.undrain("a"), ActionPlan)
        assert (world.serves(), world.holder, conductor.runs) == (True, "", {})
        assert "it was put back in rotation by hand; guardctl resume a once it is fixed" in desk.needs()["a"]
        again = await desk.undrain("a")
        assert isinstance(again, BlockedAction)
        assert again.reason == "NotDrained"
        desk.switch("", "", is_paused=False)
        assert "a" in desk.needs(), "that a pause of everything ends says nothing of this engine"
        desk.switch("a", "", is_paused=False)
        assert desk.needs() == {}

    asyncio.run(story())
    assert [one.step for one in world.entries if one.kind == INTENT] == ["lock", "evidence", "drain", "undrain", "unlock"]
    assert open_actions(world.entries) == []
    assert any("back in rotation" in said for said in world.said)


def test_the_lock_is_kept_while_it_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer that takes its time, or a gate whose lease must end first: whoever waits goes on being the one who acts."""
    world, renewed = held(), list[bool]()

    class Slow(Balancer):
        async def put_back(self) -> Outcome:
            await asyncio.sleep(0.3)
            return await super().put_back()

    class Counted(Lock):
        async def renew(self) -> Outcome:
            renewed.append(True)
            return await super().renew()

    async def story() -> None:
        ports = ports_of(world, SharedLock(Counted(world, "one")))._replace(observer=Looks(Reach.ANSWERS))
        parts = {name: one._replace(balancer=Slow(world)) for name, one in parts_of(world).items()}
        found = await ReturnToService(parts, POLICY, ports, Conductor(parts, POLICY, ports)).put_back("a")
        assert isinstance(found, ActionPlan)
        assert (world.serves(), world.holder) == (True, "")

    monkeypatch.setattr(steps, "RENEW_S", 0.02)
    asyncio.run(story())
    assert renewed


def test_one_that_does_not_answer_stays_out() -> None:
    """It would only be sent requests that nobody answers; nothing is written, and it can be asked for again."""
    for reach in (Reach.REFUSED, Reach.SILENT, Reach.NONSENSE):
        world = held()

        async def story(world: World = world, reach: Reach = reach) -> None:
            desk, conductor = desk_of(world, reach)
            found = await desk.undrain("a")
            assert isinstance(found, BlockedAction)
            assert (found.reason, found.message) == ("NotDone", "unreachable: start it first")
            assert (world.serves(), len(world.entries), conductor.runs) == (False, 1, {})

        asyncio.run(story())


def test_without_the_lock_or_the_journal_it_is_not_done() -> None:
    """Somebody else may be at work on it; and no deed without its entry. The lock is given back in any case."""

    async def locked(world: World) -> None:
        world.holder = "another guard"
        desk, _ = desk_of(world)
        found = await desk.undrain("a")
        assert isinstance(found, BlockedAction)
        assert (world.serves(), world.holder) == (False, "another guard")
        assert open_actions(world.entries) == []
        assert "puts it back" in desk.needs()["a"]

    async def full(world: World) -> None:
        world.fail_at = 8  # before the balancer is told
        desk, conductor = desk_of(world)
        assert isinstance(await desk.undrain("a"), BlockedAction)
        assert (world.serves(), world.holder, conductor.runs) == (False, "", {})

    asyncio.run(locked(held()))
    asyncio.run(full(held()))


def test_whoever_was_killed_is_followed_by_one_who_brings_it_to_an_end() -> None:
    """Before and after each entry in turn: it is in service or as it was before, and nothing stays open."""
    whole = held()
    asyncio.run(_asked(whole))
    assert len(whole.entries) == 13
    for number in range(2, len(whole.entries) + 1):
        for before, after in ((number, NEVER), (NEVER, number)):
            world = held()
            world.kill_before, world.kill_after = before, after
            asyncio.run(_dies_and_is_followed(world))
            assert open_actions(world.entries) == [], (before, after)


async def _asked(world: World) -> None:
    desk, _ = desk_of(world)
    await desk.undrain("a")


async def _dies_and_is_followed(world: World) -> None:
    with contextlib.suppress(Killed):
        await _asked(world)
    was_begun = any((one.kind, one.step) == (INTENT, "drain") for one in world.entries)
    world.kill_before = world.kill_after = NEVER
    world.holder = ""
    _, second = desk_of(world, guard="two")
    await second.take_over()
    await second.close()
    assert world.serves() is was_begun
    assert "a" in second.last_ends()
