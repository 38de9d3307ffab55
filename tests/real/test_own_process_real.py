"""A real vLLM 0.32.0 that guard starts itself: stopped without losing a stream, found again by another guard, nothing left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.engine.clients import HttpAnswer, ask, complete, is_finished
from lab.engine.server import KEEPER, READY_LIMIT_S, free_port
from lab.guard.own_engine import own_engine
from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.guard.daemon.evidence import EvidenceSources, EvidenceStore
from plimsoll.hardware.processes import read_process
from tests.real.conftest import need_vllm

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
LONG = 1900  # tokens: an answer that takes seconds on the fastest machine


@pytest.fixture
def keepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Each kills one session when the test ends, however it ends."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for keeper in found:
        keeper.communicate(timeout=30)


def keep(keepers: list[subprocess.Popen[bytes]], session: int, folder: Path) -> None:
    """A keeper for this session."""
    words = [sys.executable, "-c", KEEPER, str(folder / "none")]
    keeper = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
    assert keeper.stdin is not None
    keeper.stdin.write(f"{session}\n".encode())
    keepers.append(keeper)


def is_alive(pid: int) -> bool:
    """Whether it still does anything."""
    process = read_process(pid)
    return process is not None and process.is_alive


async def ready(engine: OwnProcess, port: int, folder: Path) -> None:
    end = time.monotonic() + READY_LIMIT_S
    while True:
        assert await engine.is_running(), (folder / "engine.log").read_text()[-3000:]
        try:
            if (await ask(port, "/health")).status == 200:
                return
        except OSError:
            pass
        assert time.monotonic() < end, (folder / "engine.log").read_text()[-3000:]
        await asyncio.sleep(0.25)


async def stopped_amid_a_stream(engine: OwnProcess, port: int) -> tuple[HttpAnswer, Outcome, list[int]]:
    """What became of a stream under way, of the stop, and the processes there were."""
    stream = asyncio.create_task(complete(port, LONG, stream=True))
    await asyncio.sleep(1.0)
    pids = list(await engine.pids())
    outcome = await engine.stop(60.0)
    return await stream, outcome, pids


async def evidence_of(engine: OwnProcess, port: int, folder: Path) -> Path:
    """What is kept of it while it answers a request."""
    keeper = EvidenceStore(folder / "evidence")

    async def metrics() -> bytes:
        return (await ask(port, "/metrics")).body

    stream = asyncio.create_task(complete(port, LONG, stream=True))
    await asyncio.sleep(0.5)
    wanted = EvidenceSources(str(folder / "engine.log"), await engine.pids(), {"metrics.txt": metrics})
    outcome = await keeper.take("real", "1", wanted)
    assert is_finished(await stream), "evidence is taken without harm"
    return Path(str(outcome.facts["folder"]))


@pytest.mark.soak  # minutes on two cores
@pytest.mark.timeout(900)  # two starts of the engine, on cores that may be busy
async def test_started_stopped_lost_and_found(tmp_path: Path, keepers: list[subprocess.Popen[bytes]]) -> None:
    """A guard starts it and is killed; the next one adopts it and stops it amid a stream, which ends whole; then once more."""
    need_vllm()
    port = free_port()
    words = [sys.executable, "-m", "lab.guard.own_engine", str(tmp_path), str(port)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as starter:
        assert starter.stdout is not None
        said = starter.stdout.readline().decode()
        assert said.startswith("it was started as pid "), said
        keep(keepers, int(said.rsplit(maxsplit=1)[1]), tmp_path)
        time.sleep(15.0)  # amid the start
        starter.kill()
    engine = own_engine(tmp_path, port)
    assert await engine.is_running() is True, "adopted"
    assert (await engine.start()).is_done is False, "there is one already"
    await ready(engine, port, tmp_path)
    told, outcome, pids = await stopped_amid_a_stream(engine, port)
    assert is_finished(told), told.body[-300:]
    assert outcome.is_done, outcome
    assert (outcome.facts["how"], outcome.facts["left"]) == ("term", 0), outcome
    assert len(pids) >= 3
    assert not [pid for pid in pids if is_alive(pid)]

    again = await engine.start()
    assert again.is_done, again
    keep(keepers, int(again.facts["pid"]), tmp_path)
    await ready(engine, port, tmp_path)
    folder = await evidence_of(engine, port, tmp_path)
    assert "EngineCore" in (folder / "engine.log").read_text()
    assert "vllm:num_requests_running" in (folder / "metrics.txt").read_text()
    assert (folder / "processes.txt").read_text().count("=== pid") >= 3
    told, outcome, pids = await stopped_amid_a_stream(engine, port)
    assert is_finished(told), told.body[-300:]
    assert outcome.facts["exit_code"] == 0, outcome
    assert not [pid for pid in pids if is_alive(pid)]
    print(outcome, dict(outcome.facts), (folder / "CONTENTS.txt").read_text(), sep="\n")
