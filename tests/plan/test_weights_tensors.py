"""Weights from the headers of a checkpoint: exact bytes by name, and agreement with the estimate from config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.errors import BadInput
from plimsoll.models.shape import ModelShape
from plimsoll.plan.settings import Settings
from plimsoll.plan.weights import weights_from_shape
from plimsoll.plan.weights_checkpoint import parameters, weights_from_tensors

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 16, "moe_intermediate_size": 768,
}  # fmt: skip
Tensor = tuple[str, str, tuple[int, ...]]
ROTARY = 4096 * 128 * 2


def _on(tensor: int = 1, pipeline: int = 1, data: int = 1, **changes: Any) -> Settings:
    settings = Settings(release="0.18.0", tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data)
    return replace(settings, **changes)


def dense_tensors(shape: ModelShape, dtype: str = "BF16") -> Iterator[Tensor]:
    """The header of a Llama checkpoint."""
    hidden, width = shape.hidden_size, shape.intermediate_size or 0
    yield "model.embed_tokens.weight", dtype, (shape.vocab_size, hidden)
    for n in range(len(shape.layers)):
        prefix = f"model.layers.{n}"
        yield from attention_tensors(shape, prefix, dtype)
        for name, size in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
            yield f"{prefix}.mlp.{name}.weight", dtype, size
        yield f"{prefix}.self_attn.rotary_emb.inv_freq", "F32", (64,)
    yield "model.norm.weight", dtype, (hidden,)
    yield "lm_head.weight", dtype, (shape.vocab_size, hidden)


def attention_tensors(shape: ModelShape, prefix: str, dtype: str) -> Iterator[Tensor]:
    """One layer's attention and norms."""
    hidden, wide = shape.hidden_size, shape.head_dim
    yield f"{prefix}.self_attn.q_proj.weight", dtype, (shape.attention_heads * wide, hidden)
    yield f"{prefix}.self_attn.k_proj.weight", dtype, (shape.kv_heads * wide, hidden)
    yield f"{prefix}.self_attn.v_proj.weight", dtype, (shape.kv_heads * wide, hidden)
    yield f"{prefix}.self_attn.o_proj.weight", dtype, (hidden, shape.attention_heads * wide)
    yield f"{prefix}.input_layernorm.weight", dtype, (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", dtype, (hidden,)


def moe_tensors(shape: ModelShape) -> Iterator[Tensor]:
    """The header of a Qwen3-MoE checkpoint."""
    hidden = shape.hidden_size
    yield "model.embed_tokens.weight", "BF16", (shape.vocab_size, hidden)
    for n in range(len(shape.layers)):
        prefix = f"model.layers.{n}"
        yield from attention_tensors(shape, prefix, "BF16")
        yield f"{prefix}.self_attn.q_norm.weight", "BF16", (shape.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", "BF16", (shape.head_dim,)
        yield f"{prefix}.mlp.gate.weight", "BF16", (16, hidden)
        for expert in range(16):
            for name, size in (("gate_proj", (768, hidden)), ("up_proj", (768, hidden)), ("down_proj", (hidden, 768))):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", "BF16", size
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (shape.vocab_size, hidden)


def test_a_whole_checkpoint_is_its_bytes() -> None:
    """On one GPU the estimate is every tensor's bytes and the rotary table, and it is exact."""
    shape = ModelShape.from_config(LLAMA)
    estimate = weights_from_tensors(dense_tensors(shape), shape)
    assert estimate.is_exact
    assert estimate.value == 2 * 8_030_261_248 + ROTARY


def test_a_32_bit_checkpoint_is_served_in_16_bits() -> None:
    """What is stored in 32 bits is loaded in the served type, unless that is float32."""
    shape = ModelShape.from_config(LLAMA)
    assert weights_from_tensors(dense_tensors(shape, "F32"), shape).value == 2 * 8_030_261_248 + ROTARY
    assert weights_from_tensors(dense_tensors(shape), shape, _on(dtype="float32")).value == 2 * (2 * 8_030_261_248 + ROTARY)


@pytest.mark.parametrize("placement", [_on(2), _on(8), _on(16), _on(4, 2), _on(1, 3)])
def test_the_shape_agrees_with_the_tensors(placement: Settings) -> None:
    """Cut by name or by the family's rules, a rank weighs the same but for the allocator's rounding."""
    shape = ModelShape.from_config(LLAMA)
    exact = weights_from_tensors(dense_tensors(shape), shape, placement)
    assert exact.is_exact
    assert weights_from_shape(shape, placement).value == pytest.approx(exact.value, rel=0.002)


@pytest.mark.parametrize("placement", [_on(), _on(4), _on(4, expert_parallel=True), _on(2, 1, 4, expert_parallel=True)])
def test_experts_agree_too(placement: Settings) -> None:
    """Experts cut by width or by count weigh the same either way."""
    shape = ModelShape.from_config(MOE)
    exact = weights_from_tensors(moe_tensors(shape), shape, placement)
    assert exact.is_exact
    assert weights_from_shape(shape, placement).value == pytest.approx(exact.value, rel=0.005)
    assert exact.value * placement.tensor_parallel * placement.data_parallel >= 2 * parameters(shape)


def test_a_tied_head_and_mtp_layers_are_not_loaded() -> None:
    """A head the config ties, layers past the last, and mtp tensors are skipped."""
    shape = ModelShape.from_config(LLAMA | {"tie_word_embeddings": True})
    more: list[Tensor] = [
        ("model.layers.32.mlp.down_proj.weight", "BF16", (4096, 14336)),
        ("mtp.layers.0.mlp.down_proj.weight", "BF16", (4096, 14336)),
    ]
    estimate = weights_from_tensors([*dense_tensors(shape), *more], shape)
    assert estimate.value == 2 * (8_030_261_248 - 128256 * 4096) + ROTARY


def test_scales_and_packed_weights_follow_their_matrix() -> None:
    """A column matrix's scales are cut with it; a row matrix's scale per output is on every rank."""
    shape = ModelShape.from_config(LLAMA | {"num_hidden_layers": 1})
    column: list[Tensor] = [
        ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (14336, 4096)),
        ("model.layers.0.mlp.up_proj.weight_scale", "F32", (14336, 1)),
    ]
    row: list[Tensor] = [
        ("model.layers.0.mlp.down_proj.weight", "F8_E4M3", (4096, 14336)),
        ("model.layers.0.mlp.down_proj.weight_scale", "F32", (4096, 1)),
        ("model.layers.0.mlp.down_proj.input_scale", "F32", ()),
    ]
    two = _on(2)
    assert weights_from_tensors(column, shape, two).value == (14336 * 4096 + 14336 * 4) // 2 + ROTARY
    assert weights_from_tensors(row, shape, two).value == 14336 * 4096 // 2 + 4096 * 4 + 4 + ROTARY


def test_unknown_names_have_a_band() -> None:
    """A tensor whose name says nothing is counted whole, and the band reaches down to its share."""
    shape = ModelShape.from_config(LLAMA)
    strange: list[Tensor] = [("model.layers.0.mystery.weight", "BF16", (1024, 1024))]
    estimate = weights_from_tensors(strange, shape, _on(2))
    assert estimate.high == estimate.value == 2 * 2**20 + ROTARY
    assert estimate.low == 2**20 + ROTARY


def test_an_unknown_type_is_one_line() -> None:
    """A type that safetensors does not have is the file's mistake."""
    shape = ModelShape.from_config(LLAMA)
    with pytest.raises(BadInput, match="Q9"):
        weights_from_tensors([("model.norm.weight", "Q9", (4096,))], shape)


def test_padded_experts_are_not_taken_for_exact() -> None:
    """Where the kernel grows the experts, the file's bytes are the lower end of the band."""
    shape = ModelShape.from_config(MOE | {"moe_intermediate_size": 700, "quantization_config": {"quant_method": "mxfp4"}})
    tensors = [(name, "U8", (rows[0], rows[1] // 2)) if ".experts." in name else (name, kind, rows)
               for name, kind, rows in moe_tensors(shape)]  # fmt: skip
    estimate = weights_from_tensors(tensors, shape)
    assert estimate.low < estimate.value < estimate.high
