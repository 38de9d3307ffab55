"""Answers of our own: JSON, and errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]


class Answer(NamedTuple):
    """One answer, to be sent by whoever holds the connection."""

    status: int
    body: Mapping[str, Any]
    headers: Headers = ()

    def encoded(self) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """The body as bytes, and the headers that go with it."""
        body = json.dumps(self.body, separators=(",", ":"), default=str).encode()
        return body, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *self.headers]


def error(status: int, message: str, kind: str, headers: Headers = ()) -> Answer:
    """An error as OpenAI's API words one."""
    return Answer(status, {"error": {"message": message, "type": kind, "param": None, "code": status}}, headers)


def busy(message: str, retry_after_s: int) -> Answer:
    """503: come again later, or elsewhere at once; the connection is closed so that the next one goes through the balancer."""
    return error(503, message, "ServiceUnavailableError", retry_headers(retry_after_s))


def retry_headers(retry_after_s: int) -> Headers:
    """When to come again, and over another connection."""
    return ((b"retry-after", str(retry_after_s).encode()), (b"connection", b"close"))


async def send_answer(send: Send, answer: Answer, *, is_head: bool = False) -> None:
    """Send it whole."""
    body, headers = answer.encoded()
    if not any(name == b"cache-control" for name, _ in headers):
        headers.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else body})


async def refuse_websocket(scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
    """Refuse a websocket before it opens: with the answer where the server can send one, else with `try again later`."""
    await receive()  # websocket.connect
    if "websocket.http.response" in (scope.get("extensions") or {}):
        body, headers = answer.encoded()
        await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body})
    else:
        await send({"type": "websocket.close", "code": 1013, "reason": "try again later"})


def with_headers(message: Message, extra: Iterable[tuple[bytes, bytes]]) -> Message:
    """The start of a response with these headers in place of any of the same name."""
    added = list(extra)
    names = {name for name, _ in added}
    kept = [(name, value) for name, value in message.get("headers", ()) if bytes(name).lower() not in names]
    return {**message, "headers": [*kept, *added]}
