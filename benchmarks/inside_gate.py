"""What the gate itself costs: microseconds a request and a streamed chunk, around an app that does nothing.

    python -m benchmarks.inside_gate

The same app is called bare, behind a middleware that only hands on (the least that any middleware can cost), and behind
the gate: serving, with shedding on, and while a drain admits. Rounds alternate; the best of each is shown.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

REQUESTS = 2_000
CHUNKS = 200
ROUNDS = 7
Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
CHUNK: Message = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
END: Message = {"type": "http.response.body", "body": b""}


class NullApp:
    """Reads a body and answers with as many chunks as it was made for."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        del scope
        await receive()
        await send(START)
        for _ in range(self._chunks):
            await send(CHUNK)
        await send(END)


class HandingOn:
    """The least that a middleware can be."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand it on, with a `send` of its own as any that looks at answers has."""

        async def handing_on(message: Message) -> None:
            await send(message)

        await self.app(scope, receive, handing_on)


class Fastapi:
    """Stands where vLLM's app does: holds the state that the gate looks at."""

    def __init__(self) -> None:
        self.state = self


async def _receive() -> Message:
    return {"type": "http.request", "body": b'{"model":"m","prompt":"p"}', "more_body": False}


async def _send(message: Message) -> None:
    del message


async def _time(app: App, requests: int) -> float:
    """Seconds for so many requests, one after the other."""
    scope: Scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "root_path": "", "query_string": b"",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json"), (b"authorization", b"Bearer k")], "app": Fastapi(),
    }  # fmt: skip
    began = time.perf_counter()
    for _ in range(requests):
        await app(scope, _receive, _send)
    return time.perf_counter() - began


def _gates(chunks: int) -> dict[str, App]:
    from plimsoll.inside import admission
    from plimsoll.inside.gate import Gate

    def gate(**settings: str) -> Gate:
        for name in ("PLIMSOLL_SHED_WAIT_S", "PLIMSOLL_DIR"):
            os.environ.pop(name, None)
        os.environ |= {"PLIMSOLL_DIR": tempfile.mkdtemp(prefix="plimsoll-bench-"), **settings}
        return Gate(HandingOn(NullApp(chunks)))

    draining = gate()
    core = draining._control  # noqa: SLF001 - set as an endpoint would
    assert core is not None
    begun = admission.Drain(epoch=1, since=time.monotonic(), until=time.monotonic() + 3600, quiet_s=3600, bound_s=3600)
    with core.shared.common.changing():
        core.shared.set_drain(begun)
    return {
        "no middleware": NullApp(chunks),
        "one that hands on": HandingOn(NullApp(chunks)),
        "gate, serving": gate(),
        "gate, shedding on": gate(PLIMSOLL_SHED_WAIT_S="10"),
        "gate, draining": draining,
    }


async def measure(chunks: int, requests: int) -> dict[str, float]:
    """The best time of each, in microseconds a request."""
    apps = _gates(chunks)
    best = dict.fromkeys(apps, float("inf"))
    for _ in range(ROUNDS):
        for name, app in apps.items():
            best[name] = min(best[name], await _time(app, requests) / requests * 1e6)
    return best


def main() -> None:
    """Print one row for each."""
    short = asyncio.run(measure(1, REQUESTS))
    long = asyncio.run(measure(CHUNKS + 1, REQUESTS // 20))
    base, base_chunk = short["no middleware"], (long["no middleware"] - short["no middleware"]) / CHUNKS
    print(f"{'':<22}{'us a request':>14}{'added':>9}{'us a chunk':>12}{'added':>9}")
    for name, each in short.items():
        chunk = (long[name] - each) / CHUNKS
        print(f"{name:<22}{each:>14.2f}{each - base:>9.2f}{chunk:>12.3f}{chunk - base_chunk:>9.3f}")


if __name__ == "__main__":
    main()
