"""What a gate does once a second: feed itself, publish its counts, look for a stuck engine, keep the metrics fresh."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from plimsoll.inside import wedging
from plimsoll.inside.attach import attach
from plimsoll.inside.canary import canary_fails
from plimsoll.inside.core import Core
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.meters import Meters
from plimsoll.inside.own_port import OwnPort
from plimsoll.inside.shared import ASLEEP, NS, PAUSED
from plimsoll.inside.stopping import notice_shutdown
from plimsoll.inside.survive import frontend

EVERY_S = 1.0
PORT_TURNS = 10
Test = Callable[[Any, float], Awaitable[bool]]
AGAIN_AFTER_S = 30.0  # between two test requests that brought no clear answer


class Tick:
    """A task on the server's own loop; each part fails alone."""

    def __init__(self, core: Core, test: Test = canary_fails) -> None:
        self._core = core
        self._test = test
        self._task: asyncio.Task[None] | None = None
        self._canary: asyncio.Task[None] | None = None
        self._meters: Meters | None = None
        self._port = OwnPort(core) if core.settings.listen else None
        self._work_since = 0.0
        self._next_canary = 0.0
        self._sleep_level: int | None = None

    def ensure(self) -> None:
        """Start the task if it does not run; called with every request, so it must be cheap."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the task, the port, and take this server's page away."""
        for task in (self._task, self._canary):
            if task is not None:
                task.cancel()
        if self._port is not None:
            await self._port.close()
        self._core.close()

    async def _run(self) -> None:
        core = self._core
        where = core.settings.listen or "vLLM's own port"
        LOG.info(
            "plimsoll: the gate is in; endpoints %s; recording %s",
            f"at {where}" if core.tokens.is_set else "but ready are off, since PLIMSOLL_TOKEN is not set",
            f"to {core.settings.record_folder}" if core.settings.record_folder else "off",
        )
        if core.settings.survive and core.alone is None:
            frontend.install()  # an API server that was started anew has loaded no plugin
        turns = 0
        while True:
            if turns % PORT_TURNS == 0:
                await self._listen()
            turns += 1
            for part in (self._feed, self._publish, self._sleep, self._wedge, self._measure):
                try:
                    part()
                except Exception as error:
                    FAULTS.note(f"the gate's {part.__name__.strip('_')}", error)
            await asyncio.sleep(EVERY_S)

    async def _listen(self) -> None:
        """Open the port, or take it over from an API server that is gone."""
        try:
            if self._port is not None and not self._port.is_open:
                await self._port.open()
        except Exception as error:
            FAULTS.note("listening", error)

    def _feed(self) -> None:
        if self._core.engine.client is not None:
            attach(self._core.engine.client)
            notice_shutdown(self._core.engine.client, self._core)

    def _publish(self) -> None:
        shared = self._core.shared
        shared.pages(look=True)
        self._core.publish_queue()
        shared.own["beat_ns"] = time.monotonic_ns()
        self._core.end_old_drain()

    def _sleep(self) -> None:
        """Pass on what vLLM itself says of sleeping, when it changes."""
        level = self._core.pulse.sleep_level
        if level != self._sleep_level:
            self._sleep_level = level
            self._core.note_sleep(0 if level is None else ASLEEP if level > 0 else PAUSED)

    def _wedge(self) -> None:
        core, now = self._core, time.monotonic()
        has_work = core.shared.own["engine_requests"] > 0
        if not has_work:
            self._work_since = 0.0
        elif self._work_since == 0.0:
            self._work_since = now
        progress = wedging.Progress(
            has_work=has_work,
            work_since=self._work_since,
            last_step=core.shared.latest("last_step_ns") / NS or None,
            longest_step_s=core.shared.latest("longest_step_ns") / NS,
            is_excused=self._is_excused(now),
        )
        if core.is_wedged() or not wedging.is_suspect(progress, core.settings.wedge_s, now) or now < self._next_canary:
            return
        if self._canary is None or self._canary.done():
            self._next_canary = now + core.settings.canary_s + AGAIN_AFTER_S
            self._canary = asyncio.get_running_loop().create_task(self._prove(core.shared.latest("last_step_ns")))

    def _is_excused(self, now: float) -> bool:
        """Whether there is another reason for it not to step; a call of ours is one, but not for ever."""
        core = self._core
        is_called = 0 < core.calls.running_s(now) < core.settings.wedge_s
        if bool(core.asleep_words()) or core.engine.is_dead() or is_called or core.is_stopping or not core.pulse.is_fed:
            return True
        last = core.survive()["last"]  # an engine that computes again what a contained failure cost is at work
        return last is not None and last["age_s"] < core.settings.wedge_s

    async def _prove(self, last_step_ns: int) -> None:
        core = self._core
        fails = await self._test(core.engine.client, core.settings.canary_s)
        core.publish_queue()
        if fails and core.shared.latest("last_step_ns") <= last_step_ns:
            core.shared.common["wedged_at_ns"] = time.monotonic_ns()
            FAULTS.say(
                "the engine", "no step for too long with work waiting, and a request of one token was not answered: it is stuck"
            )

    def measure(self) -> None:
        """Bring the metrics up to date, now."""
        try:
            self._core.publish_queue()
            self._measure()
        except Exception as error:
            FAULTS.note("the gate's measure", error)

    def _measure(self) -> None:
        if self._meters is None:
            self._meters = Meters(self._core)
        self._meters.refresh()
