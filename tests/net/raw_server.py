"""Servers on loopback that say exactly what a test wants, byte by byte, and know nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

Talk = Callable[["Visitor"], Awaitable[None]]


class Visitor:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def asked(self) -> str:
        """The head of the next request; empty when the client has gone."""
        try:
            return (await self.reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return ""

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self, body: bytes, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        await self.say("\r\n".join(lines).encode() + body)


class RawServer:
    """Remembers every request and how many connections there were."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.port = 0
        self.connections = 0
        self.heads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self.talk(Visitor(reader, writer))
        writer.close()


@contextlib.asynccontextmanager
async def raw_server(talk: Talk) -> AsyncIterator[RawServer]:
    found = RawServer(talk)
    server = await asyncio.start_server(found.visited, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


def by_path(found: dict[str, bytes | str]) -> Talk:
    """A server that answers these paths: bytes are a 200, words a status; 404 for the rest. It keeps connections."""

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            reply = found.get(head.split()[1], "404 Not Found")
            if isinstance(reply, str):
                await visitor.answer(b"", reply)
            else:
                await visitor.answer(reply)

    return talk


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
