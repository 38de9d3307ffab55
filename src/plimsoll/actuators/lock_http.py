"""One question to a lock's service by HTTP/1.1, and its answer, both JSON: a deadline, a limit on every size, no redirects."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from plimsoll.errors import BadInput

BODY_MAX = 1 << 20
_HEAD_MAX = 32 << 10
_INTERIM_MAX = 4
_PLACES = {"http": 80, "https": 443}


class Unanswered(Exception):
    """There is no answer to be believed; `why` goes on from the service's name. It may have done what was asked."""

    def __init__(self, why: str, *, was_sent: bool = True) -> None:
        super().__init__(why)
        self.why, self.was_sent = why, was_sent


class Reply(NamedTuple):
    """What was answered; `body` is empty where a refusal came with something that is no JSON."""

    status: int
    body: Mapping[str, Any]


Trust = Callable[[], ssl.SSLContext]


def place_of(url: str) -> SplitResult:
    """The parts of a service's address; BadInput if it is none. A login does not belong into it."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in _PLACES and bool(parts.hostname) and not parts.query and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not url.isascii() or re.search(r"[\s\x00-\x20\x7f]", url):
        raise BadInput("a lock's address must look like http://HOST:PORT or https://HOST:PORT")
    if "@" in parts.netloc:
        raise BadInput("a lock's address must not hold a login: give user and password apart")
    return parts


async def call(
    place: SplitResult,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    *,
    seconds: float,
    trust: Trust | None = None,
    login: str = "",
) -> Reply:
    """The answer, or Unanswered. `login` goes into the Authorization header."""
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {place.path.rstrip('/')}{path} HTTP/1.1", f"Host: {place.netloc}", "User-Agent: plimsoll",
            "Accept: application/json", "Connection: close"]  # fmt: skip
    head += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    if login and not (login.isascii() and login.isprintable()):
        raise Unanswered("cannot be asked: the login has letters in it that no header may have", was_sent=False)
    head += [f"Authorization: {login}"] if login else []
    asked = "\r\n".join(head).encode("ascii") + b"\r\n\r\n" + data
    was_sent = False
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            context = trust() if trust is not None and place.scheme == "https" else None
            reader, writer = await asyncio.open_connection(
                place.hostname, place.port or _PLACES[place.scheme], ssl=context, limit=_HEAD_MAX
            )
            was_sent = True
            writer.write(asked)
            await writer.drain()
            status, found = await _read(reader)
    except TimeoutError:
        raise Unanswered(f"did not answer within {seconds:.1f} s", was_sent=was_sent) from None
    except ssl.SSLError as problem:
        raise Unanswered(f"cannot be reached safely ({problem.reason or 'TLS'})", was_sent=was_sent) from None
    except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as problem:
        why = "broke off its answer, or gave none that is HTTP" if was_sent else _words(problem)
        raise Unanswered(why, was_sent=was_sent) from None
    finally:
        if writer is not None:
            writer.transport.abort()  # one question a connection: nothing more is to be said or heard
    return _reply(status, found)


def _words(problem: Exception) -> str:
    number = getattr(problem, "errno", None)  # asyncio's own words hold the address; a failed lookup has a number below 0
    known = os.strerror(number) if isinstance(number, int) and number > 0 else getattr(problem, "strerror", None)
    return f"cannot be reached ({known or type(problem).__name__})"


def _reply(status: int, data: bytes) -> Reply:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return Reply(status, found)
    if 200 <= status < 300:
        raise Unanswered("answers something that is not JSON")
    return Reply(status, {})


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    for _ in range(_INTERIM_MAX):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        found = re.fullmatch(r"HTTP/1\.[01] ([1-5][0-9]{2})(?: .*)?", first)
        if found is None:
            raise ValueError("not HTTP")
        if found[1][0] != "1":
            headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            return int(found[1]), await _body(reader, headers)
    raise ValueError("no answer after many beginnings")


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _chunks(reader)
    length = headers.get("content-length")
    if length is not None:
        return await reader.readexactly(_size(length, 10))
    data = b""
    while piece := await reader.read(_HEAD_MAX):
        data += piece
        _size(str(len(data)), 10)
    return data


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while True:
        size = _size((await reader.readuntil(b"\r\n")).partition(b";")[0].decode("latin-1").strip(), 16)
        if size == 0:
            return data  # what follows are trailers, which nobody needs
        _size(str(len(data) + size), 10)
        data += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("not a chunk")


def _size(text: str, base: int) -> int:
    if not re.fullmatch(r"[0-9a-fA-F]{1,8}", text) or int(text, base) > BODY_MAX:
        raise ValueError("too large, or no size")
    return int(text, base)
