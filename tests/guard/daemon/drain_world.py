"""Two engines without any part that is real, for tests of what a person drains: gate, balancer, lock, journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from plimsoll.errors import WorldFailed
from plimsoll.guard.act.capacity import EngineLoad
from plimsoll.guard.act.decide import EngineStatus, FleetView
from plimsoll.guard.act.journal_entry import Entry
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Outcome, done, failed
from plimsoll.guard.daemon.conductor import ActionPorts, Announcement
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.judge.look import Look
from plimsoll.inside import admission as gate
from plimsoll.unknown import Condition

POLICY = ActPolicy(lease_s=0.3)


def load_of(engine: str, usage: float | None) -> EngineLoad:
    """An engine that is so full, with nobody waiting."""
    return EngineLoad(engine, usage, 1.0, 0.0, model="m")


class World:
    """Two engines; what is done is done to the first."""

    def __init__(self) -> None:
        self.drain, self.is_out, self.epoch, self.holder = gate.Drain(), False, 0, ""
        self.entries: list[Entry] = []
        self.said: list[str] = []
        self.fail_at = 0
        self.engines = [EngineStatus(name, {}, load_of(name, 0.1), 0.0) for name in ("a", "b")]
        self.takes_out = done("out")

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def serves(self) -> bool:
        """Whether the first is in service: the gate admits, and the balancer sends."""
        return self.drain.phase(self.now, 0.0) == gate.SERVING and not self.is_out

    def view(self, away: frozenset[str]) -> FleetView:
        return FleetView([one._replace(is_away=one.name in away) for one in self.engines])


class Door:
    """The gate, by its own rules."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def drain(self, epoch: int, lease_s: float, *, refuse: bool = False) -> Outcome:
        world = self._world
        return self._take(lambda: gate.begin(world.drain, world.now, epoch=epoch, lease_s=lease_s, refuse=refuse))

    async def undrain(self, epoch: int) -> Outcome:
        return self._take(lambda: gate.end(self._world.drain, epoch))

    def _take(self, does: Callable[[], gate.Drain]) -> Outcome:
        try:
            self._world.drain = does()
        except gate.StaleEpoch:
            return failed("an older epoch", stale=True, current=self._world.drain.epoch)
        return done("as asked")

    async def state(self) -> Outcome:
        return done("", phase=self._world.drain.phase(self._world.now, 0.0), in_flight=0)


class Balancer:
    label = "a balancer"

    def __init__(self, world: World) -> None:
        self._world = world

    async def take_out(self) -> Outcome:
        self._world.is_out = self._world.takes_out.is_done is True
        return self._world.takes_out

    async def put_back(self) -> Outcome:
        self._world.is_out = False
        return done("back")

    async def is_out(self) -> bool | None:
        return self._world.is_out

    async def connections(self) -> int | None:
        return 0


class Lock:
    """As the real ones: who has it gets it again, and its number grows with every holder."""

    label = "a lock"

    def __init__(self, world: World, guard: str) -> None:
        self._world, self._guard = world, guard

    async def acquire(self, owner: str) -> Outcome:
        await asyncio.sleep(0)
        if self._world.holder not in ("", self._guard):
            return failed(f"{self._world.holder} has it, not {owner}")
        self._world.epoch += self._world.holder != self._guard
        self._world.holder = self._guard
        return done("ours", epoch=self._world.epoch)

    async def renew(self) -> Outcome:
        return done("ours") if self._world.holder == self._guard else failed("not ours")

    async def release(self) -> Outcome:
        self._world.holder = "" if self._world.holder == self._guard else self._world.holder
        return done("given back")


class Book:
    """The journal, on a disk that may be full."""

    def __init__(self, world: World) -> None:
        self._world = world

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        number = len(self._world.entries) + 1
        if number == self._world.fail_at:
            raise WorldFailed("the journal cannot be written: No space left on device")
        entry = Entry(number, 1_000.0 + number, kind, engine, action, step, fields or {})
        self._world.entries.append(entry)
        return entry

    def kept(self) -> list[Entry]:
        return list(self._world.entries)


class Sight:
    who_suffers = ""

    async def look(self, engine: str) -> Look | None:
        del engine
        return None

    def unproved(self, engine: str, *, is_asked: bool = False) -> str:
        del engine, is_asked
        return ""

    def conditions(self, engine: str) -> Mapping[str, Condition]:
        del engine
        return {}

    def engines(self) -> Sequence[str]:
        return ["a", "b"]

    def suffering(self, engine: str, policy: ActPolicy) -> str:
        del engine, policy
        return self.who_suffers


def parts_of(world: World) -> dict[str, EngineAdapters]:
    """What can be done to the first; nothing to the second."""
    return {"a": EngineAdapters("a", cast("Any", Door(world)), Balancer(world)), "b": EngineAdapters("b")}


def ports_of(world: World, lock: Any) -> ActionPorts:
    numbers = iter(range(100))

    def tell(said: Announcement) -> None:
        world.said.append(said.message)

    return ActionPorts(Book(world), lock, Sight(), world.view, tell, lambda: 0.0, lambda: f"x{next(numbers)}")
