"""Two real vLLM 0.32.0 behind a real HAProxy, twenty clients, and guard as it is typed: what it restarts, nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from lab.engine.clients import ask, complete
from lab.engine.server import READY_LIMIT_S, free_port
from lab.guard.command import Guard, away_s, begun, closed, engine_table, told
from lab.guard.farm import TOKEN, Balancer, Clients
from lab.guard.unit import oom_flag, unit, write_unit
from plimsoll.guard.act.journal_entry import CLOSED, OPENED, OUTCOME, Entry
from plimsoll.guard.act.journal_replay import read_restarts
from tests.real.conftest import need_vllm
from tests.real.small_farm import need

pytestmark = pytest.mark.once
NAMES = ("a", "b")
Record = Callable[[str, object], None]
RESTART_S = 600.0
WAVE_S = 8.0
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


@pytest.fixture(autouse=True)
def _installed() -> None:
    need_vllm()
    need("haproxy", "haproxy")


async def restarted(scene: Farm, name: str, *, killed_in: str = "", end: str = "done") -> None:
    """One restart that somebody asks for, to its end; guard may be killed as it begins a step, and is started again."""
    before, so = closed(scene.guard.journal()), closed(scene.guard.journal(), end)
    code, printed = await scene.guard.ctl("restart", name, "--yes")
    while "BudgetSpent" in printed:  # its back-off: at most the minute of lab/guard/command.py
        await asyncio.sleep(5)
        code, printed = await scene.guard.ctl("restart", name, "--yes")
    assert code == 0, printed
    if killed_in:
        await scene.guard.until(lambda entries: begun(entries, killed_in), RESTART_S)
        await scene.guard.kill()
        await scene.guard.start()
    entries = await scene.guard.until(lambda entries: closed(entries) > before, RESTART_S)
    assert closed(entries, end) == so + 1, told(entries)


async def compacted(scene: Farm, name: str, times: int) -> None:
    """So many compactions, one after the other; the gate says of each that it was done."""
    for number in range(1, times + 1):
        code, printed = await scene.guard.ctl("compact", name, "--yes")
        assert code == 0, printed
        await scene.guard.until(lambda entries, number=number: closed(entries, "done", "compact") == number, 60)  # type: ignore[misc]
    done = [one for one in scene.guard.journal() if one.kind == OUTCOME and one.step == "compact" and one.fields["done"]]
    assert len(done) == times, told(scene.guard.journal())


async def broken(scene: Farm, end: str, said: str) -> None:
    """Until guard's own restart of a broken engine has ended so; doctor's word on the evidence is in the journal."""
    before = closed(scene.guard.journal())
    entries = await scene.guard.until(lambda entries: closed(entries) > before, RESTART_S)
    assert [one.fields["end"] for one in entries if one.kind == CLOSED and one.fields["grade"] == "restart"][-1] == end, told(
        entries
    )
    kept = [one for one in entries if one.kind == OUTCOME and one.step == "evidence"][-1]
    assert Path(kept.fields["facts"]["folder"]).is_dir()
    assert said in kept.fields["says"], kept.fields["says"]


FAULTS = POLICY + '[policy.dead]\nrefused = "20s"\n[policy.wedged]\nstill = "20s"\n'


@pytest.mark.timeout(1800)
async def test_two_real_engines_are_restarted_compacted_and_one_is_killed(record_property: Record) -> None:
    """What guard restarts nobody notices, also when it is killed meanwhile; an engine whose core is killed is mended."""
    async with farm(policy=FAULTS, canary="5s", act='start_still = "3m"') as here:
        record_property("figures", await nobody_notices(here))
        await core_is_killed(here)


@pytest.mark.soak  # seven minutes
@pytest.mark.timeout(1800)
async def test_every_fault_is_mended_once_and_no_loop_begins(record_property: Record) -> None:
    """A killed core, a stopped worker, a crash that comes back, a start that cannot succeed: the right rung, with evidence."""
    async with farm(policy=FAULTS, canary="5s", act='start_still = "3m"') as here:
        record_property("figures", await faults_are_mended_once(here))


async def nobody_notices(here: Farm) -> str:
    """Three restarts, five compactions, guard killed in a drain, in a start and in a stop: 0 failed."""
    load = Clients(here.balancer.port, every_s=WAVE_S)
    for name, killed_in, end in (("a", "", "done"), ("b", "idle", "undone"), ("b", "ready", "done"), ("a", "stop", "done")):
        await load.wave()
        await restarted(here, name, killed_in=killed_in, end=end)
        if name == "a" and not killed_in:
            await compacted(here, "b", 5)
    lost = await load.end()
    entries = here.guard.journal()
    assert lost == [], "\n".join(map(str, lost[:10])) + here.guard.log()
    idle = [one for one in entries if one.kind == OUTCOME and one.step == "idle" and one.fields["done"]]
    assert len(idle) == 3, told(entries)
    assert restarts(entries) == 3
    return f"{load.done} requests, {len(lost)} failed; seconds out of service: {dict(away_s(entries))}"


async def core_is_killed(here: Farm) -> None:
    """It serves nobody, is not drained, and is back after one restart."""
    os.kill(await process_of(here, "a", "EngineCore"), signal.SIGKILL)
    await broken(here, "done", "engine.dead")


async def faults_are_mended_once(here: Farm) -> str:
    """Killed core, stopped worker, a crash that comes back, a start that cannot succeed: one restart each, with evidence."""
    await asyncio.sleep(10)  # so that guard has seen both well
    await core_is_killed(here)

    busy = Clients(here.ports["b"], count=4, tokens=1_500)
    await asyncio.sleep(8)  # so that guard has seen it at work
    os.kill(await process_of(here, "b", "Worker"), signal.SIGSTOP)
    await broken(here, "done", "part(s) saved")
    busy.drop()

    # From now on every step of `a` fails: so does the request that would show that it is well again.
    oom_flag(here.folder / "a").touch()
    with contextlib.suppress(OSError, TimeoutError):
        await complete(here.ports["a"], 4, stream=False, prompt="the last words")
    await broken(here, "held", "runtime.forward")

    # From now on `b` cannot start: its flags are wrong.
    write_unit(here.folder / "b", here.ports["b"], TOKEN, ("--max-model-len", "999999999"))
    os.kill(await process_of(here, "b", "EngineCore"), signal.SIGKILL)
    await broken(here, "held", "engine.dead")

    await asyncio.sleep(15)
    entries = here.guard.journal()
    kinds = [one.fields["kind"] for one in entries if one.kind == OPENED and one.fields["kind"] not in ("asked", "compact")]
    assert kinds[:2] == ["dead", "wedged"], told(entries)
    assert restarts(entries) == 4, "nothing is tried again"
    _, printed = await here.guard.ctl("actions", "--json")
    assert [one["engine"] for one in json.loads(printed)["needs"]] == ["a", "b"], printed

    # Somebody mends what was wrong with `a`, and says so.
    oom_flag(here.folder / "a").unlink()
    assert (await here.guard.ctl("resume", "a"))[0] == 0
    await restarted(here, "a")
    return f"restarted for {', '.join(kinds)}"


def restarts(entries: Sequence[Entry]) -> int:
    """Guard's own, as its budget counts them."""
    return sum(one.is_own for one in read_restarts(entries))


async def process_of(here: Farm, name: str, word: str) -> int:
    """The process of an engine with this word in its title."""
    for pid in await here.units[name].pids():
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
            if word.encode() in title:
                return pid
    raise AssertionError(f"{name} has no {word}")


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_ten_restarts_and_half_an_hour_of_bursts(record_property: Record) -> None:
    """Clients that come in bursts, ten guarded restarts in turn: 0 failed, and how long each was out of service."""
    async with farm(act="") as here:
        began_s, turn, failed, served = asyncio.get_running_loop().time(), 0, 0, 0
        while turn < 10 or asyncio.get_running_loop().time() - began_s < 1_800:
            load = Clients(here.balancer.port, count=5 + 15 * (turn % 2), every_s=WAVE_S)
            if turn < 10:
                await restarted(here, NAMES[turn % 2])
            await asyncio.sleep(20)
            lost = await load.end()
            turn, failed, served = turn + 1, failed + len(lost), served + load.done
            assert lost == [], "\n".join(map(str, lost[:10])) + here.guard.log()
            await asyncio.sleep(20)
        away = dict(away_s(here.guard.journal()))
        record_property("figures", f"{served} requests, {failed} failed; seconds out of service: {away}")
