"""Every metric of vLLM's own that a stand-in's page shows: where its value comes from, and what HELP says of it.

They stand in the order of the real page. Which of them a release has, with which labels, is in the catalogue
(`plimsoll.engine.metrics`); what is always nothing without a feature that the stand-in does not have is told as nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from plimsoll.standin.figures import ENDS, VALVES, Figures


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

# What HELP said before a release, the newest first.
_QUERIES = "GPU prefix cache queries, in terms of number of queried tokens."
_HITS = "GPU prefix cache hits, in terms of number of cached tokens."
EARLIER: dict[str, tuple[tuple[str, str], ...]] = {
    "vllm:gpu_cache_usage_perc": (("0.9.2", "GPU KV-cache usage. 1 means 100 percent usage."),),
    "vllm:gpu_prefix_cache_queries_total": (
        ("0.10.0", f"{_QUERIES}DEPRECATED: Use vllm:prefix_cache_queries instead."),
        ("0.9.2", _QUERIES),
    ),
    "vllm:gpu_prefix_cache_hits_total": (
        ("0.10.0", f"{_HITS}DEPRECATED: Use vllm:prefix_cache_hits instead."),
        ("0.9.2", _HITS),
    ),
    "vllm:time_per_output_token_seconds": (("0.10.2", "Histogram of time per output token in seconds."),),
}
# The release that first knew a label's value.
SINCE = {"error": "0.13.0", "repetition": "0.17.0"}
# Registered whatever the flags; the flag only makes them move.
ALWAYS_THERE = frozenset(row.name for row in ROWS if row.name.startswith("vllm:estimated_"))
# What these counted nobody here counts: whole blocks of each prompt.
LEFT_OUT_BEFORE = {"vllm:gpu_prefix_cache_queries_total": "0.9.0", "vllm:gpu_prefix_cache_hits_total": "0.9.0"}
