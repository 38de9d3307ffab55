"""The text of GET /metrics as a release of vLLM writes it, from the figures of one engine and of the server around it.

    page = Page("0.32.0", "tiny", cache_labels={"block_size": "16"}, created=1.79e9)
    page.text(figures, http, process)

What does not change is made once and shared by all pages of the same release, model and context; a page only fills in numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.standin.request import ENDS, VALVES, Figures, Histogram
from plimsoll.vllm.metrics import metrics_of
from plimsoll.vllm.metrics_page import escaped_label
from plimsoll.vllm.versions import Behaviour, newest, wheels

# Prometheus' text format as prometheus_client writes it: numbers, labels, heads, and lines with a place for the number.
#
# A line is made once and filled often, so that a page costs no more than the numbers on it:
#
# template = value_line("vllm:num_requests_running", {"engine": "0"})      # 'vllm:num_requests_running{engine="0"} %s\n'
# template % number(12)


def number(value: float) -> str:
    """A number as Go would print it: an exponent from a million on, and never without a point or one."""
    if type(value) is int and 0 <= value < 1_000_000:  # most of a page
        return f"{value}.0"
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    whole, _, rest = text.partition(".")
    if value <= 0 or len(whole) <= 6 or not rest:
        return text
    digits = (whole + rest).rstrip("0")
    return f"{digits[0]}.{digits[1:]}".rstrip(".") + f"e+{len(whole) - 1:02d}"


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels by name, in braces; nothing at all where there are none."""
    return "{" + ",".join(f'{name}="{escaped_label(labels[name])}"' for name in sorted(labels)) + "}" if labels else ""


def head(name: str, kind: str, meaning: str) -> str:
    """The two lines before the samples of a metric."""
    plain = meaning.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {plain}\n# TYPE {name} {kind}\n"


def literal(text: str) -> str:
    """Text that stands in a template as it is."""
    return text.replace("%", "%%")


def value_line(name: str, labels: Mapping[str, str]) -> str:
    """A template of one sample."""
    return literal(name + labels_text(labels)) + " %s\n"


def histogram_lines(name: str, labels: Mapping[str, str], edges: tuple[float, ...]) -> str:
    """A template of all samples of a histogram; `histogram_numbers` fills it."""
    bounds = bounds_text(edges)
    buckets = "".join(value_line(f"{name}_bucket", {**labels, "le": bound}) for bound in bounds)
    return buckets + value_line(f"{name}_count", labels) + value_line(f"{name}_sum", labels)


@functools.lru_cache(maxsize=64)
def bounds_text(edges: tuple[float, ...]) -> tuple[str, ...]:
    """The edges and infinity, as they stand in the label `le`."""
    return tuple(number(edge) for edge in (*edges, math.inf))


def histogram_numbers(histogram: Histogram) -> list[str]:
    """How many were no larger than each edge, how many there were, and what they add up to."""
    rising = [number(count) for count in accumulate(histogram.counts)]
    return [*rising, rising[-1], number(histogram.total)]


# Every metric of vLLM's own that a stand-in's page shows: where its value comes from, and what HELP says of it.
#
# They stand in the order of the real page. Which of them a release has, with which labels, is in the catalogue
# (`plimsoll.vllm.metrics`); what is always nothing without a feature that the stand-in does not have is told as nothing.


class Row(NamedTuple):
    """One metric: its name on the page, what it says, and either the value for a label or a histogram's name."""

    name: str
    meaning: str
    read: Callable[[Figures, str], float] | None = None  # of the label's value; "" where no label tells samples apart
    histogram: str = ""
    by: tuple[str, ...] = ("",)  # the label's values, in their order


def _nothing(figures: Figures, _label: str) -> float:
    del figures
    return 0


_SLEEP = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
    "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
)
_REASON = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
    "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
    "Sum of all reasons equals vllm:num_requests_waiting."
)
_TIER = (
    "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, "
    "p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; "
    "sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
)
_EXTERNAL = "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {} tokens."
_FOR_MFU = "Estimated number of {} per GPU (for Model Flops Utilization calculations)."


def _source(figures: Figures, source: str) -> float:
    return {"local_compute": figures.prompt_computed, "local_cache_hit": figures.prompt_cached}.get(source, 0)


def _waiting(figures: Figures, reason: str) -> float:
    return figures.waiting_deferred if reason == "deferred" else figures.waiting - figures.waiting_deferred


ROWS: tuple[Row, ...] = (
    Row("vllm:estimated_flops_per_gpu_total", _FOR_MFU.format("floating point operations"), _nothing),
    Row("vllm:estimated_read_bytes_per_gpu_total", _FOR_MFU.format("bytes read from memory"), _nothing),
    Row("vllm:estimated_write_bytes_per_gpu_total", _FOR_MFU.format("bytes written to memory"), _nothing),
    Row("vllm:num_requests_running", "Number of requests in model execution batches.", lambda f, _: f.running),
    Row("vllm:num_requests_waiting", "Number of requests waiting to be processed.", lambda f, _: f.waiting),
    Row("vllm:num_requests_waiting_by_reason", _REASON, _waiting, by=("capacity", "deferred")),
    Row("vllm:engine_sleep_state", _SLEEP, lambda f, state: int(f.sleep_state == state),
        by=("awake", "weights_offloaded", "discard_all")),
    Row("vllm:gpu_cache_usage_perc",
        "GPU KV-cache usage. 1 means 100 percent usage.DEPRECATED: Use vllm:kv_cache_usage_perc instead.",
        lambda f, _: f.kv_usage),
    Row("vllm:gpu_prefix_cache_queries_total",
        "GPU prefix cache queries, in terms of number of queriedtokens. DEPRECATED: Use vllm:prefix_cache_queries instead.",
        lambda f, _: f.prefix_queries),
    Row("vllm:gpu_prefix_cache_hits_total",
        "GPU prefix cache hits, in terms of number of cached tokens. DEPRECATED: Use vllm:prefix_cache_hits instead.",
        lambda f, _: f.prefix_hits),
    Row("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda f, _: f.kv_usage),
    Row("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.",
        lambda f, _: f.prefix_queries),
    Row("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", lambda f, _: f.prefix_hits),
    Row("vllm:external_prefix_cache_queries_total", _EXTERNAL.format("queries", "queried"), _nothing),
    Row("vllm:external_prefix_cache_hits_total", _EXTERNAL.format("hits", "cached"), _nothing),
    Row("vllm:mm_cache_queries_total", "Multi-modal cache queries, in terms of number of queried items.", _nothing),
    Row("vllm:mm_cache_hits_total", "Multi-modal cache hits, in terms of number of cached items.", _nothing),
    Row("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", lambda f, _: f.preemptions),
    Row("vllm:prompt_tokens_total", "Number of prefill tokens processed.", lambda f, _: f.prompt_tokens),
    Row("vllm:prompt_tokens_by_source_total", "Number of prompt tokens by source.", _source,
        by=("local_compute", "local_cache_hit", "external_kv_transfer")),
    Row("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", lambda f, _: f.prompt_cached),
    Row("vllm:prompt_tokens_cached_by_source_total", _TIER, lambda f, tier: f.prefix_hits if tier == "device" else 0,
        by=("device", "host", "p2p", "disk", "external_unspecified")),
    Row("vllm:generation_tokens_total", "Number of generation tokens processed.", lambda f, _: f.generation_tokens),
    Row("vllm:request_success_total", "Count of successfully processed requests.", lambda f, end: f.success[end], by=ENDS),
    Row("vllm:admission_rejections_total", "Number of admission attempts rejected by a queue limit, by reason.",
        lambda f, valve: f.rejected[valve], by=VALVES),
    Row("vllm:request_prompt_tokens", "Number of prefill tokens processed.", histogram="prompt"),
    Row("vllm:request_generation_tokens", "Number of generation tokens processed.", histogram="output"),
    Row("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", histogram="step_tokens"),
    Row("vllm:request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.",
        histogram="max_output"),
    Row("vllm:request_params_n", "Histogram of the n request parameter.", histogram="params_n"),
    Row("vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", histogram="params_max_tokens"),
    Row("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", histogram="ttft"),
    Row("vllm:time_per_output_token_seconds",
        "Histogram of time per output token in seconds.DEPRECATED: Use vllm:inter_token_latency_seconds instead.",
        histogram="inter_token"),
    Row("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", histogram="inter_token"),
    Row("vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.",
        histogram="tpot"),
    Row("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", histogram="e2e"),
    Row("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", histogram="queue"),
    Row("vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", histogram="inference"),
    Row("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", histogram="prefill"),
    Row("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", histogram="decode"),
    Row("vllm:request_num_preemptions", "Histogram of the number of times a request was preempted.",
        histogram="request_preemptions"),
    Row("vllm:request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).", histogram="prefill_kv_computed"),
    Row("vllm:spec_decode_num_draft_tokens_total", "Number of draft tokens.", _nothing),
    Row("vllm:spec_decode_num_accepted_tokens_total", "Number of accepted tokens.", _nothing),
)  # fmt: skip
CACHE_CONFIG = Row("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", lambda _f, _: 1)

# What HELP said before a change, the newest first.
_QUERIES = "GPU prefix cache queries, in terms of number of queried tokens."
_HITS = "GPU prefix cache hits, in terms of number of cached tokens."
EARLIER: dict[str, tuple[tuple[Behaviour, str], ...]] = {
    "vllm:gpu_cache_usage_perc": ((Behaviour.KV_METRIC_NAMES, "GPU KV-cache usage. 1 means 100 percent usage."),),
    "vllm:gpu_prefix_cache_queries_total": (
        (Behaviour.GPU_METRIC_HELP, f"{_QUERIES}DEPRECATED: Use vllm:prefix_cache_queries instead."),
        (Behaviour.KV_METRIC_NAMES, _QUERIES),
    ),
    "vllm:gpu_prefix_cache_hits_total": (
        (Behaviour.GPU_METRIC_HELP, f"{_HITS}DEPRECATED: Use vllm:prefix_cache_hits instead."),
        (Behaviour.KV_METRIC_NAMES, _HITS),
    ),
    "vllm:time_per_output_token_seconds": ((Behaviour.INTER_TOKEN_METRIC, "Histogram of time per output token in seconds."),),
}
# Values of labels that not every release knows.
LATER_VALUES = {"error": Behaviour.ERROR_REASON, "repetition": Behaviour.REPETITION_REASON}
# Registered whatever the flags; the flag only makes them move.
ALWAYS_THERE = frozenset(row.name for row in ROWS if row.name.startswith("vllm:estimated_"))
# What these counted nobody here counts: whole blocks of each prompt.
LEFT_OUT_BEFORE = dict.fromkeys(
    ("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"), Behaviour.PREFIX_TOKENS
)


# What a page says of the server itself: its process, its interpreter, and the HTTP requests it has answered.

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


class _Metric(NamedTuple):
    """A row of the table as one release shows it."""

    row: Row
    kind: str
    meaning: str
    names_engine: bool
    by: tuple[str, tuple[str, ...]]  # the label that tells samples apart, "" for none, and its values


class Page:
    """The metrics page of one engine."""

    def __init__(
        self,
        release: str,
        model_name: str,
        engine: str = "0",
        *,
        cache_labels: Mapping[str, str],
        created: float,
        process: bool = True,
    ) -> None:
        """`cache_labels` are those of vllm:cache_config_info; `created`: when the engine's figures began, unix seconds.

        Without `process` nothing is told of the server's process: so it is where several share one page.
        """
        self._static = (release, model_name, engine)
        self._metrics = metrics_shown(release)
        self._created = number(created)
        self._shows_process = process
        labels = {**cache_labels, "engine": engine} if Behaviour.CACHE_CONFIG_ENGINE.is_in(release) else dict(cache_labels)
        config = CACHE_CONFIG
        self._cache = f"{head(config.name, 'gauge', config.meaning)}{config.name}{labels_text(labels)} {number(1)}\n"
        self._edges: tuple[tuple[float, ...], ...] | None = None
        self._template = ""

    def text(self, figures: Figures, http: HttpFigures, process: ProcessFigures) -> str:
        """The whole page now."""
        edges = tuple(figures.histograms[metric.row.histogram].edges for metric in self._metrics if metric.row.histogram)
        if edges != self._edges:
            self._edges, self._template = edges, _template(*self._static, edges)
        numbers: list[str] = []
        for row, kind, _, _, (_, values) in self._metrics:
            if row.read is None:
                numbers += histogram_numbers(figures.histograms[row.histogram])
                numbers.append(self._created)
                continue
            numbers += [number(row.read(figures, value)) for value in values]
            if kind == "counter":
                numbers += [self._created] * len(values)
        first = process_text(process) if self._shows_process else ""
        return "".join((first, self._template % tuple(numbers), self._cache, http_text(http)))


@functools.cache
def metrics_shown(release: str) -> tuple[_Metric, ...]:
    """vLLM's own metrics that a release shows whatever the flags, in the order of the page, the cache's configuration aside."""
    if release not in wheels() or not Behaviour.V1_ENGINE.is_in(release):
        raise BadInput(f"no page of vLLM {release}: only those from {Behaviour.V1_ENGINE.since} to {newest()} are known")
    known = metrics_of(release)
    shown: list[_Metric] = []
    for row in ROWS:
        entry = known.get(row.name)
        if entry is None or entry["engine"] != "V1":
            continue
        if entry["shown"] != "always" and row.name not in ALWAYS_THERE:
            continue
        if not LEFT_OUT_BEFORE.get(row.name, Behaviour.V1_ENGINE).is_in(release):
            continue
        meaning = row.meaning
        for change, earlier in EARLIER.get(row.name, ()):
            meaning = meaning if change.is_in(release) else earlier
        labels = entry["labels"]
        assert isinstance(labels, list | tuple)
        more = [str(label) for label in labels if label not in ("model_name", "engine")]
        values = tuple(value for value in row.by if LATER_VALUES.get(value, Behaviour.V1_ENGINE).is_in(release))
        shown.append(_Metric(row, str(entry["type"]), meaning, "engine" in labels, (more[0] if more else "", values)))
    return tuple(shown)


@functools.lru_cache(maxsize=64)
def _template(release: str, model_name: str, engine: str, edges: tuple[tuple[float, ...], ...]) -> str:
    """All lines of vLLM's own with a place for each number; `edges` of the histograms in their order."""
    parts: list[str] = []
    left = iter(edges)
    for row, kind, meaning, names_engine, (label, values) in metrics_shown(release):
        labels = {"model_name": model_name, **({"engine": engine} if names_engine else {})}
        sets = [{**labels, label: value} if label else labels for value in values]
        parts.append(literal(head(row.name, kind, meaning)))
        if kind == "histogram":
            parts.append(histogram_lines(row.name, labels, next(left)))
        else:
            parts += [value_line(row.name, one) for one in sets]
        if kind != "gauge":
            created = f"{row.name if kind == 'histogram' else row.name.removesuffix('_total')}_created"
            parts.append(literal(head(created, "gauge", meaning)))
            parts += [value_line(created, one) for one in sets]
    return "".join(parts)
