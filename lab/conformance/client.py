"""One HTTP question, and everything about the answer that a client can see, as plain JSON.

An answer is recorded as a dict: `status`, `headers`, `whole` (false when the connection ended early), `compact` (its JSON
is written without spaces) and one of `json`, `page` (any other text), `events` (a stream's, each parsed) or nothing where
there was no body.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

LIMIT_S = 180.0
EVENT_END = "\n\n"
DONE = "[DONE]"

Seen = dict[str, Any]


class Ask(NamedTuple):
    """One request; `body` is sent as JSON, `raw` as it is."""

    method: str
    path: str
    body: Any = None
    raw: bytes | None = None
    headers: Mapping[str, str] = {}

    def data(self) -> bytes | None:
        """The bytes of the body."""
        if self.raw is not None:
            return self.raw
        return None if self.body is None else json.dumps(self.body).encode()

    def all_headers(self) -> dict[str, str]:
        """Its headers; a body is said to be JSON unless the request says otherwise."""
        own = dict(self.headers)
        if self.data() is not None and "Content-Type" not in own:
            own["Content-Type"] = "application/json"
        return {name: value for name, value in own.items() if value}


def see(port: int, ask: Ask, *, limit_s: float = LIMIT_S, on_first: Callable[[], None] | None = None) -> Seen:
    """Send one request and record the answer; no connection is status 0. `on_first` is called at the first byte of a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        connection.request(ask.method, ask.path, body=ask.data(), headers=ask.all_headers())
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return {"status": 0, "error": _kind(error)}
    body, error_name = _read(answer, on_first)
    connection.close()
    headers = {name.lower(): value.replace(f":{port}/", ":PORT/") for name, value in answer.getheaders()}
    seen: Seen = {"status": answer.status, "headers": headers, "whole": not error_name}
    return seen | _content(headers.get("content-type", ""), body)


def _kind(error: Exception) -> str:
    """What kind of end it was: a client may see a refused or a reset connection for the same reason."""
    return "timeout" if isinstance(error, TimeoutError) else "no answer"


def _read(answer: http.client.HTTPResponse, on_first: Callable[[], None] | None) -> tuple[bytes, str]:
    body = b""
    try:
        while part := answer.readline() if on_first else answer.read():
            body += part
            if on_first:
                on_first()
                on_first = None
    except http.client.IncompleteRead as error:
        return body + error.partial, "cut"
    except (OSError, http.client.HTTPException) as error:
        return body, _kind(error)
    return body, ""


def _content(kind: str, body: bytes) -> Seen:
    text = body.decode("utf-8", errors="replace")
    if kind.startswith("text/event-stream"):
        return {
            "compact": all(is_compact(event.removeprefix("data: ")) for event in text.split(EVENT_END)),
            "events": events_of(text),
        }
    if not body:
        return {}
    if kind.startswith("application/json"):
        try:
            return {"compact": is_compact(text), "json": json.loads(text)}
        except ValueError:
            return {"page": text}
    return {"page": text}


def events_of(text: str) -> list[Any]:
    """The events of a stream: parsed JSON, `[DONE]`, or the raw text where it is framed otherwise than `data: ...` and a
    blank line."""
    *whole, rest = text.split(EVENT_END)
    found: list[Any] = []
    for event in whole:
        payload = event.removeprefix("data: ")
        try:
            found.append(DONE if payload == DONE else json.loads(payload) if payload != event else {"raw": event})
        except ValueError:
            found.append({"raw": event})
    return [*found, {"raw": rest}] if rest else found


def is_compact(text: str) -> bool:
    """Whether a JSON text is written without a space; what is no JSON counts as such."""
    try:
        return text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        return True


class InFlight:
    """A request that runs in a thread of its own."""

    def __init__(self, port: int, ask: Ask, *, limit_s: float = LIMIT_S) -> None:
        self.begun = threading.Event()
        self.seen: Seen = {}
        self.took_s = 0.0
        self._thread = threading.Thread(target=self._run, args=(port, ask, limit_s), daemon=True)
        self._thread.start()

    def _run(self, port: int, ask: Ask, limit_s: float) -> None:
        started_s = time.monotonic()
        self.seen = see(port, ask, limit_s=limit_s, on_first=self.begun.set)
        self.took_s = time.monotonic() - started_s
        self.begun.set()

    @property
    def is_over(self) -> bool:
        """Whether the answer is in."""
        return not self._thread.is_alive()

    def result(self) -> Seen:
        """Wait for the answer."""
        self._thread.join()
        return self.seen


def see_together(port: int, asks: Sequence[Ask]) -> list[Seen]:
    """Send all at once and wait for all."""
    flights = [InFlight(port, ask) for ask in asks]
    return [flight.result() for flight in flights]
