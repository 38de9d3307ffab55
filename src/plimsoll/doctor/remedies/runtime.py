"""Remedies for a KV cache that is full, a queue that grows and an engine that makes no step, by what a page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from plimsoll.findings import Remedy

_UTILIZATION_MAX = 0.95


def cache_tokens(cache: Mapping[str, str]) -> int | None:
    """How many tokens the KV cache holds, by the labels of vllm:cache_config_info; None if they do not say."""
    tokens = _whole(cache.get("kv_cache_size_tokens"))
    if tokens is not None:
        return tokens
    # Right for models without hybrid layers, and older releases have nothing better.
    blocks, size = _whole(cache.get("num_gpu_blocks")), _whole(cache.get("block_size"))
    return blocks * size if blocks is not None and size is not None else None


def kv_remedies(cache: Mapping[str, str], figures: Mapping[str, float]) -> tuple[Remedy, ...]:
    """For a cache that is full; `running` 0 says that what runs now is no measure, as after preemptions."""
    found: list[Remedy] = []
    utilization = _number(cache.get("gpu_memory_utilization"))
    if "kv_cache_memory_bytes" in cache:
        do = "give the KV cache more memory than --kv-cache-memory-bytes allows it"
        why = f"it is fixed at {cache['kv_cache_memory_bytes']} bytes, whatever the card has free"
        found.append(Remedy(do, why, "--kv-cache-memory-bytes"))
    elif utilization is None or utilization < _UTILIZATION_MAX:
        do, why = "let vLLM use more of the card, if nothing else needs it", "all of what is added becomes KV cache"
        found.append(Remedy(do, why, "--gpu-memory-utilization", f"{_UTILIZATION_MAX}"))
    if "fp8" not in cache.get("cache_dtype", "") and "int8" not in cache.get("cache_dtype", ""):
        found.append(Remedy("store the cache in 8 bits", "about twice the tokens fit", "--kv-cache-dtype", "fp8"))
    tokens, length = cache_tokens(cache), figures.get("prompt_length_mean", 0.0) + figures.get("output_length_mean", 0.0)
    is_known = tokens is not None and {"prompt_length_mean", "output_length_mean"} <= figures.keys() and length >= 1
    fits = max(1, math.floor((tokens or 0) / length)) if is_known else None
    running = figures.get("running", 0.0)
    if fits is not None and (running < 1 or fits < running):
        why = f"about {fits} requests of the mean length seen fit at once; more are admitted only to be preempted"
        found.append(Remedy("admit no more requests than fit at their full length", why, "--max-num-seqs", str(fits)))
    else:
        why = "those that are admitted then keep their blocks to the end"
        found.append(Remedy("admit fewer requests at once", why, "--max-num-seqs"))
    found.append(Remedy("add a replica, or spread the model over more GPUs", "each brings KV cache of its own"))
    return tuple(found)


def saturated_remedies(running: float, usage: float) -> tuple[Remedy, ...]:
    """For a queue with room in the KV cache."""
    fits = math.floor(running * 0.9 / usage) if usage > 0.05 else 0
    do = "raise --max-num-seqs if as many run as it allows"
    why = f"{running:.0f} run and fill {usage:.0%} of the cache; helps only while the GPU has time left"
    return (
        Remedy(do, why, "--max-num-seqs", str(fits) if fits > running else None),
        Remedy("add a replica, or turn requests away earlier", "a queue that grows never ends by itself"),
    )


def wedge_remedies() -> tuple[Remedy, ...]:
    """For an engine that makes no step."""
    return (
        Remedy("save the stacks of its processes first (py-spy dump), then restart the server", "a stuck step never returns"),
        Remedy("restart on any exit, also on exit code 0", "vLLM exits with 0 when its engine dies"),
    )


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 and int(text) > 0 else None
