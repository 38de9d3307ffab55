"""The lab itself: its engines are the real thing, break on demand, and leave nothing behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab.engine.parser import ParserProcess
    from lab.engine.server import EngineServer

REPOSITORY = Path(__file__).resolve().parents[2]


def metric(page: str, name: str) -> float:
    """The sum of one metric over its labels; a metric that is not there is an error."""
    values = [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert values, f"{name} is not on the page"
    return sum(values)


def test_default_engine_answers_and_says_its_version(engine: EngineServer) -> None:
    """The shared server is vLLM 0.32.0 and completes a prompt."""
    assert engine.get("/version").json()["version"].startswith("0.32.0")
    reply = engine.complete("the ship may be loaded", max_tokens=8, ignore_eos=True)
    assert reply.status == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 8
    assert metric(engine.metrics(), "vllm:generation_tokens_total") >= 8


def test_default_engine_has_the_development_endpoints(engine: EngineServer) -> None:
    """Development mode is on unless a test turns it off."""
    assert engine.get("/is_paused").json() == {"is_paused": False}


def test_small_engine_preempts(small_engine: EngineServer) -> None:
    """Six answers of 900 tokens do not fit into 17 blocks of 128 together, and all of them still end."""
    before = metric(small_engine.metrics(), "vllm:num_preemptions_total")
    with ThreadPoolExecutor(6) as clients:
        replies = list(clients.map(lambda n: small_engine.complete(f"load {n}", 900, ignore_eos=True), range(6)))
    assert [reply.status for reply in replies] == [200] * 6
    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [900] * 6
    assert metric(small_engine.metrics(), "vllm:num_preemptions_total") > before


def test_an_oom_ends_the_server_with_exit_code_0(start_engine: Callable[..., EngineServer]) -> None:
    """A step that runs out of memory ends the whole server, and its exit code does not show it."""
    server = start_engine(oom_on_demand=True, forks=True)
    assert server.complete("before", max_tokens=4).status == 200
    assert server.crash_with_oom() == 0
    log = server.log_text()
    assert "torch.OutOfMemoryError: CUDA out of memory" in log
    assert "EngineDeadError" in log
    assert server.stop() == 0  # to stop what has ended is no mistake
    assert server.children() == []


def test_too_few_blocks_are_refused_at_start(start_engine: Callable[..., EngineServer]) -> None:
    """A KV cache too small for one full-length request is refused with exit code 1."""
    server = start_engine("--num-gpu-blocks-override", "4", wait=False, forks=True)
    assert server.wait_exit(timeout_s=240) == 1
    assert "To serve at least one request" in server.log_text()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_killed_engine_core_ends_the_server(start_engine: Callable[..., EngineServer]) -> None:
    """When the kernel kills the engine core, /health says 503 until the server ends, with exit code 0."""
    server = start_engine()
    server.kill_engine_core()
    seen = set()
    while server.exit_code() is None:
        with contextlib.suppress(OSError):  # the port closes before the process ends
            seen.add(server.get("/health", timeout_s=5).status)
        time.sleep(0.1)
    assert 503 in seen
    assert server.exit_code() == 0


def test_nothing_outlives_a_killed_test_run(start_engine: Callable[..., EngineServer]) -> None:
    """The server's processes are gone soon after the process that started them is killed without warning."""
    del start_engine  # only asks whether the engine is installed
    starter = "import time; from lab.engine.server import EngineServer; server = EngineServer(); server.start()"
    starter += "; print(server.pid, server.log_path, flush=True); time.sleep(60)"
    runner = subprocess.Popen([sys.executable, "-c", starter], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    server_pid, log_path = runner.stdout.readline().split()
    assert Path(f"/proc/{server_pid}").exists()
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{server_pid}").exists() or Path(log_path).parent.exists():
        assert time.monotonic() < deadline_s, "the server or its folder outlived its starter"
        time.sleep(0.05)


def test_parser_knows_every_option(parser: ParserProcess) -> None:
    """The dump holds all of the serve parser, with what decides how each option is read."""
    actions = {action["dest"]: action for action in parser.dump()}
    assert sum(len(action["option_strings"]) for action in actions.values()) > 300
    seqs = actions["max_num_seqs"]
    assert "--max-num-seqs" in seqs["option_strings"]
    assert seqs["deprecated"] is False
    assert actions["enforce_eager"]["action"] == "BooleanOptionalAction"


def test_parser_refuses_what_vllm_refuses(parser: ParserProcess) -> None:
    """A flag of older releases is refused in vLLM's own words."""
    answer = parser.parse(["serve", "m", "--swap-space", "8"])
    assert answer == {"ok": False, "error": "unrecognized arguments: --swap-space 8", "exit_code": 2, "warnings": []}


def test_parser_reads_what_vllm_reads(parser: ParserProcess) -> None:
    """Both entry points answer with what is not at its default, and with what vLLM warns about every time."""
    served = parser.parse(["serve", "m", "--max_num_seqs=8", "--max-model-len", "2k"])
    assert served["namespace"] == {"model_tag": "m", "max_num_seqs": 8, "max_model_len": 2000}
    older = parser.parse(["--model", "m", "--max-num-seqs", "8"], entry="api_server")
    assert older["namespace"] == {"model": "m", "max_num_seqs": 8}
    for _ in range(2):
        warned = parser.parse(["serve", "m", "--log-config-file", "log.json"])["warnings"]
        assert any("deprecated" in text for text in warned), warned
