"""The door and idleness against a real vLLM 0.32.0: a drain by epoch with streams under way, and idle only when they ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.engine.clients import complete, is_finished
from lab.engine.server import EngineServer
from plimsoll.guard.act.idle import Idleness, IdleSample, idleness
from plimsoll.guard.adapters.gate import GateHttpClient
from plimsoll.guard.daemon.engine_look import EngineWatcher
from tests.real.conftest import need_vllm

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
TOKEN = "an-honest-token-of-some-length"
FLAGS = ("--worker-extension-cls", "plimsoll.inside.Probe", "--middleware", "plimsoll.inside.Gate")
LONG = 1500  # tokens
WAIT_S = 90.0


@pytest.fixture(scope="module")
def gated() -> Iterator[EngineServer]:
    """One server with probe and gate."""
    need_vllm()
    with EngineServer(FLAGS, {"PYTHONPATH": str(ROOT / "src"), "PLIMSOLL_TOKEN": TOKEN}, forks=True) as server:
        server.wait_ready()
        yield server


async def looked(watcher: EngineWatcher, door: GateHttpClient, samples: list[IdleSample]) -> Idleness:
    """One more sample, and what they say together."""
    told = await door.state()
    samples.append(IdleSample(await watcher.look(time.monotonic(), time.time()), told.facts if told.is_done else None))
    return idleness(samples)


async def until_idle(watcher: EngineWatcher, door: GateHttpClient, samples: list[IdleSample]) -> None:
    """Look until it is idle."""
    async with asyncio.timeout(WAIT_S):
        while (await looked(watcher, door, samples)).is_idle is not True:
            await asyncio.sleep(0.5)


async def test_a_drain_is_led_by_the_door_and_idle_is_confirmed_only_after_the_last_token(gated: EngineServer) -> None:
    """Eight streams end whole; not one look before their end says idle; older epochs are refused, and it serves again."""
    url = f"http://127.0.0.1:{gated.port}"
    door, watcher = GateHttpClient(url, TOKEN), EngineWatcher(url, TOKEN)
    streams = [asyncio.create_task(complete(gated.port, LONG, stream=i % 2 == 0)) for i in range(8)]
    while int((await door.state()).facts["engine_requests"]) < 8:
        assert not any(stream.done() for stream in streams)
        await asyncio.sleep(0.05)
    begun = await door.drain(100, 30.0, quiet_s=60.0, bound_s=60.0)
    assert (begun.is_done, begun.facts["phase"]) == (True, "leaving")
    assert (await door.drain(100, 30.0)).is_done is True
    refusing = await door.drain(100, 30.0, refuse=True)
    assert (refusing.is_done, refusing.facts["phase"]) == (True, "refusing")
    stale = await door.drain(99, 30.0)
    assert (stale.is_done, stale.facts["stale"], stale.facts["current"]) == (False, True, 100)
    samples: list[IdleSample] = []
    while not all(stream.done() for stream in streams):
        found = await looked(watcher, door, samples)
        assert found.is_idle is not True or all(stream.done() for stream in streams), found
        assert (await door.drain(100, 30.0)).is_done is True
        await asyncio.sleep(0.3)
    assert all(is_finished(stream.result()) for stream in streams)
    await until_idle(watcher, door, samples)
    assert (await door.undrain(99)).facts["stale"] is True
    assert (await door.undrain(100)).is_done is True
    assert is_finished(await complete(gated.port, 2, stream=False))
    await watcher.close()


async def test_shedding_and_compaction_through_the_door(gated: EngineServer) -> None:
    """The real gate takes both; a CPU's workers give back what their C library kept."""
    door = GateHttpClient(f"http://127.0.0.1:{gated.port}", TOKEN)
    shed = await door.shed(5.0, 30.0)
    assert (shed.is_done, shed.facts["max_wait_s"], shed.facts["is_overruled"]) == (True, 5.0, False)
    assert (await door.unshed()).is_done is True
    async with asyncio.timeout(30):  # the probe writes its first figures within some seconds
        while "no probe" in (compacted := await door.compact()).message:
            await asyncio.sleep(0.5)
    assert (compacted.is_done, compacted.facts["workers"]) == (True, 1), compacted
    wrong = await GateHttpClient(f"http://127.0.0.1:{gated.port}", "another-token-of-some-length").drain(200, 30.0)
    assert wrong.is_done is False
    assert "does not take this token" in wrong.message
