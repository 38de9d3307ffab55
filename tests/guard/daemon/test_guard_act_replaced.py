"""A restarter that evicts, and somebody else makes the new engine: whom it evicted is written down before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lab.guard.acting import World
from lab.guard.acting_lives import MemoryBook, live, to_the_end, unsafe
from lab.guard.acting_parts import FakeRestarter, parts_of
from lab.guard.acting_play import SERVING, ends, play
from plimsoll.guard.act.journal_entry import INTENT, OUTCOME
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.steps import EngineAdapters

REPLACED_S = 7.0


class Evicts(FakeRestarter):
    """As an eviction: it knows its pod by a number, and the new one comes by itself."""

    said, replaces = "a pod", True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._uid = ""
        self.recalled: list[Mapping[str, Any]] = []
        self.learns: Outcome = done("it is pod 1", uid="1", owner="set")

    async def learn(self) -> Outcome:
        self._uid = str(self.learns.facts.get("uid", ""))
        return self.learns

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


def parts(world: World) -> tuple[EngineAdapters, Evicts]:
    restarter = Evicts(world)
    return parts_of(world)._replace(restarter=restarter), restarter


def test_the_new_one_is_waited_for_and_its_predecessor_is_not_taken_for_it() -> None:
    """No new pod yet is no failure; and that the old one has ended is no end of the new one."""
    world, book = World(), MemoryBook()
    given, _ = parts(world)

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(SERVING.plan)
        await to_the_end(conductor, world, book)

    play(world, book, script, parts=given)
    assert ends(world) == ["done"]
    assert unsafe(world, book) == []
    drained = next(number for number, one in enumerate(book.entries) if (one.kind, one.step) == (OUTCOME, "drain"))
    stopped = next(number for number, one in enumerate(book.entries) if (one.kind, one.step) == (INTENT, "stop"))
    assert book.entries[drained].fields["facts"]["learned_uid"] == "1"
    assert drained < stopped


@pytest.mark.parametrize("point", ["after stop", "after intent gone", "before intent start", "after intent ready"])
def test_a_later_guard_recalls_whom_it_was(point: str) -> None:
    """From the journal, before it does anything; so it knows the old one from the new, and evicts nobody else."""
    world, book = World(), MemoryBook()

    async def script(conductor: Conductor) -> None:
        await conductor.take_over()
        await to_the_end(conductor, world, book)

    whole = World()
    live(whole, MemoryBook(), SERVING.plan, parts=parts(whole)[0])
    assert not live(world, book, SERVING.plan, whole.points.index(point) + 1, parts=parts(world)[0])
    given, restarter = parts(world)
    play(world, book, script, parts=given)
    assert restarter.recalled
    assert all(one == {"uid": "1", "owner": "set"} for one in restarter.recalled)
    assert (world.state.stops, world.state.starts) == (1, 1)
    assert unsafe(world, book) == []


def test_a_pod_that_nobody_would_replace_is_not_even_drained() -> None:
    """It is refused before anything is done to it."""
    world, book = World(), MemoryBook()
    given, restarter = parts(world)
    restarter.learns = failed("nobody would replace this pod", bare=True)

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(SERVING.plan)

    play(world, book, script, parts=given)
    assert ends(world) == ["undone"]
    assert "before take_out" not in world.points
