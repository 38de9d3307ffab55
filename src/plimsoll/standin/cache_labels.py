"""The labels of vllm:cache_config_info: the fields of vLLM's CacheConfig, which every few releases gains or loses some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.engine.flags import is_before
from plimsoll.plan.ledger import Ledger


class _Label(NamedTuple):
    name: str
    first: str
    last: str = ""  # "": it is still there
    value: str = "None"  # as vLLM prints the default


OLDEST = "0.11.0"
"""The first release that the table knows."""

# Read from the class definitions of the releases 0.11.0 to 0.32.0. A stretch ends with the last release that has it.
_LABELS = (
    _Label("_block_size_resolved", "0.18.0", value="True"),
    _Label("block_size", OLDEST),
    _Label("cache_dtype", OLDEST, value="auto"),
    _Label("cache_hit_alignment_tokens", "0.32.0"),
    _Label("calculate_kv_scales", OLDEST, "0.27.1", "False"),
    _Label("cpu_kvcache_space_bytes", OLDEST, "0.19.1"),
    _Label("cpu_offload_gb", OLDEST, "0.17.1", "0"),
    _Label("cpu_offload_params", "0.17.0", "0.17.1", "set()"),
    _Label("effective_attention_block_size", "0.31.0"),
    _Label("enable_mamba_fine_grained_prefix_cache", "0.30.0", "0.30.0", "False"),
    _Label("enable_mamba_shared_prefix_checkpoint", "0.31.0", value="False"),
    _Label("enable_prefix_caching", OLDEST),
    _Label("gpu_memory_utilization", OLDEST),
    _Label("hash_block_size", "0.20.0", "0.25.1"),
    _Label("hash_block_size", "0.32.0"),
    _Label("is_attention_free", OLDEST, value="False"),
    _Label("kv_cache_dtype_skip_layers", "0.19.0", value="[]"),
    _Label("kv_cache_layout", "0.29.0"),
    _Label("kv_cache_max_concurrency", "0.24.0"),
    _Label("kv_cache_memory_bytes", OLDEST),
    _Label("kv_cache_size_tokens", "0.24.0"),
    _Label("kv_offloading_backend", "0.11.1", "0.13.0"),
    _Label("kv_offloading_backend", "0.14.0", value="native"),
    _Label("kv_offloading_size", "0.11.1"),
    _Label("kv_sharing_fast_prefill", OLDEST, value="False"),
    _Label("mamba_block_size", "0.11.1"),
    _Label("mamba_cache_dtype", OLDEST, value="auto"),
    _Label("mamba_cache_mode", "0.15.0", value="none"),
    _Label("mamba_page_size_padded", OLDEST),
    _Label("mamba_ssm_cache_dtype", OLDEST, value="auto"),
    _Label("num_cpu_blocks", OLDEST),
    _Label("num_gpu_blocks", OLDEST),
    _Label("num_gpu_blocks_override", OLDEST),
    _Label("prefix_cache_retention_interval", "0.29.0", value="0"),
    _Label("prefix_caching_hash_algo", OLDEST, value="sha256"),
    _Label("prefix_match_unit", "0.26.0"),
    _Label("replayssm_buffer_len", "0.27.0", value="16"),
    _Label("skip_page_size_padded", "0.25.0"),
    _Label("sliding_window", OLDEST),
    _Label("swa_bounded_replay", "0.31.0", value="True"),
    _Label("swap_space", OLDEST, "0.17.1", "4"),
    _Label("use_kda_recoverssm", "0.29.0", value="False"),
    _Label("use_replayssm", "0.27.0", value="False"),
    _Label("user_specified_block_size", "0.18.0", value="False"),
    _Label("user_specified_mamba_block_size", "0.20.0", "0.31.0", "False"),
)


def cache_labels(ledger: Ledger) -> dict[str, str]:
    """The labels of the planned server's release, in the order in which the page sorts them; `engine` is the page's to add."""
    release = ledger.settings.release
    values = _values(ledger)
    return {
        label.name: values.get(label.name, label.value)
        for label in _LABELS
        if not is_before(release, label.first) and not (label.last and is_before(label.last, release))
    }


def _values(ledger: Ledger) -> Mapping[str, str]:
    """What the plan decides; the rest stays at vLLM's defaults."""
    settings, kv = ledger.settings, ledger.kv_plan
    return {
        "block_size": str(kv.block_size),
        "cache_dtype": settings.kv_cache_dtype,
        "cpu_offload_gb": f"{settings.cpu_offload_gib:g}",
        "effective_attention_block_size": str(kv.block_size),
        "enable_prefix_caching": str(settings.prefix_caching),
        "gpu_memory_utilization": str(settings.utilization),
        "kv_cache_max_concurrency": str(kv.max_concurrency),
        "kv_cache_memory_bytes": str(settings.kv_cache_memory_bytes),
        "kv_cache_size_tokens": str(kv.tokens),
        "num_gpu_blocks": str(kv.num_blocks),
        "num_gpu_blocks_override": str(settings.num_gpu_blocks_override),
        "user_specified_block_size": str(settings.block_size is not None),
    }
