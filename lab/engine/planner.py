"""Asks the real vLLM 0.32.0 how it would cut memory into KV blocks: the near end of `ask_planner.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.engine.install import model_home
from lab.engine.parser import ParserProcess
from plimsoll.plan.kv_layers import (
    AttentionSpec,
    ChunkedSpec,
    FullSpec,
    KvSpec,
    MlaSpec,
    RankSpecs,
    SlidingMlaSpec,
    SlidingSpec,
    StateSpec,
    state_mode_of,
)
from plimsoll.plan.settings import Settings

ASK_PLANNER = Path(__file__).resolve().parent / "ask_planner.py"
# Ours to vLLM's KVQuantMode and MambaAttentionBackendEnum.
QUANT = {
    "none": "NONE", "fp8": "FP8_PER_TENSOR", "nvfp4": "NVFP4", "int8_per_token_head": "INT8_PER_TOKEN_HEAD",
    "fp8_per_token_head": "FP8_PER_TOKEN_HEAD", "int4_per_token_head": "INT4_PER_TOKEN_HEAD", "nvfp4_ds_mla": "NVFP4_DS_MLA",
}  # fmt: skip
MIXER = {
    "mamba1": "MAMBA1", "mamba2": "MAMBA2", "gdn": "GDN_ATTN", "kda": "GDN_ATTN", "linear": "LINEAR",
    "short-conv": "SHORT_CONV",
}  # fmt: skip


class PlannerProcess(ParserProcess):
    """One long-lived process that holds vLLM's planner; it ends when this one does, its stdin being closed then."""

    def __init__(self) -> None:
        super().__init__(ASK_PLANNER, str(model_home()))

    def plan(self, ranks: Sequence[RankSpecs], settings: Settings, available: Sequence[int]) -> dict[str, Any]:
        """What vLLM answers: num_blocks, bytes_per_block, groups, tokens, ...; or `ok` false with error and message."""
        return self._ask(
            {
                "ranks": [[{"layer": name, **as_vllm(spec)} for name, spec in rank] for rank in ranks],
                "available": list(available),
                "max_model_len": settings.context,
                "auto_fit": settings.auto_fit,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "async_scheduling": settings.async_scheduling,
                "hybrid_manager": settings.hybrid_manager is not False,
                "state_mode": state_mode_of(settings),
                "num_blocks_override": settings.num_gpu_blocks_override,
                "pp": settings.pipeline_parallel,
                "dcp": settings.decode_context_parallel,
                "v2_runner": settings.v2_runner,
                "layout": "BLHNC" if settings.interleaved else "LBNHC",
            }
        )


def as_vllm(spec: KvSpec) -> dict[str, Any]:
    """Our spec in vLLM's words."""
    common: dict[str, Any] = {"block_size": spec.block_size}
    if isinstance(spec, StateSpec):
        return common | {
            "type": "MambaSpec",
            "shapes": spec.shapes,
            "dtypes": spec.dtypes,
            "page_size_padded": spec.page_padded,
            "mamba_type": MIXER[spec.mixer],
            "mamba_cache_mode": spec.mode,
            "num_speculative_blocks": spec.spec_blocks,
            "num_prefill_checkpoint_blocks": spec.checkpoint_blocks,
            "prefill_checkpoint_alignment": spec.checkpoint_alignment,
        }
    assert isinstance(spec, AttentionSpec), f"{type(spec).__name__} has no name in vLLM"
    return common | _attention(spec) | _own(spec)


def _attention(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "dcp_sharded": spec.dcp_sharded,
        "max_tp_shards": spec.tp_shards,
        "num_kv_heads": spec.heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "dtype": spec.dtype,
        "kv_quant_mode": QUANT[spec.quant],
        "page_size_padded": spec.page_padded,
        "num_head_slots": spec.head_slots,
        "state_content_bytes": spec.content_bytes,
        "tokens_per_state": spec.tokens_per_state,
    }


def _own(spec: AttentionSpec) -> dict[str, Any]:
    """What only its own class has."""
    if isinstance(spec, SlidingMlaSpec):
        latent = {"cache_dtype_str": spec.cache_dtype, "alignment": spec.alignment, "model_version": spec.version}
        return {"type": "SlidingWindowMLASpec", "sliding_window": spec.window} | latent
    if isinstance(spec, SlidingSpec):
        return {"type": "SlidingWindowSpec", "sliding_window": spec.window}
    if isinstance(spec, ChunkedSpec):
        return {"type": "ChunkedLocalAttentionSpec", "attention_chunk_size": spec.chunk}
    if isinstance(spec, MlaSpec):
        return {
            "type": "MLAAttentionSpec",
            "sliding_window": spec.window,
            "cache_dtype_str": spec.cache_dtype,
            "alignment": spec.alignment,
            "model_version": spec.version,
            "cache_role": "indexer" if spec.indexer else "sparse",
            "is_index_group_leader": spec.leader,
        }
    assert isinstance(spec, FullSpec), f"{type(spec).__name__} has no name in vLLM"
    return {"type": "FullAttentionSpec", "sliding_window": spec.window, "attention_chunk_size": spec.chunk}
