"""What the weights take on one GPU: of the rank that rules, the heaviest.

    |  first stage             |  ...  |  last stage            |     pipeline: by layers
    | embed, layers            | layers| layers, norm, lm_head  |     encoders and rotary tables on every stage
      each cut by tensor parallelism: rows or columns of the matrices, the vocabulary padded to 64;
      norms, routers, latent down-projections and (beyond the KV heads) k and v on every rank;
      experts over tensor x data ranks, by width or, with expert parallelism, by count.

`weights_from_tensors` is exact, `weights_from_total` nearly so; `weights_from_shape` needs no more than a config.json.
All three give what vLLM prints as "Model loading took": parameters, rotary tables and the allocator's rounding. A draft
model is another call; LoRA slots are `lora_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.models.shape import FeedForward, Layer, LayerKind, ModelShape, Quantization
from plimsoll.plan.kv_layers import layers_by_stage
from plimsoll.plan.settings import Settings
from plimsoll.plan.weights_parts import (
    Family,
    Ranks,
    RankTensor,
    Scheme,
    Storage,
    family_of,
    held,
    left_alone,
    linear,
    named_scheme,
    norm,
    padded_vocabulary,
    part_bytes,
    scheme_of,
    share,
    sorted_rules,
    tower_parts,
)
from plimsoll.units import MIB, Estimate
from plimsoll.vllm.versions import Behaviour, Coverage

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
        case kind if kind in _STATE_PARTS:
            return _STATE_PARTS[kind](shape, ranks)
        case _:
            return _attention(layer, shape, family, ranks)


def _attention(layer: Layer, shape: ModelShape, family: Family, ranks: int) -> list[RankTensor]:
    heads = layer.attention_heads or shape.attention_heads
    kv = layer.kv_heads or shape.kv_heads
    wide = layer.head_dim or shape.head_dim
    value = layer.v_head_dim or shape.v_head_dim
    own, own_kv = share(heads, ranks), max(1, share(kv, ranks))  # more ranks than KV heads: each keeps a copy of one
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
    hidden, own = shape.hidden_size, share(layer.attention_heads or shape.attention_heads, ranks)
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
    own, wide, rank = share(heads, ranks), mla.cached_dim, mla.q_lora_rank or hidden
    low = share(heads, _HEADS_PER_GROUP_V4) * _OUTPUT_RANK_V4
    parts = [
        *linear("attn.fused_wqa_wkv", rank + wide, hidden),
        *norm(rank),
        *norm(wide),
        *linear("attn.wq_b", own * wide, rank),
        *linear("attn.wo_a", _OUTPUT_RANK_V4, own * wide),
        *linear("attn.wo_b", hidden, share(low, ranks)),
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
    inner, own_heads = share(mamba.inner_size, ranks), share(heads, ranks)
    mixed = inner + 2 * share(groups, ranks) * mamba.state_size
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
    inner, state = share(mamba.inner_size, ranks), mamba.state_size
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


def _gated_delta(shape: ModelShape, ranks: int) -> list[RankTensor]:
    delta = shape.linear
    assert delta is not None
    keys = share(delta.key_heads, ranks) * delta.key_head_dim
    own_values = share(delta.value_heads, ranks)
    values = own_values * delta.value_head_dim
    return [
        *linear("linear_attn.in_proj_qkv", 2 * keys + 2 * values, shape.hidden_size, pieces=4),
        RankTensor("linear_attn.in_proj_ba", 2 * own_values, shape.hidden_size, pieces=2),
        RankTensor("conv1d", 2 * keys + values, delta.conv_kernel or 4),
        RankTensor("A", own_values, 1, Storage.FLOAT32),
        RankTensor("dt_bias", own_values),
        *norm(delta.value_head_dim),
        *linear("linear_attn.out_proj", shape.hidden_size, values),
    ]


def _kimi_delta(shape: ModelShape, ranks: int) -> list[RankTensor]:
    delta = shape.linear
    assert delta is not None
    hidden, own = shape.hidden_size, share(delta.value_heads, ranks)
    width, low = own * delta.value_head_dim, delta.value_head_dim
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


def _lightning(shape: ModelShape, ranks: int) -> list[RankTensor]:
    attention = shape.linear
    assert attention is not None
    hidden, width = shape.hidden_size, share(attention.value_heads, ranks) * attention.value_head_dim
    return [
        *linear("self_attn.qkv_proj", 3 * width, hidden, pieces=3),
        *linear("self_attn.output_gate", width, hidden),
        *norm(width),
        *linear("self_attn.out_proj", hidden, width),
    ]


def _short_conv(shape: ModelShape, ranks: int) -> list[RankTensor]:
    conv = shape.short_conv
    assert conv is not None
    width = share(conv.width, ranks)
    return [
        *linear("conv.in_proj", 3 * width, shape.hidden_size, pieces=3),
        RankTensor("conv.conv", width, conv.kernel),
        *linear("conv.out_proj", shape.hidden_size, width),
    ]


_STATE_PARTS: dict[LayerKind, Callable[[ModelShape, int], list[RankTensor]]] = {
    LayerKind.MAMBA1: _mamba1,
    LayerKind.MAMBA2: _mamba2,
    LayerKind.GATED_DELTA_NET: _gated_delta,
    LayerKind.KIMI_DELTA: _kimi_delta,
    LayerKind.LINEAR: _lightning,
    LayerKind.SHORT_CONV: _short_conv,
}

_ALTUP_INPUTS = 4  # Gemma 3n's altup_num_inputs and laurel_rank, equal in both published sizes
_LAUREL_RANK = 64
# Shortened as vLLM shortens them: the stretch is in the table, not in max_position_embeddings.
_FROM_ORIGINAL = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling"})


class Ends(NamedTuple):
    """What the first stage holds before its layers, and the last after them."""

    first: list[RankTensor]
    last: list[RankTensor]
    tied: list[RankTensor]  # the embedding again, where a last stage of its own needs it for a tied head


def end_parts(shape: ModelShape, family: Family, ranks: int) -> Ends:
    """Embeddings, head and what else belongs to no layer."""
    rows = share(padded_vocabulary(shape.vocab_size), ranks)
    embedding = RankTensor("embed_tokens", rows, shape.embedding_size)
    first = [embedding]
    if family.positions is not None:
        first.append(RankTensor("positions", shape.max_context + family.positions, shape.hidden_size))
    if shape.text_model_type == "bloom":
        first += norm(shape.hidden_size, bias=True)
    if shape.embedding_size != shape.hidden_size:  # OPT-350m works in a narrower space than its layers
        first += linear("project_in", shape.hidden_size, shape.embedding_size)
        first += linear("project_out", shape.embedding_size, shape.hidden_size)
    first += _per_layer_inputs(shape, ranks)
    last: list[RankTensor] = norm(shape.hidden_size, bias=family.norm_bias) if family.final_norm else []
    if shape.tie_word_embeddings:
        tied = [embedding]
    else:
        tied = []
        last.append(RankTensor("lm_head", rows, shape.embedding_size))
    if family.head_bias:
        last.append(RankTensor("lm_head", rows))
    return Ends(first, last, tied)


def _per_layer_inputs(shape: ModelShape, ranks: int) -> list[RankTensor]:
    """Gemma 3n and 4: a second, wide embedding that feeds every layer."""
    width = shape.per_layer_input_size
    if not width:
        return []
    columns = width * len(shape.layers)
    rows = share(padded_vocabulary(shape.per_layer_vocab_size or shape.vocab_size), ranks)
    parts = [
        RankTensor("embed_tokens_per_layer", rows, columns),
        RankTensor("per_layer_model_projection", share(columns, ranks), shape.hidden_size),
        *norm(width),
    ]
    if shape.text_model_type == "gemma3n_text":
        both_ways = 2 * (_ALTUP_INPUTS - 1)
        parts += [RankTensor("altup_projections", share(shape.hidden_size, ranks), shape.hidden_size)] * both_ways
    return parts


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


# How far an estimate from config.json alone may be off.
#
# The bands are the largest residuals of each class in the published starts, rounded up, without the strays named here;
# `python -m benchmarks.weights_accuracy` prints every residual, and what the bands would cover if each architecture were
# judged by the others of its class alone.
#
# class                  models  residuals, said against measured                               band
# 16-bit dense             23    -1.6 % (ROCm), -2.7 % (opt-125m, 6 MiB), else within 0.7 %     1 % and 8 MiB
# 16-bit experts            4    within 0.03 %                                                  1 %
# 16-bit multimodal        11    within 0.7 %                                                   1.5 %
# hybrid, 16-bit            1    -2.2 % (LoRA slots not stated)                                 -2 % .. +3 %
# 8-bit                    12    -2.9 % (0.6.6), +5.2 % (0.5.5), else within 1.4 %              2 %
# 4-bit, dense              6    within 0.8 %                                                   2 %
# 4-bit, experts, hybrid    6    +2.4 % (kernel unknown), -9 % twice (checkpoint not stated),   -4 % .. +8 %
# -35 % (0.11.0 keeps w13 twice), else within 0.9 %
# bitsandbytes              3    +7.8 % (0.7, scales not expanded; an embedding model)          -8 % .. +3 %

# Tensors between 1 and 10 MiB share segments of 20 MiB, whose ends are lost: up to 6 MiB in opt-125m's 239 MiB.
ALLOCATOR_SLACK = 8 * MIB


class Band(NamedTuple):
    """Shares of the value below and above it, and the class it comes from."""

    below: float
    above: float
    why: str


def band_of(shape: ModelShape, family: Family, scheme: Scheme | None, *, unclear: bool, towers_known: bool) -> Band:
    """The band of the class this model and its storage belong to."""
    if unclear:
        return Band(0.5, 1.0, "quantised: the method does not say how many bits a weight has, so 4 to 16 are allowed for")
    if not family.known:
        return Band(0.15, 0.15, f"unknown family {shape.text_model_type[:40]!a}: planned like Llama")
    if shape.towers and not towers_known:
        return Band(0.05, 0.1, "multimodal: an encoder that is not described here")
    hybrid = any(layer.kind.keeps_state for layer in shape.layers)
    if scheme is not None:
        return _quantised(scheme, special=hybrid or shape.moe is not None)
    if hybrid:
        return Band(0.02, 0.03, "hybrid: parameters and tables from config.json")
    if shape.towers:
        return Band(0.015, 0.015, "multimodal: parameters, encoder and tables from config.json")
    if shape.moe is not None:
        return Band(0.01, 0.01, "16-bit experts: parameters and tables from config.json")
    return Band(0.01, 0.01, "16-bit dense: parameters and tables from config.json")


def _quantised(scheme: Scheme, *, special: bool) -> Band:
    if scheme.width == "nested":
        return Band(0.08, 0.03, "bitsandbytes: four bits and a scale per 64 weights")
    if scheme.width == "mixed":
        return Band(
            0.15, 0.25, "mixed precision: which layers have 4, 8 and 16 bits is taken from how such checkpoints are made"
        )
    if scheme.width == "8":
        return Band(0.02, 0.02, "8-bit: parameters and scales from config.json")
    if special:
        return Band(0.04, 0.08, "4-bit experts or hybrid: kernels pad differently, and checkpoints quantise different parts")
    return Band(0.02, 0.02, "4-bit dense: parameters and scales from config.json")


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
    rows = share(width, ranks) * (2 if family.gated else 1)
    return [
        *linear(f"{prefix}.up_proj", rows, hidden, bias=rows if family.mlp_bias else 0, pieces=2 if family.gated else 1),
        *linear(f"{prefix}.down_proj", hidden, share(width, ranks), bias=hidden if family.mlp_bias else 0),
    ]


def _experts(prefix: str, shape: ModelShape, family: Family, ranks: Ranks) -> list[RankTensor]:
    moe = shape.moe
    assert moe is not None
    width = moe.intermediate_size or shape.intermediate_size or shape.hidden_size
    hidden = moe.latent_size or shape.hidden_size
    here = share(moe.experts, ranks.experts) if ranks.by_expert else moe.experts
    own = width if ranks.by_expert else share(width, ranks.experts)
    rows = own * (2 if family.gated else 1)
    router = Storage.FLOAT32 if family.router_float32 else Storage.PLAIN
    if shape.text_model_type == "gemma4_text":  # the experts stand beside the dense block, not in it
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


_PROJECTIONS = frozenset({"self_attn.kv_b_proj"})
# Whose embedding table and head can have a LoRA too: `embedding_modules` in the models of vLLM 0.32.0. It takes a row of the
# rank for every word, on every rank of a tensor-parallel server.
_ADAPTED_WORDS = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Apertus", "Exaone", "Exaone4", "ExaoneMoe", "FalconH1", "Granite", "GraniteMoe", "GraniteMoeHybrid",
        "GraniteMoeShared", "GraniteSWA", "HyperCLOVAX", "InternLM3", "IQuestCoder", "Jamba", "K2Horizon", "LLaMA", "Lfm2",
        "Lfm2Moe", "Llama", "Llama4", "MiniCPM", "MiniCPM3", "Mixtral", "Nemotron", "NemotronH", "NemotronHPuzzle", "DeciLM",
        "Param2MoE", "Phi3", "PhiMoE", "Qwen3", "Qwen3Moe", "Qwen3_5", "Qwen3_5Moe", "Solar", "TeleChat2", "TeleChat3",
        "TeleFLM", "Ernie4_5",
    )
)  # fmt: skip
_ADAPTED_PLAIN = frozenset({"conv1d", "linear_attn.in_proj_ba", "self_attn.b_proj", "mamba.dt_proj"})
"""Matrices that no quantisation touches and that vLLM holds as linear layers all the same: they have slots, too."""


# What a checkpoint holds by itself: one GPU, no segment kept whole, no zero points widened.
ONE_GPU = Settings(release=Coverage.KV_RULES.first)


def _ranks(settings: Settings) -> Ranks:
    """Over how many ranks each kind of tensor is cut; experts also over the data-parallel ones."""
    experts = settings.tensor_parallel * settings.data_parallel
    return Ranks(settings.tensor_parallel, experts, settings.expert_parallel and experts > 1)


def _has_wide_zeros(settings: Settings) -> bool:
    """Whether AWQ's zero points take 16 bits: Machete multiplies them by the scales."""
    return settings.compute_capability == (9, 0) and Behaviour.AWQ_MACHETE.is_in(settings.release)


def weights_from_shape(shape: ModelShape, settings: Settings = ONE_GPU) -> Estimate:
    """The weights of the rank that rules, from the sizes in config.json; the checkpoint's own quantisation wins."""
    check_divides(shape, settings)
    family = family_of(shape)
    stored = shape.quantization or (named_scheme(settings.quantization) if settings.quantization else None)
    scheme = scheme_of(stored, shape.moe.expert_dtype if shape.moe else None, wide_zeros=_has_wide_zeros(settings))
    unclear = scheme is None and (stored is not None or settings.quantization is not None)
    if unclear:  # half a byte to two bytes a weight: the middle of what it may be
        scheme = scheme_of(Quantization("fp8", bits=8))
    whole_segments = Behaviour.WHOLE_SEGMENTS.is_in(settings.release)
    ignored = stored.ignored if stored else ()
    is_guess = stored is not None and stored.by_name and scheme is not None and scheme.width == "4" and shape.moe is not None
    if is_guess:  # beside the experts, linear attention is left in 16 bits
        ignored = (*ignored, "*linear_attn*")
    storing = _Storing(item_bytes(settings), scheme, ignored, whole_segments)
    counted = _count(shape, settings, family, storing)
    value, band = counted.heaviest, band_of(shape, family, scheme, unclear=unclear, towers_known=counted.towers_known)
    low, high = int(value * (1 - band.below)) - ALLOCATOR_SLACK, int(value * (1 + band.above)) + ALLOCATOR_SLACK
    if is_guess:  # and often all attention
        high = max(high, _count(shape, settings, family, replace(storing, ignored=(*ignored, "*self_attn*"))).heaviest)
    weights = Estimate(value, max(0, low), high, band.why)
    if scheme is None or scheme.expert_padding == (1, 1):
        return weights
    # Which kernel runs depends on what is installed, and Triton's does not pad: gpt-oss-120b took 61.29 GiB with it, not 65.97.
    bare = _count(shape, settings, family, replace(storing, scheme=replace(scheme, expert_padding=(1, 1))))
    return replace(weights, low=min(weights.low, bare.heaviest))


def weights_from_tensors(
    tensors: Iterable[tuple[str, str, Sequence[int]]], shape: ModelShape, settings: Settings = ONE_GPU
) -> Estimate:
    """The weights of the rank that rules, from the names, types and shapes in the headers of a checkpoint."""
    # Imported here because its many patterns are compiled at once, and most plans have no tensors to look at.
    from plimsoll.plan.weights_parts import EVERY_STAGE, NUMBERED_EXPERT, Cut, place_of, rank_bytes

    check_divides(shape, settings)
    ranks, item = _ranks(settings), item_bytes(settings)
    wide_zeros = _has_wide_zeros(settings)
    by_layer = [0] * len(shape.layers)
    singles: dict[tuple[int, str], int] = {}
    first = last = every = embedding = unsure = 0
    for name, kind, size in tensors:
        place = place_of(name, shape)
        if place.cut is Cut.SKIPPED or (place.layer == EVERY_STAGE and settings.language_model_only):
            continue
        if place.layer == EVERY_STAGE and settings.encoders_whole:
            place = replace(place, cut=Cut.WHOLE)
        held_here = rank_bytes(name, kind, tuple(size), place.cut, shape, ranks, item)
        if wide_zeros and name.endswith(".qzeros"):
            held_here *= 4
        if place.cut is Cut.UNKNOWN:
            unsure += held_here - held_here // settings.tensor_parallel
        if place.layer is None:
            last += held_here
        elif place.layer == EVERY_STAGE:
            every += held_here
        elif place.layer < 0:
            first += held_here
            embedding += held_here if place.cut is Cut.VOCABULARY and "per_layer" not in name else 0
        elif place.cut is Cut.EXPERTS and ranks.by_expert and (numbered := NUMBERED_EXPERT.search(name)):
            key = (place.layer, name[: numbered.start()] + name[numbered.end() :])
            singles[key] = singles.get(key, 0) + held_here
        else:
            by_layer[place.layer] += held_here
    for (number, _), all_experts in singles.items():
        count = shape.moe.experts if shape.moe is not None else 1
        by_layer[number] += all_experts * share(count, ranks.experts) // count
    if settings.pipeline_parallel > 1 and shape.tie_word_embeddings:
        last += embedding
    family, scheme = family_of(shape), scheme_of(shape.quantization)
    ignored = shape.quantization.ignored if shape.quantization else ()
    last += _next_token_head(shape, settings, family, _Storing(item, scheme, ignored, whole_segments=False))
    value = _heaviest(by_layer, settings, first, last) + every + rotary_bytes(shape, family, item)
    if scheme is not None and scheme.expert_padding != (1, 1):  # gpt-oss: a file of 60.8 GiB is held as 65.9
        padded = weights_from_shape(shape, settings)
        return Estimate(
            max(value, padded.value), value, max(value, padded.high), "checkpoint, its experts padded for the kernel"
        )
    if unsure:
        return Estimate(value, max(0, value - unsure), value, "checkpoint: tensors of unknown names are counted on every rank")
    return Estimate.exact(value, "checkpoint: every tensor by its name, type and shape")


def weights_from_total(total_bytes: int, shape: ModelShape, settings: Settings = ONE_GPU) -> Estimate:
    """The weights of the rank that rules, from the total in a checkpoint's index: the total times this rank's share.

    The total may hold MTP layers that vLLM does not load, and the share of a family we do not know is a guess; a
    checkpoint is not smaller in memory than by its MTP layers, so the band below is one layer in so many.
    """
    whole, here = weights_from_shape(shape), weights_from_shape(shape, replace(settings, dtype="bfloat16"))
    value = total_bytes * here.value // max(1, whole.value)
    below = 0.01 + shape.mtp_layers / len(shape.layers)
    above = 0.01 if family_of(shape).known or _ranks(settings) == Ranks() else 0.1
    return Estimate(
        value, int(value * (1 - below)), int(value * (1 + above)), "checkpoint: the index's total, by this rank's share"
    )


def parameters(shape: ModelShape) -> int:
    """How many parameters vLLM loads of the whole model, without MTP layers and without padding."""
    family, ranks = family_of(shape), Ranks()
    ends = end_parts(shape, family, 1)
    parts = [*ends.first, *ends.last]
    extras = layer_extras(shape, family)
    for layer in shape.layers:
        parts += mixer_parts(layer, shape, family, 1) + feed_forward_parts(layer, shape, family, ranks) + extras
    for tower in shape.towers:
        encoder = tower_parts(tower, shape, 1)
        parts += encoder.layer * encoder.layers + encoder.rest
    padding = padded_vocabulary(shape.vocab_size) - shape.vocab_size
    padded = sum(part.inputs for part in parts if part.name in ("embed_tokens", "lm_head"))
    return sum(part.elements for part in parts) - padding * padded


def routed_parameters(shape: ModelShape) -> int:
    """Those of them that belong to experts which a router picks: a token meets only some of them."""
    family, ranks = family_of(shape), Ranks()
    return sum(
        part.elements
        for layer in shape.layers
        for part in feed_forward_parts(layer, shape, family, ranks)
        if part.storage is Storage.EXPERTS
    )


def lora_bytes(shape: ModelShape, settings: Settings) -> Estimate:
    """The LoRA slots vLLM allocates at start: an A and a B of full rank for every matrix it can adapt, experts included.

    Of models that are not listed the band reaches up to where the words have one, too: which have differs by release.
    """
    family, ranks = family_of(shape), _ranks(settings)
    sizes = []
    for layer in shape.layers:
        parts = mixer_parts(layer, shape, family, ranks.tensor) + feed_forward_parts(layer, shape, family, ranks)
        touched = (part for part in parts if part.storage in (Storage.LINEAR, Storage.EXPERTS) or part.name in _ADAPTED_PLAIN)
        sizes.append(sum(part.stack * (part.pieces * part.inputs + part.outputs) for part in touched))
    each = settings.max_loras * settings.max_lora_rank * item_bytes(settings)
    words = shape.vocab_size + shape.hidden_size
    # A last stage of its own has the table as well where it is tied to the head.
    ends = words * (2 if settings.pipeline_parallel > 1 and shape.tie_word_embeddings else 1)
    low, high = each * _heaviest(sizes, settings), each * _heaviest(sizes, settings, words, ends)
    value = high if _ADAPTED_WORDS.intersection(shape.architectures) else low
    return Estimate(value, int(low * 0.9), int(high * 1.1), f"{settings.max_loras} LoRA slots of rank {settings.max_lora_rank}")


def check_divides(shape: ModelShape, settings: Settings) -> None:
    """BadInput where vLLM would refuse the split."""
    tensor = settings.tensor_parallel
    if min(tensor, settings.pipeline_parallel, settings.data_parallel) < 1:
        raise BadInput("parallel sizes start at 1")
    if shape.attention_heads % tensor:
        raise BadInput(f"--tensor-parallel-size {tensor} does not divide the model's {shape.attention_heads} attention heads")
    if padded_vocabulary(shape.vocab_size) % tensor:
        rows = padded_vocabulary(shape.vocab_size)
        raise BadInput(f"--tensor-parallel-size {tensor} does not divide the padded vocabulary of {rows}")
    if settings.pipeline_parallel > len(shape.layers):
        raise BadInput(f"--pipeline-parallel-size {settings.pipeline_parallel} is more than the {len(shape.layers)} layers")


def item_bytes(settings: Settings) -> int:
    """Bytes of an unquantised weight; a 32-bit checkpoint is served in 16 bits unless --dtype says otherwise."""
    return 4 if settings.model_dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class _Storing:
    item: int
    scheme: Scheme | None
    ignored: tuple[str, ...]
    whole_segments: bool

    def held(self, size: int) -> int:
        return held(size, whole_segments=self.whole_segments)


class _Counted(NamedTuple):
    heaviest: int
    towers_known: bool


def _count(shape: ModelShape, settings: Settings, family: Family, storing: _Storing) -> _Counted:
    """Bytes of the heaviest stage; layers that are alike are counted once."""
    ranks = _ranks(settings)
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
    last += _next_token_head(shape, settings, family, storing)
    return _Counted(_heaviest(per_layer, settings, first, last) + every, towers_known)


def _next_token_head(shape: ModelShape, settings: Settings, family: Family, storing: _Storing) -> int:
    """The MTP layers that draft: like the last layer that keeps tokens, behind a projection of two hidden states; the embedding
    and the head are the model's own. A checkpoint that leaves them out of its quantisation names them."""
    like = [layer for layer in shape.layers if layer.kind.keeps_tokens and not layer.shares_kv]
    if not settings.drafts_with_own_head or not like:
        return 0
    if any("mtp" in rule for rule in storing.ignored):
        storing = replace(storing, scheme=None)
    ranks, hidden = _ranks(settings), shape.hidden_size
    parts = mixer_parts(like[-1], shape, family, ranks.tensor) + feed_forward_parts(like[-1], shape, family, ranks)
    parts += [*linear("eh_proj", hidden, 2 * hidden), *norm(hidden, count=3)]
    rules, _ = sorted_rules(storing.ignored) if storing.ignored else ((), {})
    return shape.mtp_layers * (_sum(parts, storing, rules, ()) + _sum(layer_extras(shape, family), storing, (), ()))


def _heaviest(per_layer: Sequence[int], settings: Settings, first: int = 0, last: int = 0) -> int:
    """Of all pipeline stages, with what the first holds before its layers and the last after them."""
    spans = layers_by_stage(len(per_layer), settings.pipeline_parallel, settings.pipeline_partition)
    totals = [sum(per_layer[span.start : span.stop]) for span in spans]
    totals[0] += first
    totals[-1] += last
    return max(totals)


def _sum(parts: Sequence[RankTensor], storing: _Storing, rules: tuple[str, ...], single: tuple[str, ...]) -> int:
    item, scheme = storing.item, storing.scheme
    if scheme is None:
        return sum(storing.held(p.elements * (4 if p.storage is Storage.FLOAT32 else item)) for p in parts)
    total = 0
    for part in parts:
        alone = bool(rules or single) and left_alone(part.name, rules, single)
        size, scales = part_bytes(part, item, scheme, alone=alone)
        total += storing.held(size) + storing.held(scales)
        if part.name in _PROJECTIONS and size != part.elements * item:
            total += storing.held(part.elements * item)  # vLLM keeps a 16-bit copy of a quantised kv_b for decoding
    return total
