"""How answers leave: JSON as vLLM's framework writes it, and streams of events."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from plimsoll.inside.answers import Headers, Message, Send

DONE = b"data: [DONE]\n\n"
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
NO_VARY = (b"vary", b"")
VARY = (b"vary", b"Origin")  # every answer has it: vLLM lets a browser in by its origin


class JsonAnswer(NamedTuple):
    """One answer, whole."""

    status: int
    body: Any
    headers: Headers = ()


def dumped(value: Any) -> bytes:
    """Without blanks, and with letters as they are; half a letter (a lone surrogate) cannot be written and becomes a `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event_of(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + dumped(value) + b"\n\n"


async def send_json(send: Send, answer: JsonAnswer) -> None:
    """Send it."""
    await send_bytes(send, answer.status, dumped(answer.body), b"application/json", answer.headers)


async def send_bytes(send: Send, status: int, body: bytes, kind: bytes = b"", headers: Headers = ()) -> None:
    """Send a whole body; `kind` is its content type, none for an empty one."""
    found: list[tuple[bytes, bytes]] = [(b"content-length", str(len(body)).encode())]
    if kind:
        found.append((b"content-type", kind))
    own = () if any(name == VARY[0] for name, _ in headers) else (VARY,)
    headers = tuple(one for one in headers if one != NO_VARY)
    await send({"type": "http.response.start", "status": status, "headers": [*found, *headers, *own]})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Send) -> None:
    """200, before the first token is there."""
    await send({"type": "http.response.start", "status": 200, "headers": [EVENTS, VARY]})


def part(body: bytes) -> Message:
    """One part of a stream."""
    return {"type": "http.response.body", "body": body, "more_body": True}


async def end_stream(send: Send, body: bytes) -> None:
    """The last part; the empty one behind it is what ends a stream in vLLM's framework, too."""
    await send(part(body))
    await send({"type": "http.response.body", "body": b"", "more_body": False})
