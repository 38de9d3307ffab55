"""Weights: published parameter counts, placement, quantised sizes, bands, refusals; and a checkpoint's headers to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.models.shape import ModelShape, Quantization, RopeScaling
from plimsoll.plan.settings import Settings
from plimsoll.plan.weights import family_of, rotary_bytes, weights_from_shape
from plimsoll.plan.weights_checkpoint import lora_bytes, parameters, weights_from_tensors, weights_from_total
from tests.each import cases, each, rows
from tests.plan.planning import bundled

GIB = 2**30
CONFIGS = sorted((Path(__file__).resolve().parents[2].parent / "shared" / "data" / "model-configs").glob("*.json"))


LLAMA = bundled("meta-llama/Llama-3.1-8B", max_position_embeddings=4096, rope_scaling=None)
QWEN_72B, MIXTRAL = bundled("Qwen/Qwen2.5-72B-Instruct"), bundled("mistralai/Mixtral-8x7B-v0.1")
QWEN3_30B, DEEPSEEK_V3 = bundled("Qwen/Qwen3-30B-A3B"), bundled("deepseek-ai/DeepSeek-V3", quantization_config=None)
GPT_OSS_20B, OPT_6_7B = bundled("openai/gpt-oss-20b"), bundled("facebook/opt-6.7b")
GEMMA_2_27B, QWEN_VL_7B = bundled("google/gemma-2-27b-it"), bundled("Qwen/Qwen2.5-VL-7B-Instruct")
NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 21504, "vocab_size": 131072, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "head_dim": 128, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip


def _on(tensor: int = 1, pipeline: int = 1, data: int = 1, **changes: Any) -> Settings:
    """The GPUs of a start before vLLM kept whole segments."""
    settings = Settings(release="0.18.0", tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data)
    return replace(settings, **changes)


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape, by the only door."""
    return ModelShape.from_config(config)


@each(("name", "published"), rows(Path(__file__).with_name("parameters.txt")))
def test_parameter_counts_are_the_published_ones(name: str, published: str) -> None:
    """Every tensor of the family is there: the count is the one on the model's page, to the last parameter."""
    assert parameters(shape_of(bundled(name))) == int(published)


@each(
    ("config", "placement", "quantization", "measured"),
    [
        (QWEN_72B | {"max_position_embeddings": 131072}, _on(2), None, 67.82),
        (GEMMA_2_27B, _on(), None, 50.72),
        (MIXTRAL, _on(2), None, 43.51),
        (QWEN3_30B, _on(), None, 56.88),
        (QWEN3_30B, _on(2), "fp8", 14.53),
        (OPT_6_7B, _on(), None, 12.40),
    ],
)
def test_a_start_that_was_logged(
    config: dict[str, Any], placement: Settings, quantization: str | None, measured: float
) -> None:
    """What vLLM printed as "Model loading took" is met to the last decimal it printed."""
    estimate = weights_from_shape(shape_of(config), replace(placement, quantization=quantization))
    assert estimate.value / GIB == pytest.approx(measured, abs=0.0101)
    assert estimate.low <= measured * GIB <= estimate.high


def test_tied_embeddings_count_once() -> None:
    """A tied head costs nothing on one stage, and one more embedding on a last stage of its own."""
    tied, untied = shape_of(LLAMA | {"tie_word_embeddings": True}), shape_of(LLAMA)
    embedding = 128256 * 4096 * 2
    one = weights_from_shape(untied).value - weights_from_shape(tied).value
    assert embedding <= one <= embedding + 2**20
    two = _on(pipeline_parallel=2)
    assert abs(weights_from_shape(untied, two).value - weights_from_shape(tied, two).value) < 2**20


def test_the_vocabulary_is_padded() -> None:
    """49,155 rows become 49,216 before they are cut."""
    odd, even = (shape_of(LLAMA | {"num_hidden_layers": 2, "vocab_size": vocab}) for vocab in (49155, 49216))
    assert weights_from_shape(odd).value == weights_from_shape(even).value
    assert parameters(odd) < parameters(even)


def test_rotary_tables_are_as_long_as_the_stretch_makes_them() -> None:
    """A dynamic stretch is not in the table, LongRoPE has one more of the short length, YaRN's begins at the original one."""
    for rope, context, length in (
        (None, 4096, 4096),
        (RopeScaling("dynamic", 2.0), 8192, 4096),
        (RopeScaling("longrope"), 131072, 131072 + 4096),
        (RopeScaling("yarn", 4.0, 1024), 8192, 4096),
    ):
        shape = replace(shape_of(LLAMA), rope=rope, max_context=context, default_context=4096)
        assert rotary_bytes(shape, family_of(shape), 2) == length * 128 * 2, rope


def test_keys_are_copied_beyond_the_kv_heads() -> None:
    """With more ranks than KV heads every rank keeps one whole head of keys and values."""
    shape = shape_of(LLAMA | {"num_key_value_heads": 2})
    four, eight = (weights_from_shape(shape, _on(n)).value for n in (4, 8))
    keys = 32 * 2 * 128 * 4096 * 2  # one head of k and of v in each of 32 layers
    assert 2 * eight - four == pytest.approx(keys, rel=0.15)


def test_experts_are_spread_over_data_parallel_ranks_too() -> None:
    """Expert parallelism over 2 x 4 ranks leaves an eighth of the experts, the rest as tensor parallelism leaves it."""
    shape = shape_of(QWEN3_30B)
    both = weights_from_shape(shape, _on(4, data_parallel=2, expert_parallel=True)).value
    wide = weights_from_shape(shape, _on(4, data_parallel=2)).value
    assert both == pytest.approx(wide, rel=0.001)  # 128 experts and their width divide by eight alike
    assert both < weights_from_shape(shape, _on(4)).value


@each(
    ("quantization", "bytes_per_weight"),
    [
        (Quantization("fp8", bits=8, block=(128, 128)), 1 + 4 / 128**2),
        (Quantization("fp8", bits=8), 1.0),
        (Quantization("awq", bits=4, group_size=128), 0.5 + 2.5 / 128),
        (Quantization("gptq", bits=4, group_size=128), 0.5 + 2 / 128),
        (Quantization("compressed-tensors", "pack-quantized", 4, 32), 0.5 + 2 / 32),
        (Quantization("compressed-tensors", "nvfp4-pack-quantized", 4, 16), 0.5625),
        (Quantization("compressed-tensors", "mxfp4-pack-quantized", 4, 32), 0.53125),
        (Quantization("modelopt_fp4", "NVFP4", 4, 16), 0.5625),
        (Quantization("bitsandbytes", bits=4), 0.5625),
        (Quantization("bitsandbytes", bits=8), 1.0),
    ],
)
def test_quantised_sizes(quantization: Quantization, bytes_per_weight: float) -> None:
    """The matrices shrink to the method's bytes per weight; embeddings and head stay at 16 bits."""
    shape = shape_of(LLAMA)
    ends = 2 * 128256 * 4096
    expected = ends * 2 + (parameters(shape) - ends) * bytes_per_weight
    assert weights_from_shape(replace(shape, quantization=quantization)).value == pytest.approx(expected, rel=0.003)


def test_ignored_modules_stay_as_they_are() -> None:
    """What a checkpoint leaves alone, by name, by pattern or by layer, keeps its 16 bits."""
    shape = shape_of(QWEN3_30B)
    fp8 = Quantization("fp8", bits=8, block=(128, 128))
    attention = 2048 * (32 + 8) * 128 + 32 * 128 * 2048  # q, k, v and o of one layer
    plain = weights_from_shape(replace(shape, quantization=fp8)).value
    for ignored, layers in (
        (("re:.*self_attn.*",), 48),
        (("model.layers.*.self_attn",), 48),
        (("model.layers.3.self_attn*", "lm_head"), 1),
        (tuple(f"model.layers.{n}.self_attn.{p}" for n in range(5) for p in ("q_proj", "o_proj")), 5),
    ):
        more = weights_from_shape(replace(shape, quantization=replace(fp8, ignored=ignored))).value - plain
        assert more == pytest.approx(layers * attention, rel=0.02), ignored


def test_gpt_oss_experts_are_padded() -> None:
    """gpt-oss-120b holds 65.97 GiB on one GPU, because its kernel grows 2880 by 2880 to 2944 by 3072."""
    found = weights_from_shape(shape_of(bundled("openai/gpt-oss-120b")))
    assert found.value / GIB == pytest.approx(65.965, abs=0.05)
    assert found.low / GIB <= 61.29, "what it took on an H200 with Triton's kernel, which does not pad"


def test_encoders_are_on_every_stage_unless_switched_off() -> None:
    """The vision tower is loaded by each pipeline stage, cut by tensor parallelism or not, or not at all."""
    shape = shape_of(QWEN_VL_7B)
    tower = 2 * (8_292_166_656 - 7_615_616_512)
    with_it, without = (weights_from_shape(shape, _on(1, 2, language_model_only=not on)).value for on in (True, False))
    assert with_it - without == pytest.approx(tower, rel=0.02)
    cut, whole = (weights_from_shape(shape, _on(4, encoders_whole=on)).value for on in (False, True))
    assert whole - cut == pytest.approx(tower * 3 / 4, rel=0.02)


@pytest.mark.skipif(not CONFIGS, reason="the shared data folder is not beside the repository")
@each("path", CONFIGS, ids=lambda path: path.stem)
def test_every_public_config_is_planned(path: Path) -> None:
    """Each of the public config.json files gives a figure that shrinks with every kind of parallelism."""
    shape = shape_of(json.loads(path.read_text(encoding="utf-8")))
    one = weights_from_shape(shape)
    assert 0 < one.low <= one.value <= one.high
    for placement in (_on(2), _on(1, 2), _on(2, 2, 2, expert_parallel=True)):
        assert weights_from_shape(shape, placement).value < one.value
    assert lora_bytes(shape, _on(2, max_loras=1, max_lora_rank=16)).value > 0


def test_lora_slots() -> None:
    """One slot of rank 16 on Mistral 7B takes the 0.08 GiB that its start shows; Llama's words have slots too: with them its
    start took the 6.34 GiB that an H200 showed. Over two stages the last one of a tied model holds the table and the head."""
    mistral = shape_of(LLAMA | {"architectures": [], "model_type": "mistral", "vocab_size": 32000})
    one, wide = (_on(max_loras=1, max_lora_rank=rank) for rank in (16, 512))
    assert lora_bytes(mistral, one).value == 83_886_080
    assert lora_bytes(mistral, replace(one, max_loras=4)).value == 4 * 83_886_080
    llama = LLAMA | {"num_hidden_layers": 4, "vocab_size": 256000}
    apart, tied = (shape_of(llama | {"tie_word_embeddings": is_tied}) for is_tied in (False, True))
    slots = lora_bytes(apart, wide)
    assert (weights_from_shape(apart, _on(release="0.21.0")).value + slots.value) / GIB == pytest.approx(6.34, abs=0.02)
    assert slots.low <= slots.value - 2 * 512 * 2 * 256000 <= slots.value <= slots.high
    other = lora_bytes(shape_of(llama | {"architectures": ["MistralForCausalLM"]}), wide)
    assert other.value < slots.value
    assert other.high == slots.high
    assert lora_bytes(tied, one) == lora_bytes(apart, one)
    two = replace(one, pipeline_parallel=2)
    assert lora_bytes(tied, two).value - lora_bytes(apart, two).value == 16 * 2 * (256000 + 4096)


@pytest.mark.skipif(not CONFIGS, reason="the shared data folder is not beside the repository")
@pytest.mark.parametrize(("name", "architecture", "allocated"), cases("plan", "lora_slots_are_those_that_vllm_builds"))
def test_lora_slots_are_those_that_vllm_builds(name: str, architecture: str | None, allocated: int) -> None:
    """One slot of rank 16, as LoRAModelManager of vLLM 0.32.0 laid it out on torch's meta device: dense, Qwen3.5, Mamba 2."""
    told = json.loads((CONFIGS[0].parent / f"{name}.json").read_text(encoding="utf-8"))
    own = told["text_config"] | {"architectures": [architecture]} if architecture else told
    slots = lora_bytes(shape_of(own), _on(max_loras=1, max_lora_rank=16))
    assert slots.value == pytest.approx(allocated, rel=1e-4)
    assert slots.low <= allocated <= slots.high


def test_bands_widen_with_what_is_not_known() -> None:
    """An unknown family and an unknown method are planned, with a wide band and the reason."""
    strange = weights_from_shape(shape_of(LLAMA | {"model_type": "never_heard"}))
    assert strange.high > 1.1 * strange.value
    assert "never_heard" in strange.why
    unclear = weights_from_shape(shape_of(LLAMA), _on(quantization="some_method"))
    assert unclear.high > 1.9 * unclear.value
    assert "bits" in unclear.why
    dense = weights_from_shape(shape_of(LLAMA))
    assert dense.high < 1.02 * dense.value


def test_a_total_is_cut_like_the_shape() -> None:
    """The index's total, halved by tensor parallelism, is the shape's estimate again."""
    shape = shape_of(LLAMA)
    total = weights_from_total(2 * 8_030_261_248, shape, _on(2))
    assert total.value == pytest.approx(weights_from_shape(shape, _on(2)).value, rel=0.002)
    assert total.low < total.value < total.high


SHAPES = st.sampled_from([LLAMA, MIXTRAL, QWEN3_30B, GEMMA_2_27B, NEMOTRON_H_8B, DEEPSEEK_V3]).map(shape_of)


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3]), st.booleans())
def test_the_ranks_together_hold_the_model(shape: ModelShape, tensor: int, pipeline: int, experts: bool) -> None:
    """The heaviest rank is at least the mean and at most the whole; more ranks never make it heavier."""
    whole = weights_from_shape(shape).value
    placement = _on(tensor, pipeline, expert_parallel=experts)
    rank = weights_from_shape(shape, placement).value
    assert rank * tensor * pipeline >= parameters(shape) * 2
    assert rank <= whole + 2**21
    assert weights_from_shape(shape, replace(placement, tensor_parallel=2 * tensor)).value < rank


MOE: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 16, "moe_intermediate_size": 768,
}  # fmt: skip
Tensor = tuple[str, str, tuple[int, ...]]
ROTARY = 4096 * 128 * 2


def tensors_of(shape: ModelShape, dtype: str = "BF16", experts: int = 0) -> Iterator[Tensor]:
    """The header of a Llama checkpoint, or of a Qwen3-MoE one."""
    hidden, width, wide = shape.hidden_size, 768 if experts else shape.intermediate_size or 0, shape.head_dim
    queries, keys = shape.attention_heads * wide, shape.kv_heads * wide
    matrices = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    parts = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries)}
    parts = {f"self_attn.{name}": size for name, size in parts.items()}
    parts |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))  # type: ignore[arg-type]
    if experts:
        parts |= {"mlp.gate": (experts, hidden)} | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (wide,))  # type: ignore[arg-type]
    parts |= {
        f"mlp.{where}{name}": size
        for where in ([f"experts.{n}." for n in range(experts)] or [""])
        for name, size in matrices.items()
    }
    yield "model.embed_tokens.weight", dtype, (shape.vocab_size, hidden)
    for n in range(len(shape.layers)):
        yield from ((f"model.layers.{n}.{name}.weight", dtype, size) for name, size in parts.items())
        yield f"model.layers.{n}.self_attn.rotary_emb.inv_freq", "F32", (64,)
    yield "model.norm.weight", dtype, (hidden,)
    yield "lm_head.weight", dtype, (shape.vocab_size, hidden)


def test_a_whole_checkpoint_is_its_bytes() -> None:
    """On one GPU every tensor's bytes and the rotary table, and it is exact; 32 bits are loaded in the served type."""
    shape = ModelShape.from_config(LLAMA)
    estimate = weights_from_tensors(tensors_of(shape), shape)
    assert estimate.is_exact
    assert estimate.value == 2 * 8_030_261_248 + ROTARY
    assert weights_from_tensors(tensors_of(shape, "F32"), shape).value == 2 * 8_030_261_248 + ROTARY
    assert weights_from_tensors(tensors_of(shape), shape, _on(dtype="float32")).value == 2 * (2 * 8_030_261_248 + ROTARY)


def test_the_shape_agrees_with_the_tensors() -> None:
    """Cut by name or by the family's rules, experts by width or by count: a rank weighs the same but for the rounding."""
    for placement in (_on(2), _on(8), _on(16), _on(4, 2), _on(1, 3)):
        shape = ModelShape.from_config(LLAMA)
        exact = weights_from_tensors(tensors_of(shape), shape, placement)
        assert exact.is_exact
        assert weights_from_shape(shape, placement).value == pytest.approx(exact.value, rel=0.002)
    for placement in (_on(), _on(4), _on(4, expert_parallel=True), _on(2, 1, 4, expert_parallel=True)):
        shape = ModelShape.from_config(MOE)
        exact = weights_from_tensors(tensors_of(shape, experts=16), shape, placement)
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
    estimate = weights_from_tensors([*tensors_of(shape), *more], shape)
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
    # An expert's scale per output of its second matrix is on every rank that holds a part of its width; its first one's is cut.
    experts: list[Tensor] = [
        ("model.layers.0.mlp.experts.0.down_proj.weight_scale", "F32", (4096, 1)),
        ("model.layers.0.mlp.experts.0.down_proj.bias_scale", "F32", (4096,)),
        ("model.layers.0.mlp.experts.0.up_proj.weight_scale", "F32", (768, 1)),
        ("model.layers.0.mlp.experts.0.down_proj.weight", "F8_E4M3", (4096, 768)),
    ]
    two = _on(2)
    assert weights_from_tensors(experts, shape, two).value == 2 * 4096 * 4 + 768 * 4 // 2 + 4096 * 768 // 2 + ROTARY
    assert weights_from_tensors(column, shape, two).value == (14336 * 4096 + 14336 * 4) // 2 + ROTARY
    assert weights_from_tensors(row, shape, two).value == 14336 * 4096 // 2 + 4096 * 4 + 4 + ROTARY


def test_unknown_names_have_a_band() -> None:
    """A tensor whose name says nothing is counted whole, the band reaching down to its share; an unknown type is one line."""
    shape = ModelShape.from_config(LLAMA)
    strange: list[Tensor] = [("model.layers.0.mystery.weight", "BF16", (1024, 1024))]
    estimate = weights_from_tensors(strange, shape, _on(2))
    assert estimate.high == estimate.value == 2 * 2**20 + ROTARY
    assert estimate.low == 2**20 + ROTARY
    with pytest.raises(BadInput, match="Q9"):
        weights_from_tensors([("model.norm.weight", "Q9", (4096,))], shape)


def test_padded_experts_are_not_taken_for_exact() -> None:
    """Where the kernel grows the experts, the file's bytes are the lower end of the band."""
    shape = ModelShape.from_config(MOE | {"moe_intermediate_size": 700, "quantization_config": {"quant_method": "mxfp4"}})
    tensors = [(name, "U8", (rows[0], rows[1] // 2)) if ".experts." in name else (name, kind, rows)
               for name, kind, rows in tensors_of(shape, experts=16)]  # fmt: skip
    estimate = weights_from_tensors(tensors, shape)
    assert estimate.low < estimate.value < estimate.high
