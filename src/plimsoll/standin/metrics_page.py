"""The text of vLLM's own metrics on GET /metrics as a release writes it, from the figures of one engine.

    page = EnginePage("0.32.0", "tiny", cache_labels={"block_size": "16"}, created=1.79e9)
    page.text(figures)

What does not change is made once, by prometheus_client as in vLLM, and shared by all pages of the same release, model and
context; a page only fills in numbers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple, cast

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from plimsoll.errors import BadInput
from plimsoll.standin.request import ENDS, VALVES, Figures
from plimsoll.vllm.metrics import metrics_of
from plimsoll.vllm.versions import Behaviour, Coverage, newest, wheels

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
)  # fmt: skip
# Values of labels that not every release knows.
LATER_VALUES = {"error": Behaviour.ERROR_REASON, "repetition": Behaviour.REPETITION_REASON}
# Registered whatever the flags; the flag only makes them move.
ALWAYS_THERE = frozenset(row.name for row in ROWS if row.name.startswith("vllm:estimated_"))


class Families(Collector):
    """Metrics that are given, for prometheus_client to write."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def text(self) -> str:
        return generate_latest(self).decode()


class Shown(NamedTuple):
    """A row of the table as one release shows it."""

    row: Row
    kind: str
    names_engine: bool
    by: str  # the label that tells samples apart, "" for none
    values: tuple[str, ...]  # and its values


class EnginePage:
    def __init__(
        self, release: str, model_name: str, engine: str = "0", *, cache_labels: Mapping[str, str], created: float
    ) -> None:
        """`cache_labels` are those of vllm:cache_config_info; `created`: when the engine's figures began, unix seconds."""
        self._static = (release, model_name, engine)
        self._metrics = metrics_shown(release)
        self._created = _number(created)
        cache = Metric("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        cache.add_sample(cache.name, {**cache_labels, "engine": engine}, 1)
        self._cache = Families([cache]).text()
        self._edges: tuple[tuple[float, ...], ...] | None = None
        self._template = ""

    def text(self, figures: Figures) -> str:
        edges = tuple(figures.histograms[metric.row.histogram].edges for metric in self._metrics if metric.row.histogram)
        if edges != self._edges:
            self._edges, self._template = edges, _template(*self._static, edges)
        numbers: list[str] = []
        for row, kind, _, _, values in self._metrics:
            if row.read is None:
                histogram = figures.histograms[row.histogram]
                rising = [_number(count) for count in accumulate(histogram.counts)]
                numbers += [*rising, rising[-1], _number(histogram.total), self._created]
                continue
            numbers += [_number(row.read(figures, value)) for value in values]
            if kind == "counter":
                numbers += [self._created] * len(values)
        return self._template % tuple(numbers) + self._cache


def _number(value: float) -> str:
    if type(value) is int and 0 <= value < 1_000_000:  # most of a page
        return f"{value}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


@functools.cache
def metrics_shown(release: str) -> tuple[Shown, ...]:
    """vLLM's own metrics that a release shows whatever the flags, in the order of the page, the cache's configuration aside."""
    if release not in wheels() or Coverage.CACHE_LABELS.begins_after(release):
        raise BadInput(f"no page of vLLM {release}: only those from {Coverage.CACHE_LABELS.first} to {newest()} are known")
    known = metrics_of(release)
    shown: list[Shown] = []
    for row in ROWS:
        entry = known.get(row.name)
        if entry is None or entry["engine"] != "V1" or (entry["shown"] != "always" and row.name not in ALWAYS_THERE):
            continue
        labels = cast("list[str]", entry["labels"])
        more = [label for label in labels if label not in ("model_name", "engine")]
        values = tuple(value for value in row.by if value not in LATER_VALUES or LATER_VALUES[value].is_in(release))
        shown.append(Shown(row, str(entry["type"]), "engine" in labels, more[0] if more else "", values))
    return tuple(shown)


@functools.lru_cache(maxsize=64)
def _template(release: str, model_name: str, engine: str, edges: tuple[tuple[float, ...], ...]) -> str:
    """All lines of vLLM's own with a place for each number; `edges` of the histograms in their order."""
    metrics: list[Metric] = []
    left = iter(edges)
    for row, kind, names_engine, by, values in metrics_shown(release):
        labels = {"model_name": model_name, **({"engine": engine} if names_engine else {})}
        sets = [{**labels, by: value} if by else labels for value in values]
        metric = Metric(row.name.removesuffix("_total") if kind == "counter" else row.name, row.meaning, kind)
        if kind == "histogram":
            for edge in (*next(left), math.inf):
                metric.add_sample(f"{row.name}_bucket", {**labels, "le": _number(edge)}, 0)
            metric.add_sample(f"{row.name}_count", labels, 0)
            metric.add_sample(f"{row.name}_sum", labels, 0)
        for one in sets if kind != "histogram" else ():
            metric.add_sample(row.name, one, 0)
        for one in sets if kind != "gauge" else ():
            metric.add_sample(f"{metric.name}_created", one, 0)
        metrics.append(metric)
    return re.sub(r"(?m)^([^#].*) 0\.0$", r"\1 %s", Families(metrics).text().replace("%", "%%"))
