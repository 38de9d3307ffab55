"""Guard's own small HTTP server: one request a connection, a limit on everything.

A token must be shown for every path but /healthz and the files of the page, which say nothing of any engine; a second token may
be given that only reads. The Host header must be an address, this machine's name or one that was allowed: a web page that a
browser was lured to cannot ask under a name of its own. What is posted must call itself JSON, which no form of a web page can,
and must not come from another page than ours.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

MOST_HEAD = 16 << 10
MOST_BODY = 16 << 10
PATIENCE_S = 10.0  # for a client to send its request, and to take the answer
MOST_CLIENTS = 64
OPEN_PATH = "/healthz"
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
            409: "Conflict", 411: "Length Required", 413: "Content Too Large", 415: "Unsupported Media Type",
            421: "Misdirected Request", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
            503: "Service Unavailable"}  # fmt: skip
# What a browser may do with anything that comes from here: load our own files, ask us, and nothing else.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_FENCE = (
    f"content-security-policy: {_POLICY}",
    "x-content-type-options: nosniff", "referrer-policy: no-referrer", "x-frame-options: DENY",
    "cross-origin-opener-policy: same-origin", "cross-origin-resource-policy: same-origin",
    "permissions-policy: camera=(), geolocation=(), microphone=(), payment=(), usb=()",
)  # fmt: skip
_FIRST_LINE = re.compile(r"([A-Z]{1,16}) (/[\x21-\x7e]{0,4095}) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}):[ \t]*([\x20-\x7e\t]*)")


class Answer(NamedTuple):
    """What is sent back."""

    status: int
    body: bytes
    content_type: str = "application/json"


class Stream(NamedTuple):
    """What is sent piece by piece, for as long as the client takes it."""

    pieces: AsyncIterator[bytes]
    content_type: str = "text/event-stream"


class _Asked(NamedTuple):
    method: str
    path: str
    query: Mapping[str, str]
    headers: tuple[tuple[str, str], ...]

    def all_of(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]


Answers = Callable[[str, Mapping[str, str]], Answer | Stream | Awaitable[Answer]]  # a path and its query
Deeds = Callable[[str, bytes], Awaitable[Answer]]  # a path and the JSON that was posted to it


class GuardServer:
    """Listens; what it answers is somebody else's. Without `deeds` it only reads; who shows `read_token` only may."""

    def __init__(
        self,
        answers: Answers,
        token: str,
        hosts: tuple[str, ...] = (),
        deeds: Deeds | None = None,
        read_token: str | None = None,
        files: Mapping[str, Answer] | None = None,
    ) -> None:
        """`files`: what anybody may have, by its path."""
        self._answers, self._deeds, self._files = answers, deeds, files or {}
        self._digest = hashlib.sha256(token.encode()).digest()
        self._reads = None if read_token is None else hashlib.sha256(read_token.encode()).digest()
        self._named = {host.lower() for host in hosts}
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.StreamWriter, bool] = {}  # in the order they came; whether it has sent its request
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """Begin to listen; OSError if the place is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MOST_HEAD)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._make_room()
        self._clients[writer] = False
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                stream = await self._converse(reader, writer)
                patience.reschedule(None)
                if stream is not None:
                    await _send_pieces(reader, writer, stream)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone, or says nothing
        finally:
            self._clients.pop(writer, None)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    def _make_room(self) -> None:
        """Whoever says nothing goes first, the longest there before the others: a new one must be heard at once."""
        if len(self._clients) >= MOST_CLIENTS:
            oldest = next((one for one, has_asked in self._clients.items() if not has_asked), next(iter(self._clients)))
            del self._clients[oldest]
            oldest.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream | None:
        """Answer; what goes on for longer is handed back."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            await _refuse(reader, writer, error(431, "the headers are too large"))
            return None
        self._clients[writer] = True
        asked = _read(head)
        refusal = error(400, "this is not HTTP") if asked is None else self._refusal(asked)
        if asked is None or refusal is not None:
            assert refusal is not None
            # A body that is not read would take the answer with it.
            has_body = asked is not None and asked.method not in ("GET", "HEAD")
            await (_refuse(reader, writer, refusal) if has_body else _send(writer, refusal, is_head=_is_head(asked)))
            return None
        body = await reader.readexactly(_length(asked)) if asked.method == "POST" else b""
        found = await self._answer(asked, body)
        if isinstance(found, Answer):
            await _send(writer, found, is_head=_is_head(asked))
            return None
        writer.write(_head(200, found.content_type, None))
        return None if _is_head(asked) else found

    def _refusal(self, asked: _Asked) -> Answer | None:
        """Why it is not even looked at; None if it is."""
        if not self._is_ours(asked.all_of("host")):
            return error(421, "the Host header names neither an address nor a name that is allowed here")
        if asked.method not in ("GET", "HEAD", "POST") or (asked.method == "POST" and self._deeds is None):
            return error(405, "guard's API takes GET, HEAD and POST" if self._deeds else "guard's API only reads")
        if asked.method == "POST" and not self._is_from_us(asked):
            return error(403, "this was sent by another page than guard's own")
        shown = asked.all_of("authorization")
        is_open = asked.path == OPEN_PATH or (asked.path in self._files and asked.method != "POST")
        if not is_open and not self._may(shown, self._digest):
            if not self._may(shown, self._reads):
                return error(401, "show the token as a bearer token in the Authorization header")
            if asked.method == "POST":
                return error(403, "this token only reads")
        return _wrong_post(asked) if asked.method == "POST" else None

    def _is_from_us(self, asked: _Asked) -> bool:
        """Whether no other page's script sent it: browsers say so themselves, whatever else the request holds."""
        site, origins = asked.all_of("sec-fetch-site"), asked.all_of("origin")
        if any(one not in ("same-origin", "none") for one in site) or len(origins) > 1:
            return False
        if not origins:
            return True  # no browser
        found = re.fullmatch(r"https?://([^/@\s]{1,300})", origins[0].strip().lower())
        if found is None:
            return False
        # Behind a proxy the Host may be another one than the browser's; then only a name that was allowed.
        return found[1] == asked.all_of("host")[0].strip().lower() or found[1].partition(":")[0] in self._named

    async def _answer(self, asked: _Asked, body: bytes) -> Answer | Stream:
        if asked.method != "POST" and asked.path in self._files:
            return self._files[asked.path]
        try:
            if asked.method == "POST":
                assert self._deeds is not None, "looked at before"
                return await self._deeds(asked.path, body)
            found = self._answers(asked.path, asked.query)
            return found if isinstance(found, Answer | Stream) else await found
        except Exception as problem:  # the watching goes on whatever a question does
            return error(500, f"a mistake of ours: {type(problem).__name__}")

    def _is_ours(self, hosts: list[str]) -> bool:
        if len(hosts) != 1:
            return False
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::\d{1,5})?", hosts[0].strip())
        if found is None:
            return False
        name = found[1].lower()
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _may(self, shown: list[str], digest: bytes | None) -> bool:
        scheme, _, token = shown[0].partition(" ") if len(shown) == 1 else ("", "", "")
        same = digest is not None and hmac.compare_digest(hashlib.sha256(token.strip().encode()).digest(), digest)
        return same and scheme.lower() == "bearer"


def error(status: int, message: str) -> Answer:
    """A refusal."""
    return Answer(status, json.dumps({"error": message}).encode())


def _is_head(asked: _Asked | None) -> bool:
    return asked is not None and asked.method == "HEAD"


def _wrong_post(asked: _Asked) -> Answer | None:
    kinds, lengths = asked.all_of("content-type"), asked.all_of("content-length")
    if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
        return error(415, "post JSON, and say so: Content-Type: application/json")
    if len(lengths) != 1 or asked.all_of("transfer-encoding") or not re.fullmatch(r"[0-9]{1,9}", lengths[0]):
        return error(411, "say how long it is: Content-Length")
    return error(413, f"more than {MOST_BODY} bytes") if int(lengths[0]) > MOST_BODY else None


def _length(asked: _Asked) -> int:
    return int(asked.all_of("content-length")[0])


def _read(head: bytes) -> _Asked | None:
    """The request in these bytes; None if they are none."""
    first, *rest = head[:-4].decode("latin-1").split("\r\n")
    line = _FIRST_LINE.fullmatch(first)
    pairs = [_HEADER.fullmatch(one) for one in rest]
    if line is None or any(pair is None for pair in pairs):
        return None
    path, _, query = line[2].partition("?")
    try:
        asked = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=20))
    except ValueError:
        return None
    headers = tuple((pair[1].lower(), pair[2].rstrip()) for pair in pairs if pair is not None)
    return _Asked(line[1], unquote(path), asked, headers)


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, found: Answer) -> None:
    """Answer, and take a little of what is still sent: a connection that is closed over it loses the answer."""
    await _send(writer, found, is_head=False)
    writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            for _ in range(16):
                if not await reader.read(MOST_HEAD):
                    return


async def _send(writer: asyncio.StreamWriter, found: Answer, *, is_head: bool) -> None:
    writer.write(_head(found.status, found.content_type, len(found.body)) + (b"" if is_head else found.body))
    await writer.drain()


def _head(status: int, content_type: str, length: int | None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Answer')}", f"content-type: {content_type}", *_FENCE,
        *([] if length is None else [f"content-length: {length}"]), "cache-control: no-store", "connection: close",
    ]  # fmt: skip
    if status == 401:
        lines.append("www-authenticate: Bearer")
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n"


async def _hung_up(reader: asyncio.StreamReader) -> None:
    """Until the client has closed its end; what it still says is not heard."""
    while await reader.read(MOST_HEAD):
        pass


async def _send_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: Stream) -> None:
    """One after the other, until either side ends it; who does not take one in time is left."""
    gone = asyncio.ensure_future(_hung_up(reader))
    following: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(stream.pieces, None))
            await asyncio.wait({gone, following}, return_when=asyncio.FIRST_COMPLETED)
            piece = following.result() if following.done() and not gone.done() else None
            if piece is None:
                return
            writer.write(piece)
            async with asyncio.timeout(PATIENCE_S):
                await writer.drain()
    finally:
        for task in (gone, following):
            if task is not None and not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        close = getattr(stream.pieces, "aclose", None)
        if close is not None:
            await close()
