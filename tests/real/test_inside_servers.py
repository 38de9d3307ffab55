"""The gate on servers of other shapes: two API servers, one that sheds, one whose engine dies."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from lab.engine.clients import HttpAnswer, ask, complete, is_finished
from lab.engine.server import EngineServer
from tests.real.conftest import BEARER, GATED, GATED_ENV, StartEngine

LONG = 1500  # tokens: no machine is through with them before the drain begins


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the path in place of an address."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def over_unix(path: Path, target: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """One question to an endpoint of ours on its own socket."""
    connection = UnixConnection(path)
    connection.request("POST" if body else "GET", f"/plimsoll/{target}", json.dumps(body) if body else None, BEARER)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.timeout(400)
async def test_two_api_servers_count_and_drain_together_over_their_socket(start_engine: StartEngine, tmp_path: Path) -> None:
    """The count is the sum, one drain stops both, and the endpoints are on the Unix socket alone."""
    path = tmp_path / "own.sock"
    server = start_engine(*GATED, "--api-server-count", "2", env={**GATED_ENV, "PLIMSOLL_LISTEN": f"unix:{path}"})
    async with asyncio.timeout(60):  # until both have been asked something
        while not path.exists() or over_unix(path, "state")[1]["api_servers"] < 2:
            await ask(server.port, "/plimsoll/ready")
            await asyncio.sleep(0.2)
    for target in ("state", "memory"):
        assert (await own(server, target)).status == 404
    assert (await ask(server.port, "/plimsoll/ready")).status == 200
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    started = [asyncio.create_task(complete(server.port, LONG, stream=i % 2 == 0)) for i in range(16)]
    async with asyncio.timeout(30):
        while (await asyncio.to_thread(over_unix, path, "state"))[1]["in_flight"] < 16:
            await asyncio.sleep(0.05)
    wish = {"epoch": 1, "quiet_s": 60, "bound_s": 60, "refuse": True}
    assert (await asyncio.to_thread(over_unix, path, "drain", wish))[1]["in_flight"] == 16
    ready = await asyncio.gather(*(ask(server.port, "/plimsoll/ready") for _ in range(16)))
    assert {told.status for told in ready} == {503}  # whichever of the two was asked
    refused = await asyncio.gather(*(complete(server.port, 2, stream=False) for _ in range(16)))
    assert {told.status for told in refused} == {503}
    assert all(is_finished(told) for told in await asyncio.gather(*started))
    status, found = over_unix(path, "state")
    assert (status, found["api_servers"], found["in_flight"], found["workers"]) == (200, 2, 0, 1)
    assert over_unix(path, "undrain", {"epoch": 1})[0] == 200
    assert is_finished(await complete(server.port, 2, stream=False))
    await asyncio.sleep(1.5)
    lines = [line for line in server.metrics().splitlines() if line.startswith("plimsoll_")]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert values["plimsoll_in_flight"] == 0
    assert values["plimsoll_begun_total"] == 17  # refused ones never began
    assert values['plimsoll_refused_total{why="drain"}'] == 16
    assert len([name for name in values if name.startswith("plimsoll_figures_age_seconds")]) == 1
    assert "pid" not in "".join(values)


@pytest.mark.timeout(400)
async def test_shedding_refuses_at_the_bound_recovers_and_ends_well(start_engine: StartEngine) -> None:
    """With two places and a flood, some are told to wait; a wrong key is refused as such; afterwards all are let in.

    SIGTERM with --shutdown-timeout: what runs ends well; /health says 200, ours 503; new work gets 503, not 500.
    """
    env = {**GATED_ENV, "PLIMSOLL_SHED_WAIT_S": "2"}
    server = start_engine(*GATED, "--max-num-seqs", "2", "--api-key", "a-key", "--shutdown-timeout", "60", env=env)
    key = {"Authorization": "Bearer a-key"}

    async def flood(count: int, tokens: int, headers: dict[str, str] = key) -> list[HttpAnswer]:
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.create_task(complete(server.port, tokens, stream=False, headers=headers)))
            await asyncio.sleep(0.05)
        return await asyncio.gather(*tasks)

    # What an idle server can take is never refused, and nothing is before its rate is known.
    assert all(is_finished(told) for told in await flood(8, 150))
    told = await flood(100, 150)
    taken = [t for t in told if t.status == 200]
    refused = [t for t in told if t.status == 503]
    assert all(is_finished(t) for t in taken)
    assert len(taken) + len(refused) == 100
    assert refused, "a queue far beyond the bound and nobody was refused"
    assert len(taken) > 4
    assert all(1 <= int(t.headers["retry-after"]) <= 120 for t in refused)
    assert all(t.json()["error"]["type"] == "ServiceUnavailableError" for t in refused)
    found = (await ask(server.port, "/plimsoll/state", None, BEARER)).json()
    assert found["refused"]["shed"] == len(refused)
    assert found["ready"], "being full is no reason to be taken out"
    assert "--max-num-queued-reqs" in found["shed"]["note"]
    assert all(is_finished(t) for t in await flood(2, 20))
    load = asyncio.create_task(flood(40, 150))
    await asyncio.sleep(1.5)
    assert {t.status for t in await flood(10, 5, {"Authorization": "Bearer not-the-key"})} == {401}
    await load
    stream = asyncio.create_task(complete(server.port, 1900, stream=True, headers=key))
    await asyncio.sleep(0.5)
    os.kill(server.pid, signal.SIGTERM)
    await asyncio.sleep(0.5)
    ready = await ask(server.port, "/plimsoll/ready")
    assert (ready.status, ready.json()["reason"]) == (503, "draining")
    assert (await ask(server.port, "/health")).status == 200  # why there is a readiness of our own
    late = await complete(server.port, 2, stream=False, headers=key)
    assert late.status == 503
    assert int(late.headers["retry-after"]) > 0
    assert is_finished(await stream)
    assert server.wait_exit() == 0


async def own(server: EngineServer, path: str, body: dict[str, Any] | None = None) -> HttpAnswer:
    return await ask(server.port, f"/plimsoll/{path}", body, BEARER)


@pytest.mark.timeout(400)
async def test_vllms_own_valve_decides_alone_and_gets_a_retry_after(start_engine: StartEngine) -> None:
    """With --max-num-queued-reqs the gate refuses nobody and only adds when to come again."""
    env = {**GATED_ENV, "PLIMSOLL_SHED_WAIT_S": "0.01"}
    server = start_engine(*GATED, "--max-num-seqs", "1", "--max-num-queued-reqs", "2", env=env, forks=True)
    told = await asyncio.gather(*(complete(server.port, 200, stream=False) for _ in range(24)))
    refused = [t for t in told if t.status == 503]
    assert refused, [t.status for t in told]
    assert all(int(t.headers["retry-after"]) >= 1 for t in refused)
    assert all(is_finished(t) for t in told if t.status == 200)
    found = (await own(server, "state")).json()
    assert found["refused"]["shed"] == 0
    assert "own admission control" in found["shed"]["note"]


@pytest.mark.timeout(400)
async def test_a_crash_leaves_sensible_answers(start_engine: StartEngine) -> None:
    """A step out of memory: not ready because dead, figures still there, no call into the dead, nothing in flight."""
    env = {**GATED_ENV, "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    server = start_engine(*GATED, env=env, oom_on_demand=True, forks=True)
    assert is_finished(await complete(server.port, 4, stream=False))
    server.arm_oom()
    told = await complete(server.port, 4, stream=True)
    assert told.status in (200, 500)
    assert not is_finished(told)
    async with asyncio.timeout(30):
        while (ready := await own(server, "ready")).status == 200:
            await asyncio.sleep(0.1)
    assert (ready.status, ready.json()["reason"]) == (503, "dead")
    found = (await own(server, "state")).json()
    assert (found["in_flight"], found["engine"]["is_dead"], found["ready"]) == (0, True, False)
    (worker,) = (await own(server, "memory")).json()["workers"]
    assert worker["host_memory"]["resident"] > 0
    assert (await own(server, "compact", {})).status == 409
    await asyncio.sleep(1.5)
    assert "\nplimsoll_ready 0.0" in server.metrics()
