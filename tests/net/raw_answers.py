"""A server on a real socket that answers with the bytes it was told, and keeps the bytes it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

Answer = bytes | float | None  # bytes to send; seconds of silence; None to hang up


def answer(status: int, body: object = None, *, chunked: bool = False) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    if chunked:
        middle = len(data) // 2
        parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:middle], data[middle:]))
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + parts + b"0\r\n\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Answers:
    """What was sent so far, one request each; `reply` is asked for every one of them."""

    def __init__(self, reply: Callable[[str], Answer]) -> None:
        self._reply = reply
        self.got: list[bytes] = []

    @property
    def lines(self) -> list[str]:
        """The first line of every request, without the version."""
        return [one.split(b"\r\n")[0].decode().removesuffix(" HTTP/1.1") for one in self.got]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
            self.got.append(head + await reader.readexactly(length))
            told = self._reply(self.lines[-1])
            if isinstance(told, float):
                await asyncio.sleep(told)
            elif told is not None:
                writer.write(told)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def on_unix_socket(path: Path, reply: Callable[[str], Answer]) -> AsyncIterator[Answers]:
    answers = Answers(reply)
    server = await asyncio.start_unix_server(answers.serve, path)
    yield answers
    server.close()


@contextlib.asynccontextmanager
async def on_a_port(reply: Callable[[str], Answer]) -> AsyncIterator[tuple[Answers, str]]:
    """The same on this machine's loopback, with its address."""
    answers = Answers(reply)
    server = await asyncio.start_server(answers.serve, "127.0.0.1", 0)
    yield answers, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
