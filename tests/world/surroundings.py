"""What stands around simulated engines: a network, a balancer, supervisors, a lock and a disk, each of which can fail."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.guard.act.journal_entry import Entry
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.command import BY_HAND, ENDED, NOT_RUNNING, CommandRestarter
from plimsoll.guard.adapters.haproxy import FORCED_DRAIN, FORCED_MAINT, HAProxy, ServerLine
from plimsoll.guard.adapters.hooks import ReadinessBalancer
from plimsoll.guard.adapters.run_command import CommandResult
from plimsoll.guard.daemon.journal import Journal, JournalFailed
from plimsoll.net.client import Loss, Lost, Reply, Request
from tests.world.engine import Core, Engine
from tests.world.loop import LIFE

if TYPE_CHECKING:
    from tests.world.world import World

FALL_S, RISE_S = 6.0, 4.0  # a balancer's own checks: so long until it sees that a server is down, or up again
TTL_S = 30.0  # of the fleet's lock


@dataclass
class Link:
    """The way from one guard to one host."""

    is_cut: bool = False
    rejects: bool = False  # a cut that refuses connections, as a firewall may; else they are lost
    loss: float = 0.0  # share of requests, and of answers, that are lost
    delay_s: float = 0.0  # at most
    twice: float = 0.0  # share of requests that a proxy sends again, later


async def hang() -> Any:
    """Never returns: for a process that is no more."""
    return await asyncio.get_running_loop().create_future()


async def passes() -> None:
    """A moment at which a guard may be killed."""
    life = LIFE.get()
    if life is not None and not life.passes():
        await hang()


class Network:
    """Carries the requests of guards to engines, by their links."""

    def __init__(self, world: World) -> None:
        self._world, self._dice = world, world.dice("network")
        self.links: dict[tuple[str, str], Link] = {}

    def link(self, guard: str, host: str) -> Link:
        return self.links.setdefault((guard, host), Link())

    def transport(self, guard: str) -> Callable[[Request], Awaitable[Reply | Lost]]:
        async def call(request: Request) -> Reply | Lost:
            await passes()
            engine = self._world.at(request.url)
            if engine is None:
                return Reply(200, b"")  # the receiver of notifications
            return await self._call(self.link(guard, engine.name), engine, request)

        return call

    async def _call(self, link: Link, engine: Engine, request: Request) -> Reply | Lost:
        dice, end_s = self._dice, self._world.loop.now + request.deadline_s
        if link.is_cut and link.rejects:
            return Lost(Loss.REFUSED, "connection refused")
        if link.is_cut or dice.random() < link.loss:
            return await self._late(end_s, request, was_sent=not link.is_cut)
        if link.twice and dice.random() < link.twice and request.method == "POST":
            self._world.later(dice.uniform(0.0, 20.0), lambda: engine.is_ready and engine.answer(request))
        if link.delay_s:
            delay_s = dice.uniform(0.0, link.delay_s)
            if delay_s > request.deadline_s:  # it arrives, and nobody waits for its answer any more
                self._world.later(delay_s, lambda: engine.is_ready and engine.answer(request))
                return await self._late(end_s, request, was_sent=True)
            await asyncio.sleep(delay_s)
            await passes()
        if not engine.is_ready:
            return Lost(Loss.REFUSED, "connection refused")
        reply = engine.answer(request)
        if reply is None or dice.random() < link.loss:
            return await self._late(end_s, request, was_sent=True)
        return reply

    async def _late(self, end_s: float, request: Request, *, was_sent: bool) -> Lost:
        await asyncio.sleep(max(0.0, end_s - self._world.loop.now))
        return Lost(Loss.LATE, f"did not answer within {request.deadline_s:g} s", was_sent)


class Proxy:
    """HAProxy, by its runtime API: who is in rotation, by its operators, its guards and its own checks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.admin: dict[str, int] = {}
        self.drained_by: dict[str, str] = {}
        self._checks: dict[str, tuple[bool, bool, float]] = {}  # whether it is up, what the checks say, and since when
        self.flipped_at = -math.inf  # when its checks last found a server up or down
        self.is_down = False  # its socket does not answer
        self.told_at = -math.inf  # when it last did
        self.cut: set[str] = set()  # engines that it cannot reach

    def check(self, engine: Engine) -> bool:
        """Whether its own checks have found this server to be up; looked at whenever anything changes."""
        now = self._world.loop.now
        is_up, says, since = self._checks.get(engine.name, (False, False, -math.inf))
        is_fine = (
            engine.name not in self.cut and engine.is_ready and engine.core is not Core.DEAD and now >= engine.overload_until
        )
        is_fine = is_fine and now >= engine.says_503_until
        if engine.has_gate:
            is_fine = is_fine and engine.phase == "serving" and not engine.is_proven_wedged and not engine.is_paused
        if is_fine is not says:
            since = now
        if is_fine is not is_up and now - since >= (RISE_S if is_fine else FALL_S):
            is_up, self.flipped_at = is_fine, now
        self._checks[engine.name] = is_up, is_fine, since
        return is_up

    def sends(self, engine: Engine) -> bool:
        return self.check(engine) and not self.admin.get(engine.name, 0)

    async def say(self, guard: str, command: str) -> str:
        """One command over its socket."""
        await passes()
        if self.is_down:
            await asyncio.sleep(30.0)
        else:
            self.told_at = self._world.loop.now
        words = command.split()
        engines = self._world.engines
        if command.startswith("show servers state"):
            rows = [
                f"1 llm {place} {one.name} 10.0.0.1 {2 if self.check(one) else 0} {self.admin.get(one.name, 0)} 1"
                for place, one in enumerate(engines)
            ]
            return "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight\n" + "\n".join(rows)
        if command.startswith("show stat"):
            return "\n".join([_STATISTICS, *(self._stat(one) for one in engines)])
        name, state = words[2].partition("/")[2], words[4]
        before = self.admin.get(name, 0)
        self.admin[name] = before | FORCED_DRAIN if state == "drain" else before & ~(FORCED_DRAIN | FORCED_MAINT)
        if state == "drain":
            self.drained_by[name] = guard
            self._world.check_not_last(guard, name)
        self._world.note(f"{guard}: HAProxy sets {name} to {state}")
        return "\n"

    def _stat(self, engine: Engine) -> str:
        is_up, says, since = self._checks.get(engine.name, (False, False, 0.0))
        admin, now = self.admin.get(engine.name, 0), self._world.loop.now
        status = "MAINT" if admin & FORCED_MAINT else "DOWN" if not is_up else "DRAIN" if admin else "UP"
        check, quiet = ("L7OK", 200) if says else ("L4CON", ""), now - max(engine.last_byte_at, -1.0)
        sent = int(1000 * (engine._steps if self._world.setting.contstats else engine.served))
        row = (
            "llm", engine.name, 0, len(engine.requests), engine.begun, status, int(now - max(0.0, since)), *check, 1,
            100 * engine.begun, sent, int(quiet), "",
        )  # fmt: skip
        return ",".join(map(str, row))


_STATISTICS = "# pxname,svname,qcur,scur,stot,status,lastchg,check_status,check_code,check_duration,bin,bout,lastsess,last_chk"


class SimulatedHaproxy(HAProxy):
    """The real adapter; only its socket is simulated."""

    def __init__(self, proxy: Proxy, guard: str, engine: str) -> None:
        super().__init__("/haproxy.sock", (ServerLine("llm", engine),))
        self._proxy, self._guard = proxy, guard

    async def _say(self, command: str) -> str:
        return await self._proxy.say(self._guard, command)


@dataclass
class Supervisor:
    """What runs one engine, asked by commands."""

    engine: Engine
    knows_how: bool = True  # it can tell a crash from an operator's stop
    again_s: float | None = None  # after so long it starts a crashed one by itself
    is_silent: bool = False  # nobody can ask it
    hangs: bool = False  # its commands do not end
    flaps: bool = False  # now it says yes, now no, now nothing
    told_at: float = -math.inf  # when it last said that somebody stopped the engine
    stop_fails: int = 0  # so many stops from now on have no effect
    stop_s: float = 3.0

    def __post_init__(self) -> None:
        self.engine.when_it_crashes = self._start_again

    def _start_again(self) -> None:
        if self.again_s is not None:
            self.engine.later(self.again_s, self.engine.start, "its supervisor")

    def status(self) -> int:
        if self.is_silent:
            return 1
        if self.flaps:
            return (0, 1, NOT_RUNNING)[int(self.engine.now()) % 3]
        if self.engine.is_up:
            return 0
        how = self.engine.ended_how
        if self.knows_how and how == "by hand":
            self.told_at = self.engine.now()
        return {"crash": ENDED, "by hand": BY_HAND}.get(how, NOT_RUNNING) if self.knows_how else NOT_RUNNING


class SimulatedRestarter(CommandRestarter):
    """The real adapter; only the commands are simulated."""

    def __init__(self, world: World, guard: str, supervisor: Supervisor) -> None:
        super().__init__(["stop"], ["start"], ["status"])
        self._world, self._guard, self._supervisor = world, guard, supervisor

    async def _run(self, verb: str, limit_s: float, grace_s: float = 0.0) -> CommandResult:
        await passes()
        supervisor, engine = self._supervisor, self._supervisor.engine
        if supervisor.hangs:
            await asyncio.sleep(limit_s + grace_s)
            await passes()
            return CommandResult(None, b"", f"it did not end within {limit_s:g} s")
        if verb == "is-running":
            return CommandResult(supervisor.status(), b"")
        if supervisor.is_silent:
            return CommandResult(1, b"it cannot be asked")
        if verb == "start":
            await asyncio.sleep(0.5)
            await passes()
            self._world.check_start(self._guard, engine)
            engine.start(self._guard)
            return CommandResult(0, b"")
        self._world.check_stop(self._guard, engine)
        if supervisor.stop_fails > 0:
            supervisor.stop_fails -= 1
            await asyncio.sleep(1.0)
            return CommandResult(1, b"it does not end")
        engine.is_ending = True
        # The command is a process of its own: it goes on, whatever becomes of guard.
        engine.soon(supervisor.stop_s, engine.die, "asked")
        await asyncio.sleep(supervisor.stop_s + 0.1)
        return CommandResult(0, b"stopped")


class SimulatedEvidence:
    """Evidence takes its time: logs are copied, and doctor reads them."""

    def __init__(self, world: World) -> None:
        self._dice = world.dice("evidence")

    async def take(self, engine: str, action: str) -> Outcome:
        await passes()
        await asyncio.sleep(self._dice.choice((0.1, 2.0, 25.0)))
        await passes()
        return done(f"kept for {action} on {engine}")


class LockService:
    """The fleet's lock as a service keeps it: for a time, and with a number that grows with each holder."""

    def __init__(self) -> None:
        self.holder: SimulatedLock | None = None
        self.since, self.until, self.epoch = 0.0, 0.0, 0


class SimulatedLock:
    """One guard's hand on it, as the real ones: a lost answer is not known, an ended time is lost."""

    label = "a simulated lock"

    def __init__(self, world: World, guard: str) -> None:
        self._world, self._service, self.guard = world, world.lock, guard
        self._epoch, self._until = 0, -1.0

    async def _ask(self) -> bool:
        await passes()
        link = self._world.network.link(self.guard, "lock")
        if link.is_cut or self._world.network._dice.random() < link.loss:
            await asyncio.sleep(5.0)
            await passes()
            return False
        return True

    async def acquire(self, owner: str) -> Outcome:
        del owner
        if not await self._ask():
            return unsure("the lock cannot be taken: its service does not answer")
        now, service = self._world.loop.now, self._service
        if service.holder is not self and service.holder is not None and now < service.until:
            return failed("the lock is held by another guard")
        if service.holder is not self or now >= service.until:
            service.epoch, service.since = service.epoch + 1, now
        service.holder, service.until = self, now + TTL_S
        self._epoch, self._until = service.epoch, now + TTL_S
        return done(f"the lock is ours (epoch {self._epoch})", epoch=self._epoch, left_s=TTL_S)

    async def renew(self) -> Outcome:
        if self._until < 0:
            return failed("the lock is not ours")
        now = self._world.loop.now
        if not await self._ask():
            left_s = self._until - self._world.loop.now
            if left_s > 0:
                return unsure("its service does not answer", epoch=self._epoch, left_s=left_s)
            self._until = -1.0
            return failed("its time is over: it is lost", lost=True)
        if self._service.holder is not self or now >= self._service.until:
            self._until = -1.0
            return failed("the lock is not ours any more", lost=True)
        self._service.until = self._until = now + TTL_S
        return done("the lock is ours", epoch=self._epoch, left_s=TTL_S)

    async def release(self) -> Outcome:
        if self._until < 0:
            return done("the lock was not ours")
        if not await self._ask():
            return unsure("the lock ends by itself")
        if self._service.holder is self:
            self._service.holder = None
        self._until = -1.0
        return done("the lock is given up")


class Disk:
    """Where one guard keeps its journal: full, slow, or damaged."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.is_full = False
        self.slow_s = 0.0


class SimulatedJournal(Journal):
    """The real journal on a disk that can fail; whoever is dead writes nothing."""

    def __init__(self, path: Path, world: World, disk: Disk, wall: Callable[[], float]) -> None:
        self._world, self._disk = world, disk
        super().__init__(path, clock=wall)

    def append(self, kind: str, **fields: Any) -> Entry:
        life, disk = LIFE.get(), self._disk
        if life is not None and not life.passes():
            return Entry(0, 0.0, kind)
        if disk.is_full and disk.dice.random() < 0.5:
            raise JournalFailed("the journal cannot be written: No space left on device")
        entry = super().append(kind, **fields)
        self._world.loop.now += disk.slow_s
        if disk.is_full:
            raise JournalFailed("the journal cannot be written: Input/output error")
        return entry


def balancer_of(world: World, guard: str, engine: Engine) -> HAProxy | ReadinessBalancer | None:
    if world.setting.balancer == "haproxy":
        return SimulatedHaproxy(world.proxy, guard, engine.name)
    return ReadinessBalancer() if world.setting.balancer == "readiness" else None
