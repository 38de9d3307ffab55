"""The gate around a real vLLM 0.32.0, by itself and in guard's hands: counts, drains, and answers while it is stuck."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.engine.clients import HttpAnswer, ask, complete, is_finished
from lab.engine.server import EngineServer
from plimsoll.guard.act.idle import IdleSample, idleness
from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.adapters.gate import GateHttpClient
from plimsoll.guard.daemon.engine_look import EngineWatcher
from tests.real.conftest import BEARER, GATED, SOURCE, TOKEN, ready

ENV = {
    "PYTHONPATH": os.pathsep.join((SOURCE, str(Path(SOURCE).with_name("lab") / "engine" / "raising"))),
    "PLIMSOLL_TOKEN": TOKEN, "PLIMSOLL_WEDGE_S": "4", "PLIMSOLL_CANARY_S": "2", "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # as in production
}  # fmt: skip
WAIT_S = 60.0
LONG = 1900  # tokens: nearly the whole context, so that an answer takes seconds on the fastest machine


@pytest.fixture(scope="module")
def gated() -> Iterator[EngineServer]:
    """One server with probe and gate; each test leaves it serving and idle."""
    with ready(("--middleware", "raising.Raiser", *GATED), ENV) as server:
        yield server


async def own(
    server: EngineServer, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> HttpAnswer:
    """One question to an endpoint of ours, with the token."""
    return await ask(server.port, f"/plimsoll/{path}", body, BEARER if headers is None else headers)


async def wait_for(server: EngineServer, wanted: Any, limit_s: float = WAIT_S) -> dict[str, Any]:
    """The first state for which `wanted` holds."""
    deadline = time.monotonic() + limit_s
    while True:
        told = await own(server, "state")
        assert told.status == 200, told.body
        found: dict[str, Any] = told.json()
        if wanted(found):
            return found
        assert time.monotonic() < deadline, json.dumps(found)
        await asyncio.sleep(0.2)


async def until_with_the_engine(gated: EngineServer, count: int, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until the engine has so many requests; none of the tasks that send them may have ended before."""
    while (await own(gated, "state")).json()["engine_requests"] < count:
        over = [task.result() for task in tasks if task.done()]
        assert not over, f"ended before the engine had all {count}: {over[0]}"
        await asyncio.sleep(0.02)


async def test_every_endpoint_answers_and_only_to_the_token(gated: EngineServer) -> None:
    """`ready` is open; all else needs the token, whatever a client says of where it comes from."""
    assert (await own(gated, "ready", headers={})).json() == {"ready": True, "reason": "ready", "detail": ""}
    forged = {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1", "Forwarded": "for=127.0.0.1", "Host": "localhost"}
    for path, body in (
        ("state", None), ("memory", None), ("drain", {}), ("undrain", {}), ("compact", {}), ("snapshot", {}),
        ("shed", {"max_wait_s": 1}), ("unshed", {}),
    ):  # fmt: skip
        for headers in ({}, forged, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            assert (await own(gated, path, body, headers)).status == 401, path
    found = await wait_for(gated, lambda s: s["workers"] == 1)
    assert found["drain"]["phase"] == "serving"
    assert (found["schema"], found["api_servers"], found["in_flight"], found["ready"]) == ("plimsoll.state/1", 1, 0, True)
    (worker,) = (await own(gated, "memory")).json()["workers"]
    assert worker["host_memory"]["resident"] > 50 << 20
    assert worker["age_s"] < 5
    assert "refused" in (await own(gated, "snapshot", {})).json()["workers"][0]  # a CPU has no allocator to take one of


@pytest.mark.timeout(300)
async def test_in_flight_returns_to_nothing_after_a_thousand_requests_of_every_manner(gated: EngineServer) -> None:
    """Resets amid a stream, half-closed sockets, clients that leave at once and handlers that raise leak nothing."""
    manners = ("well", "reset", "half-close", "leave")
    before = (await own(gated, "state")).json()["begun"]
    gate = asyncio.Semaphore(48)

    async def one(i: int) -> HttpAnswer:
        async with gate:
            trouble = {0: "before", 1: "after"}.get(i % 17, "")
            headers = {"x-raise": trouble} if trouble else None
            tokens = 40 if i % 5 == 0 else 6
            return await complete(gated.port, tokens, stream=i % 3 != 0, manner=manners[i % 4], headers=headers)

    told = await asyncio.gather(*map(one, range(1000)))
    well = [t for i, t in enumerate(told) if i % 4 == 0 and i % 17 not in (0, 1)]
    assert len(well) > 200
    assert all(is_finished(t) for t in well)
    found = await wait_for(gated, lambda s: s["in_flight"] == 0)
    assert (found["begun"] - before, found["engine_requests"], found["faults"]) == (1000, 0, {})
    await asyncio.sleep(1.2)
    assert "\nplimsoll_in_flight 0.0" in gated.metrics()


async def test_a_response_in_the_background_counts_and_a_paused_server_is_not_ready(gated: EngineServer) -> None:
    """/v1/responses answers at once and runs on: not idle before it has ended. Paused, /health says 200 and ours why not."""
    body = {"model": "tiny", "input": "a tale", "background": True, "store": True, "max_output_tokens": 600}
    told = await ask(gated.port, "/v1/responses", body)
    assert told.status == 200, told.body
    assert told.json()["status"] in ("queued", "in_progress")
    found = (await own(gated, "state")).json()
    assert (found["background"], found["idle"]) == (1, False)
    assert (await own(gated, "drain", {"epoch": 30, "refuse": True, "lease_s": 30})).json()["idle"] is False
    assert (await ask(gated.port, f"/v1/responses/{told.json()['id']}")).status == 200  # what was begun can be fetched
    await wait_for(gated, lambda s: s["idle"])
    assert (await own(gated, "undrain", {"epoch": 30})).status == 200
    assert gated.post("/pause?mode=wait").status == 200
    assert gated.get("/health").status == 200
    told = await own(gated, "ready", headers={})
    assert (told.status, told.json()["reason"]) == (503, "asleep")
    assert gated.post("/resume").status == 200
    assert (await own(gated, "ready", headers={})).status == 200


@pytest.mark.timeout(300)
async def test_a_hundred_compactions_under_load_harm_no_request(gated: EngineServer) -> None:
    """Each goes through the workers between two steps, by guard's client; every stream ends whole. Shedding is taken, too."""
    door, is_over = GateHttpClient(gated.url, TOKEN), False
    shed = await door.shed(5.0, 30.0)
    assert (shed.is_done, shed.facts["max_wait_s"], shed.facts["is_overruled"]) == (True, 5.0, False)
    assert (await door.unshed()).is_done is True
    async with asyncio.timeout(30):  # the probe writes its first figures within some seconds
        while "no probe" in (await door.compact()).message:
            await asyncio.sleep(0.5)

    async def client() -> list[HttpAnswer]:
        """One stream after the other for as long as there are compactions, however fast the machine is."""
        told = []
        while not is_over:
            told.append(await complete(gated.port, 200, stream=True))
        return told

    clients = [asyncio.create_task(client()) for _ in range(12)]
    await until_with_the_engine(gated, 12, clients)
    done = [await door.compact() for _ in range(100)]
    is_over = True
    streams = [told for one in await asyncio.gather(*clients) for told in one]
    assert {(one.is_done, one.facts["workers"]) for one in done} == {(True, 1)}
    assert len(streams) >= 12
    assert all(is_finished(told) for told in streams)


async def looked(watcher: EngineWatcher, door: GateHttpClient, samples: list[IdleSample]) -> Outcome:
    """One more sample, and what they say together."""
    told = await door.state()
    samples.append(IdleSample(await watcher.look(time.monotonic(), time.time()), told.facts if told.is_done else None))
    return idleness(samples)


@pytest.mark.once
async def test_a_drain_under_load_loses_no_request_and_idle_is_confirmed_after_the_last_token(gated: EngineServer) -> None:
    """32 clients, half of them streaming: all that began end well, also in phase one; in phase two new ones get 503.

    Guard's client leads it: not one look before the end says idle, older epochs are refused, and it serves again.
    """
    door, watcher = GateHttpClient(gated.url, TOKEN), EngineWatcher(gated.url, TOKEN)
    started = [asyncio.create_task(complete(gated.port, LONG, stream=i % 2 == 0)) for i in range(32)]
    await until_with_the_engine(gated, 32, started)
    begun = await door.drain(100, 30.0, quiet_s=60.0, bound_s=60.0)
    assert (begun.is_done, begun.facts["phase"]) == (True, "leaving")
    leaving = await asyncio.gather(*(complete(gated.port, 2, stream=i % 2 == 0) for i in range(4)))
    assert all(is_finished(told) and told.headers["connection"] == "close" for told in leaving)
    assert (await own(gated, "ready")).status == 503
    refusing = await door.drain(100, 30.0, refuse=True)
    assert (refusing.is_done, refusing.facts["phase"]) == (True, "refusing")
    refused = await asyncio.gather(*(complete(gated.port, 2, stream=i % 2 == 0) for i in range(32)))
    assert {(told.status, told.json()["error"]["code"]) for told in refused} == {(503, 503)}
    assert all(int(told.headers["retry-after"]) > 0 for told in refused)
    for path in ("/health", "/metrics", "/v1/models", "/version"):
        assert (await ask(gated.port, path)).status == 200, path
    stale = await door.drain(99, 30.0)
    assert (stale.is_done, stale.facts["stale"], stale.facts["current"]) == (False, True, 100)
    samples: list[IdleSample] = []
    assert not all(stream.done() for stream in started), "the drain was to begin while requests ran"
    while not all(stream.done() for stream in started):
        found = await looked(watcher, door, samples)
        assert found.is_done is not True or all(stream.done() for stream in started), found
        assert (await door.drain(100, 30.0)).is_done is True
        await asyncio.sleep(0.3)
    assert all(is_finished(stream.result()) for stream in started)
    async with asyncio.timeout(WAIT_S):
        while (await looked(watcher, door, samples)).is_done is not True:
            await asyncio.sleep(0.5)
    assert (await door.undrain(99)).facts["stale"] is True
    assert (await door.undrain(100)).is_done is True
    assert is_finished(await complete(gated.port, 2, stream=False))
    await watcher.close()


@pytest.mark.timeout(300)
async def test_a_stopped_worker_leaves_answers_with_their_age_and_is_proven_stuck(gated: EngineServer) -> None:
    """Figures outlive a wedge; one step afterwards makes the server ready again, and nothing was lost."""
    pid = (await own(gated, "memory")).json()["workers"][0]["pid"]
    stream = asyncio.create_task(complete(gated.port, LONG, stream=True))
    await until_with_the_engine(gated, 1, [stream])
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(3.0)
        (worker,) = (await own(gated, "memory")).json()["workers"]
        assert worker["age_s"] > 2.0
        assert worker["host_memory"]["resident"] > 0
        (age,) = (line for line in gated.metrics().splitlines() if line.startswith("plimsoll_figures_age_seconds"))
        assert float(age.split()[-1]) > 1.0
        assert (await wait_for(gated, lambda s: not s["ready"], limit_s=30))["reason"] == "wedged"
        assert (await own(gated, "compact", {})).status == 409  # a call would only hang behind it
        assert gated.get("/health").status == 200  # vLLM has not noticed
        assert (await own(gated, "ready", headers={})).json()["reason"] == "wedged"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert is_finished(await stream)
    found = await wait_for(gated, lambda s: s["ready"])
    assert found["engine"]["is_wedged"] is False
