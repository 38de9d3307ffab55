"""An engine that a person drains, or puts back: out while it is wanted, back when it is not, and never without an owner."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import WorldFailed
from plimsoll.guard.act.decide import ActionPlan, BlockedAction, FailedRestarts, Switches
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.act.ports import Outcome, failed, unsure
from plimsoll.guard.act.steps import ActionRun, Step
from plimsoll.guard.api.actions import ActionDesk
from plimsoll.guard.daemon import steps
from plimsoll.guard.daemon.conductor import Announcement, Conductor
from plimsoll.guard.daemon.manual_drain import ManualDrains, ReturnToService
from plimsoll.guard.daemon.steps import EngineAdapters, SharedLock
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.tracker import Grade
from tests.each import each, in_loop
from tests.guard.acting import reason
from tests.guard.daemon.drain_world import POLICY, Balancer, Book, Lock, Sight, World, load_of, parts_of, ports_of


class Looks(Sight):
    """Every look finds this."""

    def __init__(self, reach: Reach = Reach.ANSWERS) -> None:
        self.reach = reach

    async def look(self, engine: str) -> Look | None:
        del engine
        return Look(0.0, 0.0, self.reach, health=200 if self.reach is Reach.ANSWERS else None)


class Guard:
    """The drains of one guard in a world, and what it says urgently."""

    def __init__(self, world: World | None = None, parts: Mapping[str, EngineAdapters] | None = None, **more: Any) -> None:
        self.world, self.sight, self.urgent = world or World(), Looks(), list[str]()
        ports = ports_of(self.world, SharedLock(Lock(self.world, "one")))._replace(observer=self.sight, tell=self._tell)
        self.drains = ManualDrains(parts or parts_of(self.world), POLICY, ports, {}, pause_s=0.02, **more)

    def _tell(self, said: Announcement) -> None:
        self.world.said.append(said.message)
        self.urgent += [said.message] if said.is_urgent else []


async def test_out_until_it_is_asked_back() -> None:
    """The lease is renewed for as long as it is out, the lock is free meanwhile, and every deed has its entry before it."""
    world = World()
    drains = Guard(world).drains
    assert isinstance(await drains.drain("a"), ActionPlan)
    assert not world.serves()
    assert (drains.engines, drains.runs["a"].step, world.holder) == (frozenset("a"), Step.IDLE, "")
    await asyncio.sleep(3 * POLICY.lease_s)
    assert not world.serves(), "nobody renewed it"
    assert reason(await drains.drain("a")) == "Busy"
    assert isinstance(await drains.undrain("a"), ActionPlan)
    assert world.serves()
    assert (len(drains.engines), len(drains.runs), world.holder) == (0, 0, "")
    assert [entry.step for entry in world.entries if entry.kind == INTENT] == [
        "lock", "evidence", "drain", "idle", "undrain", "unlock"
    ]  # fmt: skip
    assert (world.entries[0].kind, world.entries[-1].kind) == (OPENED, CLOSED)
    assert world.entries[-1].fields["end"] == "undone"
    assert open_actions(world.entries) == []
    assert world.epoch == 2, "once to take it out, once to put it back"


async def test_whose_it_is_and_that_it_waits_for_the_lock() -> None:
    """Put back after its bound, when guard ends, and after a while though another is at work; not under another's hands."""
    world = World()
    drains = Guard(world, longest_s=0.2).drains
    await drains.drain("a")
    await asyncio.sleep(0.6)
    assert (world.serves(), drains.engines) == (True, frozenset())
    second = Guard(world).drains
    await second.drain("a")
    await second.close()
    assert world.serves()
    assert open_actions(world.entries) == []
    world = World()
    drains = Guard(world).drains
    await drains.drain("a")
    world.epoch += 5
    world.drain = world.drain._replace(epoch=world.epoch, until=world.now + 60)
    await asyncio.sleep(0.5)
    assert (world.is_out, world.serves(), drains.engines) == (True, False, frozenset())
    assert open_actions(world.entries) == []
    world = World()
    drains = Guard(world).drains
    await drains.drain("a")
    world.holder = "another guard"
    back = asyncio.create_task(drains.undrain("a"))
    await asyncio.sleep(3 * POLICY.lease_s)
    assert not world.serves()
    world.holder = ""
    await back
    assert world.serves()
    drains = Guard(world, patience_s=0.2).drains
    await drains.drain("a")
    world.holder = "another guard"
    await drains.undrain("a")
    assert (world.serves(), world.holder) == (True, "another guard")
    assert open_actions(world.entries) == []


@each(
    ("engine", "change", "wanted"),
    [
        ("c", {}, "NotWatched"), ("b", {}, "NoGate"), ("a", {"age_s": 1e6}, "Unknown"),
        ("a", {"only_observed": "a KV connector"}, "OnlyObserved"), ("a", {"load": load_of("a", 0.75)}, "OthersCannotCarry"),
        ("a", {"load": load_of("a", None)}, "OthersCannotCarry"),
    ],
)  # fmt: skip
@in_loop
async def test_what_speaks_against_it(engine: str, change: Mapping[str, Any], wanted: str) -> None:
    """As for a restart: what is not known, what may not be touched, what the others could not carry. Nothing is written."""
    world = World()
    world.engines = [one._replace(**change) for one in world.engines]
    assert (reason(await Guard(world).drains.drain(engine)), world.entries) == (wanted, [])


async def test_what_does_not_speak_against_it_and_what_does() -> None:
    """A person may drain at any hour, one at a time; a lock that is not free or a balancer that refuses is told at once."""
    world = World()
    world.engines[0] = world.engines[0]._replace(has_restarter=False, last_end=FailedRestarts("asked", "failed"))
    drains = Guard(world).drains
    drains._policy = replace(POLICY, rungs=(), restarts_per_hour=0, fleet_restarts_per_hour=0)
    view = world.view
    drains._ports = drains._ports._replace(view=lambda away: view(away)._replace(switches=Switches(is_paused=True)))
    drains.runs["b"] = ActionRun("x", "b", Grade.RESTART, "dead", (Step.LOCK,), Step.LOCK)
    assert reason(await drains.drain("a")) == "Busy"
    del drains.runs["b"]
    assert isinstance(await drains.drain("a"), ActionPlan)
    await drains.close()
    world = World()
    world.holder = "another guard"
    drains, found = Guard(world).drains, []
    for takes_out in (failed("unused"), failed("it is the last server"), failed("in maintenance", maint=True), unsure("?")):
        world.takes_out = takes_out
        found.append(await drains.drain("a"))
        world.holder = ""
        assert (world.serves(), world.holder, drains.runs) == (True, "", {})
    assert [isinstance(one, BlockedAction) and one.message for one in found] == [
        "another guard has it, not x0 on a", "it is the last server", "in maintenance", "?"
    ]  # fmt: skip
    ends = [entry.fields["end"] for entry in world.entries if entry.kind == CLOSED]
    assert ends == ["stood-back", "undone", "undone", "undone"]


async def test_a_journal_that_fails_leaves_nothing_out_of_service() -> None:
    """At any entry: what is out comes back unwritten, the lock is free, and it is said; at the first nothing is begun."""
    for number in itertools.count(1):
        world = World()
        guard, world.fail_at = Guard(world), number
        if number == 1:
            with pytest.raises(WorldFailed, match="cannot be written"):
                await guard.drains.drain("a")
            assert world.entries == []
        elif isinstance(await guard.drains.drain("a"), ActionPlan):
            assert isinstance(await guard.drains.undrain("a"), ActionPlan), "what is out may always be asked back"
        assert (world.serves(), world.holder, dict(guard.drains.runs)) == (True, "", {})
        if number > 1 and not any("No space left" in said for said in guard.urgent):
            assert number > len(world.entries) > 12, "there is no such entry"
            return


@each(
    ("takes_out", "is_kept", "said"),
    [
        (None, True, "taken out again"),
        (failed("nobody else is up"), False, "cannot be told to stop: nobody else is up"),
        (unsure("no answer"), True, ""),
    ],
)
@in_loop
async def test_a_balancer_that_was_reloaded_is_told_again(takes_out: Outcome | None, is_kept: bool, said: str) -> None:
    """Where it does not let go again the gate does; one that cannot be asked is no reason to end the drain."""
    world = World()
    drains = Guard(world).drains
    await drains.drain("a")
    world.is_out, world.takes_out = False, takes_out or world.takes_out
    await asyncio.sleep(3 * POLICY.lease_s)
    assert (world.serves(), drains.engines) == (not is_kept, frozenset("a" if is_kept else ""))
    assert any(said in line for line in world.said)
    await drains.close()
    assert world.serves()
    assert open_actions(world.entries) == []


@pytest.mark.parametrize("is_up", [True, False])
async def test_the_others_end_it_when_they_cannot_carry_its_load(is_up: bool) -> None:
    """As a restart's drain; but an engine that does not answer would not help them."""
    world = World()
    guard = Guard(world)
    guard.sight.reach = Reach.ANSWERS if is_up else Reach.REFUSED
    await guard.drains.drain("a")
    await asyncio.sleep(0.1)
    assert not world.serves()
    guard.sight.who_suffers = "b cannot carry its load"
    await asyncio.sleep(0.3)
    assert world.serves() is is_up
    assert ("the drain by hand ends: b cannot carry its load" in world.said) is is_up
    await guard.drains.close()


@pytest.mark.parametrize("has_gate", [True, False])
async def test_a_guard_that_ends_while_another_has_the_lock_puts_it_back_or_says_what_stays(has_gate: bool) -> None:
    """With a gate it goes back with its own number in time; without one nobody can tell whose it is, and that is urgent."""
    world = World()
    given = parts_of(world)["a"]
    guard = Guard(world, {"a": given if has_gate else given._replace(gate=None)})
    assert isinstance(await guard.drains.drain("a"), ActionPlan)
    world.holder = "another guard"
    await guard.drains.close(limit_s=0.6)
    assert world.is_out is not has_gate
    assert bool([said for said in guard.urgent if "still drained by hand" in said]) is not has_gate
    assert bool(open_actions(world.entries)) is not has_gate, "what stays is left to the next guard"


async def test_two_parts_of_one_guard_keep_each_other_out() -> None:
    """The lock itself would be given to both: who has it is asked here first."""
    world = World()
    one = SharedLock(Lock(world, "guard"))
    two = one.other()
    both = await asyncio.gather(one.acquire("x"), two.acquire("y"))
    assert [outcome.is_done for outcome in both] == [True, False]
    assert (await two.release()).is_done
    assert (world.holder, (await two.renew()).is_done) == ("guard", False)
    assert (await one.acquire("x")).is_done, "who has it may take it again"
    await one.release()
    assert (await two.acquire("y")).is_done
    world.holder = "another"
    await two.release()
    assert not (await one.acquire("x")).is_done
    world.holder = ""
    assert (await two.acquire("y")).is_done, "what was refused is nobody's"


async def test_two_actions_of_one_part_do_not_release_each_others_lock() -> None:
    """Two drains by hand may leave or return at once: the lock goes back with the last of them."""
    part = SharedLock(Lock(world := World(), "guard"))
    one, two = part.handle(), part.handle()
    assert (await one.acquire("a")).facts["epoch"] == (await two.acquire("b")).facts["epoch"]
    assert (await one.release()).is_done
    assert (world.holder, await two.is_ours()) == ("guard", True)
    await two.release()
    assert (world.holder, await two.is_ours()) == ("", False)


# One that guard has held is put back by whoever mended it
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


async def test_the_desk_of_a_conductor() -> None:
    """What the API is given of a real conductor: switches, what is under way and since when, refusals while it is at work."""
    world = World()
    desk, conductor = desk_of(world)
    desk.switch("b", "", is_paused=True)
    desk.switch("", "restart", is_paused=True)
    assert desk.switches == Switches(paused=frozenset({"b"}), rungs_off=frozenset({Grade.RESTART}))
    desk.switch("b", "", is_paused=False)
    desk.switch("", "restart", is_paused=False)
    assert (desk.switches, desk.trouble, desk.under_way()) == (Switches(), "", [])
    assert isinstance(await desk.drain("a"), ActionPlan)
    ((course, since),) = desk.under_way()
    assert (course.engine, course.kind, course.step, since) == ("a", "drain", Step.IDLE, 1_005.0)
    answer = asyncio.create_task(desk.ask(Grade.RESTART, "a"))
    await asyncio.sleep(0)
    await conductor.turn()
    assert reason(await answer) == "Busy", "what a person has drained is left alone"
    assert await conductor.take_over() == []
    assert not world.serves(), "and is not taken for what an earlier guard left"
    assert isinstance(await desk.undrain("a"), ActionPlan)
    conductor.runs["b"] = ActionRun("x", "b", Grade.RESTART, "dead", (Step.LOCK,), Step.LOCK)
    assert "guard is working on b" in str(await desk.ask(Grade.COMPACT, "a"))


@pytest.mark.parametrize("kind", ["dead", "drain"])
async def test_it_is_put_back_and_what_is_remembered_of_it_stays(kind: str) -> None:
    """In service again, each deed after its entry, the lock free; still no restart by itself until somebody resumes it."""
    world = held(kind)
    desk, conductor = desk_of(world)
    assert "guardctl undrain a puts it back" in desk.needs()["a"]
    assert isinstance(await desk.undrain("a"), ActionPlan)
    assert (world.serves(), world.holder, conductor.runs) == (True, "", {})
    assert "it was put back in rotation by hand; guardctl resume a once it is fixed" in desk.needs()["a"]
    assert reason(await desk.undrain("a")) == "NotDrained"
    desk.switch("", "", is_paused=False)
    assert "a" in desk.needs(), "that a pause of everything ends says nothing of this engine"
    desk.switch("a", "", is_paused=False)
    assert desk.needs() == {}
    assert [one.step for one in world.entries if one.kind == INTENT] == ["lock", "evidence", "drain", "undrain", "unlock"]
    assert open_actions(world.entries) == []
    assert any("back in rotation" in said for said in world.said)


async def test_the_lock_is_kept_while_it_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer that takes its time, or a gate whose lease must end first: whoever waits goes on being the one who acts."""
    renewed = list[bool]()

    class Slow(Balancer):
        async def put_back(self) -> Outcome:
            await asyncio.sleep(0.3)
            return await super().put_back()

    class Counted(Lock):
        async def renew(self) -> Outcome:
            renewed.append(True)
            return await super().renew()

    monkeypatch.setattr(steps, "RENEW_S", 0.02)
    world = held()
    ports = ports_of(world, SharedLock(Counted(world, "one")))._replace(observer=Looks())
    parts = {name: one._replace(balancer=Slow(world)) for name, one in parts_of(world).items()}
    found = await ReturnToService(parts, POLICY, ports, Conductor(parts, POLICY, ports)).put_back("a")
    assert isinstance(found, ActionPlan)
    assert (world.serves(), world.holder) == (True, "")
    assert renewed


async def test_one_that_does_not_answer_stays_out_and_so_it_does_without_lock_or_journal() -> None:
    """Nobody would answer its requests, somebody else may be at work on it, and no deed without its entry."""
    for reach in (Reach.REFUSED, Reach.SILENT, Reach.NONSENSE):
        desk, conductor = desk_of(world := held(), reach)
        found = await desk.undrain("a")
        assert isinstance(found, BlockedAction)
        assert (found.reason, found.message) == ("NotDone", "unreachable: start it first")
        assert (world.serves(), len(world.entries), conductor.runs) == (False, 1, {})
    desk, _ = desk_of(world := held())
    world.holder = "another guard"
    assert reason(await desk.undrain("a"))
    assert (world.serves(), world.holder, open_actions(world.entries)) == (False, "another guard", [])
    assert "puts it back" in desk.needs()["a"]
    desk, conductor = desk_of(world := held())
    world.fail_at = 8  # before the balancer is told
    assert reason(await desk.undrain("a"))
    assert (world.serves(), world.holder, conductor.runs) == (False, "", {})
