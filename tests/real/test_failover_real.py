"""The real vLLM 0.32.0 dies by SIGKILL: what its engine never began may go elsewhere, the rest keeps vLLM's answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.engine.clients import ask, complete, is_finished
from lab.engine.server import EngineServer, free_port
from lab.page_world import answers
from plimsoll.inside.settings import InsideSettings
from plimsoll.simulate.settings import EngineLimits
from tests.fakes import eventually
from tests.real.conftest import declare, ready
from tests.real.small_farm import CONFIGS, need, until
from tests.standin.engines import engine
from tests.standin.servers import SLOW, standin
from tests.standin.test_api_admin import Asking
from tests.standin.test_api_gate import GATED, QUICK

FLAGS = ("--middleware", "plimsoll.inside.Gate", "--max-num-seqs", "2")
WAIT_S = 120.0


async def until_page(server: EngineServer, name: str, wanted: int) -> None:
    """Wait until the samples of a metric add up to this."""

    async def is_so() -> bool:
        page = (await ask(server.port, "/metrics")).body.decode()
        return sum(map(float, re.findall(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE))) == wanted

    await until(is_so, WAIT_S)


@pytest.mark.once
async def test_a_killed_engine_core_frees_what_it_never_began(tmp_path: Path) -> None:
    """Two run and six wait, half of each as streams: six get 503 with the reason, two get answers of vLLM's own."""
    path = declare(tmp_path, "plimsoll_probe = plimsoll.inside.plugin:install")
    env = {"PYTHONPATH": path, "VLLM_PLUGINS": "plimsoll_probe", "PLIMSOLL_DIR": str(tmp_path / "run")}
    with ready(FLAGS, env) as server:  # spawned, as vLLM does: a forked worker hides the death of its core
        assert is_finished(await complete(server.port, 2, stream=False))  # the first step, and a gate that has seen its ring
        await until(lambda: any((tmp_path / "run").glob("ring-*")), WAIT_S)
        await asyncio.sleep(2.5)  # the gate looks once a second
        running = [asyncio.create_task(complete(server.port, 1900, stream=i == 0)) for i in range(2)]
        await until_page(server, "vllm:num_requests_running", 2)
        waiting = [asyncio.create_task(complete(server.port, 20, stream=i % 2 == 0)) for i in range(6)]
        await until_page(server, "vllm:num_requests_waiting", 6)
        server.kill_engine_core()
        ran, waited = await asyncio.gather(*running), await asyncio.gather(*waiting)
        log = server.log_text()
    for answer in waited:
        found = answer.status, answer.headers.get("x-plimsoll-reason"), answer.headers.get("retry-after")
        assert found == (503, "engine-died-unscheduled", "1"), (answer, log[-2000:])
    assert [answer.status for answer in ran] == [200, 500], ran
    assert all("x-plimsoll-reason" not in answer.headers for answer in ran)
    assert b'"error"' in ran[0].body
    assert "plimsoll: following" not in log


@contextlib.contextmanager
def running(program: str, folder: Path, *engines: int) -> Iterator[int]:
    """This balancer in front of two engines; its port."""
    port, config, path = free_port(), folder / "balancer.conf", need(program, program)
    config.write_text(CONFIGS[f"{program} that sends elsewhere"].format(port=port, a=engines[0], b=engines[1]))
    words = ["-db", "-f", str(config)] if program == "haproxy" else ["-p", str(folder), "-c", str(config)]
    with subprocess.Popen([path, *words], stderr=subprocess.DEVNULL) as balancer:
        try:
            yield port
        finally:
            balancer.terminate()


@pytest.mark.parametrize("program", ["nginx", "haproxy"])
async def test_with_no_engine_left_clients_are_told_to_come_again(tmp_path: Path, program: str) -> None:
    """The lines of docs/balancers.md, and nobody behind them: 503, and the minute that the openai client waits at most."""
    with running(program, tmp_path, free_port(), free_port()) as port:
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(OSError):
                    answer = await complete(port, 1, stream=False)
                    if answer.status:
                        break
                await asyncio.sleep(0.1)
    assert (answer.status, answer.headers.get("retry-after")) == (503, "60"), answer


@pytest.mark.parametrize("program", ["nginx", "haproxy"])
def test_a_balancer_sends_elsewhere_what_a_dead_engine_never_began(tmp_path: Path, program: str) -> None:
    """The lines of docs/balancers.md, two stand-ins with one place each: of ten requests one is lost, the one that ran."""
    limits = EngineLimits(num_blocks=256, block_size=16, max_num_seqs=1, max_num_batched_tokens=2048, max_model_len=2048)
    with (
        standin(GATED, one=engine(step_time=SLOW, settings=limits), settings=InsideSettings(QUICK)) as a,
        standin(GATED, one=engine(step_time=SLOW, settings=limits), settings=InsideSettings(QUICK)) as b,
        running(program, tmp_path, a.port, b.port) as port,
    ):
        through = a._replace(port=port)
        eventually(lambda: answers(f"http://127.0.0.1:{port}/health"))
        asking = [Asking(through, max_tokens=10, stream=number % 4 < 2) for number in range(10)]
        services = a.service, b.service
        eventually(lambda: [len(service.states) for service in services] == [5, 5])
        eventually(lambda: services[0].engine.figures.running == 1)
        a.do(lambda: services[0].engine.die("CUDA out of memory."))
        a.do(services[0].driver.turn)
        told = [one.end() for one in asking]
    lost = [got for got in told if got.status != 200 or b"EngineCore encountered an issue" in got.body]
    assert len(lost) == 1, [(got.status, got.body[:80]) for got in told]
    assert all(b'"finish_reason":"length"' in got.body for got in told if got not in lost)
