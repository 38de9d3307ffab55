"""One HTTP request and its answer, for those who write to the world: one deadline, a size limit, no redirect, no second try.

What matters to the caller when there is no answer is whether the request may have been read. `Lost.was_sent` tells: before the
connection stood nothing can have happened; afterwards nobody knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from plimsoll.errors import BadInput

MOST_BYTES = 256 << 10
HEAD_BYTES = 32 << 10
MOST_INTERIM = 4  # answers that only say that one is to come


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}  # by their names in small letters

    def table(self) -> Mapping[str, Any]:
        """The JSON object in the body; an empty one for anything else."""
        try:
            return table(json.loads(self.body))
        except (ValueError, RecursionError):
            return {}


class Lost(NamedTuple):
    """No answer, or none that is whole."""

    why: str  # what the server does, in words that go on from its name
    was_sent: bool  # whether the other side may have read the request


class Server:
    """Where to ask: http://HOST:PORT, https://HOST:PORT (with a path before all others, if need be) or unix:/PATH."""

    def __init__(self, url: str, trust: Callable[[], ssl.SSLContext] | None = None) -> None:
        """BadInput if it is none of these; a name or a password in it is refused, since addresses are shown.

        `trust` is asked at every call by https, where others than the machine's own authorities are to be believed.
        """
        if not url.isascii() or not url.isprintable() or " " in url:
            raise BadInput("the address holds letters that an address cannot have")
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else ""
        try:
            parts = urlsplit("http://localhost" if self._socket else url)
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise BadInput("the address has no port that could be one")
        if "@" in parts.netloc:
            raise BadInput("the address holds a name or a password: give them separately")
        if (self._socket and not self._socket.startswith("/")) or parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("the address is neither http://HOST:PORT nor unix:/PATH")
        self.is_secure = parts.scheme == "https"
        self._trust = trust or functools.cache(ssl.create_default_context)
        self._host, self._port = parts.hostname, port or (443 if self.is_secure else 80)
        self._path, self._query = parts.path, parts.query
        self.netloc = parts.netloc
        self.shown = url if self._socket else f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        deadline_s: float,
        most_bytes: int = MOST_BYTES,
    ) -> Reply | Lost:
        """Ask once; never raises for what the other side does, and ends within the deadline. With 0 bytes no body is read."""
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            return Lost("cannot be asked: the login has letters in it that no header may have", was_sent=False)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(deadline_s):
                request = self._request(method, path, body, headers)
                reader, writer = await self._connect()
                writer.write(request)
                # A server may answer and hang up without having read all of it: its answer counts.
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                return await _read(reader, most_bytes)
        except TimeoutError:
            why = f"did not answer within {round(deadline_s, 1):g} s"
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as problem:
            why = _trouble(problem, was_sent=writer is not None)
        finally:
            if writer is not None:
                writer.transport.abort()  # closing politely may wait for the other side
        return Lost(why, was_sent=writer is not None)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._socket:
            return await asyncio.open_unix_connection(self._socket, limit=HEAD_BYTES)
        trust = self._trust() if self.is_secure else None
        return await asyncio.open_connection(self._host, self._port, ssl=trust, limit=HEAD_BYTES)

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        target = (f"{self._path.rstrip('/')}{path}" if path else self._path) or "/"
        target += f"?{self._query}" if self._query else ""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.netloc}", "User-Agent: plimsoll", "Connection: close",
                 "Accept: application/json", f"Content-Length: {len(body)}"]  # fmt: skip
        lines += ["Content-Type: application/json"] if body else []
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _trouble(problem: Exception, *, was_sent: bool) -> str:
    if isinstance(problem, ssl.SSLError):
        return f"cannot be reached safely ({problem.reason or 'TLS'})"
    if was_sent and not isinstance(problem, OSError | EOFError):
        return f"gave no HTTP that we read ({type(problem).__name__})"
    number = getattr(problem, "errno", None)  # asyncio's own words hold the address; a failed lookup has a number below 0
    known = os.strerror(number) if isinstance(number, int) and number > 0 else getattr(problem, "strerror", None)
    return f"{'broke off its answer' if was_sent else 'cannot be reached'} ({known or type(problem).__name__})"


async def _read(reader: asyncio.StreamReader, most_bytes: int) -> Reply:
    for _ in range(MOST_INTERIM + 1):
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        found = re.fullmatch(r"HTTP/1\.[01] ([1-5][0-9]{2})(?: .*)?", first)
        if found is None:
            raise ValueError("no status")
        if found[1] >= "200":
            fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            return Reply(int(found[1]), await _body(reader, int(found[1]), fields, most_bytes), fields)
    raise ValueError("no answer after many beginnings")


async def _body(reader: asyncio.StreamReader, status: int, fields: Mapping[str, str], most_bytes: int) -> bytes:
    if status in (204, 304) or most_bytes == 0:
        return b""
    if "chunked" in fields.get("transfer-encoding", "").lower():
        return await _chunks(reader, most_bytes)
    if (length := fields.get("content-length")) is not None:
        return await reader.readexactly(_size(length, 10, most_bytes))
    body = b""
    while part := await reader.read(HEAD_BYTES):
        body += part
        if len(body) > most_bytes:
            raise ValueError("too large")
    return body


async def _chunks(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = _size(line.partition(b";")[0].decode("latin-1").strip(), 16, most_bytes - len(body))
        if size == 0:
            return body  # what may follow is of no use, and the connection ends here
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("not a chunk")


def _size(text: str, base: int, most: int) -> int:
    if not re.fullmatch(r"[0-9a-fA-F]{1,12}", text) or int(text, base) > most:
        raise ValueError("too large, or no size")
    return int(text, base)


def table(found: object) -> Mapping[str, Any]:
    """A JSON object; an empty one for anything else."""
    return found if isinstance(found, dict) else {}


def number(found: object, most: float = 2.0**63) -> float | None:
    """A number that a figure can be; None for anything else."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < most:
        return None
    return found
