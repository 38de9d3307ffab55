"""Guard's real daemon in a simulated world: only its clocks, its network, its adapters and its disk are the world's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.errors import PlimsollError
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.adapters.gate import GateHttpClient
from plimsoll.guard.config import GuardConfig, files_of
from plimsoll.guard.daemon.acting import ActingSetup, ActionRunner
from plimsoll.guard.daemon.engine_look import served_model, warm_up
from plimsoll.guard.daemon.observer import Clocks, EngineCapabilities
from plimsoll.guard.daemon.run import Daemon, GuardOptions
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.policy import Policy
from plimsoll.net.client import TRANSPORT
from plimsoll.render.guard import Event, EventKind
from tests.world.engine import TOKEN, Engine
from tests.world.loop import Life
from tests.world.surroundings import (
    Disk,
    Link,
    SimulatedEvidence,
    SimulatedJournal,
    SimulatedLock,
    SimulatedRestarter,
    balancer_of,
)

if TYPE_CHECKING:
    from tests.world.world import World

OPENS = (EventKind.BEGINS, EventKind.UNREACHABLE, EventKind.NEEDS)
CLOSES = {EventKind.OVER: EventKind.BEGINS, EventKind.REACHED: EventKind.UNREACHABLE, EventKind.MENDED: EventKind.NEEDS}


class Lines:
    """Guard's standard output."""

    trouble, dropped, is_gone = "", 0, False

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def say(self, line: str) -> None:
        self._world.note(f"{self._name} says: {line[20:]}")


class _LockConfig:
    def __init__(self, world: World, guard: str) -> None:
        self._world, self._guard = world, guard

    def build(self) -> SimulatedLock:
        return SimulatedLock(self._world, self._guard)


class SimulatedGuard(Daemon):
    """One life of one guard."""

    def __init__(self, world: World, host: Host) -> None:
        self._world, self._host = world, host
        setting = world.setting
        engines = tuple(
            EngineConfig(
                name=one.name, url=one.url, token=TOKEN if one.has_gate else None, canary_s=setting.canary_s,
                group="", gate_url=None, api_key=None, balancer=None, restart=None, log=None, plan=None,
                kv_connector=False, nodes=1,
            )
            for one in world.engines
        )  # fmt: skip
        act = dataclasses.replace(setting.act, journal=str(host.folder / "guard.journal"))
        config = GuardConfig(engines=engines, act=act, lock=_LockConfig(world, host.name))
        numbers = {("dead", "refused"): setting.refused_s, ("wedged", "still"): setting.still_s}
        options = GuardOptions(config, Policy(numbers, every_s=setting.every_s), None, False, False, is_acting=True)
        dice = world.dice(f"{host.name}, life {host.lives}")
        clocks = Clocks(lambda: world.loop.now, host.wall, dice.random, lambda: f"{dice.getrandbits(32):08x}")
        super().__init__(options, Lines(world, host.name), clocks)  # type: ignore[arg-type]

    @property
    def desk(self) -> Any:
        return None if self._acting is None else self._acting.desk

    @property
    def mistakes(self) -> dict[str, int]:
        return dict(self._fleet.mistakes)

    def _make_acting(self) -> ActionRunner:
        world, host = self._world, self._host
        act = self._config.act or ActPolicy()
        files = files_of(act, self._config.own, os.environ)
        assert files is not None
        adapters = {one.name: self._adapters(one) for one in world.engines}
        may = {one.name: EngineCapabilities(has_gate=one.has_gate, has_restarter=True) for one in world.engines}

        def open_journal(path: Path) -> SimulatedJournal:
            host.journal = SimulatedJournal(path, world, host.disk, host.wall)
            return host.journal

        return ActionRunner(
            ActingSetup(adapters, may, act, None), self._config, files, self._fleet, self._announce,
            is_dry=False, clocks=self._clocks, open_journal=open_journal,
        )  # fmt: skip

    def _adapters(self, engine: Engine) -> EngineAdapters:
        world, guard = self._world, self._host.name

        async def context() -> float | None:
            model = await served_model(engine.url)
            return None if model is None else model.context

        return EngineAdapters(
            engine.name, GateHttpClient(engine.url, TOKEN) if engine.has_gate else None, balancer_of(world, guard, engine),
            SimulatedRestarter(world, guard, world.supervisors[engine.name]), SimulatedEvidence(world),
            ask_once=lambda: warm_up(engine.url), context=context,
        )  # fmt: skip

    async def _reader_gone(self) -> None:
        await asyncio.get_running_loop().create_future()

    def _tell(self, event: Event) -> None:
        if event.what in OPENS and not event.message.startswith("the clock of"):  # which says nothing of an engine
            self._host.told[event.engine, event.what, event.condition.kind if event.condition else ""] = self._world.loop.now
        elif event.what in CLOSES and event.message != "the gate answers again":
            self._host.told.pop((event.engine, CLOSES[event.what], event.condition.kind if event.condition else ""), None)
        super()._tell(event)


class Host:
    """The machine of one guard: its folder, its clock, and the service manager that starts guard again."""

    def __init__(self, world: World, name: str, folder: Path) -> None:
        self._world, self.folder = world, folder
        self.name: str = name
        folder.mkdir()
        self.ahead_s = 0.0  # how far its wall clock is off
        self.jumps = 0  # of that clock, ahead
        self.disk: Disk = Disk(world.dice(f"{name}'s disk"))
        self.journal: SimulatedJournal | None = None
        self.told: dict[tuple[str, EventKind, str], float] = {}  # what it has told of and not taken back
        self.lives = 0
        self.life = Life(name)
        self.guard: SimulatedGuard | None = None
        self.since = 0.0  # when this life began
        self.paused_at: float | None = None  # by an operator
        self.all_lives: list[Life] = []
        self._hindered_at = -1.0

    def wall(self) -> float:
        return 1_700_000_000.0 + self._world.loop.now + self.ahead_s

    def start(self) -> None:
        self.lives += 1
        self.life = Life(self.name)
        self.all_lives.append(self.life)
        self.told.clear()
        self.since = self._world.loop.now
        self._world.loop.begin(self.life, self._run(self.life))

    async def _run(self, life: Life) -> None:
        TRANSPORT.set(self._world.network.transport(self.name))
        try:
            self.guard = SimulatedGuard(self._world, self)
            await self.guard.run()
        except PlimsollError as error:
            self._world.note(f"{self.name}: guard ends: {error}")
        except Exception as problem:
            if not self._world.is_over:
                self._world.violate(f"{self.name}: guard ends with an internal error: {problem!r}")
            raise
        finally:
            if not self._world.is_over:
                self.close()
                self._world.later(10.0, self._again, life)

    def buried(self, again_s: float) -> None:
        """Takes note of its death, and starts the next one later."""
        self._world.note(f"{self.name}: guard is killed (moment {self.life.moments})")
        self.close()
        self._world.later(again_s, self._again, self.life)

    def _again(self, life: Life) -> None:
        if self.life is life:
            self.start()

    def close(self) -> None:
        self.guard = None
        if self.journal is not None:
            with contextlib.suppress(Exception):
                self.journal.close()
            self.journal = None

    @property
    def is_fine_since(self) -> float:
        """Since when nothing hinders it: its way to the engines, its disk, its own life. A slow disk takes everybody's time."""
        is_hindered = self.guard is None or self.life.is_frozen or self.disk.is_full
        is_hindered = is_hindered or any(host.disk.slow_s > 0 for host in self._world.hosts)
        if is_hindered or any(link != Link() for (name, _), link in self._world.network.links.items() if name == self.name):
            self._hindered_at = self._world.loop.now
        return max(self.since, self._hindered_at)

    def is_telling(self, engine: str) -> bool:
        """Whether it has told somebody of this engine, or of itself."""
        return any(name in (engine, "") for name, _, _ in self.told)

    def needs(self, engine: str) -> bool:
        """Whether it has told somebody that this engine needs attention."""
        return any(name == engine and what is EventKind.NEEDS for name, what, _ in self.told)
