"""`plimsoll doctor` on the real engine: a start that is refused, a step that runs out of memory, a core that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from lab.engine.server import EngineServer

Start = Callable[..., EngineServer]


def doctor(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the object."""
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", "doctor", *words, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "" or done.returncode > 1, done.stderr
    return done.returncode, dict(json.loads(done.stdout or "{}"))


def test_a_refused_start_is_explained(start_engine: Start) -> None:
    """Four blocks are too few for one request: the code, the flag and the engine's own line, whatever the exit code says."""
    server = start_engine("--num-gpu-blocks-override", "4", wait=False, forks=True)
    exit_code = server.wait_exit(timeout_s=240)
    code, said = doctor(str(server.log_path), "--exit-code", str(exit_code))
    assert code == 1
    assert said["memory_failure"] is True
    finding = said["findings"][0]
    assert finding["code"] == "startup.context-too-long"
    quoted = finding["evidence"][0]
    assert "larger than the available KV cache memory" in quoted["text"]
    assert "To serve at least one request" in server.log_text().splitlines()[quoted["line"] - 1]
    assert said["facts"]["vllm"].startswith("0.32.0")
    assert said["facts"]["flags"]["num_gpu_blocks_override"] == "4"
    assert finding["remedy"]


def test_a_living_server_is_well_until_a_step_runs_out_of_memory(start_engine: Start) -> None:
    """Its page and its log show nothing wrong; after the crash the log shows the step, and nobody answers at its address."""
    server = start_engine(oom_on_demand=True, forks=True)
    assert server.complete("before", max_tokens=4).status == 200
    assert doctor(server.url)[0] == 0
    code, said = doctor(str(server.log_path), server.url)
    assert code == 0
    assert (said["memory_failure"], said["findings"]) == (False, [])
    exit_code = server.crash_with_oom()
    for more in ([], ["--exit-code", str(exit_code)], ["--exit-code", "137"]):
        code, said = doctor(str(server.log_path), *more)
        assert code == 1
        assert said["memory_failure"] is True
        assert said["findings"][0]["code"] == "runtime.forward"
        assert said["findings"][0]["remedy"]
    assert said["facts"]["out_of_memory"]["tried_bytes"] > 0
    assert doctor(server.url, "--timeout", "5")[0] == 3


def test_a_killed_core_is_not_blamed_on_memory(start_engine: Start) -> None:
    """SIGKILL may come from the kernel or from anybody: it cannot be told, and doctor says what would tell."""
    server = start_engine()
    server.kill_engine_core()
    exit_code = server.wait_exit()
    code, said = doctor(str(server.log_path))
    assert code == 1
    assert said["memory_failure"] is None
    assert said["findings"][0]["code"] == "engine.dead"
    assert any("dmesg" in ask for ask in said["collect_next"])
    assert doctor(str(server.log_path), "--exit-code", str(exit_code))[1]["memory_failure"] is None
