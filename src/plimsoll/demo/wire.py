"""HTTP as the demo's clients speak it: one request a connection, and what came back told exactly, also half of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll.errors import WorldFailed

HOST = "127.0.0.1"
HEAD_MAX = 64 << 10
_GIVEN: set[int] = set()  # ports, by this process


@dataclass
class Told:
    """One answer: status 0 where none came; `is_whole` only where it came to its end."""

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
    port: int,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    token: str = "",
    method: str = "",
    limit_s: float = 5.0,
) -> Told:
    """One request of this machine's port; whatever goes wrong is in what was told, and nothing is raised."""
    told = Told()
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


async def _read(reader: asyncio.StreamReader, told: Told) -> None:
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
