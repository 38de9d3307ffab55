"""The parts that guard is given in a world without any that is real: gate, balancer, restarter, lock, and the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from lab.guard.acting import Died, World
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.daemon.steps import EngineAdapters
from plimsoll.guard.judge.look import Look, Reach, WorkerMemory
from plimsoll.inside import admission as gate
from plimsoll.unknown import Condition, Status

ENDS_S = 2.0  # an engine takes so long to end
STARTS_S = 4.0  # and so long to be ready
WALL_S = 1_700_000_000.0
ENGINE = "a"


class FakeDoor:
    """The gate, by its own rules."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def drain(self, epoch: int, lease_s: float, *, refuse: bool = False) -> Outcome:
        wish: dict[str, Any] = {"epoch": epoch, "lease_s": lease_s, "refuse": refuse}

        def does(drain: gate.Drain) -> gate.Drain:
            return gate.begin(drain, self._world.state.now, self._world.state.last_admitted, **wish)

        return await self._ask("drain", lambda: self._take(does))

    async def undrain(self, epoch: int) -> Outcome:
        return await self._ask("undrain", lambda: self._take(lambda drain: gate.end(drain, epoch)))

    def _take(self, does: Callable[[gate.Drain], gate.Drain]) -> Outcome:
        state = self._world.state
        drain = gate.Drain(*state.drain)
        try:
            found = does(drain)
        except gate.StaleEpoch:
            return failed("an older epoch", stale=True, current=drain.epoch)
        if found.epoch < state.epoch and state.holder not in (0, state.life):
            self._world.hurt("a deed of an old epoch was accepted")
        state.drain = tuple(found)
        return done("as asked", phase=self._world.phase, epoch=found.epoch)

    async def _ask(self, name: str, does: Callable[[], Outcome]) -> Outcome:
        if not self._world.serves:
            return failed(f"{name}: nobody answers", unreachable=True)
        return await self._world.deed(name, does)

    async def shed(self, max_wait_s: float, lease_s: float) -> Outcome:
        del max_wait_s

        def does() -> Outcome:
            self._world.state.shed_until = self._world.state.now + lease_s
            return done("it sheds")

        return await self._ask("shed", does)

    async def unshed(self) -> Outcome:

        def does() -> Outcome:
            self._world.state.shed_until = 0.0
            return done("it sheds no more")

        return await self._ask("unshed", does)

    async def compact(self) -> Outcome:

        def does() -> Outcome:
            self._world.state.free += 0.0 if "verify" in self._world.faults else 2.0**20
            return done("given back")

        return await self._ask("compact", does)

    async def state(self) -> Outcome:
        world, state = self._world, self._world.state
        if not world.serves:
            return unsure("nobody answers")
        count, drain = len(state.in_flight), gate.Drain(*state.drain)
        return done(
            world.phase, phase=world.phase, epoch=drain.epoch, in_flight=count, background=0, engine_requests=count,
            begun=state.last_admitted, steps=state.last_admitted, idle=count == 0, is_dead=False, is_wedged=False,
            api_servers=1,
        )  # fmt: skip


class FakeBalancer:
    """One that is told, or one that asks for readiness by itself."""

    label = "a balancer"

    def __init__(self, world: World) -> None:
        self._world = world

    async def take_out(self) -> Outcome:
        return await self._set("take_out", is_out=True)

    async def put_back(self) -> Outcome:
        return await self._set("put_back", is_out=False)

    async def _set(self, name: str, *, is_out: bool) -> Outcome:
        state = self._world.state

        def does() -> Outcome:
            state.is_out = is_out and state.balancer == "told"
            return done(name)

        if (
            self._world.intent == "drain"
            and is_out
            and state.balancer == "told"
            and gate.Drain(*state.drain).is_on(state.now)
            and not state.is_out
        ):
            self._world.hurt("the gate was drained before the balancer was told")
        return await self._world.deed(name, does)

    async def is_out(self) -> bool | None:
        return self._world.state.is_out if self._world.state.balancer == "told" else None

    async def connections(self) -> int | None:
        return len(self._world.state.in_flight) if self._world.state.balancer == "told" else None


class FakeRestarter:
    """Stops and starts; a second signal is as good as one, and a start is refused while it runs."""

    label, replaces = "a restarter", False

    def __init__(self, world: World) -> None:
        self._world = world

    async def stop(self, deadline_s: float) -> Outcome:
        state = self._world.state

        def does() -> Outcome:
            if state.mode == "serving" and state.in_flight and not self._world.may_lose:
                self._world.hurt(f"stopped with {len(state.in_flight)} requests in flight")
            if state.mode in ("serving", "wedged"):
                state.stops += 1
                state.mode, state.gone_at = "ending", state.now + ENDS_S
            return done("it was told")

        outcome = await self._world.deed("stop", does)
        if outcome.is_done:
            end = state.now + deadline_s
            while self._world.is_running and state.now < end:
                await asyncio.sleep(0.5)
        return outcome

    async def start(self) -> Outcome:
        state = self._world.state
        if self._world.is_running:
            return failed("it runs already", running=True)

        def does() -> Outcome:
            state.mode, state.drain, state.starts = "serving", tuple(gate.Drain()), state.starts + 1
            late = 1e9 if "ready" in self._world.faults else STARTS_S
            state.began, state.ready_at = state.now, state.now + late
            return done("started")

        return await self._world.deed("start", does)

    async def is_running(self) -> bool | None:
        return self._world.is_running

    async def last_exit(self) -> Outcome:
        if self._world.is_running:
            return failed("it has not ended")
        return done("somebody stopped it", by_hand=True) if self._world.state.by_hand else done("it ended")

    async def pids(self) -> tuple[int, ...]:
        return ()


class FakeLock:
    """One for the fleet; its number only grows."""

    label = "a lock"

    def __init__(self, world: World) -> None:
        self._world = world

    async def acquire(self, owner: str) -> Outcome:
        """Take it, unless somebody who lives has it, or its time is not over."""
        del owner
        state = self._world.state

        def does() -> Outcome:
            is_held = state.holder != 0 and state.holder != state.life
            if is_held and self._world.ttl_s and state.now < state.held_until:
                return failed("somebody else has it")
            state.epoch, state.holder = state.epoch + 1, state.life
            return self._ours()

        is_take_over = self._world.intent == ""
        return await self._world.deed("acquire", does, is_free=is_take_over)

    def _ours(self) -> Outcome:
        state, ttl_s = self._world.state, self._world.ttl_s
        state.held_until = state.now + ttl_s if ttl_s else float("inf")
        return done("ours", epoch=state.epoch, **({"left_s": ttl_s} if ttl_s else {}))

    async def renew(self) -> Outcome:
        if self._world.is_dying:
            raise Died
        state = self._world.state
        return self._ours() if state.holder == state.life else failed("it is lost", lost=True)

    async def release(self) -> Outcome:
        state = self._world.state

        def does() -> Outcome:
            state.holder = 0 if state.holder == state.life else state.holder
            return done("given back")

        return await self._world.deed("release", does)


class FakeEvidence:
    """Keeps nothing."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def take(self, engine: str, action: str) -> Outcome:
        return await self._world.deed("evidence", lambda: done("kept", folder=f"{engine}-{action}"))


class FakeMemory:
    """Of the device: back as soon as the engine is down."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def note(self) -> None:
        """Nothing to note."""

    async def wait_back(self, deadline_s: float) -> Outcome:
        del deadline_s
        return await self._world.deed("wait_back", lambda: done("free again"))


class FakeSight:
    """Sees the world as it is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_blind = False  # a judge that has just begun knows nothing yet

    async def look(self, engine: str) -> Look | None:
        del engine
        world, state = self._world, self._world.state
        wall = WALL_S + state.now
        if not world.serves:
            return Look(state.now, wall, Reach.REFUSED)
        count = float(len(state.in_flight))
        figures = {"running": count, "waiting": 0.0, "steps": state.last_admitted}
        config = {"num_gpu_blocks": "10" if "check" in world.faults and state.starts else "1000", "block_size": "16"}
        return Look(
            state.now, wall, Reach.ANSWERS, health=200, figures=figures, config=config, started_unix_s=WALL_S + state.began,
            workers=(WorkerMemory("0", 0.0, device_free=state.free),),
        )  # fmt: skip

    def conditions(self, engine: str) -> Mapping[str, Condition]:
        del engine
        state = self._world.state
        if self.is_blind:
            return {}
        held = {
            "dead": state.mode == "down", "wedged": state.mode == "wedged",
            "saturated": state.now < self._world.full_until,
        }  # fmt: skip
        return {
            kind: Condition(kind, Status.TRUE if is_true else Status.FALSE, "Seen", f"{kind} or not", 0.0)
            for kind, is_true in held.items()
        }

    def unproved(self, engine: str, *, is_asked: bool = False) -> str:
        """Nobody stands between guard and this engine."""
        del engine, is_asked
        return ""

    def engines(self) -> tuple[str, ...]:
        return (ENGINE,)

    def suffering(self, engine: str, policy: ActPolicy) -> str:
        """Nobody else carries its load."""
        del engine, policy
        return ""


def parts_of(world: World) -> EngineAdapters:

    async def ask_once() -> Outcome:
        return await world.deed("warm", lambda: done("answered"))

    async def context() -> float | None:
        return 1_000.0

    async def progress() -> object:
        return None

    return EngineAdapters(
        ENGINE, FakeDoor(world), FakeBalancer(world), FakeRestarter(world), FakeEvidence(world), FakeMemory(world), ask_once,
        context, progress,
    )  # fmt: skip
