"""Guard's own HTTP server: one request per connection, a limit on everything.

Every path but /healthz and the page's files, which contain nothing about any engine, needs a token; a second token may be set
that only reads. The Host header must be an address, this machine's name or an allowed one, so that a hostile web page cannot
use a name of its own. A POST must have the content type JSON, which no form of a web page can send, and must not come from
another page than ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from plimsoll.net.client import current

MOST_BODY = 16 << 10
PATIENCE_S = 10.0  # for a client to send its request, and to take the answer
MOST_CLIENTS = 64
LONGEST_TOKEN = 8 << 10
OPEN_PATH = "/healthz"
# A page from here may load our own files and call us, and nothing else.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store", "Server": "plimsoll",
}  # fmt: skip


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    content_type: str = "application/json"


class Stream(NamedTuple):
    """An answer that is sent piece by piece, for as long as the client takes it."""

    pieces: AsyncGenerator[bytes]
    content_type: str = "text/event-stream"


Answers = Callable[[str, Mapping[str, str]], HttpAnswer | Stream | Awaitable[HttpAnswer]]  # a path and its query
Deeds = Callable[[str, bytes, str], Awaitable[HttpAnswer]]  # a path, the JSON that was posted to it, and the caller's name
Identify = Callable[[str, str, str], Awaitable[str | HttpAnswer]]  # by token, method and path: the caller's name or a refusal
THE_TOKEN = "the API's token"  # noqa: S105  (the caller's name in the journal)


class _Connection(web.RequestHandler):
    """One client's connection, with a time limit, and with our own error for a client that speaks no HTTP."""

    clients: dict[_Connection, bool]  # in the order they came; True once a client has sent its request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepts a new client at once. Where there are too many, drops the oldest one without a request, else the oldest."""
        super().connection_made(transport)
        self.patience = asyncio.get_running_loop().call_later(PATIENCE_S, self.abort)
        if len(self.clients) >= MOST_CLIENTS:
            oldest = next((client for client, has_asked in self.clients.items() if not has_asked), next(iter(self.clients)))
            del self.clients[oldest]
            oldest.abort()
        self.clients[self] = False

    def connection_lost(self, exc: BaseException | None) -> None:
        self.patience.cancel()
        self.clients.pop(self, None)
        super().connection_lost(exc)

    def abort(self) -> None:
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Returns an error for something that is no request, or for a mistake of ours; without any detail."""
        del message
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        if status == 400:
            is_large = isinstance(exc, LineTooLong)
            return _response(error(431, "the headers are too large") if is_large else error(400, "this is not HTTP"))
        return _response(error(500, f"a mistake of ours: {type(exc).__name__}"))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class GuardServer:
    """The listener; others make its answers. Without `deeds` it only reads; a client with `read_token` may only read."""

    def __init__(
        self,
        answers: Answers,
        token: str,
        hosts: tuple[str, ...] = (),
        deeds: Deeds | None = None,
        read_token: str | None = None,
        files: Mapping[str, HttpAnswer] | None = None,
        identify: Identify | None = None,
    ) -> None:
        """`files`: answers by path that need no token. `identify` is called for tokens that are neither of guard's own."""
        self._answers, self._deeds, self._files, self._identify = answers, deeds, files or {}, identify
        self._token, self._read_token = token, read_token
        self._named = {host.lower() for host in hosts}
        self._hosts = {"localhost", socket.gethostname().lower(), *self._named}
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """Begins to listen. Raises OSError if the port is taken."""
        loop, clients = asyncio.get_running_loop(), dict[_Connection, bool]()
        manager = web.Server(self._handle, handler_cancellation=True)

        def connection() -> _Connection:
            made = _Connection(manager, loop=loop, access_log=None)  # type: ignore[arg-type]
            made.clients = clients
            return made

        self._server = await loop.create_server(connection, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        if connection in connection.clients:
            connection.clients[connection] = True
        if (refusal := self._refusal(request)) is not None:
            return _response(refusal)
        who = await self._who(request)
        wrong = _wrong_post(request) if request.method == "POST" else None
        if isinstance(who, HttpAnswer):
            return _response(who)
        if wrong is not None:
            return _response(wrong)
        if request.method == "POST":
            body = await request.read()
            assert self._deeds is not None, "looked at before"
            found = await asyncio.shield(_tried(self._deeds(request.path, body, who)))  # it goes on even if the client hangs up
        else:
            found = self._files.get(request.path) or await _tried(self._read(request))
        return _response(found) if isinstance(found, HttpAnswer) else await _stream(request, connection, found)

    async def _read(self, request: web.BaseRequest) -> HttpAnswer | Stream:
        found = self._answers(request.path, dict(request.query))
        return found if isinstance(found, HttpAnswer | Stream) else await found

    def _refusal(self, request: web.BaseRequest) -> HttpAnswer | None:
        """Returns why a request is refused before its token is checked; None if it is not."""
        method = request.method
        if not self._is_ours(request.headers.getall("Host", [])):
            return error(421, "the Host header names neither an address nor a name that is allowed here")
        if method not in ("GET", "HEAD", "POST") or (method == "POST" and self._deeds is None):
            return error(405, "guard's API takes GET, HEAD and POST" if self._deeds else "guard's API only reads")
        if method == "POST" and not self._is_from_us(request):
            return error(403, "this was sent by another page than guard's own")
        return None

    async def _who(self, request: web.BaseRequest) -> str | HttpAnswer:
        """Returns the caller's name by its token, or a refusal for a caller that may not make this request."""
        method, path = request.method, request.path
        shown = request.headers.getall("Authorization", [])
        scheme, _, token = shown[0].partition(" ") if len(shown) == 1 else ("", "", "")
        is_bearer, digest = scheme.lower() == "bearer", _digest(token.strip())
        is_token = hmac.compare_digest(digest, _digest(current(self._token))) and is_bearer
        if path == OPEN_PATH or (path in self._files and method != "POST") or is_token:
            return THE_TOKEN
        if self._read_token is not None and hmac.compare_digest(digest, _digest(current(self._read_token))) and is_bearer:
            return error(403, "this token only reads") if method == "POST" else THE_TOKEN
        if self._identify is not None and is_bearer and 0 < len(token) <= LONGEST_TOKEN:
            try:
                return await self._identify(token.strip(), method, path)
            except Exception as problem:
                return error(500, f"a mistake of ours: {type(problem).__name__}")
        return error(401, "show the token as a bearer token in the Authorization header")

    def _is_from_us(self, request: web.BaseRequest) -> bool:
        """True if no other page's script sent the request: a browser says so in headers that no script can set."""
        sites, origins = (request.headers.getall(name, []) for name in ("Sec-Fetch-Site", "Origin"))
        if any(site not in ("same-origin", "none") for site in sites) or len(origins) > 1:
            return False
        if not origins:
            return True  # no browser
        found = re.fullmatch(r"https?://([^/@\s]{1,300})", origins[0].strip().lower())
        if found is None:
            return False
        # Behind a proxy the Host may differ from the browser's; then the origin must be an allowed name.
        return found[1] == request.headers["Host"].strip().lower() or found[1].partition(":")[0] in self._named

    def _is_ours(self, hosts: list[str]) -> bool:
        if len(hosts) != 1:
            return False
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::\d{1,5})?", hosts[0].strip())
        if found is None:
            return False
        name = found[1].lower()
        with contextlib.suppress(ValueError):
            return name in self._hosts or bool(ipaddress.ip_address(name.strip("[]")))
        return False


def error(status: int, message: str) -> HttpAnswer:
    return HttpAnswer(status, json.dumps({"error": message}).encode())


def _wrong_post(request: web.BaseRequest) -> HttpAnswer | None:
    kinds, lengths = (request.headers.getall(name, []) for name in ("Content-Type", "Content-Length"))
    if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
        return error(415, "post JSON, and say so: Content-Type: application/json")
    if len(lengths) != 1 or not re.fullmatch(r"[0-9]{1,9}", lengths[0]):
        return error(411, "say how long it is: Content-Length")
    return error(413, f"more than {MOST_BODY} bytes") if int(lengths[0]) > MOST_BODY else None


async def _tried(found: Awaitable[HttpAnswer | Stream]) -> HttpAnswer | Stream:
    """Returns the answer, or a 500 for any exception, so that no request can stop guard."""
    try:
        return await found
    except Exception as problem:
        return error(500, f"a mistake of ours: {type(problem).__name__}")


def _response(found: HttpAnswer) -> web.Response:
    headers = {**_HEADERS, "Content-Type": found.content_type}
    headers |= {"WWW-Authenticate": "Bearer"} if found.status == 401 else {}
    response = web.Response(status=found.status, body=found.body, headers=headers)
    response.force_close()
    return response


async def _stream(request: web.BaseRequest, connection: _Connection, stream: Stream) -> web.StreamResponse:
    """Sends one piece after the other until either side ends; drops a client that does not take one in time."""
    connection.patience.cancel()
    response = web.StreamResponse(headers={**_HEADERS, "Content-Type": stream.content_type})
    response.force_close()
    async with contextlib.aclosing(stream.pieces):
        await response.prepare(request)
        if request.method != "HEAD":
            async for piece in stream.pieces:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await response.write(piece)
                except TimeoutError:
                    connection.abort()
                    break
    return response
