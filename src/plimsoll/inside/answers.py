"""Answers of our own: JSON, and errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from plimsoll.inside.settings import data_table

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]


class GateAnswer(NamedTuple):
    """One answer, which the holder of the connection sends."""

    status: int
    body: Mapping[str, Any]
    headers: Headers = ()

    def encoded(self) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        body = json.dumps(self.body, separators=(",", ":"), default=str).encode()
        return body, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *self.headers]


ERRORS = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 409: "ConflictError", 413: "BadRequestError",
    500: "InternalServerError", 501: "NotImplementedError", 502: "BadGatewayError", 503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}  # fmt: skip


def error(status: int, message: str, headers: Headers = (), *, param: str | None = None, kind: str = "") -> GateAnswer:
    """Returns an error in the form of OpenAI's API."""
    body = {"message": message, "type": kind or ERRORS[status], "param": param, "code": status}
    return GateAnswer(status, {"error": body}, headers)


def busy(message: str, retry_after_s: int) -> GateAnswer:
    """Returns a 503: retry later, or elsewhere at once. It closes the connection: a retry goes through the balancer."""
    return error(503, message, retry_headers(retry_after_s))


def retry_headers(retry_after_s: int) -> Headers:
    """Returns headers that tell the client when to retry, and to use another connection."""
    return ((b"retry-after", str(retry_after_s).encode()), (b"connection", b"close"))


async def send_answer(send: Send, answer: GateAnswer, *, is_head: bool = False) -> None:
    body, headers = answer.encoded()
    if not any(name == b"cache-control" for name, _ in headers):
        headers.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else body})


async def refuse(scope: Scope, receive: Receive, send: Send, answer: GateAnswer) -> None:
    """Answers a request, or refuses a websocket before it opens, with the answer where the server can send one there."""
    if scope["type"] != "websocket":
        await send_answer(send, answer, is_head=scope.get("method") == "HEAD")
        return
    await receive()  # websocket.connect
    if "websocket.http.response" in (scope.get("extensions") or {}):
        body, headers = answer.encoded()
        await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body})
    else:
        await send({"type": "websocket.close", "code": 1013, "reason": "try again later"})


def with_headers(message: Message, extra: Iterable[tuple[bytes, bytes]]) -> Message:
    """Returns the start of a response with these headers in place of any of the same name."""
    added = list(extra)
    names = {name for name, _ in added}
    kept = [(name, value) for name, value in message.get("headers", ()) if bytes(name).lower() not in names]
    return {**message, "headers": [*kept, *added]}


LARGEST_BODY = 64 * 1024


class AskRefused(Exception):
    """A request to one of our endpoints that is answered with an error; the text says why in one line."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def fields_of(body: bytes, known: tuple[str, ...]) -> dict[str, Any]:
    """Returns the object in the body, {} for an empty one. Raises AskRefused for an unknown field."""
    if not body.strip():
        return {}
    try:
        fields = json.loads(body, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise AskRefused("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise AskRefused("the body is not a JSON object")
    for name in fields:
        if name not in known:
            takes = f"there is: {', '.join(known)}" if known else "it takes none"
            raise AskRefused(f"there is no field {str(name)[:40]!r}; {takes}")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns one JSON object. Raises AskRefused for a name that comes twice: nobody knows which value is meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise AskRefused("a field appears twice")
    return fields


def number(fields: dict[str, Any], name: str, low: float, high: float, default: float | None = None) -> float | None:
    """Returns a number within its bounds, or the default where it is not given."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise AskRefused(f"{name} is not a number from {low:g} to {high:g}")
    return float(value)


def whole(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """Returns a whole number within its bounds, or None where it is not given."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise AskRefused(f"{name} is not a whole number from {low} to {high}")
    return value


def switch(fields: dict[str, Any], name: str) -> bool:
    """Returns True or False; False where it is not given."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise AskRefused(f"{name} is neither true nor false")
    return value


# A drain refuses only work, not requests that only read or that control the server.

OWN = "/plimsoll/"

# POST, but no work for the engine: these control it, and an operator needs them most while it drains.
STEERING = frozenset(data_table("steering"))
LOOKING = frozenset(("GET", "HEAD", "OPTIONS"))
RESPONSES = "/v1/responses/"


WORK = "work"  # in flight until it ends; a drain in phase two, or shedding, may refuse it
FOLLOW_UP = "follow-up"  # reads or cancels earlier work: in flight, never refused
ASIDE = "aside"  # neither


def route_of(kind: str, method: str, path: str) -> str:
    """Returns WORK, FOLLOW_UP or ASIDE for a request. An unknown path is WORK, so that a drain never lets it pass unseen."""
    if kind == "websocket":
        return WORK
    if path.startswith(RESPONSES) and (method in (*LOOKING, "DELETE") or path.endswith("/cancel")):
        return FOLLOW_UP
    if method in LOOKING or path.rstrip("/") in STEERING:
        return ASIDE
    return WORK


def path_of(scope_path: str, root_path: str) -> str:
    """Returns the path without the prefix that `--root-path` puts before it."""
    prefix = root_path.rstrip("/")
    if prefix and (scope_path == prefix or scope_path.startswith(f"{prefix}/")):
        return scope_path[len(prefix) :] or "/"
    return scope_path


# Behind a proxy on the same machine every client is 127.0.0.1, and uvicorn believes X-Forwarded-For from there; so the gate
# looks at no address and at no header but the token's own.

OFF = "off"
DENIED = "denied"
ALLOWED = "allowed"
SHORTEST = 16


class Tokens:
    """The digest of the token, never the token itself; the token's file is read again when it has changed."""

    def __init__(self, token: str, file: str = "", read: Callable[[], str] = str) -> None:
        self._file, self._read, self._stamp = file, read, _stamp(file)
        self._take(token)

    def _take(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest() if token else None
        self.is_short = 0 < len(token) < SHORTEST

    @property
    def is_set(self) -> bool:
        return self._digest is not None

    def judge(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Returns ALLOWED or DENIED for a request with these headers, or OFF where no token is set."""
        if self._file and (stamp := _stamp(self._file)) not in (None, self._stamp) and (news := self._read()):
            self._stamp = stamp
            self._take(news)
        if self._digest is None:
            return OFF
        shown = [value for name, value in headers if bytes(name).lower() == b"authorization"]
        allowed = False
        for value in shown:
            scheme, _, token = bytes(value).partition(b" ")
            same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
            allowed = allowed or (same and scheme.lower() == b"bearer")
        return ALLOWED if allowed and len(shown) == 1 else DENIED


def _stamp(file: str) -> tuple[int, int] | None:
    """Returns a file's mtime and inode, or None: a mounted secret changes the inode, an edit in place the mtime."""
    try:
        found = os.stat(file)  # noqa: PTH116 - pathlib would take longer than all else here
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
