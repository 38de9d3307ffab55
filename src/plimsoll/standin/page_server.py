"""What a page says of the server itself: its process, its interpreter, and the HTTP requests it has answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.standin.exposition import head, histogram_lines, histogram_numbers, number, value_line
from plimsoll.standin.figures import Histogram

# Requests for these leave no trace on the page; a path that has one of them anywhere in it does not either.
NOT_COUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
FINE_EDGES = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
COARSE_EDGES = (0.1, 0.5, 1.0)
_SIZE = "Content length of {} by handler. Only value of header is respected. Otherwise ignored. No percentile calculated. "
_FINE = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
_COARSE = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "


class ProcessFigures(NamedTuple):
    """The server's process as it is now; what is None, or empty, is not shown."""

    virtual: int | None = None  # bytes
    resident: int | None = None  # bytes
    start_time: float | None = None  # unix s
    cpu_seconds: float | None = None
    open_fds: int | None = None
    max_fds: int | None = None
    python: Mapping[str, str] | None = None  # implementation, major, minor, patchlevel, version
    collections: Sequence[Mapping[str, int]] = ()  # of garbage, one for each generation, as gc.get_stats() tells them


_PROCESS = (
    ("virtual", "process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    ("resident", "process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    ("start_time", "process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."),
    ("cpu_seconds", "process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
    ("open_fds", "process_open_fds", "gauge", "Number of open file descriptors."),
    ("max_fds", "process_max_fds", "gauge", "Maximum number of open file descriptors."),
)
_COLLECTIONS = (
    ("collected", "python_gc_objects_collected_total", "Objects collected during gc"),
    ("uncollectable", "python_gc_objects_uncollectable_total", "Uncollectable objects found during GC"),
    ("collections", "python_gc_collections_total", "Number of times this generation was collected"),
)


def process_text(process: ProcessFigures) -> str:
    """The first lines of a page."""
    parts: list[str] = []
    for key, name, meaning in _COLLECTIONS if process.collections else ():
        parts.append(head(name, "counter", meaning))
        for generation, counts in enumerate(process.collections):
            parts.append(value_line(name, {"generation": str(generation)}) % number(counts[key]))
    if process.python is not None:
        parts.append(head("python_info", "gauge", "Python platform information"))
        parts.append(value_line("python_info", process.python) % number(1))
    for field, name, kind, meaning in _PROCESS:
        value: float | None = getattr(process, field)
        if value is not None:
            parts.append(f"{head(name, kind, meaning)}{name} {number(value)}\n")
    return "".join(parts)


class _Size:
    __slots__ = ("count", "created", "total")

    def __init__(self, created: float) -> None:
        self.count, self.total, self.created = 0, 0, created


class HttpFigures:
    """The requests a server has answered, told apart as vLLM's page tells them."""

    def __init__(self, created: float) -> None:
        """`created`: when the server began to count, in unix seconds."""
        self.created = created
        self.durations = Histogram(FINE_EDGES)
        self.requests: dict[tuple[str, str, str], list[float]] = {}  # handler, method, status -> how many, since when
        self.sizes: dict[str, tuple[_Size, _Size]] = {}  # handler -> of requests, of answers
        self.by_handler: dict[tuple[str, str], tuple[Histogram, float]] = {}  # handler, method -> durations, since when

    def observe(
        self,
        handler: str,
        method: str,
        status: int,
        *,
        seconds: float,
        request_bytes: int,
        answer_bytes: int,
        now: float,
        is_route: bool = True,
    ) -> None:
        """One answered request. `handler` is the route, or the path asked for where no route has it.

        `seconds` until the last byte was sent. The bytes are those of the Content-Length headers, 0 where there is none.
        """
        if any(part in handler for part in NOT_COUNTED):
            return
        handler = handler if is_route else "none"
        count = self.requests.setdefault((handler, method, f"{str(status)[0]}xx"), [0, now])
        count[0] += 1
        for size, length in zip(
            self.sizes.setdefault(handler, (_Size(now), _Size(now))), (request_bytes, answer_bytes), strict=True
        ):
            size.count += 1
            size.total += length
        self.durations.observe(seconds)
        self.by_handler.setdefault((handler, method), (Histogram(COARSE_EDGES), now))[0].observe(seconds)


def http_text(http: HttpFigures) -> str:
    """The last lines of a page."""
    parts = _requests(http)
    parts += _sizes(http, "http_request_size_bytes", _SIZE.format("incoming requests"), 0)
    parts += _sizes(http, "http_response_size_bytes", _SIZE.format("outgoing responses"), 1)
    fine, coarse = "http_request_duration_highr_seconds", "http_request_duration_seconds"
    parts += [head(fine, "histogram", _FINE), histogram_lines(fine, {}, FINE_EDGES) % (*histogram_numbers(http.durations),)]
    parts += [head(f"{fine}_created", "gauge", _FINE), f"{fine}_created {number(http.created)}\n"]
    parts.append(head(coarse, "histogram", _COARSE))
    created: list[str] = []
    for (handler, method), (durations, since) in http.by_handler.items():
        labels = {"handler": handler, "method": method}
        parts.append(histogram_lines(coarse, labels, COARSE_EDGES) % (*histogram_numbers(durations),))
        created.append(value_line(f"{coarse}_created", labels) % number(since))
    return "".join(parts + _since(f"{coarse}_created", _COARSE, created))


def _since(name: str, meaning: str, lines: list[str]) -> list[str]:
    """When each sample came to be: nothing, not even a head, while there is none."""
    return [head(name, "gauge", meaning), *lines] if lines else []


def _requests(http: HttpFigures) -> list[str]:
    meaning = "Total number of requests by method, status and handler."
    parts, created = [head("http_requests_total", "counter", meaning)], []
    for (handler, method, status), (count, since) in http.requests.items():
        labels = {"handler": handler, "method": method, "status": status}
        parts.append(value_line("http_requests_total", labels) % number(count))
        created.append(value_line("http_requests_created", labels) % number(since))
    return parts + _since("http_requests_created", meaning, created)


def _sizes(http: HttpFigures, name: str, meaning: str, which: int) -> list[str]:
    parts, created = [head(name, "summary", meaning)], []
    for handler, both in http.sizes.items():
        labels, size = {"handler": handler}, both[which]
        parts.append(value_line(f"{name}_count", labels) % number(size.count))
        parts.append(value_line(f"{name}_sum", labels) % number(size.total))
        created.append(value_line(f"{name}_created", labels) % number(size.created))
    return parts + _since(f"{name}_created", meaning, created)
