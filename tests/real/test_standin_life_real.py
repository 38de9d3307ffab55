"""Whole processes: a port that opens late, signals, deaths, failures to start and fleets end as vLLM's processes end."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.engine.server import free_port
from plimsoll.standin.serve.server import Port, StartFailed
from tests.fakes import TOKEN, asked, eventually

SLOW_STEPS = ("--base-ns", "50000000")  # 50 ms each
LONG = {"prompt": "go on", "max_tokens": 60, "ignore_eos": True}


class Process:
    """One stand-in in a process of its own."""

    def __init__(self, folder: Path, *words: str, port: int = 0) -> None:
        self.port = port or free_port()
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "plimsoll", "standin", "--port", str(self.port), *words],
            env={**os.environ, "PLIMSOLL_TOKEN": TOKEN, "PLIMSOLL_DIR": str(folder), "VLLM_SERVER_DEV_MODE": "1"},
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def post(self, path: str, body: object, port: int = 0) -> int:
        """One request, with the token; its status."""
        return asked(port or self.port, "POST", path, body, authorization=f"Bearer {TOKEN}").status

    def is_refused(self, port: int = 0) -> bool:
        try:
            socket.create_connection(("127.0.0.1", port or self.port), timeout=5).close()
        except ConnectionRefusedError:
            return True
        return False

    def ready(self, port: int = 0) -> None:
        eventually(lambda: self.process.poll() is not None or not self.is_refused(port), 60)
        assert self.process.poll() is None, self.log()

    def ends(self, within_s: float = 20.0) -> int:
        return self.process.wait(within_s)

    def log(self) -> str:
        """All it printed so far."""
        return Path(self._log.name).read_text()


@contextlib.contextmanager
def started(folder: Path, *words: str, port: int = 0) -> Iterator[Process]:
    """One that is gone afterwards."""
    found = Process(folder, *words, port=port)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.wait(10)


BAD_MIDDLEWARES = """
class NotMade:
    def __init__(self, app):
        raise RuntimeError("no\\nroom")

class NotStarted:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            raise RuntimeError("no room")
        await self.app(scope, receive, send)
"""


def test_what_fails_a_start_ends_it_as_often_as_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and the next start serves; of a middleware that does not come up one line of ours says why."""
    port = free_port()
    with started(tmp_path, "--fault", "start-failure=1", port=port) as server:
        assert server.ends(60) == 1
        assert "Engine core initialization failed" in server.log()
    with started(tmp_path, "--fault", "start-failure=1", port=port) as server:
        server.ready()
    (tmp_path / "own_middlewares.py").write_text(BAD_MIDDLEWARES, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name, says in (
        ("NotMade", "plimsoll: --middleware own_middlewares.NotMade: RuntimeError: no room\n"),
        ("NotStarted", "plimsoll: a --middleware failed in its lifespan.startup"),
    ):
        with started(tmp_path, "--middleware", f"own_middlewares.{name}") as server:
            assert server.ends(60) == 1
            assert says in server.log()
            assert "mistake of ours" not in server.log()


def free_ports(count: int) -> int:
    """The first of so many in a row that are free now."""
    for first in range(21_000 + os.getpid() % 5000 * 2, 60_000, 7):
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for port in range(first, first + count):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no port is free")


def test_a_fleet_loses_one_engine_and_no_more(tmp_path: Path) -> None:
    """The port of the dead one closes; the others serve, and the process ends with the last of them."""
    port = free_ports(3)
    with started(tmp_path, "--fleet", "3", "--speed", "5", *SLOW_STEPS, port=port) as server:
        for one in range(3):
            server.ready(port + one)
        server.post("/standin/faults", {"kind": "oom"}, port + 1)
        with contextlib.suppress(ConnectionError):
            assert server.post("/v1/completions", LONG, port + 1) == 500
        eventually(lambda: server.is_refused(port + 1))
        for one in (0, 2):
            assert server.post("/v1/completions", LONG, port + one) == 200
        server.process.send_signal(signal.SIGINT)
        assert server.ends() == 0


def test_a_slow_start_lets_nobody_in_and_what_is_slow_can_be_stopped(tmp_path: Path) -> None:
    """A taken port is said at once, that of a slow start is refused until its time; SIGTERM ends slow failures and answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=f"127.0.0.1:{number}: Address already in use"):
            Port("127.0.0.1", number)
    with started(tmp_path, "--fault", "start-failure", "--start-seconds", "60") as server:
        eventually(lambda: "INFO" in server.log() or server.process.poll() is not None, 60)
        server.process.send_signal(signal.SIGTERM)
        assert server.ends(10) == 0
    with started(tmp_path, "--fault", "slow-start=3") as server:
        eventually(lambda: "INFO" in server.log(), 60)
        began = time.monotonic()
        assert server.is_refused()
        server.ready()
        assert time.monotonic() - began > 2.0
    with started(tmp_path, "--fault", "slow-loris=30") as server:
        server.ready()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/metrics")
        assert connection.getresponse().read(1)
        server.process.send_signal(signal.SIGTERM)
        assert server.ends(10) == 0
        connection.close()
        assert "Traceback" not in server.log()


def test_the_log_tells_rates_no_faster_than_one_can_read(tmp_path: Path) -> None:
    """With time a million times as fast there are at most ten lines a second."""
    with started(tmp_path, "--speed", "1000000", "--base-ns", "10000000000000") as server:
        server.ready()
        thread = threading.Thread(target=lambda: _asked_in_vain(server))
        thread.start()
        time.sleep(1.5)
        assert 1 <= server.log().count("Avg prompt throughput") <= 20
        server.process.kill()
        thread.join(10)


def _asked_in_vain(server: Process) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.post("/v1/completions", {**LONG, "max_tokens": 4000})
