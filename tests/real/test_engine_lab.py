"""The lab itself: its engines are the real thing, break on demand, and leave nothing behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab.engine.server import EngineServer

REPOSITORY = Path(__file__).resolve().parents[2]


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
