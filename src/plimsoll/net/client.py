"""One HTTP client for all of plimsoll's calls: one deadline for the whole call, a limit on the answer, no redirect by default.

A caller that changes something must know, when there is no answer, whether its request may have been read. `Lost.was_sent`
says so: without a connection nothing can have happened; with one nobody knows. Such a request is never sent a second time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import errno
import functools
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast
from urllib.parse import urljoin, urlsplit

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.net.address import Address, server_address

if TYPE_CHECKING:  # it takes a quarter of a second to import: imported only for a call
    import aiohttp

MOST_BYTES = 256 << 10
READ_BYTES = 256 << 10  # at once: a metrics page comes in a few pieces
KEPT_S = 60.0  # how long a connection stays open without a request
REDIRECTS_MAX = 5
MOVED = (301, 302, 303, 307, 308)
# This machine cannot reach that address at all; then the error of another address of the same name tells more.
NO_WAY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH}
NOBODY = {errno.ECONNREFUSED, errno.ENOENT}  # nobody listens there
Sink = Callable[[bytes], None]
Follow = Callable[[str, Mapping[str, str]], str]  # a redirect's target by its URL and headers; or it raises WorldFailed


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; `body` is empty if it went to a sink."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # their names match in upper or lower case
    seconds: float = 0.0  # from the request to the last byte, without lookup and connect

    def table(self) -> Mapping[str, Any]:
        """Returns the JSON object in the body; an empty one for anything else."""
        try:
            return table(json.loads(self.body))
        except (ValueError, RecursionError):
            return {}

    @property
    def asks_for_token(self) -> bool:
        """True if this is a gate's answer to a request without a token."""
        return self.status == 401 and self.headers.get("www-authenticate", "").lower().startswith("bearer")


class Loss(StrEnum):
    """The reason why there is no answer."""

    REFUSED = "refused"  # nobody listens there
    LATE = "late"  # not in time
    SILENT = "silent"  # the network fails, or the server closed the connection without an answer
    NONSENSE = "nonsense"  # the answer is incomplete or no HTTP
    TOO_LARGE = "too large"


class Lost(NamedTuple):
    """A call without a whole answer."""

    loss: Loss
    why: str  # the rest of a sentence that begins with the server's name
    was_sent: bool = False  # True if the server may have read the request
    was_begun: bool = False  # True if the head of an answer came

    @property
    def status(self) -> int:
        """Always 0: there is no answer."""
        return 0

    def table(self) -> Mapping[str, Any]:
        """Returns an empty table, for callers that treat this like a Reply."""
        return {}

    def error(self, shown: str = "") -> TimedOut | TooLarge | WorldFailed:
        """Returns the loss as an exception, after the server's name."""
        kinds: dict[Loss, type[TimedOut | TooLarge]] = {Loss.LATE: TimedOut, Loss.TOO_LARGE: TooLarge}
        return kinds.get(self.loss, WorldFailed)(f"{shown}: {self.why}" if shown else self.why)


class Request(NamedTuple):
    """One call, as a transport in place of the network gets it."""

    url: str
    method: str
    body: bytes
    headers: Mapping[str, str]
    deadline_s: float


TRANSPORT: contextvars.ContextVar[Callable[[Request], Awaitable[Reply | Lost]] | None] = contextvars.ContextVar(
    "transport", default=None
)
"""Answers all calls of a context instead of the network, within their deadlines: a simulated world sets it."""


TRUST: contextvars.ContextVar[Callable[[], ssl.SSLContext] | None] = contextvars.ContextVar("trust", default=None)
"""Whom clients made in a context believe by https, where they are given no `tls`; None: the machine's own authorities."""


class HttpClient:
    def __init__(
        self,
        where: Address | str,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        keeps: bool = False,
        proxied: bool = False,
        idle_s: float | None = None,
    ) -> None:
        """Raises BadInput for a bad address; one given as text may hold no login, since it is shown.

        `tls` is called at each https call, to trust other authorities than the machine's own. `keeps`: one connection for all
        calls, which must then be closed. `proxied`: through the proxy that the environment names. `idle_s`: the longest pause
        of the server, where the deadline is that of a long answer.
        """
        self.address = where if isinstance(where, Address) else server_address(where)
        self._tls, self._keeps, self._proxied, self._idle_s = tls or TRUST.get(), keeps, proxied, idle_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def shown(self) -> str:
        return self.address.shown

    async def close(self) -> None:
        """Closes the kept connection."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def call(
        self,
        method: str,
        path: str = "",
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        deadline_s: float,
        most_bytes: int = MOST_BYTES,
        cuts: bool = False,
        sink: Sink | None = None,
        follow: Follow | None = None,
    ) -> Reply | Lost:
        """Sends one request; never raises for the server's errors, and ends within the deadline.

        The body of a 200 goes to `sink` if there is one. A body over `most_bytes` is a loss, or with `cuts` cut off there.
        """
        if (transport := TRANSPORT.get()) is not None:
            request = Request(self._target(path), method, body, self._headers(body, headers or {}), deadline_s)
            answer = await transport(request)
            if sink is None or answer.status != 200:
                return answer
            sink(cast("Reply", answer).body)
            return replace(cast("Reply", answer), body=b"")

        import aiohttp
        from yarl import URL

        url, sent = self._target(path), self._headers(body, headers or {})
        if not all(value.isascii() and value.isprintable() for value in sent.values()):
            return Lost(Loss.NONSENSE, "cannot be called: the login has characters that no header may have")
        home, progress = urlsplit(url), _Progress()
        try:
            async with asyncio.timeout(deadline_s), self._connected() as session:
                for _ in range(REDIRECTS_MAX + 1):
                    async with session.request(
                        method, URL(url, encoded=True), data=body or None, headers=sent, allow_redirects=False,
                        proxy=_proxy(url) if self._proxied else None, trace_request_ctx=progress,
                    ) as response:  # fmt: skip
                        progress.is_begun = True
                        if follow is None or response.status not in MOVED or "Location" not in response.headers:
                            read = await _read(response, most_bytes, sink if response.status == 200 else None, cuts=cuts)
                            seconds = time.monotonic() - (progress.sent_s or 0.0)
                            return Reply(response.status, read, response.headers, seconds)
                        url = follow(url, response.headers)
                    onward = urlsplit(url)
                    if onward.netloc != home.netloc or onward.scheme not in (home.scheme, "https"):
                        sent.pop("Authorization", None)
                raise WorldFailed(f"redirects more than {REDIRECTS_MAX} times")
        except TimeoutError as problem:
            waited_s = self._idle_s if isinstance(problem, aiohttp.ServerTimeoutError) and self._idle_s else deadline_s
            loss, why = Loss.LATE, f"did not answer within {round(waited_s, 1):g} s"
        except _Oversized:
            loss, why = Loss.TOO_LARGE, f"answers with more than {_size(most_bytes)}"
        except WorldFailed as problem:
            loss, why = Loss.NONSENSE, str(problem)
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            loss, why = _reason(problem, was_begun=progress.is_begun)
        if progress.sent_s is None:
            NAMES.doubt(home.hostname or "")
        return Lost(loss, why, progress.sent_s is not None, progress.is_begun)

    def _target(self, path: str) -> str:
        """Returns the URL of the path below the address's own; without a path the address's own URL."""
        parts = urlsplit(self.address.url)
        below = f"{parts.path.rstrip('/')}{path}" if path else parts.path
        query = f"?{parts.query}" if parts.query else ""
        return f"{parts.scheme}://{parts.netloc}{below or '/'}{query}"

    def _headers(self, body: bytes, own: Mapping[str, str]) -> dict[str, str]:
        headers = {"User-Agent": "plimsoll", "Accept": "*/*", "Accept-Encoding": "identity"}
        headers |= {"Content-Type": "application/json"} if body else {}
        headers |= {"Authorization": self.address.login} if self.address.login else {}
        return {**headers, **own}

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yields the kept session, or one for this call alone."""
        if self._keeps:
            self._session = self._session or self._open()
            yield self._session
        else:
            async with self._open() as session:
                yield session

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        # A kept connection carries one request at a time; any other ends with its answer.
        kept: dict[str, Any] = {"limit": 1, "keepalive_timeout": KEPT_S} if self._keeps else {"limit": 0, "force_close": True}
        connector: aiohttp.BaseConnector
        if self.address.socket:
            connector = aiohttp.UnixConnector(self.address.socket, **kept)
        else:
            trust = self._tls() if self._tls and self.address.url.startswith("https:") else True
            resolver = cast("aiohttp.abc.AbstractResolver", NAMES)
            connector = aiohttp.TCPConnector(ssl=trust, resolver=resolver, use_dns_cache=False, **kept)
        pauses = aiohttp.ClientTimeout(total=None, sock_connect=self._idle_s, sock_read=self._idle_s)
        session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=pauses, trace_configs=[_trace()],
            read_bufsize=READ_BYTES,
        )  # fmt: skip
        # aiohttp sends a PUT again where the server hung up; only a kept connection may have been closed before it was read.
        session._retry_connection = self._keeps  # noqa: SLF001
        return session


class _Progress:
    sent_s: float | None = None  # when the request had a connection
    is_begun = False


class _Oversized(Exception):
    """An answer that is longer than the caller takes."""


@functools.cache
def _trace() -> aiohttp.TraceConfig:
    """Returns a trace that notes when a request has a connection: from then on it may have been read."""
    import aiohttp

    async def note(session: aiohttp.ClientSession, context: Any, event: object) -> None:
        del session, event
        context.trace_request_ctx.sent_s = time.monotonic()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(note)
    trace.on_connection_reuseconn.append(note)
    return trace


async def _read(response: aiohttp.ClientResponse, most_bytes: int, sink: Sink | None, *, cuts: bool) -> bytes:
    pieces: list[bytes] = []
    size = 0
    if not cuts and (response.content_length or 0) > most_bytes:
        raise _Oversized
    while not (cuts and size >= most_bytes) and (piece := await response.content.readany()):
        size += len(piece)
        if size > most_bytes and not cuts:
            raise _Oversized
        (sink or pieces.append)(piece)
    return b"".join(pieces)[:most_bytes]


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count:,} bytes"


def _proxy(url: str) -> str | None:
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _reason(problem: Exception, *, was_begun: bool) -> tuple[Loss, str]:
    """Returns the loss, and the rest of a sentence that begins with the server's name."""
    import aiohttp

    if isinstance(problem, aiohttp.ClientConnectorCertificateError):
        return Loss.SILENT, "has a certificate that is not trusted"
    if isinstance(problem, aiohttp.ClientSSLError | ssl.SSLError):
        return Loss.NONSENSE, "does not speak TLS as it should"
    if isinstance(problem, aiohttp.ClientConnectorDNSError):
        return Loss.SILENT, "cannot be reached: its name does not resolve"
    if isinstance(problem, aiohttp.ClientConnectorError):
        # With several addresses the text has a reason for each.
        numbers = {int(found) for found in re.findall(r"\[Errno (\d+)\]", str(problem.os_error))}
        number = min(numbers - NO_WAY or numbers, default=0)
        loss = Loss.REFUSED if numbers - NO_WAY and numbers - NO_WAY <= NOBODY else Loss.SILENT
        return loss, f"cannot be reached ({os.strerror(number) if number else type(problem.os_error).__name__})"
    if was_begun:
        return Loss.NONSENSE, "sends a truncated answer"
    if isinstance(problem, aiohttp.ClientResponseError):
        return Loss.NONSENSE, "answers with something that is not HTTP"
    if isinstance(problem, aiohttp.ServerDisconnectedError | ConnectionError):
        return Loss.SILENT, "closed the connection without an answer"
    return Loss.NONSENSE, f"cannot be asked ({type(problem).__name__})"


def same_server(url: str, headers: Mapping[str, str], *, may_upgrade: bool = False) -> str:
    """Returns a redirect's URL on the same server, with `may_upgrade` also by https on its host; else raises WorldFailed."""
    try:
        old, new = urlsplit(url), urlsplit(urljoin(url, headers["Location"]))
        is_same = (new.scheme, new.port) == (old.scheme, old.port)
        is_upgrade = may_upgrade and (old.scheme, new.scheme) == ("http", "https")
        if new.hostname == old.hostname and new.username is None and (is_same or is_upgrade):
            return new.geturl()
    except ValueError:
        pass
    raise WorldFailed("redirects to another host; ask that one directly")


same_host: Follow = functools.partial(same_server, may_upgrade=True)


class FileToken(str):
    """A token from a file, which is read again when it has changed; while it cannot be read, the last token stays."""

    _path: str
    _read: Callable[[str], str]
    _stamp: tuple[int, int] | None
    _now: str

    def __new__(cls, path: str, read: Callable[[str], str]) -> Self:
        stamp = _stamp(path)  # before the file is read: a change in between is seen next time
        token = super().__new__(cls, read(path))
        token._path, token._read, token._stamp, token._now = path, read, stamp, str(token)
        return token

    def now(self) -> str:
        """Returns the token that is now in the file."""
        stamp = _stamp(self._path)
        if stamp not in (None, self._stamp):
            with contextlib.suppress(BadInput):
                self._now, self._stamp = self._read(self._path), stamp
        return self._now


def _stamp(path: str) -> tuple[int, int] | None:
    """Returns a file's mtime and inode, or None: a mounted secret changes the inode, an edit in place the mtime."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def current(token: str) -> str:
    """Returns a token's present value, from its file if it came from one."""
    return token.now() if isinstance(token, FileToken) else token


class _Bearer(Mapping[str, str]):
    """The header with a token's value at the time the header is sent."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __getitem__(self, name: str) -> str:
        if name != "Authorization":
            raise KeyError(name)
        return f"Bearer {current(self._token)}"

    def __iter__(self) -> Iterator[str]:
        yield "Authorization"

    def __len__(self) -> int:
        return 1


def bearer(token: str) -> Mapping[str, str]:
    """Returns the header with a token. Raises BadInput for a token that no header can hold."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput("the token holds letters that a token cannot have")
    return _Bearer(token)


def table(found: object) -> Mapping[str, Any]:
    """Returns a JSON object as it is; an empty one for anything else."""
    return found if isinstance(found, dict) else {}


def tables(found: object) -> list[Mapping[str, Any]]:
    """The objects of a list from JSON or YAML; none where it is no list."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def number(found: object, most: float = 2.0**63) -> float | None:
    """Returns a number from 0 to below `most` as it is; None for anything else."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < most:
        return None
    return found


FRESH_S = 45.0
PATIENCE_S = 0.3  # for a new answer where an old one is known
LOOKUPS_MAX = 160  # at once
NAMES_MAX = 20_000
AddressInfo = tuple[Any, ...]


def look_up(host: str) -> Sequence[AddressInfo]:
    """Returns a name's addresses from this machine's resolver. Raises OSError or UnicodeError if there are none."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)


class NameCache:
    """aiohttp's resolver, with threads of its own: a lookup cannot be cancelled, and may outlast its caller.

    The last good answer holds while a new one is slow or fails for now: a resolver's trouble must not look like the engines'.
    """

    def __init__(self, look_up: Callable[[str], Sequence[AddressInfo]] = look_up) -> None:
        self._look_up = look_up
        self._known: dict[str, tuple[Sequence[AddressInfo], float]] = {}  # with the time until which each is fresh
        self._jobs: dict[str, concurrent.futures.Future[Sequence[AddressInfo]]] = {}

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        """Returns a name's addresses; waits for them as long as none are known. Raises OSError if it has none."""
        addresses, until_s = self._known.get(host, ((), 0.0))
        if time.monotonic() >= until_s:
            try:
                async with asyncio.timeout(PATIENCE_S if addresses else None):
                    addresses = await self._renewed(host)
            except OSError as error:  # a timeout is one, too
                if not addresses or error.errno == socket.EAI_NONAME:  # the name is gone, not just its resolver in trouble
                    self._known.pop(host, None)
                    raise
        return [
            {"hostname": host, "host": where[0], "port": port, "family": kind, "proto": proto, "flags": socket.AI_NUMERICHOST}
            for kind, _, proto, _, where in addresses
            if family in (0, kind)
        ]

    async def close(self) -> None:
        """Does nothing: the cache outlives every connection."""

    def doubt(self, host: str) -> None:
        """Makes the next call look the name up again, because its address did not answer."""
        if host in self._known:
            self._known[host] = self._known[host][0], 0.0

    async def _renewed(self, host: str) -> Sequence[AddressInfo]:
        while (job := self._jobs.get(host)) is None:
            if len(self._jobs) < LOOKUPS_MAX:
                job = self._jobs[host] = concurrent.futures.Future()
                try:
                    threading.Thread(target=self._run, args=(host, job), name="plimsoll-name", daemon=True).start()
                except RuntimeError as error:  # this machine gives us no more threads
                    self._jobs.pop(host)
                    raise OSError(str(error)) from None
                break
            await asyncio.sleep(0.05)
        return await asyncio.shield(asyncio.wrap_future(job))

    def _run(self, host: str, job: concurrent.futures.Future[Sequence[AddressInfo]]) -> None:
        if len(self._known) >= NAMES_MAX:
            self._known.clear()
        try:
            found = self._look_up(host)
            self._known[host] = found, time.monotonic() + FRESH_S
            job.set_result(found)
        except Exception as error:
            job.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        finally:
            self._jobs.pop(host, None)


NAMES = NameCache()
