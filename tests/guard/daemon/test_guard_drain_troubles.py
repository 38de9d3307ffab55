"""A drain by hand when something goes wrong: the journal, the balancer, the others, the lock when guard is to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from plimsoll.guard.act.decide import ActionPlan, BlockedAction
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.act.ports import failed, unsure
from plimsoll.guard.daemon.conductor import Announcement
from plimsoll.guard.daemon.manual_drain import ManualDrains, SharedLock
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.judge.look import Look, Reach
from tests.each import each
from tests.guard.daemon.drain_world import POLICY, Lock, Sight, World, parts_of, ports_of


class Answers(Sight):
    """The engine answers, or not."""

    def __init__(self) -> None:
        self.is_up = True

    async def look(self, engine: str) -> Look | None:
        del engine
        return Look(0.0, 0.0, Reach.ANSWERS if self.is_up else Reach.REFUSED, health=200 if self.is_up else None)


class Story:
    """A world, the drains of one guard in it, and what it says urgently."""

    def __init__(self, parts: Mapping[str, EngineAdapters] | None = None, **more: Any) -> None:
        self.world, self.sight = World(), Answers()
        self.urgent: list[str] = []
        ports = ports_of(self.world, SharedLock(Lock(self.world, "one")))
        ports = ports._replace(observer=self.sight, tell=self._tell)
        given = parts_of(self.world) if parts is None else parts
        self.drains = ManualDrains(given, POLICY, ports, {}, pause_s=0.02, **more)

    def _tell(self, said: Announcement) -> None:
        self.world.said.append(said.message)
        self.urgent += [said.message] if said.is_urgent else []


def run(does: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(does(), 30))


def entries_of_a_whole_life() -> int:
    """How often the journal is written to."""

    async def whole() -> int:
        story = Story()
        await story.drains.drain("a")
        await story.drains.undrain("a")
        return len(story.world.entries)

    return asyncio.run(whole())


@each("number", range(2, entries_of_a_whole_life() + 1))
def test_a_journal_that_fails_leaves_nothing_out_of_service(number: int) -> None:
    """At any entry: what is out comes back unwritten, the lock is free, and it is said urgently."""

    async def does() -> None:
        story = Story()
        world = story.world
        world.fail_at = number
        decision = await story.drains.drain("a")
        if isinstance(decision, ActionPlan):
            assert isinstance(await story.drains.undrain("a"), ActionPlan), "what is out may always be asked back"
        assert (world.serves(), world.holder, dict(story.drains.runs)) == (True, "", {})
        assert any("No space left" in said for said in story.urgent)

    run(does)


def test_a_balancer_that_was_reloaded_is_told_again() -> None:
    """It has the server in again, while the gate refuses: it is taken out again, and that is said."""

    async def does() -> None:
        story = Story()
        world = story.world
        await story.drains.drain("a")
        world.is_out = False
        await asyncio.sleep(POLICY.lease_s)
        assert (world.is_out, story.drains.engines) == (True, frozenset("a"))
        assert any("taken out again" in said for said in world.said)
        await story.drains.undrain("a")
        assert world.serves()

    run(does)


def test_where_the_balancer_does_not_let_go_again_the_gate_does() -> None:
    """A drain that only refuses what still comes would be worse than none."""

    async def does() -> None:
        story = Story()
        world = story.world
        await story.drains.drain("a")
        world.is_out, world.takes_out = False, failed("nobody else is up")
        await asyncio.sleep(3 * POLICY.lease_s)
        assert world.serves()
        assert any("cannot be told to stop: nobody else is up" in said for said in world.said)
        assert open_actions(world.entries) == []

    run(does)


def test_a_balancer_that_cannot_be_asked_is_no_reason_to_end_it() -> None:
    """Not known is no: it stays drained, and is asked again."""

    async def does() -> None:
        story = Story()
        world = story.world
        await story.drains.drain("a")
        world.is_out, world.takes_out = False, unsure("no answer")
        await asyncio.sleep(2 * POLICY.lease_s)
        assert story.drains.engines == frozenset("a")
        await story.drains.close()

    run(does)


@pytest.mark.parametrize("is_up", [True, False])
def test_the_others_end_it_when_they_cannot_carry_its_load(is_up: bool) -> None:
    """As a restart's drain; but an engine that does not answer would not help them."""

    async def does() -> None:
        who: list[str] = []
        story = Story()
        parts = {"a": parts_of(story.world)["a"]._replace(suffering=lambda: "".join(who))}
        story.drains = ManualDrains(parts, POLICY, story.drains._ports, {}, pause_s=0.02)
        story.sight.is_up = is_up
        await story.drains.drain("a")
        await asyncio.sleep(0.1)
        assert not story.world.serves()
        who.append("b cannot carry its load")
        await asyncio.sleep(0.3)
        assert story.world.serves() is is_up
        assert ("the drain by hand ends: b cannot carry its load" in story.world.said) is is_up
        await story.drains.close()

    run(does)


@pytest.mark.parametrize("has_gate", [True, False])
def test_a_guard_that_ends_while_another_has_the_lock_puts_it_back_or_says_what_stays(has_gate: bool) -> None:
    """With a gate it goes back with its own number in time; without one nobody can tell whose it is, and that is urgent."""

    async def does() -> None:
        story = Story()
        world = story.world
        given = parts_of(world)["a"]
        parts = {"a": given if has_gate else given._replace(gate=None)}
        story.drains = ManualDrains(parts, POLICY, story.drains._ports, {}, pause_s=0.02)
        assert isinstance(await story.drains.drain("a"), ActionPlan)
        world.holder = "another guard"
        await story.drains.close(limit_s=0.6)
        assert world.is_out is not has_gate
        assert bool([said for said in story.urgent if "still drained by hand" in said]) is not has_gate
        assert bool(open_actions(world.entries)) is not has_gate, "what stays is left to the next guard"

    run(does)


def test_what_is_in_maintenance_is_not_drained_by_hand() -> None:
    """It is an operator's: whoever asks is told so, and nothing is left behind."""

    async def does() -> None:
        story = Story()
        story.world.takes_out = failed("an operator has it in maintenance in farm/a: it is left alone", maint=True)
        decision = await story.drains.drain("a")
        assert isinstance(decision, BlockedAction)
        assert "in maintenance" in decision.message
        assert story.world.serves()

    run(does)
