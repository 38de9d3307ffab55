"""Tiny HTTP servers and twenty clients, for tests of what stands between them: what came, what failed, who served it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from lab.engine.clients import HttpAnswer, ask
from plimsoll.guard.act.ports import Balancer

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
CLIENTS = 20
PIECES = 5
CONFIGS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("balancers.yaml").read_text(encoding="utf-8"))


def need(program: str, package: str) -> str:
    """Where a program is; without it the test is skipped, and in CI, where it must be, failed."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    return found or missing(f"{program} is not installed: it comes with the system package {package}")


def missing(message: str) -> NoReturn:
    """What a test needs is not here: it is skipped, and in CI, where it must be, failed."""
    if IN_CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def ran(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program to its end, with what it printed; whatever its exit code."""
    done: subprocess.CompletedProcess[str] = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    return done


def busy() -> float:
    """How many times as long things may take here: other work on this machine's cores, as the kernel counts it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Backend:
    """Answers every request with its name, in pieces over a tenth of a second or two; it counts what it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.served = 0
        self.now = 0
        self.is_refusing = False  # it says 503, as the gate's second phase does
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._visited, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0].strip()
                await reader.readexactly(int(length or b"0"))
                self.now += 1
                try:
                    await self._answer(writer)
                finally:
                    self.now -= 1
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        self.served += 1
        if self.is_refusing:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n")
            return await writer.drain()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(PIECES):
            writer.write(f"{len(self.name):x}\r\n{self.name}\r\n".encode())
            await writer.drain()
            await asyncio.sleep(0.02 + 0.01 * (self.served % 3))
        writer.write(b"0\r\n\r\n")
        return await writer.drain()


class Load:
    """Twenty clients that ask a port again and again, each over a new connection, until they are told to end."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.told: list[HttpAnswer] = []
        self._is_over = False
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(CLIENTS)]

    async def _client(self, i: int) -> None:
        while not self._is_over:
            body: dict[str, Any] | None = {"prompt": "a tale"} if i % 2 else None
            try:
                self.told.append(await ask(self.port, "/v1/completions", body, {"Connection": "close"}))
            except OSError:
                self.told.append(HttpAnswer())

    async def end(self) -> list[HttpAnswer]:
        """Let each finish what it has; all that failed."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return [told for told in self.told if told.status != 200 or not told.is_whole]


@contextlib.asynccontextmanager
async def backends(*names: str) -> AsyncIterator[list[Backend]]:
    """So many servers that listen."""
    found = [Backend(name) for name in names]
    for one in found:
        await one.open()
    try:
        yield found
    finally:
        for one in found:
            one.close()


@contextlib.asynccontextmanager
async def running(*words: str) -> AsyncIterator[None]:
    """A program for as long as it is wanted, and quiet."""
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def until(holds: Callable[[], Any], within_s: float = 20.0) -> None:
    """Wait until it holds; it may be a coroutine function."""
    async with asyncio.timeout(within_s):
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)


async def served_in(backend: Backend, seconds: float) -> int:
    """How many requests it gets in so many seconds."""
    before = backend.served
    await asyncio.sleep(seconds)
    return backend.served - before


async def drained_and_put_back(balancer: Balancer, port: int, one: Backend, two: Backend) -> None:
    """Under load: its requests go to 0 while the other serves everything, it is read back each time, and none fails."""
    load = Load(port)
    await until(lambda: one.served > 50 and two.served > 50)
    assert await balancer.is_out() is False
    for _ in range(2):
        taken = await balancer.take_out()
        assert taken.is_done is True, taken
        assert await balancer.is_out() is True
        await until(lambda: one.now == 0)
        assert await served_in(one, 0.7) == 0
        assert await served_in(two, 0.3) > 0
        assert (await balancer.take_out()).is_done is True, "it was out already"
        assert (await balancer.put_back()).is_done is True
        assert await balancer.is_out() is False
        assert await served_in(one, 0.7) > 0
    assert await load.end() == []
    print(f"{len(load.told)} requests, none failed")
