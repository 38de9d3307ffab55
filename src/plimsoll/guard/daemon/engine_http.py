"""An HTTP client for engines, over one kept connection. No server can hold guard up or fill its memory.

The whole exchange, from the name lookup to the last byte, has one deadline. The body is handed on in pieces and never kept.
Redirects are followed only to the same server, and no proxy is used.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import ipaddress
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.guard.judge.look import Reach
from plimsoll.net.http_get import address

# A lookup cannot be cancelled: its thread stays until the resolver is done. So each name has one lookup at a time, slow names
# have their own share of threads, and none keeps another name waiting.
FRESH_S = 45.0
PATIENCE_S = 0.3  # for a new answer, if an old one is at hand
SLOW_S = 1.0
QUICK_MAX = 64  # lookups at once that may yet be quick
ALL_MAX = 160
SLOW_MAX = 32  # of names that were slow before
NAMES_MAX = 20_000
POLL_S = 0.05
LookUp = Callable[[str], list[str]]


def look_up(host: str) -> list[str]:
    """The addresses of a name, as this machine's resolver has them; OSError or UnicodeError if there are none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


class NameCache:
    """Resolves names in threads, and keeps the last good answer while a new one is slow."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._known: dict[str, _Name] = {}
        self._running: set[_Name] = set()

    async def addresses(self, host: str) -> list[str]:
        """The addresses of a name; OSError or UnicodeError if it has none. Waits as long as it takes to have any at all."""
        name = self._known.get(host)
        if name is None:
            if len(self._known) >= NAMES_MAX:
                self._known = {key: one for key, one in self._known.items() if one in self._running}
            name = self._known[host] = _Name()
        if name.is_fresh:
            return name.addresses
        patience_s = PATIENCE_S if name.addresses else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._renewed(name, host)
        if name.error is not None and not name.addresses:
            raise name.error
        return name.addresses

    def doubt(self, host: str) -> None:
        """Looks the name up again next time: its address did not answer."""
        if (name := self._known.get(host)) is not None:
            name.until_s = 0.0

    async def _renewed(self, name: _Name, host: str) -> None:
        while name.job is None or name.job.done():
            if self._has_room(name):
                name.job, name.began_s = concurrent.futures.Future(), time.monotonic()
                self._running.add(name)
                self._begin(name, name.job, host)
                break
            await asyncio.sleep(POLL_S)
            if name.is_fresh:
                return
        assert name.job is not None
        await asyncio.shield(asyncio.wrap_future(name.job))

    def _begin(self, name: _Name, job: concurrent.futures.Future[None], host: str) -> None:
        try:
            threading.Thread(target=self._run, args=(name, job, host), name="plimsoll-name", daemon=True).start()
        except RuntimeError:  # this machine gives us no more threads
            name.fail(OSError("no thread to look it up in"), is_gone=False)
            self._running.discard(name)
            job.set_result(None)

    def _has_room(self, name: _Name) -> bool:
        """Whether a lookup may start; one that turns out slow no longer counts as quick."""
        running, slow_since_s = list(self._running), time.monotonic() - SLOW_S
        slow = sum(one.is_slow or one.began_s < slow_since_s for one in running)
        return slow < SLOW_MAX if name.is_slow else len(running) - slow < QUICK_MAX and len(running) < ALL_MAX

    def _run(self, name: _Name, job: concurrent.futures.Future[None], host: str) -> None:
        try:
            name.take(self._look_up(host))
        except socket.gaierror as error:
            name.fail(error, is_gone=error.errno == socket.EAI_NONAME)
        except Exception as error:
            name.fail(error if isinstance(error, OSError | UnicodeError) else OSError(str(error)), is_gone=False)
        finally:
            self._running.discard(name)
            job.set_result(None)


class _Name:
    """The state of one name."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.error: OSError | UnicodeError | None = None
        self.until_s = 0.0
        self.job: concurrent.futures.Future[None] | None = None
        self.began_s = 0.0
        self.is_slow = False  # at the last time

    @property
    def is_fresh(self) -> bool:
        return bool(self.addresses) and time.monotonic() < self.until_s

    def take(self, addresses: list[str]) -> None:
        self._timed()
        self.addresses, self.error, self.until_s = addresses, None, time.monotonic() + FRESH_S

    def fail(self, error: OSError | UnicodeError, *, is_gone: bool) -> None:
        """A resolver that fails for now does not revoke its last answer; one that knows no such name does."""
        self._timed()
        self.addresses, self.error = [] if is_gone else self.addresses, error

    def _timed(self) -> None:
        self.is_slow = time.monotonic() - self.began_s > SLOW_S


NAMES = NameCache()


HEAD_MAX = 32 << 10
HEADERS_MAX = 200
CHUNKS_MAX = 65_536
CHUNK_LINE_MAX = 1_024
INTERIM_MAX = 4  # interim responses: 100, 103
PIECE = 64 << 10
CHUNKED_PIECE = 16 << 10
Sink = Callable[[bytes], None]


class RequestFailed(WorldFailed):
    """No answer, or an invalid one; `was_sent` and `was_begun` say how far it came.

    `why` continues the server's name: "did not answer within 3 s".
    """

    def __init__(self, reach: Reach, why: str, *, was_sent: bool = False, was_begun: bool = False) -> None:
        super().__init__(why)
        self.reach, self.why, self.was_sent, self.was_begun = reach, why, was_sent, was_begun


class RequestTimedOut(RequestFailed):
    """The deadline has passed."""


def invalid_answer(why: str) -> RequestFailed:
    """The error for an answer that breaks the rules of HTTP or of ours."""
    return RequestFailed(Reach.NONSENSE, why, was_sent=True, was_begun=True)


class AnswerReader:
    """Parses one HTTP/1.1 answer from bytes, without sockets: `feed` what was received, `end` when the connection closed.

    Head, body, decompressed body and the number of chunks have limits; whatever breaks the rules is refused at once.
    """

    def __init__(self, most_bytes: int, sink: Sink) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.is_complete = False
        self.is_begun = False
        self.can_stay = False  # whether the connection may be used again
        self._most, self._sink = most_bytes, sink
        self._read: Callable[[bytes], bytes] = self._read_head
        self._held = b""
        self._missing = 0  # of the body, or of the chunk
        self._received = self._handed = self._chunks = self._interim = 0
        self._unpacker: zlib._Decompress | None = None
        self._lasts_until_close = False

    def feed(self, data: bytes) -> None:
        """Takes what was received; raises Missed when it cannot be an answer."""
        self.is_begun = self.is_begun or bool(data)
        at, piece = 0, b""
        while at < len(data) and not self.is_complete:
            # Chunks are cut off the front one by one: in small pieces, so that little is copied.
            size = len(data) if self._read in (self._read_body, self._read_until_close) else CHUNKED_PIECE
            piece = data[at : at + size]
            at += len(piece)
            while piece and not self.is_complete:
                piece = self._read(piece)
        if piece or at < len(data):  # more than one answer: it belongs to no request
            self.can_stay = False

    def end(self) -> None:
        """The server has closed the connection; raises Missed if something is missing."""
        self.can_stay = False
        if self.is_complete:
            return
        if not self._lasts_until_close:
            raise invalid_answer("sends a truncated answer" if self.is_begun else "closed the connection without an answer")
        self._finish()

    # The head

    def _read_head(self, data: bytes) -> bytes:
        before = len(self._held)
        self._held += data
        end = self._held.find(b"\r\n\r\n", max(0, before - 3))
        if not self._held.startswith(b"HTTP/1."[: len(self._held)]):
            raise invalid_answer("answers with something that is not HTTP")
        if end < 0 or end > HEAD_MAX:
            if len(self._held) > HEAD_MAX:
                raise invalid_answer("sends headers without an end")
            return b""
        head, rest = self._held[:end], self._held[end + 4 :]
        self._held = b""
        self._take_head(head.decode("latin-1").split("\r\n"))
        return rest

    def _take_head(self, lines: list[str]) -> None:
        version, _, status = lines[0].partition(" ")
        status = status.partition(" ")[0]
        if version not in ("HTTP/1.1", "HTTP/1.0") or len(status) != 3 or not (status.isascii() and status.isdigit()):
            raise invalid_answer("answers with something that is not HTTP")
        self.status = int(status)
        if 100 <= self.status < 200 and self.status != 101:
            self._interim += 1
            if self._interim > INTERIM_MAX:
                raise invalid_answer("sends interim responses without an end")
            return
        if not 200 <= self.status < 600:
            raise invalid_answer(f"answers with the status {self.status}")
        if len(lines) > HEADERS_MAX:
            raise invalid_answer("answers with too many headers")
        self.headers = _headers(lines[1:])
        wants_close = "close" in self.headers.get("connection", "").lower()
        self.can_stay = version == "HTTP/1.1" and not wants_close
        self._choose_body()

    def _choose_body(self) -> None:
        length, coding = self.headers.get("content-length"), self.headers.get("transfer-encoding", "").strip().lower()
        packing = self.headers.get("content-encoding", "identity").strip().lower()
        if packing in ("gzip", "x-gzip"):
            self._unpacker = zlib.decompressobj(wbits=31)
        elif packing not in ("identity", ""):
            raise invalid_answer("uses a Content-Encoding that was not requested")
        if coding:
            if coding != "chunked" or length is not None:
                raise invalid_answer("gives two lengths for its answer")
            self._read = self._read_chunk_line
        elif length is not None:
            if not (length.isascii() and length.isdigit()) or len(length) > 18:
                raise invalid_answer("gives an invalid Content-Length")
            self._missing = int(length)
            self._check_size(self._missing)
            self._read = self._read_body
        else:
            self._lasts_until_close = True
            self.can_stay = False
            self._read = self._read_until_close
        if self.status in (204, 304) or (length is not None and self._missing == 0):
            self._finish()

    # The body

    def _read_body(self, data: bytes) -> bytes:
        piece, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(piece)
        self._hand(piece)
        if self._missing == 0:
            self._finish()
        return rest

    def _read_until_close(self, data: bytes) -> bytes:
        self._hand(data)
        return b""

    def _line(self, data: bytes) -> tuple[bytes | None, bytes]:
        """The next whole line, and what follows it."""
        self._held += data
        end = self._held.find(b"\r\n")
        if end < 0 or end > CHUNK_LINE_MAX:
            if len(self._held) > CHUNK_LINE_MAX:
                raise invalid_answer("sends invalid chunks")
            return None, b""
        line, rest = self._held[:end], self._held[end + 2 :]
        self._held = b""
        return line, rest

    def _read_chunk_line(self, data: bytes) -> bytes:
        line, rest = self._line(data)
        if line is None:
            return rest
        size = line.partition(b";")[0].strip()
        self._chunks += 1
        if not 0 < len(size) <= 8 or any(letter not in b"0123456789abcdefABCDEF" for letter in size):
            raise invalid_answer("sends invalid chunks")
        if self._chunks > CHUNKS_MAX:
            raise invalid_answer("sends too many chunks")
        self._missing = int(size, 16)
        self._check_size(self._received + self._missing)
        self._read = self._read_chunk if self._missing else self._read_trailer
        return rest

    def _read_chunk(self, data: bytes) -> bytes:
        piece, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(piece)
        self._hand(piece)
        if self._missing == 0:
            self._read = self._read_chunk_end
        return rest

    def _read_chunk_end(self, data: bytes) -> bytes:
        missing = 2 - len(self._held)
        self._held += data[:missing]
        if not b"\r\n".startswith(self._held):
            raise invalid_answer("sends invalid chunks")
        if len(self._held) == 2:
            self._held = b""
            self._read = self._read_chunk_line
        return data[missing:]

    def _read_trailer(self, data: bytes) -> bytes:
        line, rest = self._line(data)
        self._chunks += 1
        if self._chunks > CHUNKS_MAX:
            raise invalid_answer("sends an answer without an end")
        if line == b"":
            self._finish()
        return rest

    def _hand(self, piece: bytes) -> None:
        self._received += len(piece)
        self._check_size(self._received)
        if self._unpacker is None:
            self._sink(piece)
            return
        try:
            while not self._unpacker.eof:
                unpacked = self._unpacker.decompress(piece, PIECE)
                piece = self._unpacker.unconsumed_tail
                self._handed += len(unpacked)
                self._check_size(self._handed)
                if unpacked:
                    self._sink(unpacked)
                if not piece and len(unpacked) < PIECE:
                    break
        except zlib.error:
            raise invalid_answer("sends an answer that cannot be decompressed") from None

    def _finish(self) -> None:
        if self._unpacker is not None and self._received and not self._unpacker.eof:
            raise invalid_answer("sends a truncated answer")
        self.is_complete = True

    def _check_size(self, size: int) -> None:
        if size > self._most:
            raise invalid_answer(f"answers with more than {self._most:,} bytes")


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise invalid_answer("sends invalid headers")
        if name in ("content-length", "transfer-encoding") and found.get(name, value) != value:
            raise invalid_answer("gives two lengths for its answer")
        found[name] = value
    return found


REDIRECTS_MAX = 2
ADDRESSES_MAX = 8
ADDRESS_S = 1.0
MOVED = (301, 302, 303, 307, 308)
# This machine cannot speak to that address at all; then another address of the same name tells more.
NO_WAY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH)


class EngineReply(NamedTuple):
    """An answer; `body` is empty if it went to a sink."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    seconds: float = 0.0  # from the request to the last byte, without lookup and connect


class EngineClient:
    """Sends requests to one server, one at a time."""

    def __init__(self, url: str, names: NameCache = NAMES) -> None:
        """`url`: http://HOST:PORT, perhaps with a base path, or unix:/PATH; BadInput if it is neither."""
        if not url.isascii():
            raise BadInput("the address has characters that are not ASCII")
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
        self._wire: _Connection | None = None
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
    ) -> EngineReply:
        """GET. The body goes to `sink` if the status is 200, else into the reply. Missed if there is no answer in time."""
        asked = _Request("GET", path, headers or {}, b"", most_bytes, sink)
        return await self._ask(asked, deadline_s, REDIRECTS_MAX if follows else 0)

    async def post(
        self, path: str, body: bytes, *, deadline_s: float, most_bytes: int, headers: Mapping[str, str] | None = None
    ) -> EngineReply:
        """POST of JSON, which is never sent a second time."""
        return await self._ask(_Request("POST", path, headers or {}, body, most_bytes, None), deadline_s, 0)

    def close(self) -> None:
        """Closes the connection."""
        if self._wire is not None:
            self._wire.drop()
            self._wire = None

    async def _ask(self, asked: _Request, deadline_s: float, redirects: int) -> EngineReply:
        progress = _Progress()
        try:
            async with asyncio.timeout(deadline_s), self._lock:
                for _ in range(redirects + 1):
                    reply = await self._exchange(asked, progress)
                    if reply.status not in MOVED or not redirects:
                        return reply
                    asked = asked._replace(path=self._followed(asked.path, reply.headers.get("location")))
                raise invalid_answer("redirects in a loop")
        except TimeoutError:
            self.close()
            if not progress.is_sent:
                self._names.doubt(self._host)
            why = f"did not answer within {deadline_s:g} s"
            raise RequestTimedOut(Reach.SILENT, why, was_sent=progress.is_sent, was_begun=progress.is_begun) from None
        except (Exception, asyncio.CancelledError):
            self.close()
            raise

    async def _exchange(self, asked: _Request, progress: _Progress) -> EngineReply:
        """Sends a request over the kept connection, and once more over a new one if that had been closed."""
        wire = self._wire
        if wire is not None and wire.is_open and asked.method == "GET":
            try:
                return await self._over(wire, asked, progress)
            except RequestFailed as error:
                if error.was_begun:
                    raise
        self.close()
        self._wire = wire = await self._connected()
        return await self._over(wire, asked, progress)

    async def _over(self, wire: _Connection, asked: _Request, progress: _Progress) -> EngineReply:
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
        return EngineReply(reader.status, reader.headers, b"".join(pieces), seconds)

    def _request(self, asked: _Request) -> bytes:
        headers = {"Host": self._netloc, "User-Agent": "plimsoll", "Accept-Encoding": "identity", "Accept": "*/*"}
        if self._login is not None:
            headers["Authorization"] = self._login
        if asked.method == "POST":
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(asked.body))}
        headers |= asked.headers
        lines = [f"{asked.method} {self._base}{asked.path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + asked.body

    def _followed(self, path: str, target: str | None) -> str:
        """The path of a redirect, if it stays on the same server."""
        try:
            here = f"{self._origin[0]}://{self._netloc}{self._base}{path}"
            parts = urlsplit(urljoin(here, target or "//"))
            port = parts.port or (443 if parts.scheme == "https" else 80)
            same = (parts.scheme, parts.hostname, port) == self._origin and parts.username is None
        except ValueError:
            same = False
        new = parts.path + (f"?{parts.query}" if parts.query else "") if same else ""
        if not same or not new.startswith(f"{self._base}/") or not new.isascii() or not new.isprintable() or " " in new:
            raise invalid_answer("redirects to another server: ask that one directly")
        return new.removeprefix(self._base)

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._socket:
            try:
                return (await loop.create_unix_connection(_Connection, self._socket))[1]
            except OSError as error:
                if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    raise RequestFailed(Reach.REFUSED, "refuses connections") from None
                raise _unreached([error]) from None
        problems: list[OSError] = []
        found = await self._addresses()
        for number, where in enumerate(found):
            # A silent address must not take the time of the others.
            patience_s = None if number == len(found) - 1 else ADDRESS_S
            try:
                async with asyncio.timeout(patience_s):
                    context = _context() if self._is_tls else None
                    name = self._host if context else None
                    return (await loop.create_connection(_Connection, where, self._port, ssl=context, server_hostname=name))[1]
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
            raise RequestFailed(Reach.SILENT, "cannot be reached: its name does not resolve") from None


class _Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    most_bytes: int
    sink: Sink | None


class _Progress:
    """How far an exchange has come."""

    is_sent = False
    is_begun = False


class _Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._progress: _Progress | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, reader: AnswerReader, progress: _Progress) -> None:
        """Sends a request and feeds the reader until its answer is complete."""
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
        """Closes it at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._reader is None or self._progress is None:
            self.drop()  # unrequested
            return
        self._progress.is_begun = True
        try:
            self._reader.feed(data)
        except Exception as error:  # errors of the sink as well
            self._end(error)
        else:
            if self._reader.is_complete:
                self._end(None)

    def eof_received(self) -> None:
        """The server sends no more."""
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._ended(exc)
        self._transport = None

    def _ended(self, exc: Exception | None) -> None:
        if self._reader is None or self._done is None or self._done.done():
            return
        if not self._reader.is_begun:
            self._end(RequestFailed(Reach.SILENT, "closed the connection without an answer", was_sent=True))
        elif exc is not None:
            self._end(invalid_answer("sends a truncated answer"))
        else:
            try:
                self._reader.end()
            except RequestFailed as error:
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


def _unreached(problems: list[OSError]) -> RequestFailed:
    """The failure that describes why no address of a name could be reached."""
    telling = [problem for problem in problems if problem.errno not in NO_WAY]
    if telling and all(isinstance(problem, ConnectionRefusedError) for problem in telling):
        return RequestFailed(Reach.REFUSED, "refuses connections")
    for problem in telling or problems:
        if isinstance(problem, ssl.SSLCertVerificationError):
            return RequestFailed(Reach.SILENT, "has a certificate that is not trusted")
        if isinstance(problem, ssl.SSLError):
            return RequestFailed(Reach.NONSENSE, "does not speak TLS as it should")
        if not isinstance(problem, ConnectionRefusedError):
            return RequestFailed(Reach.SILENT, f"cannot be reached ({problem.strerror or type(problem).__name__})")
    return RequestFailed(Reach.SILENT, "cannot be reached: it has no address")


@functools.cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()
