"""Engines behind a real HAProxy with clients that never rest, and what became of every request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.engine.clients import HttpAnswer, complete, is_finished
from lab.engine.server import free_port
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.hardware.processes import boot_mark, read_processes

TOKEN = "a-token-for-the-gates-of-the-farm"
HAPROXY = """
global
    stats socket {socket} mode 600 level admin
defaults
    mode http
    timeout connect 5s
    timeout client 120s
    timeout server 120s
    timeout queue 60s
    option redispatch 1
    retries 3
    retry-on conn-failure empty-response 503
    option http-buffer-request
frontend clients
    bind 127.0.0.1:{port}
    default_backend farm
backend farm
    option httpchk GET /plimsoll/ready
    timeout check 5s
    default-server check inter 500ms fall 3 rise 1
{servers}
"""


class Lost(NamedTuple):
    """A request that failed or was cut short."""

    at_s: float
    status: int
    body: bytes

    def __str__(self) -> str:
        return f"{self.at_s:.1f} s: {self.status} {self.body[-200:]!r}"


class Clients:
    """So many that ask again and again through one port, every other one for a stream.

    They come in waves, `every_s` apart; what takes longer than that goes on into the next one. Between two waves the engine
    rests: its processes spin for a second after each step, and two cores have another engine to start.
    """

    def __init__(self, port: int, count: int = 20, tokens: int = 60, every_s: float = 0.0) -> None:
        self._port, self._tokens, self._every_s = port, tokens, every_s
        self.done = self.under_way = 0
        self.lost: list[Lost] = []
        self._is_over = False
        self._began_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._one(number)) for number in range(count)]

    async def _one(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            turn += 1
            is_stream = number % 2 == 0
            began_s = time.monotonic() - self._began_s
            told = HttpAnswer()
            self.under_way += 1
            with contextlib.suppress(OSError, TimeoutError):
                told = await complete(
                    self._port, self._tokens + 7 * (turn % 9), stream=is_stream, prompt=f"client {number} turn {turn}"
                )
            self.under_way -= 1
            if is_finished(told):
                self.done += 1
            else:
                self.lost.append(Lost(began_s, told.status, told.body))
            await self.wave()

    async def wave(self) -> None:
        if self._every_s:
            await asyncio.sleep(self._every_s - (time.monotonic() - self._began_s) % self._every_s)

    async def end(self) -> list[Lost]:
        """Let what is under way end; what was lost."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.lost

    def drop(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()


class Balancer:
    """A real HAProxy before these ports."""

    def __init__(self, folder: Path, servers: Sequence[tuple[str, int]]) -> None:
        self.port, self.socket = free_port(), str(folder / "admin.sock")
        lines = "\n".join(f"    server {name} 127.0.0.1:{port}" for name, port in servers)
        self._config = folder / "haproxy.cfg"
        self._config.write_text(HAPROXY.format(socket=self.socket, port=self.port, servers=lines), encoding="utf-8")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        program = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
        assert program is not None, "haproxy is not installed"
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            program, "-db", "-f", str(self._config), stdout=quiet, stderr=quiet
        )
        for _ in range(100):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(self.socket)
                writer.close()
                return
            await asyncio.sleep(0.05)
        raise AssertionError("HAProxy did not start")

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


def stand_in(folder: Path, port: int, *flags: str) -> OwnProcess:
    """A stand-in with the gate and the probe, as a process that outlives whoever started it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = [sys.executable, "-m", "plimsoll", "standin", "--port", str(port), "--middleware", "plimsoll.inside.Gate"]
    words += ["--worker-extension-cls", "plimsoll.inside.Probe", "--shutdown-timeout", "30", *flags]
    return OwnProcess(
        words, environment={**os.environ, "PLIMSOLL_TOKEN": TOKEN, "TMPDIR": str(folder)}, state_path=folder / "engine.json",
        log_path=folder / "engine.log", processes=read_processes, boot=boot_mark(),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(engines: Sequence[OwnProcess]) -> AsyncIterator[None]:
    """Started, and stopped however the scene ends."""
    try:
        for engine in engines:
            outcome = await engine.start()
            assert outcome.is_done, outcome
        yield
    finally:
        await asyncio.gather(*(engine.stop(5.0) for engine in engines))
