"""Two real vLLM 0.32.0 behind a real HAProxy, twenty clients, and guard as it is typed: what it restarts, nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from lab.engine.clients import ask, complete
from lab.engine.server import READY_LIMIT_S, free_port
from lab.guard.command import Guard, away_s, begun, closed, engine_table, told
from lab.guard.farm import TOKEN, Balancer, Clients
from lab.guard.unit import unit, write_unit
from plimsoll.domain.journal_entry import OUTCOME, RESTART
from tests.real.conftest import need_vllm
from tests.real.small_farm import need

NAMES = ("a", "b")
RESTART_S = 900.0
# A request waits for longer than the judge's own bounds allow where two engines and their clients share two cores.
POLICY = '[policy.saturated]\nwait = "10m"\n[policy.slow]\ntakes = "5m"\n'


async def is_up(port: int) -> bool:
    """Whether it answers that it is ready."""
    with contextlib.suppress(OSError):
        return (await ask(port, "/plimsoll/ready")).status == 200
    return False


class Farm:
    """Two engines, HAProxy before them, and guard."""

    def __init__(self, folder: Path, *, act: str = "", policy: str = POLICY, canary: str = "10s") -> None:
        self.folder, self.ports = folder, {name: free_port() for name in NAMES}
        for name, port in self.ports.items():
            write_unit(folder / name, port, TOKEN)
        self.units = {name: unit(folder / name) for name in NAMES}
        self.balancer = Balancer(folder, list(self.ports.items()))
        words = {name: [sys.executable, "-m", "lab.guard.unit", str(folder / name)] for name in NAMES}
        engines = [
            engine_table(name, port, words[name], folder / name / "engine.log", socket=self.balancer.socket, canary=canary)
            for name, port in self.ports.items()
        ]
        self.guard = Guard(folder / "guard", engines, act=act, policy=policy)

    async def open(self) -> None:
        """Everything, until both engines are ready."""
        for name in NAMES:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lab.guard.unit", str(self.folder / name), "start"
            )
            assert await process.wait() == 0
        async with asyncio.timeout(READY_LIMIT_S):
            while not all([await is_up(port) for port in self.ports.values()]):
                await asyncio.sleep(0.5)
        await self.balancer.start()
        await self.guard.start()

    async def close(self) -> None:
        """Everything."""
        await self.guard.kill()
        await self.balancer.stop()
        for one in self.units.values():
            await one.stop(5.0)


@contextlib.asynccontextmanager
async def farm(**options: str) -> AsyncIterator[Farm]:
    """One that is closed however the scene ends."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-farm-") as folder:
        scene = Farm(Path(folder), **options)
        try:
            await scene.open()
            yield scene
        finally:
            await scene.close()


def run(scene: Coroutine[Any, Any, None]) -> None:
    """To its end."""
    asyncio.run(scene)


@pytest.fixture(autouse=True)
def _installed() -> None:
    need_vllm()
    need("haproxy", "haproxy")


async def restarted(scene: Farm, name: str) -> None:
    """One restart that somebody asks for, to its end."""
    before, well = closed(scene.guard.journal()), closed(scene.guard.journal(), "done")
    code, printed = await scene.guard.ctl("restart", name, "--yes")
    assert code == 0, printed
    entries = await scene.guard.until(lambda entries: closed(entries) > before, RESTART_S)
    assert closed(entries, "done") == well + 1, told(entries)


@pytest.mark.soak  # twenty minutes on two cores: one engine starts while the other serves
@pytest.mark.timeout(3600)
def test_three_restarts_two_killed_guards_and_five_compactions_lose_no_request() -> None:
    """Idle before each stop; a guard killed in a drain takes it back, one killed in a restart finishes it; 0 failed."""

    async def scene() -> None:
        async with farm() as here:
            # Two cores start one engine while the other serves: clients that never rest would leave it no turn.
            load = Clients(here.balancer.port, tokens=20, rest_s=5.0)
            await asyncio.sleep(5)
            await restarted(here, "a")
            for number in range(1, 6):
                code, printed = await here.guard.ctl("compact", "b", "--yes")
                assert code == 0, printed
                await here.guard.until(lambda entries, number=number: closed(entries, grade="compact") == number, 60)  # type: ignore[misc]
            compactions = [one for one in here.guard.journal() if one.kind == OUTCOME and one.step == "compact"]
            assert len(compactions) == 5
            assert all(one.fields["done"] for one in compactions), told(here.guard.journal())

            # Killed in a drain: the next guard takes it back.
            done = closed(here.guard.journal())
            assert (await here.guard.ctl("restart", "b", "--yes"))[0] == 0
            await here.guard.until(lambda entries: begun(entries, "idle"), 60)
            await here.guard.kill()
            await here.guard.start()
            entries = await here.guard.until(lambda entries: closed(entries) > done, 60)
            assert closed(entries, "undone") == 1, told(entries)

            # Killed while the engine is down: the next guard brings it up.
            assert (await here.guard.ctl("restart", "b", "--yes"))[0] == 0
            await here.guard.until(lambda entries: begun(entries, "start") or begun(entries, "ready"), RESTART_S)
            await here.guard.kill()
            await here.guard.start()
            entries = await here.guard.until(lambda entries: closed(entries) > done + 1, RESTART_S)
            assert closed(entries, "done") == 2, told(entries)
            await restarted(here, "a")

            lost = await load.end()
            entries = here.guard.journal()
            idle = [one for one in entries if one.kind == OUTCOME and one.step == "idle" and one.fields["done"]]
            assert len(idle) == 3, told(entries)
            assert sum(one.kind == RESTART and bool(one.fields["own"]) for one in entries) == 3
            print(f"{load.done} requests, {len(lost)} failed; seconds out of service: {dict(away_s(entries))}")
            assert lost == [], "\n".join(map(str, lost[:10])) + here.guard.log()

    run(scene())


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_real_faults_get_the_right_rung_and_no_more_restarts_than_allowed() -> None:
    """A killed core and a stopped worker are restarted once each, with evidence; one that cannot start is held, and left."""

    async def scene() -> None:
        policy = POLICY + '[policy.dead]\nrefused = "20s"\n[policy.wedged]\nstill = "20s"\n'
        async with farm(policy=policy, canary="5s", act='start_still = "3m"') as here:
            await asyncio.sleep(6)
            core = (await core_of(here, "a"))[0]
            os.kill(core, signal.SIGKILL)
            entries = await here.guard.until(lambda entries: closed(entries) == 1, RESTART_S)
            assert closed(entries, "done") == 1, told(entries)
            kept = [one for one in entries if one.kind == OUTCOME and one.step == "evidence"]
            assert Path(kept[0].fields["facts"]["folder"]).is_dir()

            busy = [asyncio.create_task(complete(here.ports["b"], 1900, stream=True, prompt=f"tale {n}")) for n in range(8)]
            await asyncio.sleep(2.5)
            worker = (await core_of(here, "b", "Worker"))[0]
            os.kill(worker, signal.SIGSTOP)
            entries = await here.guard.until(lambda entries: closed(entries) == 2, RESTART_S)
            assert [one.fields["kind"] for one in entries if one.kind == "opened"] == ["dead", "wedged"], told(entries)
            assert closed(entries, "done") == 2, told(entries)
            for stream in busy:
                stream.cancel()

            # From now on `a` cannot start: its flags are wrong.
            write_unit(here.folder / "a", here.ports["a"], TOKEN, ("--max-model-len", "999999999"))
            os.kill((await core_of(here, "a"))[0], signal.SIGKILL)
            entries = await here.guard.until(lambda entries: closed(entries, "held") == 1, RESTART_S)
            await asyncio.sleep(15)
            entries = here.guard.journal()
            assert sum(one.kind == RESTART and bool(one.fields["own"]) for one in entries) == 3, "it is not tried again"
            assert "a person is needed" in here.guard.log()

    run(scene())


async def core_of(here: Farm, name: str, word: str = "EngineCore") -> list[int]:
    """The processes of an engine with this word in their title."""
    found = []
    for pid in await here.units[name].pids():
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
            found += [pid] if word.encode() in title else []
    assert found, f"{name} has no {word}"
    return found


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_restarts_and_half_an_hour_of_bursts() -> None:
    """Clients that come in bursts, ten guarded restarts in turn: 0 failed, and how long each was out of service."""

    async def scene() -> None:
        async with farm(act="") as here:
            began_s, turn, failed, served = asyncio.get_running_loop().time(), 0, 0, 0
            while turn < 10 or asyncio.get_running_loop().time() - began_s < 1_800:
                load = Clients(here.balancer.port, count=5 + 15 * (turn % 2), tokens=20, rest_s=1.0)
                if turn < 10:
                    await restarted(here, NAMES[turn % 2])
                await asyncio.sleep(20)
                lost = await load.end()
                turn, failed, served = turn + 1, failed + len(lost), served + load.done
                assert lost == [], "\n".join(map(str, lost[:10])) + here.guard.log()
                await asyncio.sleep(20)
            print(f"{served} requests, {failed} failed; seconds out of service: {dict(away_s(here.guard.journal()))}")

    run(scene())
