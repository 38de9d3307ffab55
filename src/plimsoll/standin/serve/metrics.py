"""GET /metrics: the page of the engine's figures, the gate's behind it, and what faults make of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from plimsoll.inside.answers import Message, Receive, Send
from plimsoll.standin.metrics_page import HttpFigures, Page, ProcessFigures, http_text, process_text
from plimsoll.standin.serve.fields import VARY, part, send_bytes
from plimsoll.standin.serve.service import Service

# Clients that leave while their answer is being sent: an answer that takes long is not sent to nobody.

LOOK_S = 0.1  # how soon a slow answer sees that it need not be slow any more


class ClientWatch:
    """An ear on one client; begun when its body has been read, or is of no interest any more."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether it has left, as far as was heard."""
        return self._task is not None and self._task.done()

    def begin(self) -> None:
        """Listen from now on; once more is as good as once."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    async def wait(self, seconds: float) -> None:
        """So long, or until it leaves."""
        self.begin()
        assert self._task is not None, "it was begun"
        await asyncio.wait({self._task}, timeout=seconds)

    def end(self) -> None:
        """Listen no more."""
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


@contextlib.asynccontextmanager
async def listening(receive: Receive) -> AsyncIterator[ClientWatch]:
    """An ear on a client for as long as the block runs."""
    found = ClientWatch(receive)
    try:
        yield found
    finally:
        found.end()


def byte_by_byte(send: Send, client: ClientWatch, pause_s: Callable[[], float | None]) -> Send:
    """A `send` with a pause behind every byte; `pause_s` is asked for each, and None ends the slowness."""

    async def pause() -> bool:
        """Whether the next byte is to be alone, too."""
        passed = 0.0
        while (wanted := pause_s()) is not None and not client.is_gone:
            if passed >= wanted:
                return True
            piece = min(LOOK_S, wanted - passed)
            await client.wait(piece)
            passed += piece
        return False

    async def slowly(message: Message) -> None:
        body: bytes = message.get("body", b"")
        sent = 0
        if message["type"] == "http.response.body":
            while sent < len(body) - 1 and not client.is_gone:
                await send({"type": "http.response.body", "body": body[sent : sent + 1], "more_body": True})
                sent += 1
                if not await pause():
                    break
        await send({**message, "body": body[sent:]} if body else message)

    return slowly


# What the process of this server is like, as the kernel tells it; where the kernel does not (no /proc), nothing is made up.

PROC = Path("/proc")
PYTHON = {
    "implementation": platform.python_implementation(),
    **dict(zip(("major", "minor", "patchlevel"), platform.python_version_tuple(), strict=True)),
    "version": platform.python_version(),
}
# Places in /proc/self/stat behind the name of the process.
USER, SYSTEM, STARTED, VIRTUAL, RESIDENT = 11, 12, 19, 20, 21


def process_figures(added: int = 0, *, is_alone: bool = True, proc: Path = PROC) -> ProcessFigures:
    """This process now. `added` is host memory that a fault pretends to hold.

    One of a fleet shares its process with the others: what all of them use together is left out. What is resident stays, as a
    fault shows in it.
    """
    found = ProcessFigures(python=PYTHON, collections=gc.get_stats())
    try:
        fields = (proc / "self" / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        found = found._replace(
            resident=int(fields[RESIDENT]) * os.sysconf("SC_PAGE_SIZE") + added,
            start_time=_booted(proc) + int(fields[STARTED]) / ticks,
        )
        if is_alone:
            found = found._replace(
                virtual=int(fields[VIRTUAL]),
                cpu_seconds=(int(fields[USER]) + int(fields[SYSTEM])) / ticks,
                open_fds=sum(1 for _ in (proc / "self" / "fd").iterdir()),
                max_fds=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
    except (OSError, ValueError, IndexError):
        pass
    return found


def _booted(proc: Path) -> float:
    with (proc / "stat").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("btime "):
                return float(line.split()[1])
    raise ValueError("no btime")


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
        return int(self._service.engine.memory.figures()["host_memory"]["resident"] or 0)

    async def answer(self, receive: Receive, send: Send, method: str = "GET") -> int:
        """Send the page, changed by the active faults; returns its bytes."""
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
