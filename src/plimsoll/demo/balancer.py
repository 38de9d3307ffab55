"""A small balancer in this process: fewest requests first, readiness asked by itself, and guard's webhook to take engines out.

A request goes to another engine as long as not one byte of its answer's body has come: of a stream the head is held back until
its first token is there. What has begun is never begun anew. Out means: no new request; what runs goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import random
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll.errors import WorldFailed

# HTTP as the demo's clients speak it: one request a connection, and what came back told exactly, also half of it.

HOST = "127.0.0.1"
HEAD_MAX = 64 << 10
_GIVEN: set[int] = set()  # ports, by this process


@dataclass
class HttpAnswer:
    """An answer: status 0 where none came; `is_whole` only where it came to its end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def request_bytes(method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> bytes:
    """One request as it goes over the wire; the connection ends with its answer."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close", f"Content-Length: {len(data)}"]
    lines += ["Content-Type: application/json"] if body is not None else []
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


async def ask(
    port: int, path: str, body: Mapping[str, Any] | None = None, *, token: str = "", method: str = "", limit_s: float = 5.0
) -> HttpAnswer:
    """Send a request to a port of this machine; nothing is raised, errors are in the answer."""
    told = HttpAnswer()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(HOST, port, limit=HEAD_MAX)
            try:
                writer.write(request_bytes(method or ("GET" if body is None else "POST"), path, body, headers))
                await writer.drain()
                await _read(reader, told)
            finally:
                writer.close()
    return told


def read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer; ValueError where it is none."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split()
    if len(words) < 2 or not words[0].startswith("HTTP/"):
        raise ValueError("no answer")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read(reader: asyncio.StreamReader, told: HttpAnswer) -> None:
    told.status, told.headers = read_head(await reader.readuntil(b"\r\n\r\n"))
    if told.headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            told.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in told.headers:
        told.body = await reader.readexactly(int(told.headers["content-length"]))
    else:
        told.body = await reader.read()
    told.is_whole = True


def free_port() -> int:
    """One that nobody listens on now, below those that the kernel gives to outgoing connections: a client could take one.

    No port is given twice: whoever got one may need a minute until it listens there.
    """
    for port in random.sample(range(22_000, 32_000), 200):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind((HOST, port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise WorldFailed("no free port could be found")


READY = "/plimsoll/ready"
CHECK_S = 0.5
PATIENCE_S = 30.0  # how long a request waits for an engine that takes it
BODY_MAX = 8 << 20
PIECE = 64 << 10
NOBODY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Serves = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass
class Backend:
    """An engine behind the balancer."""

    name: str
    port: int
    is_ready: bool = False
    is_out: bool = False
    in_flight: int = 0
    served: int = 0


class AnswerBroken(Exception):
    """The answer broke off after it had begun: nobody else can end it."""


class Balancer:
    """A balancer for these engines with two ports: one for clients, one for guard."""

    is_haproxy = False

    def __init__(self, engines: dict[str, int], token: str, checks: str = READY) -> None:
        self.engines = {name: Backend(name, port) for name, port in engines.items()}
        self.port = self.hook_port = 0
        self._sent_again = 0
        self._token, self._checks_path = token, checks
        self._epoch = 0
        self._servers: list[asyncio.Server] = []
        self._checks: asyncio.Task[None] | None = None
        self._visitors: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on ports that are free."""
        for serves in (self._client, self._hooked):
            self._servers.append(await asyncio.start_server(self._visits(serves), HOST, 0, limit=HEAD_MAX))
        self.port, self.hook_port = (server.sockets[0].getsockname()[1] for server in self._servers)
        self._checks = asyncio.create_task(self._check())

    async def stop(self) -> None:
        """Stop at once."""
        for server in self._servers:
            server.close()
        tasks = [*self._visitors, *([] if self._checks is None else [self._checks])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _visits(self, serves: Serves) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:

        def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(serves(reader, writer))
            self._visitors.add(task)
            task.add_done_callback(self._visitors.discard)

        return visited

    def table(self, name: str) -> str:
        """Guard's configuration of this balancer."""
        del name
        return f'balancer = {{ webhook = "http://{HOST}:{self.hook_port}/hook", token_file = "hook.token" }}'

    async def count_sent_again(self) -> int | None:
        """Requests that were given to another engine."""
        return self._sent_again

    async def takes_work(self) -> dict[str, bool]:
        """To which of them new requests go now."""
        return {name: one.is_ready and not one.is_out for name, one in self.engines.items()}

    # Clients

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, AnswerBroken, ValueError):
            request = await _request(reader)
            end_s = asyncio.get_running_loop().time() + PATIENCE_S
            tried: set[str] = set()
            while asyncio.get_running_loop().time() < end_s:
                engine = self._next(tried)
                if engine is None:
                    tried.clear()
                    await asyncio.sleep(0.1)
                elif await self._sent(engine, request, writer):
                    break
                else:
                    self._sent_again += 1
                    tried.add(engine.name)
            else:
                writer.write(NOBODY)
        writer.close()

    def _next(self, tried: set[str]) -> Backend | None:
        found = [one for one in self.engines.values() if one.is_ready and not one.is_out and one.name not in tried]
        return min(found, key=lambda one: (one.in_flight, one.served), default=None)

    async def _sent(self, engine: Backend, request: bytes, client: asyncio.StreamWriter) -> bool:
        """Whether it was answered; False where nothing of an answer came."""
        engine.in_flight += 1
        try:
            reader, writer = await asyncio.open_connection(HOST, engine.port, limit=HEAD_MAX)
        except OSError:
            engine.in_flight -= 1
            engine.is_ready = False
            return False
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            headers = read_head(head)[1]
            first = b"" if headers.get("content-length") == "0" else await reader.read(PIECE)
            if not first and headers.get("content-length") != "0":
                return False
            client.write(head + first)
            await self._pass_on(reader, client)
            engine.served += 1
        except (OSError, asyncio.IncompleteReadError, ValueError):
            return False
        finally:
            engine.in_flight -= 1
            writer.close()
        return True

    async def _pass_on(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(PIECE):
                client.write(piece)
                await client.drain()
            await client.drain()
        except OSError as error:
            raise AnswerBroken from error

    # Health

    async def _check(self) -> None:
        while True:
            await asyncio.gather(*(self._look(one) for one in self.engines.values()))
            await asyncio.sleep(CHECK_S)

    async def _look(self, engine: Backend) -> None:
        engine.is_ready = (await ask(engine.port, self._checks_path, limit_s=2.0)).status == 200

    # Guard

    async def _hooked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            head, _, body = (await _request(reader)).partition(b"\r\n\r\n")
            shown = head.lower().partition(b"\nauthorization: bearer ")[2].split(b"\r\n")[0]
            is_ours = hmac.compare_digest(shown.strip(), self._token.lower().encode())
            answer = self.obey(json.loads(body)) if is_ours else {}
            data = json.dumps(answer).encode()
            status = "200 OK" if is_ours else "401 Unauthorized"
            fields = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close"
            writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + data)
            await writer.drain()
        writer.close()

    def obey(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what guard asks, by the contract of docs/balancers.md."""
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


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"\ncontent-length:")[2].split(b"\r\n")[0] or b"0")
    if not 0 <= length <= BODY_MAX:
        raise ValueError("too much")
    return head + await reader.readexactly(length)
