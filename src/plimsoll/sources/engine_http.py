"""Asks an engine over HTTP, over one connection that is kept. Nothing it does can hold the asker up or fill its memory.

The whole exchange, from the name's lookup to the last byte, has one deadline. What comes back is handed on in pieces and never
kept. Redirects lead nowhere but to the same server, and no proxy is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from plimsoll.domain.look import Reach
from plimsoll.errors import BadInput
from plimsoll.sources.http_answer import AnswerReader, Late, Missed, Sink, nonsense
from plimsoll.sources.http_get import address
from plimsoll.sources.names import NAMES, Names

REDIRECTS_MAX = 2
ADDRESSES_MAX = 8
ADDRESS_S = 1.0
MOVED = (301, 302, 303, 307, 308)
# This machine cannot speak to that address at all; then another address of the same name tells more.
NO_WAY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH)


class Reply(NamedTuple):
    """What came back, without the body where that went somewhere else."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    seconds: float = 0.0  # from when it was asked to the last byte: without the time to find the server and to connect


class Client:
    """Asks one server, one question at a time."""

    def __init__(self, url: str, names: Names = NAMES) -> None:
        """`url`: http://HOST:PORT, perhaps with a path before all others, or unix:/PATH; BadInput if it is none."""
        if not url.isascii():
            raise BadInput("the address holds letters that an address cannot have")
        self._socket = url.removeprefix("unix:") if url.startswith("unix:/") else ""
        where = address("http://localhost" if self._socket else url)
        parts = urlsplit(where.url)
        assert parts.hostname is not None
        self.shown = url if self._socket else where.shown
        self._host, self._netloc, self._login = parts.hostname, parts.netloc, where.login
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._origin = (parts.scheme, self._host, self._port)
        self._base = parts.path.rstrip("/")
        self._names = names
        self._wire: _Wire | None = None
        self._lock = asyncio.Lock()

    async def get(
        self,
        path: str,
        *,
        deadline_s: float,
        most_bytes: int,
        headers: Mapping[str, str] | None = None,
        sink: Sink | None = None,
        follows: bool = False,
    ) -> Reply:
        """GET. The body goes to `sink` if the status is 200, else into the reply. Missed if there is no answer in time."""
        asked = _Asked("GET", path, headers or {}, b"", most_bytes, sink)
        return await self._ask(asked, deadline_s, REDIRECTS_MAX if follows else 0)

    async def post(
        self, path: str, body: bytes, *, deadline_s: float, most_bytes: int, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """POST of JSON, which is never sent a second time."""
        return await self._ask(_Asked("POST", path, headers or {}, body, most_bytes, None), deadline_s, 0)

    def close(self) -> None:
        """Hang up."""
        if self._wire is not None:
            self._wire.drop()
            self._wire = None

    async def _ask(self, asked: _Asked, deadline_s: float, redirects: int) -> Reply:
        progress = _Progress()
        try:
            async with asyncio.timeout(deadline_s), self._lock:
                for _ in range(redirects + 1):
                    reply = await self._exchange(asked, progress)
                    if reply.status not in MOVED or not redirects:
                        return reply
                    asked = asked._replace(path=self._followed(asked.path, reply.headers.get("location")))
                raise nonsense("sends the asker round in circles")
        except TimeoutError:
            self.close()
            if not progress.is_sent:
                self._names.doubt(self._host)
            why = f"did not answer within {deadline_s:g} s"
            raise Late(Reach.SILENT, why, was_sent=progress.is_sent, was_begun=progress.is_begun) from None
        except (Exception, asyncio.CancelledError):
            self.close()
            raise

    async def _exchange(self, asked: _Asked, progress: _Progress) -> Reply:
        """One question over the kept connection; once more over a new one where the kept one had been closed meanwhile."""
        wire = self._wire
        if wire is not None and wire.is_open and asked.method == "GET":
            try:
                return await self._over(wire, asked, progress)
            except Missed as error:
                if error.was_begun:
                    raise
        self.close()
        self._wire = wire = await self._connected()
        return await self._over(wire, asked, progress)

    async def _over(self, wire: _Wire, asked: _Asked, progress: _Progress) -> Reply:
        pieces: list[bytes] = []
        reader: AnswerReader | None = None

        def take(piece: bytes) -> None:
            if asked.sink is not None and reader is not None and reader.status == 200:
                asked.sink(piece)
            else:
                pieces.append(piece)

        reader = AnswerReader(asked.most_bytes, take)
        began_s = asyncio.get_running_loop().time()
        await wire.ask(self._request(asked), reader, progress)
        if not reader.can_stay:
            self.close()
        seconds = asyncio.get_running_loop().time() - began_s
        return Reply(reader.status, reader.headers, b"".join(pieces), seconds)

    def _request(self, asked: _Asked) -> bytes:
        headers = {"Host": self._netloc, "User-Agent": "plimsoll", "Accept-Encoding": "identity", "Accept": "*/*"}
        if self._login is not None:
            headers["Authorization"] = self._login
        if asked.method == "POST":
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(asked.body))}
        headers |= asked.headers
        lines = [f"{asked.method} {self._base}{asked.path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + asked.body

    def _followed(self, path: str, target: str | None) -> str:
        """The path that a redirect names, if it is one of the same server."""
        try:
            here = f"{self._origin[0]}://{self._netloc}{self._base}{path}"
            parts = urlsplit(urljoin(here, target or "//"))
            port = parts.port or (443 if parts.scheme == "https" else 80)
            same = (parts.scheme, parts.hostname, port) == self._origin and parts.username is None
        except ValueError:
            same = False
        new = parts.path + (f"?{parts.query}" if parts.query else "") if same else ""
        if not same or not new.startswith(f"{self._base}/") or not new.isascii() or not new.isprintable() or " " in new:
            raise nonsense("redirects to another server: ask that one directly")
        return new.removeprefix(self._base)

    async def _connected(self) -> _Wire:
        loop = asyncio.get_running_loop()
        if self._socket:
            try:
                return (await loop.create_unix_connection(_Wire, self._socket))[1]
            except OSError as error:
                if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    raise Missed(Reach.REFUSED, "refuses connections: nobody listens there") from None
                raise _unreached([error]) from None
        problems: list[OSError] = []
        found = await self._addresses()
        for number, where in enumerate(found):
            # An address that nobody answers from must not take the time of the others.
            patience_s = None if number == len(found) - 1 else ADDRESS_S
            try:
                async with asyncio.timeout(patience_s):
                    context = _context() if self._is_tls else None
                    name = self._host if context else None
                    return (await loop.create_connection(_Wire, where, self._port, ssl=context, server_hostname=name))[1]
            except OSError as error:  # a timeout is one, too
                problems.append(error)
        self._names.doubt(self._host)
        raise _unreached(problems)

    async def _addresses(self) -> list[str]:
        with contextlib.suppress(ValueError):
            return [str(ipaddress.ip_address(self._host))]
        try:
            return (await self._names.addresses(self._host))[:ADDRESSES_MAX]
        except (OSError, UnicodeError):
            raise Missed(Reach.SILENT, "cannot be reached: its name is not known") from None


class _Asked(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    most_bytes: int
    sink: Sink | None


class _Progress:
    """How far an exchange has come, for whoever has to say what its end means."""

    is_sent = False
    is_begun = False


class _Wire(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._progress: _Progress | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it may still be used."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, reader: AnswerReader, progress: _Progress) -> None:
        """Send it, and let the reader have what comes until its answer is complete."""
        assert self._transport is not None
        self._reader, self._progress = reader, progress
        done = self._done = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            progress.is_sent = True
            await done
        finally:
            self._reader = self._progress = self._done = None

    def drop(self) -> None:
        """Close it without waiting for anybody."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self._reader is None or self._progress is None:
            self.drop()  # nobody asked
            return
        self._progress.is_begun = True
        try:
            self._reader.feed(data)
        except Exception as error:  # the sink's as well: whoever asked has to know
            self._end(error)
        else:
            if self._reader.is_complete:
                self._end(None)

    def eof_received(self) -> None:
        """The other side has said all it will."""
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._ended(exc)
        self._transport = None

    def _ended(self, exc: Exception | None) -> None:
        if self._reader is None or self._done is None or self._done.done():
            return
        if not self._reader.is_begun:
            self._end(Missed(Reach.SILENT, "hung up without an answer", was_sent=True))
        elif exc is not None:
            self._end(nonsense("answers with something that is cut off"))
        else:
            try:
                self._reader.end()
            except Missed as error:
                self._end(error)
            else:
                self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
            self.drop()


def _unreached(problems: list[OSError]) -> Missed:
    """What it means that no address of a name could be spoken to."""
    telling = [problem for problem in problems if problem.errno not in NO_WAY]
    if telling and all(isinstance(problem, ConnectionRefusedError) for problem in telling):
        return Missed(Reach.REFUSED, "refuses connections: nobody listens there")
    for problem in telling or problems:
        if isinstance(problem, ssl.SSLCertVerificationError):
            return Missed(Reach.SILENT, "shows a certificate that is not trusted")
        if isinstance(problem, ssl.SSLError):
            return Missed(Reach.NONSENSE, "does not speak TLS as it should")
        if not isinstance(problem, ConnectionRefusedError):
            return Missed(Reach.SILENT, f"cannot be reached ({problem.strerror or type(problem).__name__})")
    return Missed(Reach.SILENT, "cannot be reached: it has no address")


@functools.cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()
