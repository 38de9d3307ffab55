"""One server's port: bound at once, open when the engine is ready, closed when it is over; uvicorn reads and writes HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import time
from collections.abc import Iterable
from email.utils import formatdate
from typing import Any

import uvicorn
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from plimsoll.errors import PlimsollError
from plimsoll.inside.answers import App

BACKLOG = 2048
KEEP_ALIVE_S = 5  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE
LAST_ANSWERS_S = 3.0  # that clients have to take what is left for them
LAST_WORDS_S = 0.5  # that whoever answers has to see that nobody is there any more


class PortTaken(PlimsollError):
    """Nobody can listen there; vLLM ends with the same code."""

    exit_code = 1


class StartFailed(PlimsollError):
    """Something that was to stand before the engine did not come up; vLLM ends with the same code."""

    exit_code = 1


class Port:
    """Nobody is let in before `open`: a client is refused, as it is by vLLM while it starts."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise PortTaken(f"{host or '*'}:{port}: {error.strerror or error}") from None
        self.number: int = self._socket.getsockname()[1]
        self._state = ServerState()
        self._config: uvicorn.Config | None = None
        self._life: LifespanOn | None = None
        self._server: asyncio.Server | None = None

    @property
    def is_open(self) -> bool:
        """Whether clients are let in."""
        return self._server is not None

    async def open(self, app: App, *, root_path: str = "", has_access_log: bool = False) -> None:
        """Let clients in."""
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=has_access_log,
            root_path=root_path,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
        config.load()
        self._config = config
        self.date()
        self._life = LifespanOn(config)
        await self._life.startup()
        if self._life.should_exit:
            raise StartFailed("a --middleware failed in its lifespan.startup; the lines above say how")
        loop = asyncio.get_running_loop()
        made: Any = config.http_protocol_class  # the base class that it is declared as takes no arguments
        protocol = functools.partial(made, config=config, server_state=self._state, app_state=self._life.state, _loop=loop)
        self._server = await loop.create_server(protocol, sock=self._socket, backlog=BACKLOG)

    def date(self) -> None:
        """Bring the date in the answers' headers up to now; due once a second."""
        if self._config is not None:
            self._state.default_headers = [
                (b"date", formatdate(time.time(), usegmt=True).encode()),
                *self._config.encoded_headers,
            ]

    async def close(self) -> None:
        """Let nobody in any more, and leave when the last answer is sent."""
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if not await self._is_quiet_within(LAST_ANSWERS_S):
            for connection in list(self._state.connections):
                connection.transport.abort()
            if not await self._is_quiet_within(LAST_WORDS_S):
                for task in list(self._state.tasks):
                    task.cancel()
        if self._life is not None:
            await self._life.shutdown()
        self._server = None

    async def _is_quiet_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._state.connections or self._state.tasks:
                    await asyncio.sleep(0.01)
        return not (self._state.connections or self._state.tasks)


async def keep_dates(ports: Iterable[Port]) -> None:
    """For ever: the date in the headers of all of them."""
    while True:
        await asyncio.sleep(1.0)
        for port in ports:
            port.date()


def allow_many_sockets() -> None:
    """As many as this user may have: vLLM does so, too."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
