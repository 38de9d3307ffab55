"""Our names for vLLM's figures, and what each release calls them.

A figure has one name here, whatever vLLM calls it this year. `resolve` answers for a release; `on_page` answers for a page
whose version is unknown, newer than the catalogue or a fork's: by what the page shows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from plimsoll.vllm import versions
from plimsoll.vllm.versions import Behaviour, Coverage, Engine


class Unit(StrEnum):
    """The unit that a figure counts in."""

    RATIO = "ratio"  # 0 to 1, also where vLLM's own name says perc
    REQUESTS = "requests"
    TOKENS = "tokens"
    PREEMPTIONS = "preemptions"
    SECONDS = "seconds"
    BLOCKS = "blocks"
    ITEMS = "items"
    STATE = "state"
    INFO = "info"


@dataclass(frozen=True)
class Figure:
    """One thing we want to know, and the names it has had, newest first."""

    name: str
    unit: Unit
    meaning: str
    names: tuple[str, ...]
    traps: tuple[str, ...] = ()
    blocks_before: Behaviour | None = None  # until this the figure counted blocks, not what `unit` says
    nearest: str | None = None  # a metric of another kind that says something similar where none of `names` existed


@dataclass(frozen=True)
class ResolvedMetric:
    """The metric that carries a figure."""

    figure: Figure
    exposition: str  # the name on the page
    type: str  # gauge, counter, histogram
    labels: tuple[str, ...]
    unit: Unit
    is_exact: bool = True  # False: it is a relative of the figure, of another type or unit; never do sums with it
    # always; conditional (a flag, or an engine that is not the default); hidden (--show-hidden-metrics-for-version)
    shown: str = "always"


_FROZEN = "moves only when the engine steps: frozen while paused, wedged or idle"

FIGURES: tuple[Figure, ...] = (
    Figure(
        "kv_cache_usage", Unit.RATIO, "share of KV blocks in use", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("a ratio from 0 to 1, whatever its name says", _FROZEN, "cached blocks that nobody references count as free"),
    ),
    Figure(
        "running", Unit.REQUESTS, "requests in the running batch", ("vllm:num_requests_running",),
        (_FROZEN, "includes prompts that are still being read in chunks"),
    ),
    Figure(
        "waiting", Unit.REQUESTS, "requests that wait for room", ("vllm:num_requests_waiting",),
        (_FROZEN, "preempted requests are in here", "a request queued during a pause does not show"),
    ),
    Figure("waiting_by_reason", Unit.REQUESTS, "waiting requests by reason", ("vllm:num_requests_waiting_by_reason",)),
    Figure(
        "preemptions", Unit.PREEMPTIONS, "requests thrown out of the batch to make room", ("vllm:num_preemptions_total",),
        ("lags: rises only when the victim is scheduled again",),
    ),
    Figure(
        "success", Unit.REQUESTS, "finished requests by reason", ("vllm:request_success_total",),
        ("counts aborted and failed requests too: look at finished_reason",),
    ),
    Figure(
        "prefix_queries", Unit.TOKENS, "tokens looked up in the prefix cache",
        ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        ("counted at admission; since 0.11.1 preempted requests that resume are left out",), Behaviour.PREFIX_TOKENS,
        "vllm:gpu_prefix_cache_hit_rate",
    ),
    Figure(
        "prefix_hits", Unit.TOKENS, "tokens found in the prefix cache",
        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        ("counted at admission; since 0.11.1 preempted requests that resume are left out",), Behaviour.PREFIX_TOKENS,
        "vllm:gpu_prefix_cache_hit_rate",
    ),
    Figure(
        "external_prefix_queries", Unit.TOKENS, "tokens looked up through a KV connector",
        ("vllm:external_prefix_cache_queries_total",),
    ),
    Figure(
        "external_prefix_hits", Unit.TOKENS, "tokens found through a KV connector", ("vllm:external_prefix_cache_hits_total",)
    ),
    Figure(
        "prompt_tokens", Unit.TOKENS, "prompt tokens processed", ("vllm:prompt_tokens_total",),
        ("recomputation after a preemption is not counted",),
    ),
    Figure("prompt_tokens_by_source", Unit.TOKENS, "prompt tokens by where they came from",
           ("vllm:prompt_tokens_by_source_total",)),
    Figure("prompt_tokens_cached", Unit.TOKENS, "prompt tokens served from a cache", ("vllm:prompt_tokens_cached_total",)),
    Figure("generation_tokens", Unit.TOKENS, "tokens generated", ("vllm:generation_tokens_total",)),
    Figure(
        "step_tokens", Unit.TOKENS, "tokens per step; its count is the number of steps", ("vllm:iteration_tokens_total",),
        ("a histogram although its name ends in _total",),
    ),
    Figure("ttft", Unit.SECONDS, "time to first token", ("vllm:time_to_first_token_seconds",)),
    Figure(
        "inter_token", Unit.SECONDS, "time between tokens",
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    Figure("tpot", Unit.SECONDS, "mean time per output token of a request", ("vllm:request_time_per_output_token_seconds",)),
    Figure("e2e", Unit.SECONDS, "whole time of a request", ("vllm:e2e_request_latency_seconds",)),
    Figure(
        "queue_time", Unit.SECONDS, "time until first scheduled", ("vllm:request_queue_time_seconds",),
        ("time in the queue after a preemption is not in it",),
    ),
    Figure("prefill_time", Unit.SECONDS, "time spent on the prompt", ("vllm:request_prefill_time_seconds",)),
    Figure("decode_time", Unit.SECONDS, "time spent on the output", ("vllm:request_decode_time_seconds",)),
    Figure("prompt_length", Unit.TOKENS, "prompt tokens per request", ("vllm:request_prompt_tokens",)),
    Figure("output_length", Unit.TOKENS, "output tokens per request", ("vllm:request_generation_tokens",)),
    Figure(
        "request_preemptions", Unit.PREEMPTIONS, "preemptions per finished request", ("vllm:request_num_preemptions",),
        ("the first bucket holds both 0 and 1",),
    ),
    Figure("admission_rejections", Unit.REQUESTS, "requests refused at the door", ("vllm:admission_rejections_total",),
           ("has no engine label",)),
    Figure("sleep_state", Unit.STATE, "whether the engine is awake", ("vllm:engine_sleep_state",)),
    Figure(
        "cache_config", Unit.INFO, "the cache's configuration as labels", ("vllm:cache_config_info",),
        ("the label set changes with every release",
         "num_gpu_blocks x block_size is wrong for hybrid models: use kv_cache_size_tokens (0.24)"),
    ),
    Figure("multimodal_cache_queries", Unit.ITEMS, "items looked up in the multimodal cache", ("vllm:mm_cache_queries_total",)),
    Figure("multimodal_cache_hits", Unit.ITEMS, "items found in the multimodal cache", ("vllm:mm_cache_hits_total",)),
    Figure("lora_requests", Unit.INFO, "adapters running and waiting, as labels", ("vllm:lora_requests_info",),
           ("its value is a time stamp", "unreliable with data parallelism")),
    Figure("corrupted_requests", Unit.REQUESTS, "requests whose logits held NaN", ("vllm:corrupted_requests_total",)),
    Figure("swapped", Unit.REQUESTS, "requests swapped to host memory (V0)", ("vllm:num_requests_swapped",)),
    Figure("cpu_cache_usage", Unit.RATIO, "share of host KV blocks in use (V0 swap)", ("vllm:cpu_cache_usage_perc",)),
    Figure("kv_offload_cpu_usage", Unit.RATIO, "share of the host KV cache in use",
           ("vllm:kv_offload_cpu_cache_usage_perc",)),
    Figure("kv_block_lifetime", Unit.SECONDS, "from allocation to reuse of a sampled block",
           ("vllm:kv_block_lifetime_seconds",)),
    Figure("kv_block_idle", Unit.SECONDS, "idle time of a sampled block before reuse",
           ("vllm:kv_block_idle_before_evict_seconds",)),
    Figure("draft_tokens", Unit.TOKENS, "tokens proposed by the draft", ("vllm:spec_decode_num_draft_tokens_total",)),
    Figure("accepted_tokens", Unit.TOKENS, "proposed tokens that were accepted",
           ("vllm:spec_decode_num_accepted_tokens_total",)),
)  # fmt: skip


@functools.cache
def _by_name() -> Mapping[str, Figure]:
    return {figure.name: figure for figure in FIGURES}


def figure(name: str) -> Figure:
    """The figure of this name."""
    return _by_name()[name]


def resolve(name: str, engine: Engine) -> ResolvedMetric | None:
    """The metric that carries a figure in a release; None if nothing there does.

    Of several, the one shown by default is preferred, then the newest name. Where the figure did not exist yet but a
    relative did (a hit rate instead of hits and queries), the relative comes back marked `is_exact=False`.
    """
    wanted = figure(name)
    found = [r for n in wanted.names if (r := _in_release(wanted, n, engine.release)) is not None]
    if found:
        return min(found, key=lambda r: r.shown == "hidden")
    if wanted.nearest is not None:
        relative = _in_release(wanted, wanted.nearest, engine.release)
        if relative is not None:
            return ResolvedMetric(
                wanted, relative.exposition, relative.type, relative.labels, Unit.RATIO, is_exact=False, shown=relative.shown
            )
    return None


def on_page(name: str, families: Collection[str]) -> str | None:
    """The exposition name of a figure among those a page shows; None if it shows none of them."""
    for candidate in figure(name).names:
        if candidate in families or candidate.removesuffix("_total") in families:
            return candidate
    return None


def _default_engine(release: str) -> str:
    return "V1" if Behaviour.V1_ENGINE.is_in(release) else "V0"


@functools.cache
def metrics_of(release: str) -> Mapping[str, Mapping[str, object]]:
    """Every metric a release can export, by exposition name; the engine that runs by default rules."""
    found: dict[str, Mapping[str, object]] = {}
    first = _default_engine(release)
    for key, stretches in versions.rows("metrics").items():
        exposition, engine = key.rsplit(" ", 1)
        for plain in stretches:
            if versions.is_within(plain, release) and (exposition not in found or engine == first):
                found[exposition] = {"engine": engine, **plain}
    return found


def _in_release(wanted: Figure, exposition: str, release: str) -> ResolvedMetric | None:
    known = metrics_of(release).get(exposition) or metrics_of(release).get(exposition.removesuffix("_total"))
    if known is None:
        return None
    labels = known.get("labels", ())
    assert isinstance(labels, list | tuple)
    runs = known["engine"] in (_default_engine(release), "any")
    unit = Unit.BLOCKS if wanted.blocks_before and not wanted.blocks_before.is_in(release) else wanted.unit
    shown = str(known["shown"]) if runs else "conditional"
    return ResolvedMetric(wanted, exposition, str(known["type"]), tuple(labels), unit, shown=shown)


def find(name: str, engine: Engine, families: Collection[str]) -> str | None:
    """The metric that carries a figure on this page: by version where that is known for sure, else by what is there."""
    resolved = resolve(name, engine) if engine.is_exact else None
    if resolved is not None and resolved.is_exact:
        spellings = {resolved.exposition, resolved.exposition.removesuffix("_total")}
        if spellings & set(families):
            return resolved.exposition
    return on_page(name, families)


_LABELS_FROM = Coverage.CACHE_LABELS.first


class _Label(NamedTuple):
    name: str
    first: str = _LABELS_FROM
    last: str | None = None
    value: str = "None"  # as vLLM prints the default


# The labels of vllm:cache_config_info: the fields of vLLM's CacheConfig, which every few releases gains or loses some.
_LABELS = (
    _Label("_block_size_resolved", "0.18.0", value="True"),
    _Label("block_size"),
    _Label("cache_dtype", value="auto"),
    _Label("cache_hit_alignment_tokens", "0.32.0"),
    _Label("calculate_kv_scales", _LABELS_FROM, "0.27.1", value="False"),
    _Label("cpu_kvcache_space_bytes", _LABELS_FROM, "0.19.1"),
    _Label("cpu_offload_gb", _LABELS_FROM, "0.17.1", value="0"),
    _Label("cpu_offload_params", "0.17.0", "0.17.1", value="set()"),
    _Label("effective_attention_block_size", "0.31.0"),
    _Label("enable_mamba_fine_grained_prefix_cache", "0.30.0", "0.30.0", value="False"),
    _Label("enable_mamba_shared_prefix_checkpoint", "0.31.0", value="False"),
    _Label("enable_prefix_caching"),
    _Label("gpu_memory_utilization"),
    _Label("hash_block_size", "0.20.0", "0.25.1"),
    _Label("hash_block_size", "0.32.0"),
    _Label("is_attention_free", value="False"),
    _Label("kv_cache_dtype_skip_layers", "0.19.0", value="[]"),
    _Label("kv_cache_layout", "0.29.0"),
    _Label("kv_cache_max_concurrency", "0.24.0"),
    _Label("kv_cache_memory_bytes"),
    _Label("kv_cache_size_tokens", "0.24.0"),
    _Label("kv_offloading_backend", "0.11.1", "0.13.0"),
    _Label("kv_offloading_backend", "0.14.0", value="native"),
    _Label("kv_offloading_size", "0.11.1"),
    _Label("kv_sharing_fast_prefill", value="False"),
    _Label("mamba_block_size", "0.11.1"),
    _Label("mamba_cache_dtype", value="auto"),
    _Label("mamba_cache_mode", "0.15.0", value="none"),
    _Label("mamba_page_size_padded"),
    _Label("mamba_ssm_cache_dtype", value="auto"),
    _Label("num_cpu_blocks"),
    _Label("num_gpu_blocks"),
    _Label("num_gpu_blocks_override"),
    _Label("prefix_cache_retention_interval", "0.29.0", value="0"),
    _Label("prefix_caching_hash_algo", value="sha256"),
    _Label("prefix_match_unit", "0.26.0"),
    _Label("replayssm_buffer_len", "0.27.0", value="16"),
    _Label("skip_page_size_padded", "0.25.0"),
    _Label("sliding_window"),
    _Label("swa_bounded_replay", "0.31.0", value="True"),
    _Label("swap_space", _LABELS_FROM, "0.17.1", value="4"),
    _Label("use_kda_recoverssm", "0.29.0", value="False"),
    _Label("use_replayssm", "0.27.0", value="False"),
    _Label("user_specified_block_size", "0.18.0", value="False"),
    _Label("user_specified_mamba_block_size", "0.20.0", "0.31.0", value="False"),
)


def cache_config_labels(release: str) -> dict[str, str]:
    """The labels of vllm:cache_config_info in a release, in the page's order, each with vLLM's default; without `engine`."""
    return {row.name: row.value for row in _LABELS if versions.covers(row.first, row.last, release)}


def releases_with(names: Iterable[str]) -> tuple[str | None, str | None]:
    """The oldest and the newest release that export all of these metrics; None where nothing bounds it."""
    wanted = set(names)
    spans: dict[str, list[tuple[str, str]]] = {}
    for key, stretches in versions.rows("metrics").items():
        name = key.rsplit(" ", 1)[0]
        if name in wanted:
            spans.setdefault(name, []).extend((row["from"], row["to"]) for row in stretches)
    shared = versions.shared_span([versions.whole_span(found) for found in spans.values()]) if spans else None
    if shared is None:
        return None, None
    return shared[0], None if shared[1] == versions.newest() else shared[1]
