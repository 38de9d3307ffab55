"""Two whole guards, one fleet, a real etcd: rounds in which one of them is stopped past its lease, or killed, amid a deed.

Each is `plimsoll guard --config F --act` in a process of its own. The fleet is two stand-ins with the real gate, and a balancer
that is a webhook. All that a guard asks of etcd, of a gate and of the balancer goes through a front (lab/guard/fronts.py), so
what was taken and what was refused is known from there and not from what a guard says of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lab.engine.clients import HttpAnswer, ask
from lab.engine.server import free_port
from lab.guard.command import API_TOKEN, Guard
from lab.guard.contenders import pause
from lab.guard.farm import TOKEN, running, stand_in
from lab.guard.fronts import Trap, World, judge
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.daemon.journal import Journal

NAMES = ("one", "two")
ENGINES = ("a", "b")
# Each engine is a group of its own: what is tested is who may act, not whether the others could carry the load.
ENGINE = """
[[engine]]
name = "{name}"
url = "http://127.0.0.1:{port}"
gate = "{gate}"
token_file = "gate.token"
group = "{name}"
balancer = {{ webhook = "{hook}" }}
"""
ACT = """
may_be_last = true
lease = "15s"

[lock]
etcd = ["{etcd}"]
ttl = "15s"
"""
MANNERS = {"plain": 6, "stopped": 3, "killed": 1}
MOMENTS = (("hook", "take-out"), ("hook", "put-back"), ("gate", "drain"), ("gate", "undrain"), ("sometime", ""))
PATIENCE_S = 30.0


class Hand:
    """One of the guards, as it is asked through its API."""

    def __init__(self, name: str, guard: Guard) -> None:
        self.name, self.guard = name, guard

    async def ask(self, verb: str, engine: str) -> HttpAnswer:
        """One wish; status 0 where guard was killed over it."""
        with contextlib.suppress(OSError):
            return await ask(
                self.guard.port, f"/v1/engines/{engine}/{verb}", {}, {"Authorization": f"Bearer {API_TOKEN}"}, method="POST"
            )
        return HttpAnswer()

    async def until_done(self, verb: str, engine: str, is_over: Callable[[], bool] = lambda: False) -> None:
        """Ask until it is, or nobody wants it any more; an engine that nobody has drained is back already."""
        end_s, told = time.monotonic() + PATIENCE_S, HttpAnswer()
        while time.monotonic() < end_s:
            told = await self.ask(verb, engine)
            is_back = verb == "undrain" and told.status == 409 and told.json()["reason"] == "NotDrained"
            if told.status == 200 or is_back or is_over():
                return
            await asyncio.sleep(0.1)
        how = f"its exit code is {self.guard.exit_code}, its last answer {told}"
        raise AssertionError(f"{self.name} never came to {verb} {engine}: {how}\n{self.guard.log()}")


class Scene:
    """The fleet, the fronts and the guards."""

    def __init__(self, world: World, hands: Mapping[str, Hand], gates: Mapping[str, int]) -> None:
        self.world, self.hands, self.gates = world, dict(hands), dict(gates)
        self.counts: Counter[str] = Counter()

    async def gate_state(self, engine: str) -> Mapping[str, Any]:
        told = await ask(self.gates[engine], "/plimsoll/state", headers={"Authorization": f"Bearer {TOKEN}"})
        found: Mapping[str, Any] = told.json()["drain"]
        return found

    async def round(self, chance: random.Random) -> None:
        """One guard is asked for an engine and back; it is left alone, stopped or killed meanwhile, and the other asked too."""
        engine, manner = chance.choice(ENGINES), chance.choices(list(MANNERS), list(MANNERS.values()))[0]
        holder, other = (self.hands[name] for name in chance.sample(NAMES, 2))
        if manner == "plain":
            await asyncio.gather(holder.ask("drain", engine), other.ask("drain", engine))
        else:
            await self._disturb(chance, manner, engine, holder, other)
        await asyncio.gather(*(hand.until_done("undrain", engine) for hand in (holder, other)))
        self.counts[manner] += 1

    async def _disturb(self, chance: random.Random, manner: str, engine: str, holder: Hand, other: Hand) -> None:
        place, verb = chance.choice(MOMENTS)
        asks = "undrain" if verb in ("put-back", "undrain") else "drain"
        if asks == "undrain":
            await holder.until_done("drain", engine)
        pid = holder.guard.pid

        def strikes() -> None:
            if manner == "stopped":
                pause(pid)
            else:
                os.kill(pid, signal.SIGKILL)

        keeps_back = chance.random() < (0.8 if place == "gate" else 0.4)
        self.world.trap = trap = Trap(holder.name, place, verb, strikes, keeps_back=keeps_back)
        asking = asyncio.create_task(holder.until_done(asks, engine, is_over=trap.sprung.is_set))
        if place == "sometime":
            await asyncio.sleep(0.3 * chance.random())
        else:
            caught = asyncio.create_task(trap.sprung.wait())
            await asyncio.wait({asking, caught}, return_when=asyncio.FIRST_COMPLETED)
            caught.cancel()
        if not trap.sprung.is_set():
            trap.sprung.set()
            strikes()
        # Past the lease, or the other would not get the lock; and now it acts on the same engine.
        await other.until_done("drain", engine)
        if chance.random() < 0.3:
            await other.until_done("undrain", engine)
        trap.let_go()
        self.world.trap = None
        if manner == "stopped":
            os.kill(pid, signal.SIGCONT)
        else:
            await holder.guard.kill()  # it is dead already: this waits for it
            await holder.guard.start()
        await asking

    async def end(self) -> None:
        """Both guards end, each is started once more alone, and then nothing is open, drained or out."""
        for hand in self.hands.values():
            await hand.guard.stop()
        for hand in self.hands.values():
            await asyncio.sleep(2.0)  # what a killed one held of the lock is over
            await hand.guard.start()
            await asyncio.sleep(1.0)
            await hand.guard.until(lambda entries: not open_actions(entries), PATIENCE_S)
            await hand.guard.stop()
            with Journal(hand.guard.folder / "state" / "journal") as journal:
                assert open_actions(journal.kept()) == [], f"left open by {hand.name}"
        for engine in ENGINES:
            found = await self.gate_state(engine)
            assert found["phase"] == "serving", f"the gate of {engine}: {found}"
        assert not any(self.world.out.values()), f"out of the balancer, and nobody's: {self.world.out}"

    def evidence(self) -> dict[str, Any]:
        """What the fronts saw, held against the rule."""
        grants = dict(self.world.grants)
        assert len(grants) == len(self.world.grants), "an epoch was given twice"
        epochs = [epoch for epoch, _ in self.world.grants]
        assert epochs == sorted(epochs), "epochs went back"
        return {**judge(self.world.deeds, grants), "epochs": len(grants)}


class Places(NamedTuple):
    """Where things are."""

    folder: Path
    etcd: str


@contextlib.asynccontextmanager
async def scene(places: Places, *, has_front: bool = True, hook_fences: bool = True) -> AsyncIterator[Scene]:
    """All of it, until the block ends; without a front before etcd its leases are as long as the configuration says."""
    world = World(hook_fences=hook_fences)
    ports = {name: free_port() for name in ENGINES}
    engines = [stand_in(places.folder / name, port) for name, port in ports.items()]
    hands: dict[str, Hand] = {}
    async with running(engines):
        try:
            for port in ports.values():
                await _until_ready(port)
            for name in NAMES:
                etcd = await world.etcd(name, places.etcd) if has_front else places.etcd
                hook = await world.hook(name)
                tables = [
                    ENGINE.format(
                        name=engine, port=port, gate=await world.gate(name, engine, f"http://127.0.0.1:{port}"), hook=hook
                    )
                    for engine, port in ports.items()
                ]
                guard = Guard(places.folder / name, tables, act=ACT.format(etcd=etcd))
                hands[name] = Hand(name, guard)
                await guard.start()
            yield Scene(world, hands, ports)
        finally:
            world.close()
            for hand in hands.values():
                await hand.guard.kill()


async def _until_ready(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                if (await ask(port, "/plimsoll/ready")).status == 200:
                    return
            await asyncio.sleep(0.1)


async def rounds(places: Places, count: int, seed: int, *, hook_fences: bool = True) -> dict[str, Any]:
    """So many of them; what the evidence says, and a line to print."""
    chance = random.Random(seed)
    began_s = time.monotonic()
    async with scene(places, hook_fences=hook_fences) as here:
        for hand in here.hands.values():
            for engine in ENGINES:  # until it has looked at each of them
                await hand.until_done("drain", engine)
                await hand.until_done("undrain", engine)
        for _ in range(count):
            await here.round(chance)
        await here.end()
        found = {**here.evidence(), **here.counts}
        for engine in ENGINES:
            state = await here.gate_state(engine)
            assert state["epoch"] == found["highest"][engine], "the gate has seen an epoch that did not pass its front"
    found["says"] = (
        f"{count} rounds in {time.monotonic() - began_s:.0f} s (seed {seed}): {found['epochs']} epochs, "
        f"{here.counts['stopped']} holders stopped past their lease and woken, {here.counts['killed']} killed; "
        f"{found['taken']} drains and undrains taken at the gates, none after one of a newer epoch; "
        f"{found['late']} late ones refused there and {found['late_hooks']} at the balancer"
    )
    return found
