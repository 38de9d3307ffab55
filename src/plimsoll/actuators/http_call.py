"""One HTTP request and its answer, for those who write to the world: one deadline, a size limit, no redirect, no second try.

What matters to the caller when there is no answer is whether the request may have been read. `Lost.was_sent` tells: before the
connection stood nothing can have happened; afterwards nobody knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from plimsoll.errors import BadInput

MOST_BYTES = 256 << 10
HEAD_BYTES = 16 << 10


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}  # by their names in small letters

    def table(self) -> Mapping[str, Any]:
        """The JSON object in the body; an empty one for anything else."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class Lost(NamedTuple):
    """No answer, or none that is whole."""

    why: str
    was_sent: bool  # whether the other side may have read the request


class Server:
    """Where to ask: http://HOST:PORT, https://HOST:PORT (with a path before all others, if need be) or unix:/PATH."""

    def __init__(self, url: str) -> None:
        """BadInput if it is none of these; a name or a password in it is refused, since addresses are shown."""
        if not url.isascii() or not url.isprintable() or " " in url:
            raise BadInput("the address holds letters that an address cannot have")
        self._path = url.removeprefix("unix:") if url.startswith("unix:") else ""
        try:
            parts = urlsplit("http://localhost" if self._path else url)
            port = parts.port
        except ValueError:
            raise BadInput("the address has no port that could be one") from None
        if parts.username or parts.password:
            raise BadInput("the address holds a name or a password: give them separately")
        if (self._path and not self._path.startswith("/")) or parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("the address is neither http://HOST:PORT nor unix:/PATH")
        self._trust = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, port or (443 if self._trust else 80)
        self._netloc = parts.netloc
        self._base = parts.path.rstrip("/")
        self._query = parts.query
        self.shown = url if self._path else f"{parts.scheme}://{parts.netloc}{self._base}"

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        deadline_s: float,
        most_bytes: int = MOST_BYTES,
    ) -> Reply | Lost:
        """Ask once; never raises for what the other side does, and ends within the deadline."""
        sent = False

        def note_sent() -> None:
            nonlocal sent
            sent = True

        try:
            async with asyncio.timeout(deadline_s):
                return await self._exchange(self._request(method, path, body, headers), most_bytes, note_sent)
        except TimeoutError:
            return Lost(f"no answer within {deadline_s:g} s", sent)
        except (OSError, asyncio.IncompleteReadError) as problem:
            why = getattr(problem, "strerror", None) or type(problem).__name__
            return Lost(f"the answer was cut off ({why})" if sent else f"it cannot be reached ({why})", sent)
        except (ValueError, asyncio.LimitOverrunError) as problem:
            return Lost(f"the answer is no HTTP that we read ({type(problem).__name__})", sent)

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        target = f"{self._base}{path}" or "/"
        target += f"?{self._query}" if self._query else ""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._netloc}", "User-Agent: plimsoll", "Connection: close",
                 "Accept: application/json", f"Content-Length: {len(body)}"]  # fmt: skip
        lines += ["Content-Type: application/json"] if body else []
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    async def _exchange(self, request: bytes, most_bytes: int, note_sent: Any) -> Reply:
        if self._path:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=HEAD_BYTES)
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._trust, limit=HEAD_BYTES)
        try:
            note_sent()
            writer.write(request)
            # A server may answer and hang up without having read all of it: its answer counts.
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return await _read(reader, most_bytes)
        finally:
            writer.transport.abort()  # closing politely may wait for the other side


async def _read(reader: asyncio.StreamReader, most_bytes: int) -> Reply:
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        first = lines[0].split(" ")
        if len(first) < 2 or not first[0].startswith("HTTP/1.") or len(first[1]) != 3 or not first[1].isdecimal():
            raise ValueError("no status")
        status = int(first[1])
        if status >= 200:  # the rest only says that an answer is to come
            break
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if status in (204, 304):
        return Reply(status, b"", fields)
    if "chunked" in fields.get("transfer-encoding", "").lower():
        return Reply(status, await _chunks(reader, most_bytes), fields)
    length = fields.get("content-length")
    if length is None:
        return Reply(status, await _until_the_end(reader, most_bytes), fields)
    if not length.isdecimal() or len(length) > 12 or int(length) > most_bytes:
        raise ValueError("too large")
    return Reply(status, await reader.readexactly(int(length)), fields)


async def _until_the_end(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    body = b""
    while part := await reader.read(HEAD_BYTES):
        body += part
        if len(body) > most_bytes:
            raise ValueError("too large")
    return body


async def _chunks(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    body = b""
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0].strip() or b"-1", 16)
        if size < 0 or len(body) + size > most_bytes:
            raise ValueError("too large")
        if size == 0:
            return body  # what may follow is of no use, and the connection ends here
        body += (await reader.readexactly(size + 2))[:-2]


def number(found: object, most: float = 2.0**63) -> float | None:
    """A number that a figure can be; None for anything else."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < most:
        return None
    return found


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token; BadInput if it is none that a header can hold."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput("the token holds letters that a token cannot have")
    return {"Authorization": f"Bearer {token}"}
