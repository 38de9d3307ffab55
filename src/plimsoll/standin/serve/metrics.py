"""GET /metrics: the page of the engine's figures, then the gate's, with the faults of the page and the counts of HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    Summary,
    generate_latest,
)
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plimsoll.inside.answers import path_of
from plimsoll.standin.metrics_page import EnginePage
from plimsoll.standin.serve.service import Service

CUT_AT = 0.6  # of the page
HUGE_LINES = 1500  # of a huge page that are in memory at once: 64 KiB
LIES = ("NaN", "+Inf", "-1.0", "-Inf", "1e+308")
MISSING = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
# Requests for these are not counted, nor are those for a path with one of them anywhere in it.
NOT_COUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
FINE_EDGES = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_SIZE = "Content length of {} by handler. Only value of header is respected. Otherwise ignored. No percentile calculated. "
_FINE = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
_COARSE = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "


class HttpFigures:
    """The counts of a server's answered requests, with the labels of the library that vLLM counts them with."""

    def __init__(self, registry: CollectorRegistry) -> None:
        help_text, by = "Total number of requests by method, status and handler.", ("method", "status", "handler")
        self.requests = Counter("http_requests_total", help_text, by, registry=registry)
        self.sizes = [
            Summary(f"http_{name}_size_bytes", _SIZE.format(what), ("handler",), registry=registry)
            for name, what in (("request", "incoming requests"), ("response", "outgoing responses"))
        ]
        self.fine = Histogram("http_request_duration_highr_seconds", _FINE, buckets=FINE_EDGES, registry=registry)
        self.coarse = Histogram(
            "http_request_duration_seconds", _COARSE, ("method", "handler"), buckets=(0.1, 0.5, 1), registry=registry
        )


class Counting:
    """The layer that counts answers; `paths` are the server's own, any other path counts as "none"."""

    def __init__(self, app: ASGIApp, http: HttpFigures, paths: Collection[str]) -> None:
        self.app = app
        self._http = http
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope["path"], scope.get("root_path", "")) if scope["type"] == "http" else "/metrics"
        if any(part in path for part in NOT_COUNTED):
            return await self.app(scope, receive, send)
        began, status, size = time.monotonic(), 500, 0

        async def sizing(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status, size = message["status"], _length(message["headers"])
            await send(message)

        try:
            await self.app(scope, receive, sizing)
        finally:
            http, method, seconds = self._http, scope["method"], time.monotonic() - began
            handler = path if path in self._paths and status != 405 else "none"
            http.requests.labels(method, f"{str(status)[0]}xx", handler).inc()
            for summary, length in zip(http.sizes, (_length(scope["headers"]), size), strict=True):
                summary.labels(handler).observe(length)
            http.fine.observe(seconds)
            http.coarse.labels(method, handler).observe(seconds)
        return None


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    length = next((bytes(value) for name, value in headers if name == b"content-length"), b"")
    return int(length) if length.isdigit() else 0


class ProcessFigures(ProcessCollector):
    """The figures of this server's process. A fleet shares one process: then the figures of the whole process are left out."""

    def __init__(self, added: Callable[[], int], *, is_alone: bool, registry: CollectorRegistry) -> None:
        """`added`: the bytes of host memory that a fault pretends to hold."""
        self._added = added
        self._is_alone = is_alone
        super().__init__(registry=registry)

    def collect(self) -> Iterable[Metric]:
        """Yields the figures now; none where the system has no /proc."""
        for metric in super().collect():
            if metric.name == "process_resident_memory_bytes":
                metric.samples = [sample._replace(value=sample.value + self._added()) for sample in metric.samples]
            elif not self._is_alone and metric.name != "process_start_time_seconds":
                continue
            yield metric


class Metrics:
    def __init__(self, service: Service, more: CollectorRegistry, *, is_alone: bool = True) -> None:
        """`more` are the gate's metrics, after vLLM's own. `is_alone`: no other server is in this process."""
        config = service.engine.config
        self._service = service
        self._process, http = CollectorRegistry(), CollectorRegistry()
        GCCollector(self._process)
        PlatformCollector(self._process)
        first = self._host_resident()
        ProcessFigures(lambda: self._host_resident() - first, is_alone=is_alone, registry=self._process)
        self.http = HttpFigures(http)
        self._behind = [http, more]
        page = EnginePage(config.release, service.names[0], cache_labels=config.cache_labels, created=time.time())
        self._page = page if service.options.has_stats else None
        self._frozen: bytes | None = None

    def _host_resident(self) -> int:
        return int(self._service.engine.memory.figures()["host_memory"]["resident"] or 0)

    def text(self) -> bytes:
        page = b"" if self._page is None else self._page.text(self._service.engine.figures).encode()
        return b"".join((generate_latest(self._process), page, *map(generate_latest, self._behind)))

    async def answer(self, _service: Service, _request: Request) -> Response:
        faults, now_ns = self._service.engine.faults, self._service.driver.now_ns()
        headers = {"content-type": CONTENT_TYPE_LATEST}
        if (huge := faults.active("huge-page", now_ns)) is not None:
            return StreamingResponse(_flood(self.text(), int(huge.value)), headers=headers)
        is_frozen = faults.active("frozen-gauges", now_ns) is not None
        self._frozen = (self._frozen or self.text()) if is_frozen else None
        body = self._frozen or self.text()
        if faults.active("lying-page", now_ns) is not None:
            body = lie(body)
        if faults.active("cut-page", now_ns) is not None:
            body = cut(body)
        return Response(body, headers=headers)


async def _flood(first: bytes, size: int) -> AsyncIterator[bytes]:
    """Yields a huge page; never more than a piece of it is in memory, and other clients do not wait for its end."""
    yield first[:size]
    sent, number = len(first), 0
    while sent < size:
        piece = b"".join(b'vllm:standin_padding{number="%d"} 1.0\n' % one for one in range(number, number + HUGE_LINES))
        yield piece[: size - sent]
        sent, number = sent + len(piece), number + HUGE_LINES
        await asyncio.sleep(0)  # a client that has left takes every piece at once


def cut(body: bytes) -> bytes:
    end = body.find(b"\n", int(len(body) * CUT_AT))
    return body[: end - 2] if end > 0 else body[: int(len(body) * CUT_AT)]


def lie(body: bytes) -> bytes:
    """Returns the page with unbelievable values: NaN, infinities, negative counters, and with some metrics missing."""
    lines: list[str] = []
    for number, line in enumerate(body.decode().splitlines()):
        if not any(name in line for name in MISSING):
            lines.append(line if line.startswith("#") else f"{line.rpartition(' ')[0]} {LIES[number % len(LIES)]}")
    return ("\n".join(lines) + "\n").encode()
