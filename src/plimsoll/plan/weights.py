"""The memory that the weights take on one GPU: on the heaviest rank, which decides.

    |  first stage             |  ...  |  last stage            |     pipeline: by layers
    | embed, layers            | layers| layers, norm, lm_head  |     encoders and rotary tables on every stage
      each cut by tensor parallelism: rows or columns of the matrices, the vocabulary padded to 64;
      norms, routers, latent down-projections and (beyond the KV heads) k and v on every rank;
      experts over tensor x data ranks, by width or, with expert parallelism, by count.

`weights_from_shape` needs no more than a config.json; weights_checkpoint.py counts a checkpoint's own tensors.
Both give the figure that vLLM prints as "Model loading took": parameters, rotary tables and the allocator's rounding.
A draft model takes another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from plimsoll.models.shape import FeedForward, Layer, LayerKind, ModelShape, Quantization, Tower
from plimsoll.plan.kv_layers import check_split, layers_by_stage, padded_vocabulary
from plimsoll.plan.settings import Settings
from plimsoll.plan.weights_tables import (
    FAMILIES,
    FIXED_ENCODERS,
    GLOBAL_LAYERS,
    STYLES,
    UNKNOWN_FAMILY,
    Family,
    Scheme,
    Style,
    left_alone,
    named_scheme,
    scheme_of,
    sorted_rules,
)
from plimsoll.units import MIB, Estimate, allocated_bytes, ceil_div, filled, round_up
from plimsoll.vllm.versions import Behaviour, Coverage, table


class Storage(Enum):
    """How a tensor is kept, which decides whether quantisation touches it."""

    LINEAR = "linear"
    EXPERTS = "experts"
    PLAIN = "plain"
    FLOAT32 = "float32"


class RankTensor(NamedTuple):
    """One tensor of one rank (or `stack` equal matrices in one tensor), under its module's name in the checkpoint."""

    name: str
    outputs: int
    inputs: int = 1
    storage: Storage = Storage.PLAIN
    stack: int = 1
    pieces: int = 1  # matrices of the checkpoint that are fused in it: each has a LoRA of its own

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * self.stack


class Ranks(NamedTuple):
    """The number of ranks each kind of tensor is cut over."""

    tensor: int = 1
    experts: int = 1
    by_expert: bool = False


def linear(name: str, outputs: int, inputs: int, *, bias: int = 0, pieces: int = 1) -> list[RankTensor]:
    """A matrix that quantisation may touch, with a bias of so many rows."""
    parts = [RankTensor(name, outputs, inputs, Storage.LINEAR, 1, pieces)]
    if bias:
        parts.append(RankTensor(name, bias))
    return parts


def norm(width: int, *, bias: bool = False, count: int = 1) -> list[RankTensor]:
    """Normalisation weights, with a bias in a LayerNorm."""
    return [RankTensor("norm", width)] * (count * (2 if bias else 1))


def family_of(shape: ModelShape) -> Family:
    family = FAMILIES.get(shape.text_model_type, UNKNOWN_FAMILY)
    if shape.text_model_type == "falcon" and shape.kv_heads > 1:  # Falcon 40B and 180B: a norm for each branch
        return replace(family, norms=2)
    if shape.text_model_type == "phi" and shape.hidden_size == 2560:  # phi-2 turns 0.4 of a head, phi-1 and 1.5 the half
        return replace(family, rotary=0.4)
    return family


_OUTPUT_RANK_V4, _HEADS_PER_GROUP_V4 = 1024, 8  # o_lora_rank and heads per o_group of both published sizes


def mixer_parts(layer: Layer, shape: ModelShape, family: Family, ranks: int) -> list[RankTensor]:
    """The parameters one tensor-parallel rank holds of the layer's mixing half."""
    match layer.kind:
        case LayerKind.NONE:
            return []
        case LayerKind.MLA_SLIDING | LayerKind.MLA_COMPRESSED:
            return _latent_v4(layer, shape, ranks)
        case LayerKind.MLA:
            return _latent(layer, shape, ranks)
        case LayerKind.FULL_AND_MAMBA2:
            return _mamba2(shape, ranks) + _attention(layer, shape, family, ranks)
        case LayerKind.MAMBA2:
            return _mamba2(shape, ranks)
        case LayerKind.MAMBA1:
            return _mamba1(shape, ranks)
        case LayerKind.GATED_DELTA_NET | LayerKind.KIMI_DELTA | LayerKind.LINEAR:
            return _linear(layer.kind, shape, ranks)
        case LayerKind.SHORT_CONV:
            assert shape.short_conv is not None
            width = ceil_div(shape.short_conv.width, ranks)
            return [
                *linear("conv.in_proj", 3 * width, shape.hidden_size, pieces=3),
                RankTensor("conv.conv", width, shape.short_conv.kernel),
                *linear("conv.out_proj", shape.hidden_size, width),
            ]
        case _:
            return _attention(layer, shape, family, ranks)


def _attention(layer: Layer, shape: ModelShape, family: Family, ranks: int) -> list[RankTensor]:
    heads = layer.attention_heads or shape.attention_heads
    kv = layer.kv_heads or shape.kv_heads
    wide = layer.head_dim or shape.head_dim
    value = layer.v_head_dim or shape.v_head_dim
    own, own_kv = ceil_div(heads, ranks), max(1, ceil_div(kv, ranks))  # more ranks than KV heads: each keeps a copy of one
    queries = own * wide * (2 if shape.attention_output_gate else 1)
    prefix = "mixer" if shape.text_model_type == "nemotron_h" else "self_attn"
    keys = 0 if layer.shares_kv else own_kv * (wide + value)  # Gemma 3n and 4: a sharing layer has no k and v
    rows = queries + keys
    parts = linear(f"{prefix}.q_proj", rows, shape.hidden_size, bias=rows if family.qkv_bias else 0, pieces=3)
    parts += linear(f"{prefix}.o_proj", shape.hidden_size, own * value, bias=shape.hidden_size if family.out_bias else 0)
    if family.query_norm == "head":
        parts += norm(wide, count=1 if layer.shares_kv else 2)
    elif family.query_norm == "full":
        parts += [*norm(own * wide), *norm(own_kv * wide)]
    if family.sinks:
        parts.append(RankTensor("sinks", own))
    return parts


def _latent(layer: Layer, shape: ModelShape, ranks: int) -> list[RankTensor]:
    mla = shape.mla
    assert mla is not None
    hidden, own = shape.hidden_size, ceil_div(layer.attention_heads or shape.attention_heads, ranks)
    nope = mla.qk_nope_head_dim if mla.qk_nope_head_dim is not None else 128
    value = mla.v_head_dim or 128
    query = own * (nope + mla.qk_rope_head_dim)
    down = mla.cached_dim
    parts: list[RankTensor] = []
    if mla.q_lora_rank:  # the two down-projections are one matrix, and every rank has all of it
        parts += linear("self_attn.kv_a_proj_with_mqa", mla.q_lora_rank + down, hidden, pieces=2)
        parts += [*norm(mla.q_lora_rank), *linear("self_attn.q_b_proj", query, mla.q_lora_rank)]
    else:
        parts += linear("self_attn.kv_a_proj_with_mqa", down, hidden)
        parts += linear("self_attn.q_proj", query, hidden)
    parts += norm(mla.kv_lora_rank)
    parts += linear("self_attn.kv_b_proj", own * (nope + value), mla.kv_lora_rank)
    parts += linear("self_attn.o_proj", hidden, own * value)
    if layer.indexer and shape.indexer is not None:
        parts += _indexer(shape, mla.q_lora_rank or hidden)
    return parts


def _latent_v4(layer: Layer, shape: ModelShape, ranks: int) -> list[RankTensor]:
    """DeepSeek V4: one latent for key and value, an output of low rank in groups, and the compressor beside it."""
    mla = shape.mla
    assert mla is not None
    hidden, heads = shape.hidden_size, layer.attention_heads or shape.attention_heads
    own, wide, rank = ceil_div(heads, ranks), mla.cached_dim, mla.q_lora_rank or hidden
    low = ceil_div(heads, _HEADS_PER_GROUP_V4) * _OUTPUT_RANK_V4
    parts = [
        *linear("attn.fused_wqa_wkv", rank + wide, hidden),
        *norm(rank),
        *norm(wide),
        *linear("attn.wq_b", own * wide, rank),
        *linear("attn.wo_a", _OUTPUT_RANK_V4, own * wide),
        *linear("attn.wo_b", hidden, ceil_div(low, ranks)),
        RankTensor("sinks", own, 1, Storage.FLOAT32),
    ]
    if layer.compress_ratio > 1:
        parts.append(RankTensor("attn.compressor", 2 * wide * (2 if layer.compress_ratio == 4 else 1), hidden))
    if layer.indexer and shape.indexer is not None:
        parts += _indexer(shape, rank)
        parts.append(RankTensor("attn.indexer.compressor", 4 * shape.indexer.head_dim, hidden))
    return parts


def _indexer(shape: ModelShape, query_width: int) -> list[RankTensor]:
    """The sparse indexer; every rank has all of it, and its last projection is never quantised."""
    indexer = shape.indexer
    assert indexer is not None
    heads = indexer.heads or 1
    return [
        *linear("self_attn.indexer.wq_b", heads * indexer.head_dim, query_width),
        RankTensor("self_attn.indexer.wk_weights_proj", indexer.head_dim + heads, shape.hidden_size),
        RankTensor("norm", indexer.head_dim, 2, Storage.FLOAT32),
    ]


def _mamba2(shape: ModelShape, ranks: int) -> list[RankTensor]:
    mamba = shape.mamba
    assert mamba is not None
    heads, groups = mamba.heads or 1, mamba.groups or 1
    if groups % ranks:
        groups = ranks if groups == 1 else groups + (-groups % ranks)  # vLLM adds copies until they divide
    inner, own_heads = ceil_div(mamba.inner_size, ranks), ceil_div(heads, ranks)
    mixed = inner + 2 * ceil_div(groups, ranks) * mamba.state_size
    prefix = "mixer" if shape.text_model_type == "nemotron_h" else "mamba"
    return [
        *linear(f"{prefix}.in_proj", inner + mixed + own_heads, shape.hidden_size, pieces=5),
        RankTensor("conv1d", mixed, mamba.conv_kernel + 1, pieces=3),  # the weights and a bias
        RankTensor("A", own_heads, 1, Storage.FLOAT32),
        RankTensor("D", own_heads, 2),  # and dt_bias
        *norm(inner),
        *linear(f"{prefix}.out_proj", shape.hidden_size, inner),
    ]


def _mamba1(shape: ModelShape, ranks: int) -> list[RankTensor]:
    mamba = shape.mamba
    assert mamba is not None
    inner, state = ceil_div(mamba.inner_size, ranks), mamba.state_size
    rank = -(-shape.hidden_size // 16)  # time_step_rank "auto", as every published file has it
    parts = [
        *linear("mamba.in_proj", 2 * inner, shape.hidden_size),
        RankTensor("conv1d", inner, mamba.conv_kernel + 1),
        *linear("mamba.x_proj", rank + 2 * state, inner),
        RankTensor("mamba.dt_proj", inner, rank + 1),
        RankTensor("A", inner, state, Storage.FLOAT32),
        RankTensor("D", inner),
        *linear("mamba.out_proj", shape.hidden_size, inner),
    ]
    if shape.text_model_type == "jamba":
        parts += [*norm(rank), *norm(state, count=2)]
    return parts


def _linear(kind: LayerKind, shape: ModelShape, ranks: int) -> list[RankTensor]:
    """Gated delta net, Kimi's delta attention, or lightning attention."""
    delta, hidden = shape.linear, shape.hidden_size
    assert delta is not None
    own, low = ceil_div(delta.value_heads, ranks), delta.value_head_dim
    width, keys = own * low, ceil_div(delta.key_heads, ranks) * delta.key_head_dim
    if kind is LayerKind.GATED_DELTA_NET:
        return [
            *linear("linear_attn.in_proj_qkv", 2 * keys + 2 * width, hidden, pieces=4),
            RankTensor("linear_attn.in_proj_ba", 2 * own, hidden, pieces=2),
            RankTensor("conv1d", 2 * keys + width, delta.conv_kernel or 4),
            RankTensor("A", own, 1, Storage.FLOAT32),
            RankTensor("dt_bias", own),
            *norm(low),
            *linear("linear_attn.out_proj", hidden, width),
        ]
    if kind is LayerKind.KIMI_DELTA:
        return [
            *linear("self_attn.q_proj", 3 * width, hidden, pieces=3),
            RankTensor("self_attn.b_proj", own, hidden),
            *linear("self_attn.f_a_proj", 2 * low, hidden, pieces=2),  # and g_a_proj, both on every rank
            *linear("self_attn.f_b_proj", 2 * width, low, pieces=2),
            RankTensor("conv1d", 3 * width, delta.conv_kernel or 4),
            RankTensor("A", own + width, 1, Storage.FLOAT32),
            *norm(low),
            *linear("self_attn.o_proj", hidden, width),
        ]
    return [
        *linear("self_attn.qkv_proj", 3 * width, hidden, pieces=3),
        *linear("self_attn.output_gate", width, hidden),
        *norm(width),
        *linear("self_attn.out_proj", hidden, width),
    ]


_ALTUP_INPUTS = 4  # Gemma 3n's altup_num_inputs and laurel_rank, equal in both published sizes
_LAUREL_RANK = 64
# Rope types whose table has original context x factor rows in vLLM, whatever max_position_embeddings is.
_FROM_ORIGINAL = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling"})


class Ends(NamedTuple):
    """The tensors of the first stage before its layers, and of the last after them."""

    first: list[RankTensor]
    last: list[RankTensor]
    tied: list[RankTensor]  # the embedding again, where a last stage of its own needs it for a tied head


def end_parts(shape: ModelShape, family: Family, ranks: int) -> Ends:
    """Embeddings, head and the other tensors that belong to no layer."""
    rows = ceil_div(padded_vocabulary(shape.vocab_size), ranks)
    embedding = RankTensor("embed_tokens", rows, shape.embedding_size)
    first = [embedding]
    if family.positions is not None:
        first.append(RankTensor("positions", shape.max_context + family.positions, shape.hidden_size))
    if shape.text_model_type == "bloom":
        first += norm(shape.hidden_size, bias=True)
    if shape.embedding_size != shape.hidden_size:  # OPT-350m works in a narrower space than its layers
        first += linear("project_in", shape.hidden_size, shape.embedding_size)
        first += linear("project_out", shape.embedding_size, shape.hidden_size)
    if width := shape.per_layer_input_size:  # Gemma 3n and 4: a second, wide embedding that feeds every layer
        columns = width * len(shape.layers)
        words = ceil_div(padded_vocabulary(shape.per_layer_vocab_size or shape.vocab_size), ranks)
        projection = RankTensor("per_layer_model_projection", ceil_div(columns, ranks), shape.hidden_size)
        first += [RankTensor("embed_tokens_per_layer", words, columns), projection, *norm(width)]
        if shape.text_model_type == "gemma3n_text":
            both_ways = 2 * (_ALTUP_INPUTS - 1)
            first += [RankTensor("altup_projections", ceil_div(shape.hidden_size, ranks), shape.hidden_size)] * both_ways
    last: list[RankTensor] = norm(shape.hidden_size, bias=family.norm_bias) if family.final_norm else []
    if not shape.tie_word_embeddings:
        last.append(RankTensor("lm_head", rows, shape.embedding_size))
    if family.head_bias:
        last.append(RankTensor("lm_head", rows))
    return Ends(first, last, [embedding] if shape.tie_word_embeddings else [])


def layer_extras(shape: ModelShape, family: Family) -> list[RankTensor]:
    """The small tensors of every layer: norms, and what Gemma 3n and 4 add."""
    hidden = shape.hidden_size
    parts = norm(hidden, bias=family.norm_bias, count=family.norms)
    if width := shape.per_layer_input_size:
        parts += [RankTensor("per_layer_input_gate", width, hidden), RankTensor("per_layer_projection", hidden, width)]
        if shape.text_model_type == "gemma3n_text":
            routers = _ALTUP_INPUTS * (1 + _ALTUP_INPUTS + hidden) + 2 * hidden
            parts += [RankTensor("altup", routers), RankTensor("laurel", 2 * _LAUREL_RANK + 1, hidden)]
        else:
            parts += norm(hidden)
    return parts


def rotary_bytes(shape: ModelShape, family: Family, item: int) -> int:
    """The cosine and sine tables, one per kind of rotary positions, kept on every rank beside the parameters.

    The startups show them: Gemma 3 4B loads 8.58 GiB with 8.01 GiB of parameters, because a linear factor of 8 makes a
    table of 1,048,576 rows.
    """
    kinds = {layer.kind for layer in shape.layers if layer.kind.keeps_tokens}
    if not family.rotary or not kinds:
        return 0
    width = shape.mla.qk_rope_head_dim if shape.mla is not None else int(shape.head_dim * family.rotary)
    rows = shape.max_context
    rope = shape.rope
    two_kinds = shape.text_model_type.startswith(("gemma3", "gemma4")) and LayerKind.SLIDING in kinds
    plain = rows if two_kinds else 0
    if rope is not None and rope.factor:
        if two_kinds:
            rows = int(rows * rope.factor) if rope.kind == "linear" else rows
        elif rope.kind in _FROM_ORIGINAL and rope.original_context:
            rows = int(rope.original_context * rope.factor)
        elif rope.kind == "dynamic":
            rows = int(rows / rope.factor)
    if rope is not None and rope.kind == "longrope":
        rows += shape.default_context
    if family.interleaved_positions:
        rows *= 4
    wide = max((layer.head_dim for layer in shape.layers), default=0) if two_kinds else width
    return (rows * (wide or width) + plain * width) * item


_BANDS = table("overhead", "plan")["weight_bands"]
# Tensors between 1 and 10 MiB share segments of 20 MiB, whose ends are lost: up to 6 MiB in opt-125m's 239 MiB.
ALLOCATOR_SLACK = 8 * MIB


def band_of(
    shape: ModelShape, family: Family, scheme: Scheme | None, *, unclear: bool, towers_known: bool
) -> tuple[float, float, str]:
    """The band below and above the value, as shares of it, and the class of this model and its storage that they come from.

    Each is the largest residual of its class in the published starts, predicted against measured, rounded up, without the
    outliers named beside it; `python -m benchmarks.weights_accuracy` prints them all.
    """
    hybrid = any(layer.kind.keeps_state for layer in shape.layers)
    width = "" if scheme is None else scheme.width
    classes = (
        ("unclear", unclear),
        ("unknown family", not family.known),
        ("unknown encoder", shape.towers and not towers_known),
        (width, width in ("nested", "mixed", "8")),
        ("4, experts or hybrid", width and (hybrid or shape.moe is not None)),
        ("4", width),
        ("hybrid", hybrid),
        ("multimodal", shape.towers),
        ("experts", shape.moe is not None),
        ("dense", True),
    )
    row = _BANDS[next(name for name, holds in classes if holds)]
    return row["below"], row["above"], filled(row["why"], {"family": shape.text_model_type[:40]})


def feed_forward_parts(layer: Layer, shape: ModelShape, family: Family, ranks: Ranks) -> list[RankTensor]:
    """The parameters one rank holds of the layer's feed-forward half."""
    prefix = "mixer" if shape.text_model_type == "nemotron_h" else "mlp"
    parts: list[RankTensor] = []
    if layer.feed_forward in (FeedForward.DENSE, FeedForward.DENSE_AND_EXPERTS):
        width = layer.intermediate_size or shape.intermediate_size or 4 * shape.hidden_size
        parts += _dense(prefix, shape.hidden_size, width, family, ranks.tensor)
    if layer.feed_forward in (FeedForward.EXPERTS, FeedForward.DENSE_AND_EXPERTS):
        parts += _experts(prefix, shape, family, ranks)
    return parts


def _dense(prefix: str, hidden: int, width: int, family: Family, ranks: int) -> list[RankTensor]:
    rows = ceil_div(width, ranks) * (2 if family.gated else 1)
    return [
        *linear(f"{prefix}.up_proj", rows, hidden, bias=rows if family.mlp_bias else 0, pieces=2 if family.gated else 1),
        *linear(f"{prefix}.down_proj", hidden, ceil_div(width, ranks), bias=hidden if family.mlp_bias else 0),
    ]


def _experts(prefix: str, shape: ModelShape, family: Family, ranks: Ranks) -> list[RankTensor]:
    moe = shape.moe
    assert moe is not None
    width = moe.intermediate_size or shape.intermediate_size or shape.hidden_size
    hidden = moe.latent_size or shape.hidden_size
    here = ceil_div(moe.experts, ranks.experts) if ranks.by_expert else moe.experts
    own = width if ranks.by_expert else ceil_div(width, ranks.experts)
    rows = own * (2 if family.gated else 1)
    router = Storage.FLOAT32 if family.router_float32 else Storage.PLAIN
    if shape.text_model_type == "gemma4_text":  # the experts are beside the dense block, not in it
        prefix = "moe"
    parts = [
        RankTensor(f"{prefix}.gate", moe.experts, shape.hidden_size, router),
        RankTensor(f"{prefix}.experts.up_proj", rows, hidden, Storage.EXPERTS, here, 2 if family.gated else 1),
        RankTensor(f"{prefix}.experts.down_proj", hidden, own, Storage.EXPERTS, here),
    ]
    if family.router_bias:
        parts.append(RankTensor("bias", moe.experts, 1, Storage.FLOAT32 if family.router_bias == "float32" else Storage.PLAIN))
    if family.expert_bias:
        parts.append(RankTensor("bias", rows + hidden, here))
    if moe.latent_size:  # Nemotron 3 Super: into the experts' width and back, on every rank
        parts += linear(f"{prefix}.fc1_latent_proj", moe.latent_size, shape.hidden_size)
        parts += linear(f"{prefix}.fc2_latent_proj", shape.hidden_size, moe.latent_size)
    if moe.shared_intermediate_size:
        parts += _dense(f"{prefix}.shared_expert", shape.hidden_size, moe.shared_intermediate_size, family, ranks.tensor)
        if family.shared_gate:
            parts.append(RankTensor(f"{prefix}.shared_expert_gate", 1, shape.hidden_size))
    if shape.text_model_type == "gemma4_text":  # its own norms around the experts, and scales in the router
        parts += [*norm(shape.hidden_size, count=4), RankTensor("per_expert_scale", moe.experts)]
    return parts


# The settings under which a checkpoint is counted by itself: one GPU, no segment kept whole, no zero points widened.
ONE_GPU = Settings(release=Coverage.KV_RULES.first)


def ranks_of(settings: Settings) -> Ranks:
    """The number of ranks each kind of tensor is cut over; experts are also cut over the data-parallel ones."""
    experts = settings.tensor_parallel * settings.data_parallel
    return Ranks(settings.tensor_parallel, experts, settings.expert_parallel and experts > 1)


def has_wide_zeros(settings: Settings) -> bool:
    """True if AWQ's zero points take 16 bits: Machete multiplies them by the scales."""
    return settings.compute_capability == (9, 0) and Behaviour.AWQ_MACHETE.is_in(settings.release)


def weights_from_shape(shape: ModelShape, settings: Settings = ONE_GPU) -> Estimate:
    """The weights of the heaviest rank, from the sizes in config.json; the checkpoint's own quantisation wins."""
    check_split(shape, settings)
    family = family_of(shape)
    stored = shape.quantization or (named_scheme(settings.quantization) if settings.quantization else None)
    expert_dtype = shape.moe.expert_dtype if shape.moe else None
    scheme = scheme_of(stored, expert_dtype, wide_zeros=has_wide_zeros(settings)) if stored else None
    unclear = scheme is None and (stored is not None or settings.quantization is not None)
    if unclear:  # half a byte to two bytes a weight: the middle of that range
        scheme = scheme_of(Quantization("fp8", bits=8))
    whole_segments = Behaviour.WHOLE_SEGMENTS.is_in(settings.release)
    ignored = stored.ignored if stored else ()
    is_guess, all_quantised = stored is not None and stored.by_name and scheme is not None and scheme.width == "4", ignored
    # A hybrid's plain AWQ and GPTQ leave all attention in 16 bits (QuantTrio/Qwen3.5-9B-AWQ: 11.21 GiB, not 8.1); checkpoints
    # named AWQ-4bit do not (cyankiwi).
    is_hybrid = any(kind.keeps_state for kind in shape.kinds)
    leaves_attention = stored is not None and stored.method in ("awq", "gptq") and is_hybrid
    may_leave_attention = is_guess and stored is not None and stored.method == "modelopt" and is_hybrid
    is_guess = is_guess and (shape.moe is not None or leaves_attention)
    if is_guess:  # beside the experts, linear attention is left in 16 bits
        ignored = (*ignored, "*linear_attn*", "*self_attn*") if leaves_attention else (*ignored, "*linear_attn*")
    storing = StorageRules(item_bytes(settings), scheme, ignored, whole_segments)
    value, towers_known = _count(shape, settings, family, storing)
    below, above, why = band_of(shape, family, scheme, unclear=unclear, towers_known=towers_known)
    low, high = int(value * (1 - below)) - ALLOCATOR_SLACK, int(value * (1 + above)) + ALLOCATOR_SLACK
    if is_guess or may_leave_attention:  # often all attention; some NVFP4 checkpoints of dense hybrids do so too
        attention = (*ignored, "*linear_attn*", "*self_attn*")
        high = max(high, _count(shape, settings, family, replace(storing, ignored=attention))[0])
        low = min(low, int(0.98 * _count(shape, settings, family, replace(storing, ignored=all_quantised))[0]))
    weights = Estimate(value, max(0, low), high, why)
    if scheme is None or scheme.expert_padding == (1, 1):
        return weights
    # Which kernel runs depends on what is installed, and Triton's does not pad: gpt-oss-120b took 61.29 GiB with it, not 65.97.
    bare, _ = _count(shape, settings, family, replace(storing, scheme=replace(scheme, expert_padding=(1, 1))))
    return replace(weights, low=min(weights.low, bare))


def item_bytes(settings: Settings) -> int:
    """Bytes of an unquantised weight; a 32-bit checkpoint is served in 16 bits unless --dtype says otherwise."""
    return 4 if settings.model_dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class StorageRules:
    """How the tensors of one model are stored."""

    item: int
    scheme: Scheme | None
    ignored: tuple[str, ...]
    whole_segments: bool

    def held(self, size: int) -> int:
        return allocated_bytes(size, whole_segments=self.whole_segments)


def _count(shape: ModelShape, settings: Settings, family: Family, storing: StorageRules) -> tuple[int, bool]:
    """Bytes of the heaviest stage, layers that are alike counted once; and whether the encoders' code is known."""
    ranks = ranks_of(settings)
    ends = end_parts(shape, family, ranks.tensor)
    extras = _sum(layer_extras(shape, family), storing, (), ())
    rules, single = sorted_rules(storing.ignored) if storing.ignored else ((), {})
    seen: dict[tuple[Layer, tuple[str, ...]], int] = {}
    per_layer = []
    for number, layer in enumerate(shape.layers):
        key = (layer, single.get(number, ()))
        size = seen.get(key)
        if size is None:
            parts = mixer_parts(layer, shape, family, ranks.tensor) + feed_forward_parts(layer, shape, family, ranks)
            size = seen[key] = _sum(parts, storing, rules, key[1]) + extras
        per_layer.append(size)
    towers_known, every = True, storing.held(rotary_bytes(shape, family, storing.item))
    for tower in shape.towers if not settings.language_model_only else ():
        encoder = tower_parts(tower, shape, 1 if settings.encoders_whole else ranks.tensor)
        towers_known = towers_known and encoder.known
        quantised = storing.scheme is not None and storing.scheme.towers
        how = storing if quantised else replace(storing, scheme=None)
        every += _sum(encoder.layer, how, rules, ()) * encoder.layers + _sum(encoder.rest, how, rules, ())
    last = _sum(ends.last, storing, (), ())
    if settings.pipeline_parallel > 1:
        last += _sum(ends.tied, storing, (), ())
    first = _sum(ends.first, storing, (), ())
    last += next_token_head(shape, settings, family, storing)
    return heaviest(per_layer, settings, first, last) + every, towers_known


def next_token_head(shape: ModelShape, settings: Settings, family: Family, storing: StorageRules) -> int:
    """The MTP layers that draft: like the last layer that keeps tokens, behind a projection of two hidden states; the embedding
    and the head are the model's own. A checkpoint that leaves them out of its quantisation names them."""
    like = [layer for layer in shape.layers if layer.kind.keeps_tokens and not layer.shares_kv]
    if not settings.drafts_with_own_head or not like:
        return 0
    if any("mtp" in rule for rule in storing.ignored):
        storing = replace(storing, scheme=None)
    ranks, hidden = ranks_of(settings), shape.hidden_size
    parts = mixer_parts(like[-1], shape, family, ranks.tensor) + feed_forward_parts(like[-1], shape, family, ranks)
    parts += [*linear("eh_proj", hidden, 2 * hidden), *norm(hidden, count=3)]
    rules, _ = sorted_rules(storing.ignored) if storing.ignored else ((), {})
    return shape.mtp_layers * (_sum(parts, storing, rules, ()) + _sum(layer_extras(shape, family), storing, (), ()))


def heaviest(per_layer: Sequence[int], settings: Settings, first: int = 0, last: int = 0) -> int:
    """Returns the bytes of the heaviest pipeline stage; `first` and `last` are those stages' bytes beside their layers."""
    spans = layers_by_stage(len(per_layer), settings.pipeline_parallel, settings.pipeline_partition)
    totals = [sum(per_layer[span.start : span.stop]) for span in spans]
    totals[0] += first
    totals[-1] += last
    return max(totals)


def _sum(parts: Sequence[RankTensor], storing: StorageRules, rules: tuple[str, ...], single: tuple[str, ...]) -> int:
    item, scheme = storing.item, storing.scheme
    if scheme is None:
        return sum(storing.held(p.elements * (4 if p.storage is Storage.FLOAT32 else item)) for p in parts)
    total = 0
    for part in parts:
        alone = bool(rules or single) and left_alone(part.name, rules, single)
        size, scales = part_bytes(part, item, scheme, alone=alone)
        total += storing.held(size) + storing.held(scales)
        if part.name == "self_attn.kv_b_proj" and size != part.elements * item:
            total += storing.held(part.elements * item)  # vLLM keeps a 16-bit copy of a quantised kv_b for decoding
    return total


def part_bytes(part: RankTensor, item: int, scheme: Scheme | None, *, alone: bool) -> tuple[int, int]:
    """The bytes of one matrix and of its scales; `alone` where the checkpoint leaves its module unquantised."""
    if part.storage is Storage.FLOAT32:
        return part.elements * 4, 0
    is_expert = part.storage is Storage.EXPERTS
    size = None
    if scheme is not None and not alone and part.storage is not Storage.PLAIN:
        is_mlp = scheme.mlp_size is not None and part.name.startswith("mlp.")
        size = scheme.expert_size if is_expert else scheme.mlp_size if is_mlp else scheme.linear_size
    if scheme is None or size is None:
        return part.elements * item, 0
    outputs, inputs = part.outputs, part.inputs
    if is_expert and scheme.expert_padding != (1, 1):
        # vLLM rounds the experts' width and the hidden size up for its kernels: gpt-oss 2880 becomes 2944 by 3072.
        width, hidden = scheme.expert_padding
        if part.name.endswith("up_proj"):
            outputs, inputs = 2 * round_up(outputs // 2, width), round_up(inputs, hidden)
        else:
            outputs, inputs = round_up(outputs, hidden), round_up(inputs, width)
    weights, scales = size(outputs, inputs)
    return weights * part.stack, scales * part.stack


class Encoder(NamedTuple):
    """The parameters one rank holds of an encoder: one layer, how often it comes, the rest, and whether its code is known."""

    layer: list[RankTensor]
    layers: int
    rest: list[RankTensor]
    known: bool


def tower_parts(tower: Tower, shape: ModelShape, ranks: int) -> Encoder:
    """An encoder as vLLM builds it."""
    fixed = FIXED_ENCODERS.get(shape.model_type, {}).get(tower.what)
    if fixed is not None:
        return Encoder([], 0, [RankTensor(tower.what, ceil_div(fixed, ranks))], known=True)
    style = STYLES.get(shape.model_type) if tower.what == "vision" else None
    known = style is not None
    style = style or Style()
    width = style.width or tower.hidden_size
    layers = tower.layers
    if not width or not layers:
        return Encoder([], 0, [], known=False)
    inner = tower.intermediate_size if tower.intermediate_size and style.width is None else 4 * width
    count = max(1, layers - style.skipped + GLOBAL_LAYERS.get(shape.model_type, 0))
    pixels = 3 * (tower.patch_size or 14) ** 2 * style.frames
    rest = [
        RankTensor("patch", width, pixels + (1 if style.patch_bias else 0)),
        RankTensor("positions", style.positions, width),
    ]
    rest += _projector(width, inner, shape.hidden_size, style, ranks)
    own, rows = ceil_div(width, ranks), ceil_div(inner, ranks)
    up, bias = rows * (2 if style.gated else 1), 1 if style.bias else 0
    layer = [
        *linear("visual.qkv", 3 * own, width, bias=3 * own * bias),
        *linear("visual.proj", width, own, bias=width * bias),
        *linear("visual.up_proj", up, width, bias=up * bias),
        *linear("visual.down_proj", width, rows, bias=width * bias),
        *norm(width, bias=style.norm_bias, count=style.norms),
    ]
    if shape.model_type == "gemma4" and tower.what == "audio":  # conformers: two feed-forwards, attention, a gated convolution
        layer = layer * 2
    return Encoder(layer, count, rest, known)


def _projector(width: int, inner: int, hidden: int, style: Style, ranks: int) -> list[RankTensor]:
    if style.projector == "single":
        return [RankTensor("projector", width + 1, hidden), *norm(width, count=3)]
    if style.projector == "pixtral":  # a merger of four patches into one, then two matrices; on every rank
        return [
            RankTensor("projector", width, 4 * width),
            RankTensor("projector", hidden, width),
            RankTensor("projector", hidden, hidden),
        ]
    if style.projector == "llama4":
        between = 4096  # projector_input_dim and projector_output_dim of both published sizes
        return [
            RankTensor("projector", ceil_div(between, ranks), inner),
            RankTensor("projector", between, ceil_div(between, ranks)),
            RankTensor("projector", ceil_div(hidden, ranks), between),
        ]
    merged = width * style.merge**2
    middle = hidden if style.inner == "hidden" else merged
    one = [
        *linear("visual.merger.fc1", ceil_div(middle, ranks), merged, bias=middle),
        *linear("visual.merger.fc2", hidden, ceil_div(middle, ranks), bias=hidden),
        *norm(width, bias=style.norm_bias),
    ]
    return one * style.mergers
