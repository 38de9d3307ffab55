"""GET /metrics: the page of the engine's figures, the gate's behind it, and what faults make of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from plimsoll.inside.answers import Receive, Send
from plimsoll.standin.page import HttpFigures, Page, ProcessFigures
from plimsoll.standin.page_server import http_text, process_text
from plimsoll.standin.serve.leaving import listening
from plimsoll.standin.serve.process import process_figures
from plimsoll.standin.serve.sending import VARY, part, send_bytes
from plimsoll.standin.serve.service import Service

KIND = b"text/plain; version=1.0.0; charset=utf-8"
OLD_KIND = b"text/plain; version=0.0.4; charset=utf-8"
CUT_AT = 0.6  # of the page
HUGE_PIECE = 64 * 1024
LIES = ("NaN", "+Inf", "-1.0", "-Inf", "1e+308")
MISSING = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")


class Metrics:
    """The page of one server."""

    def __init__(
        self, service: Service, more: Callable[[], bytes] | None = None, *, has_stats: bool = True, is_alone: bool = True
    ) -> None:
        """`more` is what stands behind vLLM's own: the gate's. Without `has_stats` the engine tells nothing of itself.

        `is_alone`: no other server is in this process.
        """
        config = service.engine.config
        now = time.time()
        self.http = HttpFigures(now)
        self._service = service
        self._more = more
        self._has_stats = has_stats
        self._page = Page(config.release, service.names[0], cache_labels=config.cache_labels, created=now)
        self._frozen: bytes | None = None
        self._is_alone = is_alone
        self._first_resident = self._host_resident()

    def text(self) -> bytes:
        """The page now."""
        if self._has_stats:
            body = self._page.text(self._service.engine.figures, self.http, self._process()).encode()
        else:
            body = (process_text(self._process()) + http_text(self.http)).encode()
        return body if self._more is None else body + self._more()

    def _process(self) -> ProcessFigures:
        return process_figures(self._host_resident() - self._first_resident, is_alone=self._is_alone)

    def _host_resident(self) -> int:
        """What the simulated worker has on the host."""
        return int(self._service.engine.memory.figures()["host_memory"]["resident"] or 0)

    async def answer(self, receive: Receive, send: Send, method: str = "GET") -> int:
        """Send it, as the faults want it; how many bytes there were."""
        if method != "GET":
            return await self._by_the_mount(send, method)
        faults, now_ns = self._service.engine.faults, self._service.driver.now_ns()
        if not faults.all:
            body = self.text()
        elif (huge := faults.active("huge-page", now_ns)) is not None:
            return await self._flood(receive, send, int(huge.value))
        else:
            body = self._faulty(now_ns)
        await send_bytes(send, 200, body, KIND)
        return len(body)

    async def _by_the_mount(self, send: Send, method: str) -> int:
        """What vLLM has mounted behind its own route for the page answers every other method, with an older kind of text."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", OLD_KIND), VARY]})
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else self.text()})
        return 0

    def _faulty(self, now_ns: int) -> bytes:
        faults = self._service.engine.faults
        if faults.active("frozen-gauges", now_ns) is not None:
            self._frozen = self._frozen or self.text()
        else:
            self._frozen = None
        body = self._frozen or self.text()
        if faults.active("lying-page", now_ns) is not None:
            body = lie(body)
        if faults.active("cut-page", now_ns) is not None:
            body = cut(body)
        return body

    async def _flood(self, receive: Receive, send: Send, size: int) -> int:
        """A page that goes on and on; never more than a piece of it is in memory, and nobody else waits for its end."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", KIND), VARY]})
        sent = 0
        async with listening(receive) as client:
            client.begin()
            for piece in _pieces(self.text(), size):
                await send(part(piece))
                sent += len(piece)
                await asyncio.sleep(0)  # whoever has left takes everything at once
                if client.is_gone:
                    return sent
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return sent


def _pieces(first: bytes, size: int) -> Iterator[bytes]:
    yield first[:size]
    sent, number = len(first), 0
    while sent < size:
        lines: list[bytes] = []
        length = 0
        while length < HUGE_PIECE:
            lines.append(b'vllm:standin_padding{number="%d"} 1.0\n' % number)
            length += len(lines[-1])
            number += 1
        yield b"".join(lines)[: size - sent]
        sent += length


def cut(body: bytes) -> bytes:
    """A page that ends in the middle of a number."""
    end = body.find(b"\n", int(len(body) * CUT_AT))
    return body[: end - 2] if end > 0 else body[: int(len(body) * CUT_AT)]


def lie(body: bytes) -> bytes:
    """A page of which nothing can be believed: no numbers, infinities, negative counters, and some of it missing."""
    lines: list[str] = []
    for number, line in enumerate(body.decode().splitlines()):
        if any(name in line for name in MISSING):
            continue
        if line.startswith("#"):
            lines.append(line)
            continue
        lines.append(f"{line.rpartition(' ')[0]} {LIES[number % len(LIES)]}")
    return ("\n".join(lines) + "\n").encode()
