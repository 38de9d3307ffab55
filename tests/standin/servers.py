"""Stand-ins behind real sockets for tests, and a small client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from plimsoll.inside.settings import InsideSettings
from plimsoll.simulate.settings import StepTime
from plimsoll.standin.config import ServerFlags
from plimsoll.standin.engine import StandinEngine
from plimsoll.standin.serve.server import Port, assemble
from plimsoll.standin.serve.service import ClientView, Driver, Service
from tests.fakes import TOKEN, Got, asked
from tests.standin.engines import ask, engine, served

FAST = StepTime(1_000_000, 0, 0, 0)  # 1 ms a step
SLOW = StepTime(50_000_000, 0, 0, 0)


class Server(NamedTuple):
    port: int
    service: Service
    client: ClientView
    loop: asyncio.AbstractEventLoop

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Got:
        return asked(self.port, method, path, body, **headers)

    def do(self, action: Any) -> Any:
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
    compiled()
    found = one or engine(step_time=FAST)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = Port("127.0.0.1", 0)

    async def begin() -> Server:
        driver = Driver(found, time.monotonic_ns, speed)
        app = assemble(driver, options or ServerFlags(is_dev_mode=True, token=TOKEN), settings=settings)
        await port.open(app, root_path=options.root_path if options else "")
        driver.start()
        return Server(port.number, app.state.service, app.state.engine_client, loop)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(20)
    try:
        yield server
    finally:

        async def end() -> None:
            server.client.shutdown(timeout=0)
            await port.close()
            server.service.driver.stop()

        asyncio.run_coroutine_threadsafe(end(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
