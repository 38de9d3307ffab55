"""An engine that a person drains: out while it is wanted, back when it is not, and never without an owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import WorldFailed
from plimsoll.guard.act.decide import ActionPlan, BlockedAction, Decision, FailedRestarts, Switches
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.act.ports import failed, unsure
from plimsoll.guard.act.steps import ActionRun, Step
from plimsoll.guard.api.actions import ActionDesk
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.manual_drain import ManualDrains, SharedLock
from plimsoll.guard.judge.tracker import Grade
from tests.guard.daemon.drain_world import NEVER, POLICY, Book, Killed, Lock, World, load_of, parts_of, ports_of


def made(world: World, guard: str = "one", **more: Any) -> ManualDrains:
    ports = ports_of(world, SharedLock(Lock(world, guard)))
    return ManualDrains(parts_of(world), POLICY, ports, {}, pause_s=0.02, **more)


def run(does: Callable[[World], Coroutine[Any, Any, None]]) -> World:
    world = World()
    asyncio.run(does(world))
    return world


def test_out_until_it_is_asked_back() -> None:
    """The lease is renewed for as long as it is out, the lock is free meanwhile, and every deed has its entry before it."""

    async def story(world: World) -> None:
        drains = made(world)
        assert isinstance(await drains.drain("a"), ActionPlan)
        assert not world.serves()
        assert (drains.engines, drains.runs["a"].step, world.holder) == (frozenset("a"), Step.IDLE, "")
        await asyncio.sleep(3 * POLICY.lease_s)
        assert not world.serves(), "nobody renewed it"
        decision = await drains.drain("a")
        assert isinstance(decision, BlockedAction)
        assert decision.reason == "Busy"
        assert isinstance(await drains.undrain("a"), ActionPlan)
        assert world.serves()
        assert (len(drains.engines), len(drains.runs), world.holder) == (0, 0, "")

    world = run(story)
    assert [entry.step for entry in world.entries if entry.kind == INTENT] == [
        "lock", "evidence", "drain", "idle", "undrain", "unlock"
    ]  # fmt: skip
    assert (world.entries[0].kind, world.entries[-1].kind) == (OPENED, CLOSED)
    assert world.entries[-1].fields["end"] == "undone"
    assert open_actions(world.entries) == []
    assert world.epoch == 2, "once to take it out, once to put it back"


def test_it_comes_back_by_itself_after_its_bound() -> None:
    """Whoever forgot it has it back after an hour."""

    async def story(world: World) -> None:
        drains = made(world, longest_s=0.2)
        await drains.drain("a")
        await asyncio.sleep(0.6)
        assert world.serves()
        assert drains.engines == frozenset()

    run(story)


def test_a_guard_that_ends_puts_it_back() -> None:
    """Nothing stays out when its owner goes in order."""

    async def story(world: World) -> None:
        drains = made(world)
        await drains.drain("a")
        await drains.close()
        assert world.serves()
        assert open_actions(world.entries) == []

    run(story)


@pytest.mark.parametrize(
    ("engine", "change", "reason"),
    [
        ("c", {}, "NotWatched"),
        ("b", {}, "NoGate"),
        ("a", {"age_s": 1e6}, "Unknown"),
        ("a", {"only_observed": "a KV connector"}, "OnlyObserved"),
        ("a", {"load": load_of("a", 0.75)}, "OthersCannotCarry"),
        ("a", {"load": load_of("a", None)}, "OthersCannotCarry"),
    ],
)
def test_what_speaks_against_it(engine: str, change: Mapping[str, Any], reason: str) -> None:
    """As for a restart: what is not known, what may not be touched, what the others could not carry. Nothing is written."""

    async def story(world: World) -> None:
        world.engines = [one._replace(**change) for one in world.engines]
        decision = await made(world).drain(engine)
        assert isinstance(decision, BlockedAction)
        assert (decision.reason, world.entries) == (reason, [])

    run(story)


def test_what_does_not_speak_against_it() -> None:
    """A person may drain at any hour, with the budget spent, guard paused, a sick card and no way to restart it."""

    async def story(world: World) -> None:
        world.engines[0] = world.engines[0]._replace(has_restarter=False, last_end=FailedRestarts("asked", "failed"))
        drains = made(world)
        drains._policy = replace(POLICY, rungs=(), restarts_per_hour=0, fleet_restarts_per_hour=0)
        view = world.view
        drains._ports = drains._ports._replace(view=lambda away: view(away)._replace(switches=Switches(is_paused=True)))
        assert isinstance(await drains.drain("a"), ActionPlan)
        await drains.close()

    run(story)


def test_while_guard_is_at_work_it_is_refused() -> None:
    """One engine at a time: also for people."""

    async def story(world: World) -> None:
        drains = made(world)
        drains.runs["b"] = ActionRun("x", "b", Grade.RESTART, "dead", (Step.LOCK,), Step.LOCK)
        decision = await drains.drain("a")
        assert isinstance(decision, BlockedAction)
        assert decision.reason == "Busy"

    run(story)


def test_a_lock_that_is_not_free_or_a_balancer_that_refuses() -> None:
    """It is told at once, and nothing is left behind."""

    async def story(world: World) -> None:
        world.holder = "another guard"
        drains = made(world)
        first = await drains.drain("a")
        world.holder = ""
        world.takes_out = failed("it is the last server")
        second = await drains.drain("a")
        assert [isinstance(one, BlockedAction) and one.message for one in (first, second)] == [
            "another guard has it, not x0 on a", "it is the last server"
        ]  # fmt: skip
        assert (world.serves(), world.holder, drains.runs) == (True, "", {})
        world.takes_out = unsure("no answer")
        assert isinstance(await drains.drain("a"), BlockedAction)
        assert world.serves()

    world = run(story)
    assert [entry.fields["end"] for entry in world.entries if entry.kind == CLOSED] == ["stood-back", "undone", "undone"]


def test_somebody_else_takes_it_meanwhile() -> None:
    """A newer number at the gate: it is theirs, and it is not put back under their hands."""

    async def story(world: World) -> None:
        drains = made(world)
        await drains.drain("a")
        world.epoch += 5
        world.drain = world.drain._replace(epoch=world.epoch, until=world.now + 60)
        await asyncio.sleep(0.5)
        assert (world.is_out, world.serves(), drains.engines) == (True, False, frozenset())

    assert open_actions(run(story).entries) == []


def test_it_waits_for_the_lock_to_put_it_back() -> None:
    """While another guard is at work it stays out, renewed; then it comes back."""

    async def story(world: World) -> None:
        drains = made(world)
        await drains.drain("a")
        world.holder = "another guard"
        back = asyncio.create_task(drains.undrain("a"))
        await asyncio.sleep(3 * POLICY.lease_s)
        assert not world.serves()
        world.holder = ""
        await back
        assert world.serves()

    run(story)


def test_a_lock_that_never_comes_does_not_keep_it_out() -> None:
    """The gate knows whose it is: after a while it is put back with the number that it was drained with."""

    async def story(world: World) -> None:
        drains = made(world, patience_s=0.2)
        await drains.drain("a")
        world.holder = "another guard"
        await drains.undrain("a")
        assert (world.serves(), world.holder) == (True, "another guard")

    assert open_actions(run(story).entries) == []


def test_whoever_was_killed_is_followed_by_one_who_undoes_it() -> None:
    """Before and after each entry of the journal in turn: the next guard puts the engine back, and nothing stays open."""

    async def one_life(world: World) -> None:
        drains = made(world)
        await drains.drain("a")
        await drains.undrain("a")

    whole = len(run(one_life).entries)
    assert whole > 12
    for number in range(1, whole + 1):
        for before, after in ((number, NEVER), (NEVER, number)):
            world = World()
            world.kill_before, world.kill_after = before, after
            asyncio.run(_dies_and_is_followed(world))
            assert open_actions(world.entries) == [], (before, after)


async def _dies_and_is_followed(world: World) -> None:
    try:
        first = made(world)
        await first.drain("a")
        await first.undrain("a")
    except Killed:
        pass
    world.kill_before = world.kill_after = NEVER
    world.holder = ""
    second = Conductor(parts_of(world), POLICY, ports_of(world, Lock(world, "two")), pause_s=0.01)
    await second.take_over()
    await second.close()
    assert world.serves()
    assert second.runs == {}


def test_without_a_journal_nothing_is_done() -> None:
    """A full disk at the first entry is told to whoever asked; later nothing that is out stays so."""

    async def story(world: World) -> None:
        world.fail_at = 1
        with pytest.raises(WorldFailed, match="cannot be written"):
            await made(world).drain("a")
        assert (world.serves(), world.entries) == (True, [])

    async def later(world: World) -> None:
        drains = made(world)
        world.fail_at = 6  # before the drain itself
        decision: Decision = await drains.drain("a")
        assert isinstance(decision, BlockedAction)
        assert world.serves()
        assert any("the engine goes back in rotation" in said for said in world.said)
        assert drains.runs == {}

    run(story)
    run(later)


def test_two_parts_of_one_guard_keep_each_other_out() -> None:
    """The lock itself would be given to both: who has it is asked here first."""

    async def story(world: World) -> None:
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

    run(story)


def test_the_desk_of_a_conductor() -> None:
    """What the API is given of a real conductor: switches, what is under way and since when, refusals while it is at work."""

    async def story(world: World) -> None:
        lock = SharedLock(Lock(world, "one"))
        conductor = Conductor(parts_of(world), POLICY, ports_of(world, lock), pause_s=0.01)
        drains = ManualDrains(parts_of(world), POLICY, ports_of(world, lock.other()), conductor.runs, pause_s=0.02)
        desk = ActionDesk(conductor, drains, Book(world), Path("guard.journal"))
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
        refusal = await answer
        assert isinstance(refusal, BlockedAction)
        assert refusal.reason == "Busy", "what a person has drained is left alone"
        assert await conductor.take_over() == []
        assert not world.serves(), "and is not taken for what an earlier guard left"
        assert isinstance(await desk.undrain("a"), ActionPlan)
        conductor.runs["b"] = ActionRun("x", "b", Grade.RESTART, "dead", (Step.LOCK,), Step.LOCK)
        refusal = await desk.ask(Grade.COMPACT, "a")
        assert isinstance(refusal, BlockedAction)
        assert refusal.message == "guard is working on b"

    run(story)
