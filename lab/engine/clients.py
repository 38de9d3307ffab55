"""Clients of a vLLM server, good and bad: they stream, they wait, they reset, they close half of the connection.

Each is a coroutine over a raw socket, so that a thousand of them are light and each can misbehave exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 120.0


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


def request_bytes(port: int, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> bytes:
    """One HTTP request as it goes over the wire."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(data)}"]
    if body is not None:
        lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


async def ask(
    port: int,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "",
    manner: str = "well",
    after_bytes: int = 400,
) -> HttpAnswer:
    """One request in one of four manners.

    `well`; `reset`: RST amid the answer; `half-close`: FIN right after the request; `leave`: closed with nothing read.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    told = HttpAnswer()
    try:
        writer.write(request_bytes(port, method or ("GET" if body is None else "POST"), path, body, headers or {}))
        await writer.drain()
        if manner == "leave":
            await asyncio.sleep(0.02)
            return told
        if manner == "half-close":
            writer.write_eof()
        await asyncio.wait_for(_read(reader, told, after_bytes if manner == "reset" else None), LIMIT_S)
        if manner == "reset":
            # With a linger of 0 closing sends RST in place of FIN.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, OSError):
            await writer.wait_closed()
    return told


async def _read(reader: asyncio.StreamReader, told: HttpAnswer, at_most: int | None) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    told.status = int(head[0].split()[1])
    told.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    if told.headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            told.body += (await reader.readexactly(size + 2))[:-2]
            if size == 0:
                break
            if at_most is not None and len(told.body) >= at_most:
                return
    else:
        left = int(told.headers.get("content-length", "0"))
        told.body = await reader.readexactly(left)
    told.is_whole = True


async def complete(
    port: int, max_tokens: int, *, stream: bool, prompt: str = "a tale", manner: str = "well", **more: Any
) -> HttpAnswer:
    """One completion of the lab's model; `more` may hold `headers`."""
    headers = more.pop("headers", None)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True, **more}
    return await ask(port, "/v1/completions", body, headers, manner=manner)


def is_finished(told: HttpAnswer) -> bool:
    """Whether a completion ended as it should: whole, 200, no error in the stream, cut by its own length."""
    return told.status == 200 and told.is_whole and b'"finish_reason":"length"' in told.body and b'"error"' not in told.body
