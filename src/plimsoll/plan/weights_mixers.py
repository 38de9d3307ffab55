"""What mixes the tokens in one layer: attention in all its forms, and the layers that keep a state."""

from __future__ import annotations

from plimsoll.domain.model import Layer, LayerKind, ModelShape
from plimsoll.plan.weights_families import Family
from plimsoll.plan.weights_parts import Part, Storage, linear, norm, share

_COMPRESSED = (LayerKind.MLA_SLIDING, LayerKind.MLA_COMPRESSED)
_OUTPUT_RANK_V4, _HEADS_PER_GROUP_V4 = 1024, 8  # o_lora_rank and heads per o_group of both published sizes


def mixer_parts(layer: Layer, shape: ModelShape, family: Family, ranks: int) -> list[Part]:
    """The parameters one tensor-parallel rank holds of the layer's mixing half."""
    kind = layer.kind
    if kind is LayerKind.NONE:
        return []
    if kind in _COMPRESSED:
        return _latent_v4(layer, shape, ranks)
    if kind is LayerKind.MLA:
        return _latent(layer, shape, ranks)
    if kind is LayerKind.MAMBA2:
        return _mamba2(shape, ranks)
    if kind is LayerKind.FULL_AND_MAMBA2:
        return _mamba2(shape, ranks) + _attention(layer, shape, family, ranks)
    if kind is LayerKind.MAMBA1:
        return _mamba1(shape, ranks)
    if kind is LayerKind.GATED_DELTA_NET:
        return _gated_delta(shape, ranks)
    if kind is LayerKind.KIMI_DELTA:
        return _kimi_delta(shape, ranks)
    if kind is LayerKind.LINEAR:
        return _lightning(shape, ranks)
    if kind is LayerKind.SHORT_CONV:
        return _short_conv(shape, ranks)
    return _attention(layer, shape, family, ranks)


def _attention(layer: Layer, shape: ModelShape, family: Family, ranks: int) -> list[Part]:
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
        parts.append(Part("sinks", own))
    return parts


def _latent(layer: Layer, shape: ModelShape, ranks: int) -> list[Part]:
    mla = shape.mla
    assert mla is not None
    hidden, own = shape.hidden_size, share(layer.attention_heads or shape.attention_heads, ranks)
    nope = mla.qk_nope_head_dim if mla.qk_nope_head_dim is not None else 128
    value = mla.v_head_dim or 128
    query = own * (nope + mla.qk_rope_head_dim)
    down = mla.cached_dim
    parts: list[Part] = []
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


def _latent_v4(layer: Layer, shape: ModelShape, ranks: int) -> list[Part]:
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
        Part("sinks", own, 1, Storage.FLOAT32),
    ]
    if layer.compress_ratio > 1:
        parts.append(Part("attn.compressor", 2 * wide * (2 if layer.compress_ratio == 4 else 1), hidden))
    if layer.indexer and shape.indexer is not None:
        parts += _indexer(shape, rank)
        parts.append(Part("attn.indexer.compressor", 4 * shape.indexer.head_dim, hidden))
    return parts


def _indexer(shape: ModelShape, query_width: int) -> list[Part]:
    """The sparse indexer; every rank has all of it, and its last projection is never quantised."""
    indexer = shape.indexer
    assert indexer is not None
    heads = indexer.heads or 1
    return [
        *linear("self_attn.indexer.wq_b", heads * indexer.head_dim, query_width),
        Part("self_attn.indexer.wk_weights_proj", indexer.head_dim + heads, shape.hidden_size),
        Part("norm", indexer.head_dim, 2, Storage.FLOAT32),
    ]


def _mamba2(shape: ModelShape, ranks: int) -> list[Part]:
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
        Part("conv1d", mixed, mamba.conv_kernel + 1, pieces=3),  # the weights and a bias
        Part("A", own_heads, 1, Storage.FLOAT32),
        Part("D", own_heads, 2),  # and dt_bias
        *norm(inner),
        *linear(f"{prefix}.out_proj", shape.hidden_size, inner),
    ]


def _mamba1(shape: ModelShape, ranks: int) -> list[Part]:
    mamba = shape.mamba
    assert mamba is not None
    inner, state = share(mamba.inner_size, ranks), mamba.state_size
    rank = -(-shape.hidden_size // 16)  # time_step_rank "auto", as every published file has it
    parts = [
        *linear("mamba.in_proj", 2 * inner, shape.hidden_size),
        Part("conv1d", inner, mamba.conv_kernel + 1),
        *linear("mamba.x_proj", rank + 2 * state, inner),
        Part("mamba.dt_proj", inner, rank + 1),
        Part("A", inner, state, Storage.FLOAT32),
        Part("D", inner),
        *linear("mamba.out_proj", shape.hidden_size, inner),
    ]
    if shape.text_model_type == "jamba":
        parts += [*norm(rank), *norm(state, count=2)]
    return parts


def _gated_delta(shape: ModelShape, ranks: int) -> list[Part]:
    delta = shape.linear
    assert delta is not None
    keys = share(delta.key_heads, ranks) * delta.key_head_dim
    own_values = share(delta.value_heads, ranks)
    values = own_values * delta.value_head_dim
    return [
        *linear("linear_attn.in_proj_qkv", 2 * keys + 2 * values, shape.hidden_size, pieces=4),
        Part("linear_attn.in_proj_ba", 2 * own_values, shape.hidden_size, pieces=2),
        Part("conv1d", 2 * keys + values, delta.conv_kernel or 4),
        Part("A", own_values, 1, Storage.FLOAT32),
        Part("dt_bias", own_values),
        *norm(delta.value_head_dim),
        *linear("linear_attn.out_proj", shape.hidden_size, values),
    ]


def _kimi_delta(shape: ModelShape, ranks: int) -> list[Part]:
    delta = shape.linear
    assert delta is not None
    hidden, own = shape.hidden_size, share(delta.value_heads, ranks)
    width, low = own * delta.value_head_dim, delta.value_head_dim
    return [
        *linear("self_attn.q_proj", 3 * width, hidden, pieces=3),
        Part("self_attn.b_proj", own, hidden),
        *linear("self_attn.f_a_proj", 2 * low, hidden, pieces=2),  # and g_a_proj, both on every rank
        *linear("self_attn.f_b_proj", 2 * width, low, pieces=2),
        Part("conv1d", 3 * width, delta.conv_kernel or 4),
        Part("A", own + width, 1, Storage.FLOAT32),
        *norm(low),
        *linear("self_attn.o_proj", hidden, width),
    ]


def _lightning(shape: ModelShape, ranks: int) -> list[Part]:
    attention = shape.linear
    assert attention is not None
    hidden, width = shape.hidden_size, share(attention.value_heads, ranks) * attention.value_head_dim
    return [
        *linear("self_attn.qkv_proj", 3 * width, hidden, pieces=3),
        *linear("self_attn.output_gate", width, hidden),
        *norm(width),
        *linear("self_attn.out_proj", hidden, width),
    ]


def _short_conv(shape: ModelShape, ranks: int) -> list[Part]:
    conv = shape.short_conv
    assert conv is not None
    width = share(conv.width, ranks)
    return [
        *linear("conv.in_proj", 3 * width, shape.hidden_size, pieces=3),
        Part("conv.conv", width, conv.kernel),
        *linear("conv.out_proj", shape.hidden_size, width),
    ]
