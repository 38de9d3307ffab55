"""A small balancer in this process: fewest requests first, readiness checks, and guard's webhook to take engines out.

A request may go to another engine until the first byte of its answer's body: the head of a stream is held back until its first
token comes. An answer that has begun is never repeated. Out of rotation means no new request; running ones go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from plimsoll.errors import WorldFailed
from plimsoll.net.client import HttpClient, Lost, Reply, bearer

HOST = "127.0.0.1"
TEMPLATES = Path(__file__).parent / "templates"  # of the files that the demo writes
READY = "/plimsoll/ready"
CHECK_S = 0.5
PATIENCE_S = 30.0  # how long a request waits for an engine that takes it
ANSWER_MAX = 8 << 20
_OF_ONE_CONNECTION = {"host", "connection", "content-length", "transfer-encoding"}
_GIVEN: set[int] = set()  # ports, by this process


async def ask(
    port: int, path: str, body: Mapping[str, Any] | None = None, *, token: str = "", method: str = "", limit_s: float = 5.0
) -> Reply | Lost:
    data = b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    headers = bearer(token) if token else {}
    client = HttpClient(f"http://{HOST}:{port}")
    return await client.call(method, path, data, headers, deadline_s=limit_s, most_bytes=ANSWER_MAX)


def free_port() -> int:
    """Returns a port that is not open now, below those that the kernel gives to outgoing connections: a client could take one.

    No port is returned twice: its server may need a minute to open it.
    """
    for port in random.sample(range(22_000, 32_000), 200):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind((HOST, port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise WorldFailed("no free port could be found")


@dataclass
class Backend:
    name: str
    port: int
    is_ready: bool = False
    is_out: bool = False
    in_flight: int = 0
    served: int = 0


class DemoBalancer:
    """A balancer for these engines, with one port for clients and one for guard."""

    def __init__(self, engines: dict[str, int], token: str, checks: str = READY) -> None:
        self.engines = {name: Backend(name, port) for name, port in engines.items()}
        self.port = self.hook_port = 0
        self._sent_again = 0
        self._token, self._checks_path = token, checks
        self._epoch = 0
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        self._session = await self._stack.enter_async_context(session)
        self.port, self.hook_port = [await self._listen(handler) for handler in (self._client, self._hooked)]
        checks = asyncio.create_task(self._check())
        self._stack.callback(checks.cancel)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _listen(self, handler: Any) -> int:
        server = web.Server(handler, handler_cancellation=True, access_log=None)
        self._stack.push_async_callback(server.shutdown, 0.1)
        listening = await asyncio.get_running_loop().create_server(server, HOST, 0)
        self._stack.callback(listening.close)
        return int(listening.sockets[0].getsockname()[1])

    def table(self, name: str) -> str:
        del name
        return f'balancer = {{ webhook = "http://{HOST}:{self.hook_port}/hook", token_file = "hook.token" }}'

    async def count_sent_again(self) -> int:
        return self._sent_again

    async def takes_work(self) -> dict[str, bool]:
        return {name: one.is_ready and not one.is_out for name, one in self.engines.items()}

    async def _client(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        end_s = asyncio.get_running_loop().time() + PATIENCE_S
        tried: set[str] = set()
        while asyncio.get_running_loop().time() < end_s:
            free = [one for one in self.engines.values() if one.is_ready and not one.is_out and one.name not in tried]
            if not free:
                tried.clear()
                await asyncio.sleep(0.1)
                continue
            engine = min(free, key=lambda one: (one.in_flight, one.served))
            engine.in_flight += 1
            try:
                if (answer := await self._sent(engine, request, body)) is not None:
                    engine.served += 1
                    return answer
            finally:
                engine.in_flight -= 1
            self._sent_again += 1
            tried.add(engine.name)
        return web.Response(status=503)

    async def _sent(self, engine: Backend, request: web.BaseRequest, body: bytes) -> web.StreamResponse | None:
        """Passes on the engine's answer; None if nothing of one came. If it breaks off, so does ours."""
        answer: web.StreamResponse | None = None
        url = f"http://{HOST}:{engine.port}{request.path_qs}"
        try:
            async with self._session.request(request.method, url, data=body, headers=_passed_on(request.headers)) as told:
                first = await told.content.readany()
                if not first and told.content_length != 0:
                    return None
                answer = web.StreamResponse(status=told.status, headers=_passed_on(told.headers))
                answer.content_length = told.content_length
                await answer.prepare(request)
                await answer.write(first)
                async for piece in told.content.iter_any():
                    await answer.write(piece)
        except (aiohttp.ClientError, OSError) as problem:
            if answer is not None:
                raise ConnectionError("the answer broke off after it had begun: nobody else can end it") from problem
            engine.is_ready = engine.is_ready and not isinstance(problem, aiohttp.ClientConnectorError)
        return answer

    async def _check(self) -> None:
        while True:
            found = await asyncio.gather(*(ask(one.port, self._checks_path, limit_s=2.0) for one in self.engines.values()))
            for engine, told in zip(self.engines.values(), found, strict=True):
                engine.is_ready = told.status == 200
            await asyncio.sleep(CHECK_S)

    async def _hooked(self, request: web.BaseRequest) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
            return web.json_response({}, status=401)
        return web.json_response(self.obey(await request.json()))

    def obey(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carries out one verb of guard's, by the contract of docs/balancers.md."""
        engine, verb, epoch = self.engines.get(str(asked.get("engine"))), asked.get("verb"), asked.get("epoch")
        if engine is None:
            return {"done": None, "says": "there is no such engine here"}
        if verb == "connections":
            return {"done": True, "connections": engine.in_flight}
        if verb == "is-out":
            return {"done": engine.is_out, "says": "out" if engine.is_out else "in"}
        if isinstance(epoch, int) and epoch < self._epoch:
            return {"done": False, "says": "another guard has acted since"}
        self._epoch = max(self._epoch, epoch if isinstance(epoch, int) else 0)
        if verb == "take-out" and not any(
            one.is_ready and not one.is_out for one in self.engines.values() if one is not engine
        ):
            return {"done": False, "says": "nobody else is in: it stays in"}
        if verb not in ("take-out", "put-back"):
            return {"done": None, "says": "there is no such verb"}
        engine.is_out = verb == "take-out"
        return {"done": True, "says": "no new work goes there" if engine.is_out else "work goes there again"}


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OF_ONE_CONNECTION}
