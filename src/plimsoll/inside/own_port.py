"""The endpoints on a Unix socket or a port of their own, away from the port that clients reach.

HTTP is read by h11, which vLLM brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import socket
import stat
from typing import Any, NamedTuple

from plimsoll.inside.answers import Answer, error
from plimsoll.inside.asked import LARGEST_BODY
from plimsoll.inside.core import Core
from plimsoll.inside.endpoints import Ask, answer
from plimsoll.inside.faults import FAULTS, LOG

READ_BYTES = 65_536
PATIENCE_S = 10.0  # for a client to send its whole request
MOST_CLIENTS = 64


class Where(NamedTuple):
    """Where to listen: the path of a Unix socket, or an address and a port."""

    path: str = ""
    host: str = ""
    port: int = 0


def where_of(text: str) -> Where | str:
    """What PLIMSOLL_LISTEN says, or a sentence why it cannot be read."""
    if text.startswith("unix:"):
        path = text[5:]
        return Where(path=path) if path.startswith("/") else "PLIMSOLL_LISTEN=unix: needs a path that starts with /"
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        return "PLIMSOLL_LISTEN is neither unix:/path nor host:port"
    return Where(host=host.strip("[]") or "127.0.0.1", port=int(port))


class OwnPort:
    """Serves the endpoints; with several API servers the first to come serves for all, since what they answer is shared."""

    def __init__(self, core: Core, patience_s: float = PATIENCE_S) -> None:
        self._core = core
        self._patience_s = patience_s
        self._server: asyncio.Server | None = None
        self._path = ""
        self._clients = 0
        self._is_hopeless = False  # what was set cannot be served, now or later

    @property
    def is_open(self) -> bool:
        """Whether there is nothing left to do: it listens, or it never will."""
        return self._server is not None or self._is_hopeless

    async def open(self) -> None:
        """Begin to listen; a place that is taken or cannot be used is said once, and nothing listens instead."""
        where = where_of(self._core.settings.listen)
        if isinstance(where, str):
            self._is_hopeless = True
            FAULTS.say("listening", where)
            return
        if not self._core.tokens.is_set:
            FAULTS.say("listening", "PLIMSOLL_LISTEN is set and PLIMSOLL_TOKEN is not: every endpoint but ready stays off")
        if where.host and not _is_loopback(where.host) and not self._core.tokens.is_set:
            self._is_hopeless = True
            return
        try:
            self._server = await (
                self._open_unix(where.path) if where.path else asyncio.start_server(self._serve, where.host, where.port)
            )
            LOG.info("plimsoll: endpoints are served at %s", self._core.settings.listen)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and self._core.key != os.getpid():
                return  # one of the other API servers of this server has it; should it go, this one takes over
            FAULTS.note(f"listening at {self._core.settings.listen}", problem)

    async def _open_unix(self, path: str) -> asyncio.Server:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                if _answers(path):
                    raise OSError(errno.EADDRINUSE, "taken")
                os.unlink(path)  # noqa: PTH108 - left behind by a server that is gone
        place = socket.socket(socket.AF_UNIX)
        try:
            before = os.umask(0o177)  # of the whole process: for this one call, not across an await
            try:
                place.bind(path)
            finally:
                os.umask(before)
            server = await asyncio.start_unix_server(self._serve, sock=place)
        except BaseException:
            place.close()
            raise
        self._path = path
        return server

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                if self._path:
                    os.unlink(self._path)  # noqa: PTH108

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            if self._clients <= MOST_CLIENTS:
                await self._converse(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client has gone, or says nothing
        except Exception as problem:
            FAULTS.note("serving an endpoint", problem)
        finally:
            self._clients -= 1
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer, and the connection ends."""
        h11 = importlib.import_module("h11")
        connection = h11.Connection(h11.SERVER)
        try:
            ask = await asyncio.wait_for(_read(h11, connection, reader), self._patience_s)
            found = error(413, "the body is too large", "BadRequestError") if ask is None else await answer(self._core, ask)
            is_head = ask is not None and ask.method == "HEAD"
        except h11.RemoteProtocolError:
            found, is_head = error(400, "this is not HTTP", "BadRequestError"), False
        await _write(h11, connection, writer, found, is_head=is_head)


async def _read(h11: Any, connection: Any, reader: asyncio.StreamReader) -> Ask | None:
    """The whole request; None when its body is too large."""
    request, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
            if len(body) > LARGEST_BODY:
                return None
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            path = bytes(request.target).partition(b"?")[0].decode("latin-1")
            return Ask(bytes(request.method).decode("latin-1"), path, [(bytes(n), bytes(v)) for n, v in request.headers], body)
        else:
            raise OSError("the client has gone")


async def _write(h11: Any, connection: Any, writer: asyncio.StreamWriter, found: Answer, *, is_head: bool) -> None:
    body, headers = found.encoded()
    headers = [*(pair for pair in headers if pair[0] != b"connection"), (b"connection", b"close")]
    if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    data = connection.send(h11.Response(status_code=found.status, headers=headers))
    if not is_head:
        data += connection.send(h11.Data(data=body))
    writer.write(data)
    await asyncio.wait_for(writer.drain(), PATIENCE_S)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _answers(path: str) -> bool:
    """Whether somebody listens there; never waits, since vLLM's event loop would wait along."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue is full: it lives and is busy
        except OSError:
            return False
    return True
