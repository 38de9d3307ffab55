"""The peaks of vLLM's profile run, as its tensors add up: the sampler's, the forward pass's, the embedding's, the encoder's.

Each was checked to a few MiB against starts whose allocator we read (docs/overhead.md); the largest one is what vLLM subtracts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from plimsoll.domain.model import LayerKind, ModelShape, Tower
from plimsoll.plan.overhead_table import CUBLAS_WORKSPACE, MULTIPROCESSORS, V2_SAMPLER_BYTES, Era

_MIXERS = (LayerKind.MAMBA1, LayerKind.MAMBA2, LayerKind.FULL_AND_MAMBA2)
_DELTAS = (LayerKind.GATED_DELTA_NET, LayerKind.KIMI_DELTA, LayerKind.LINEAR)
_MLA_WORKSPACE_TOKENS = 65536  # the most context MLA up-projects at once, mla_attention.py


@dataclass(frozen=True)
class Batch:
    """What the dummy batch looks like to one rank."""

    tokens: int
    rows: int  # of logits: sequences that sample
    context: int
    tensor_parallel: int
    dtype_bytes: int
    is_hopper: bool
    multiprocessors: int


def multiprocessors_of(capability: tuple[int, int]) -> int:
    """How many multiprocessors a card of this compute capability has at most."""
    known = [count for have, count in MULTIPROCESSORS.items() if have <= capability]
    return known[-1] if known else 80


def sampler_peak(shape: ModelShape, batch: Batch, era: Era, *, v2: bool) -> int:
    """Logits and what the sampler makes of them, on top of all that outlives the forward pass."""
    logits = batch.rows * shape.vocab_size
    per_logit = V2_SAMPLER_BYTES if v2 else era.sampler_bytes
    if batch.dtype_bytes > 2:
        per_logit += batch.dtype_bytes - 2
    buffer = 0
    if era.top_k_buffer and not v2:
        buffer = min(batch.rows, batch.multiprocessors) * shape.vocab_size * 4
    hidden = (batch.tokens + 2 * batch.rows) * shape.hidden_size * batch.dtype_bytes
    return ceil(logits * per_logit) + buffer + hidden + persistent(shape, batch, era) + encoder_outputs(shape, batch)


def forward_peak(shape: ModelShape, batch: Batch, era: Era, *, compiled: bool) -> int:
    """The widest moment of one layer over the whole batch of tokens."""
    hidden_tensors = era.forward_hidden if compiled else (4.0 if era.name == "V0" else 3.0)
    widest = 3 * _dense_width(shape) / batch.tensor_parallel + hidden_tensors * shape.hidden_size
    per_token = max(widest, _attention_width(shape, batch), _mixer_width(shape, batch))
    transient = ceil(batch.tokens * per_token * batch.dtype_bytes)
    experts = moe_workspace(shape, batch)
    if experts and not _has_dense_layer(shape):
        # No dense layer is as wide: what is alive beside the experts is the attention's or a few hidden tensors.
        narrow = max(6.0 * shape.hidden_size, _attention_width(shape, batch), _mixer_width(shape, batch))
        transient = ceil(batch.tokens * narrow * batch.dtype_bytes)
    return transient + experts + _cublas(batch) + mla_context(shape, batch) + encoder_outputs(shape, batch)


def embedding_peak(shape: ModelShape, batch: Batch) -> int:
    """A compiled pass begins with a second copy of the embedding table (0.19.0 and 0.25.1, warm or cold cache)."""
    table = shape.vocab_size * shape.embedding_size // batch.tensor_parallel
    return (table + 2 * batch.tokens * shape.hidden_size) * batch.dtype_bytes


def encoder_peak(shape: ModelShape, batch: Batch) -> int:
    """A vision or audio encoder over as many items as the batch holds: the widest moment of one of its layers."""
    peaks = [_tower_peak(tower, shape, batch) for tower in shape.towers]
    return max(peaks, default=0) + (_cublas(batch) if peaks else 0)


def encoder_outputs(shape: ModelShape, batch: Batch) -> int:
    """Pixels and embeddings of the dummy items, alive until the profile run ends."""
    if not shape.towers:
        return 0
    merged, patch = _merge(shape), max((tower.patch_size or 14) for tower in shape.towers)
    pixels = (merged * patch) ** 2 * 3 * 2
    return batch.tokens * (shape.hidden_size * batch.dtype_bytes + pixels)


def persistent(shape: ModelShape, batch: Batch, era: Era) -> int:
    """What the forward pass leaves allocated: cuBLAS's workspace and, in some releases, the experts'."""
    return _cublas(batch) + (moe_workspace(shape, batch) if era.keeps_moe_workspace else 0)


def moe_workspace(shape: ModelShape, batch: Batch) -> int:
    """The two buffers of the fused experts (fused_moe.py, workspace_shapes): M x top-k x max(I, K) and x max(2I, K)."""
    moe = shape.moe
    if moe is None:
        return 0
    inner = (moe.intermediate_size or shape.intermediate_size or shape.hidden_size) / batch.tensor_parallel
    outer = moe.latent_size or shape.hidden_size
    width = max(inner, outer) + max(2 * inner, outer)
    return ceil(batch.tokens * (moe.experts_per_token or 1) * width * batch.dtype_bytes)


def mla_context(shape: ModelShape, batch: Batch) -> int:
    """The up-projected context that an MLA layer's profile run stands in for."""
    mla = shape.mla
    if mla is None:
        return 0
    tokens = min(max(8 * batch.context, 4 * batch.rows * 64), _MLA_WORKSPACE_TOKENS)
    heads = max(1, shape.attention_heads // batch.tensor_parallel)
    width = heads * ((mla.qk_nope_head_dim or 128) + (mla.v_head_dim or 128)) + mla.cached_dim
    return tokens * width * batch.dtype_bytes


def _tower_peak(tower: Tower, shape: ModelShape, batch: Batch) -> int:
    if tower.hidden_size is None:
        return encoder_outputs(shape, batch)
    patches = batch.tokens * _merge(shape) ** 2
    width = (tower.intermediate_size or 4 * tower.hidden_size) + 4 * tower.hidden_size
    return patches * width * batch.dtype_bytes


def _merge(shape: ModelShape) -> int:
    """How many patches a side make one token: 4 in Gemma 3 (256 tokens of 64 x 64 patches), 2 in most others."""
    return 4 if any(name.startswith("Gemma3") for name in shape.architectures) else 2


def _cublas(batch: Batch) -> int:
    return CUBLAS_WORKSPACE[batch.is_hopper]


def _has_dense_layer(shape: ModelShape) -> bool:
    return any("dense" in layer.feed_forward for layer in shape.layers)


def _dense_width(shape: ModelShape) -> int:
    widths = [layer.intermediate_size or 0 for layer in shape.layers]
    shared = (shape.moe.shared_intermediate_size or 0) if shape.moe is not None else 0
    return max([shape.intermediate_size or 4 * shape.hidden_size, shared, *widths])


def _attention_width(shape: ModelShape, batch: Batch) -> float:
    """Residual, input, the projected heads, a normalised copy of the queries and the output."""
    queries, keys = shape.attention_heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    if shape.mla is not None:
        mla = shape.mla
        queries = shape.attention_heads * ((mla.qk_nope_head_dim or 128) + mla.qk_rope_head_dim)
        keys = shape.attention_heads * ((mla.qk_nope_head_dim or 128) + (mla.v_head_dim or 128))
    return 2 * shape.hidden_size + (3 * queries + keys) / batch.tensor_parallel


def _mixer_width(shape: ModelShape, batch: Batch) -> float:
    """Projections, convolution and output of a Mamba or delta-net layer; not measured, so on the wide side."""
    width = 0.0
    if shape.mamba is not None and shape.count(*_MIXERS):
        width = 6.0 * shape.mamba.inner_size
    if shape.linear is not None and shape.count(*_DELTAS):
        linear = shape.linear
        width = max(width, 6.0 * (linear.value_heads * linear.value_head_dim + linear.key_heads * linear.key_head_dim))
    return 4 * shape.hidden_size + width / batch.tensor_parallel if width else 0.0
