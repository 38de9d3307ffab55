"""Stand-ins behind real sockets for tests, and a small client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from plimsoll.inside.settings import InsideSettings
from plimsoll.simulate.settings import StepTime
from plimsoll.standin.config import ServerFlags
from plimsoll.standin.engine import StandinEngine
from plimsoll.standin.serve.server import AssembledServer, Port, assemble
from plimsoll.standin.serve.service import Driver
from tests.standin.engines import ask, engine, served

TOKEN = "a-token-that-is-long-enough"
FAST = StepTime(1_000_000, 0, 0, 0)  # 1 ms a step
SLOW = StepTime(50_000_000, 0, 0, 0)


class Got(NamedTuple):
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The events of a stream, without the word before each."""
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == "", "a stream ends with an empty line"
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [part.removeprefix("data: ") for part in parts[:-1]]


class Server(NamedTuple):
    """One stand-in that runs in a thread."""

    port: int
    made: AssembledServer
    loop: asyncio.AbstractEventLoop

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Got:
        """One request; the body is JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            return Got(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def do(self, action: Any) -> Any:
        """Call something in the server's own thread."""

        async def act() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self.loop).result(10)


@functools.cache
def compiled() -> None:
    """Have the scheduler compiled before anybody waits for an answer: on a fresh machine that takes longer than most waits."""
    one = engine(step_time=FAST)
    served(one, one.submit(ask(), 0))


@contextlib.contextmanager
def standin(
    options: ServerFlags | None = None,
    *,
    one: StandinEngine | None = None,
    speed: float = 1.0,
    settings: InsideSettings | None = None,
) -> Iterator[Server]:
    """One that listens."""
    compiled()
    found = one or engine(step_time=FAST)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = Port("127.0.0.1", 0)

    async def begin() -> AssembledServer:
        driver = Driver(found, time.monotonic_ns, speed)
        made = assemble(driver, options or ServerFlags(is_dev_mode=True, token=TOKEN), settings=settings)
        await port.open(made.app, root_path=options.root_path if options else "")
        driver.start()
        return made

    made = asyncio.run_coroutine_threadsafe(begin(), loop).result(20)
    try:
        yield Server(port.number, made, loop)
    finally:

        async def end() -> None:
            made.client.shutdown(timeout=0)
            await port.close()
            made.service.driver.stop()

        asyncio.run_coroutine_threadsafe(end(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextlib.contextmanager
def with_gate() -> Iterator[Server]:
    """A stand-in with the gate's own code in it."""
    with standin(ServerFlags(middleware=("plimsoll.inside.Gate",), token=TOKEN)) as server:
        yield server
