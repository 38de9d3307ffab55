"""Scripts for a guard in a world that is not real: something happens while it is in a certain step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from lab.guard.acting import State, World
from lab.guard.acting_lives import CASES, Case, MemoryBook, conductor_of, live, run_in
from lab.guard.acting_parts import ENGINE
from plimsoll.guard.act.capacity import EngineLoad
from plimsoll.guard.act.decide import EngineStatus, FleetView
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.unknown import Condition, Status

SERVING = CASES[0]
Script = Callable[[Conductor], Awaitable[None]]


def play(world: World, book: Any, script: Script, **more: Any) -> Conductor:
    world.new_life(None)
    made: list[Conductor] = []

    async def main() -> None:
        made.append(conductor_of(world, book, **more))
        await script(made[0])

    assert run_in(world, main())
    world.is_dying = False  # it may still be asked what it remembers
    return made[0]


def ends(world: World) -> list[str]:
    """How actions ended, as it was told."""
    return [end for _, end in world.state.told if end]


def says(world: World) -> str:
    return "\n".join(line for line, _ in world.state.told)


def killed_at(point: str, case: Case = SERVING, *, ttl_s: float = 0.0) -> tuple[World, MemoryBook]:
    """A world and a journal as a guard leaves them that dies there."""
    whole = World(State(case.mode, case.balancer))
    live(whole, MemoryBook(), case.plan)
    world, book = World(State(case.mode, case.balancer), ttl_s=ttl_s), MemoryBook()
    assert not live(world, book, case.plan, whole.points.index(point) + 1)
    return world, book


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(3_000):
        if is_so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never came to that")


def view_of(kind: str, *, is_true: bool = True, name: str = ENGINE) -> FleetView:
    """A fleet in which this holds of the engine, and another one carries its load."""
    status = Status.TRUE if is_true else Status.FALSE
    conditions = {kind: Condition(kind, status, "Seen", f"it is {kind}", 0.0)}
    others = EngineStatus("z", {}, EngineLoad("z", 0.1, 1.0, 0.0, model="m"), 1.0)
    return FleetView([EngineStatus(name, conditions, EngineLoad(name, 0.1, 1.0, 0.0, model="m"), 1.0), others])
