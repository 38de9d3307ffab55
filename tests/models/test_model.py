"""A config.json becomes a ModelShape: context, nesting, quantisation, hostile input, and every public file we have."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.models.shape import Mla, ModelShape
from tests.each import cases, each
from tests.models.model_configs import (
    DATA,
    DEEPSEEK_V3,
    FILES,
    GPT_OSS_20B,
    LLAMA_8B,
    NEMOTRON_H,
    NO_DATA,
    QWEN3_NEXT,
    K,
    cached_elements,
    shape,
    usual,
    without,
)


@pytest.mark.parametrize(("keys", "context"), cases("models", "max_context_follows_vllm"))
def test_max_context_follows_vllm(keys: dict[str, Any], context: int) -> None:
    """The smallest stated length counts, model_max_length overrides it, and only some stretches multiply it."""
    assert shape(usual("llama", **keys)).max_context == context


@pytest.mark.parametrize("path", [("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config")])
def test_the_language_model_is_found_wherever_it_is_nested(path: tuple[str, ...]) -> None:
    """Multimodal files nest the text model under several names, and say dtype and tying outside it."""
    config: dict[str, Any] = usual("qwen2")
    for name in reversed(path):
        config = {name: config, "vision_config": {"depth": 32}, "audio_config": {"d_model": 1280}}
    nested = ModelShape.from_config(config | {"model_type": "outer", "dtype": "bfloat16", "tie_word_embeddings": True})
    assert (nested.model_type, nested.text_model_type, nested.hidden_size) == ("outer", "qwen2", 1024)
    assert (nested.dtype, nested.tie_word_embeddings) == ("bfloat16", True)
    assert [(tower.what, tower.layers, tower.hidden_size) for tower in nested.towers] == [
        ("vision", 32, None),
        ("audio", None, 1280),
    ]


GROUP = {"weights": {"num_bits": 4, "group_size": 128, "type": "int"}, "targets": ["Linear"]}


@pytest.mark.parametrize(("key", "quant", "expected"), cases("models", "quantization"))
def test_quantization(key: str, quant: dict[str, Any], expected: tuple[object, ...]) -> None:
    """Bits and group come from the keys, the groups, or the method's own definition; otherwise they are unknown."""
    found = shape(usual("llama"), **{key: quant}).quantization
    assert found is not None
    assert (found.method, found.bits, found.group_size, found.kv_cache) == expected


def test_an_unknown_family_with_the_usual_keys_is_read_with_a_note() -> None:
    """A family nobody told us about is read, and the result says so."""
    new = shape(usual("quokka9"))
    assert (new.kv_heads, new.head_dim, new.tie_word_embeddings) == (4, 64, None)
    assert new.notes == ("model_type 'quokka9' is not known here; its keys were read as the usual ones.",)
    latent = shape(usual("quokka9", kv_lora_rank=256, qk_rope_head_dim=32))
    assert (latent.kinds[0], latent.head_dim) == (K.MLA, 288)
    odd = shape(usual("llama", layer_types=["full_attention", "retention"] * 4))
    assert odd.count(K.FULL) == 8
    assert "retention" in odd.notes[0]


@each(
    ("changes", "said"),
    [
        *cases("models", "a_bad_key_is_named_in_one_line"),
        ({"num_hidden_layers": 10**5000}, "num_hidden_layers should be a whole number from 1 to 4096"),
        ({"num_attention_heads": float("nan")}, "num_attention_heads"),
        ({"architectures": "x" * 10**6}, "architectures"),
    ],
)
def test_a_bad_key_is_named_in_one_line(changes: dict[str, Any], said: str) -> None:
    """Whatever is wrong, the user reads one short line that names the key."""
    with pytest.raises(BadInput) as caught:
        shape(LLAMA_8B, **changes)
    message = str(caught.value)
    assert said in message
    assert message.startswith("config.json: ")
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("config", [None, [], "llama", 3, True, [[]]])
def test_what_is_not_an_object_is_refused(config: Any) -> None:
    """A file that holds anything but an object is refused."""
    with pytest.raises(BadInput, match="top level"):
        ModelShape.from_config(config)


def test_deep_nesting_is_refused_or_ignored() -> None:
    """A thousand nested text models, or a deep list where a number belongs, end in one line."""
    deep: Any = {}
    for _ in range(100_000):
        deep = {"text_config": deep}
    with pytest.raises(BadInput, match="missing"):
        ModelShape.from_config(deep)
    stack: Any = []
    for _ in range(100_000):
        stack = [stack]
    with pytest.raises(BadInput, match="hidden_size"):
        shape(LLAMA_8B, hidden_size=stack)


# Every key any rule reads, so that random objects reach the rules instead of failing at the first missing size.
KEYS = sorted(
    {*LLAMA_8B, *DEEPSEEK_V3, *GPT_OSS_20B, *QWEN3_NEXT, *NEMOTRON_H}
    | {"text_config", "vision_config", "block_configs", "compress_ratios", "attn_type_list", "hybrid_layer_pattern"}
    | {"linear_attn_config", "layers_block_type", "sparse_attention_config", "index_topk", "index_head_dim", "dtype"}
    | {"attn_layer_period", "attn_layer_offset", "num_attention_heads_per_layer", "attention_other_setting", "moe_layers"}
    | {"no_rope_layers", "sliding_window_pattern", "num_kv_shared_layers", "rope_parameters", "compression_config"}
    | {"ffn_config", "attn_config", "moe_layers_enum", "is_encoder_decoder", "multi_query", "swa_num_key_value_heads"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "llama", "M-*E", "auto", "full_attention", "linear_attention", "mamba", "conv", "hybrid"])
    | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), inner, max_size=6)
        | st.lists(st.sampled_from([0, 1, 4, 128]), max_size=70)
    ),
    max_leaves=25,
)


def read_or_refuse(config: Any) -> None:
    """Reading ends in a shape or in one line for the user, never in anything else."""
    try:
        read = ModelShape.from_config(config)
    except BadInput as caught:
        refused: str | None = str(caught)
    else:
        refused = None
    if refused is not None:
        assert "\n" not in refused
    else:
        assert 1 <= len(read.layers) <= 4096
        assert all(cached_elements(layer) >= 0 for layer in read.layers)
        assert all("\n" not in note for note in read.notes)


@given(JSON)
def test_arbitrary_json_is_read_or_refused(config: Any) -> None:
    """No JSON value makes the reader raise anything but BadInput."""
    read_or_refuse(config)


BASES = (LLAMA_8B, DEEPSEEK_V3, GPT_OSS_20B, QWEN3_NEXT, NEMOTRON_H)


@given(st.sampled_from(BASES), st.lists(st.sampled_from(KEYS), max_size=4), st.data())
def test_a_mutilated_config_is_read_or_refused(base: dict[str, Any], deleted: list[str], data: st.DataObject) -> None:
    """Deleting keys of a working config, and replacing others with anything, never escapes BadInput."""
    config = copy.deepcopy(without(base, *deleted))
    config.update(data.draw(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3)))
    families = ["llama", "gemma4_text", "mamba", "jamba", "zamba2", "nemotron-nas", "llama4_text", "minicpm3", "x"]
    if data.draw(st.booleans()):
        config["model_type"] = data.draw(st.sampled_from(families))
    read_or_refuse(config)


# These two name no type, so vLLM looks into the weight files; deepseek_ref is a family that vLLM refuses as well.
NO_DTYPE = ("openai__gpt-oss-120b", "MiniMaxAI__MiniMax-M2.5")
TYING_UNKNOWN = ("sgl-project__DeepSeek-V4-Flash-FP8", "sgl-project__DeepSeek-V4-Pro-FP8")
# Notes are for the reader; these files are the only ones that need any.
NOTED = {
    "RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8": "config_groups",
    "nvidia__DeepSeek-V4-Flash-NVFP4": "MIXED_PRECISION",
    "nvidia__DeepSeek-V4-Pro-NVFP4": "MIXED_PRECISION",
    "nvidia__Qwen3.6-35B-A3B-NVFP4": "MIXED_PRECISION",
    "sgl-project__DeepSeek-V4-Flash-FP8": "deepseek_ref",
    "sgl-project__DeepSeek-V4-Pro-FP8": "deepseek_ref",
}


@pytest.mark.skipif(not FILES, reason=NO_DATA)
@each("path", FILES, ids=lambda path: path.stem)
def test_every_public_config_is_read(path: Path) -> None:
    """Every file gives a shape; six of them need a note, two leave the type open and two the tying."""
    model = ModelShape.from_config(json.loads(path.read_text()))
    assert (model.dtype is None) == (path.stem in NO_DTYPE)
    assert (model.tie_word_embeddings is None) == (path.stem in TYING_UNKNOWN)
    assert any(layer.kind.keeps_tokens for layer in model.layers)
    if model.moe is not None:
        assert model.moe.experts_per_token is not None
        assert model.moe.intermediate_size is not None
    if path.stem in NOTED:
        assert NOTED[path.stem] in " ".join(model.notes)
    else:
        assert model.notes == ()


def _stated() -> list[tuple[str, dict[str, Any]]]:
    if not FILES:
        return []
    table = json.loads((DATA / "startups" / "architectures.json").read_text())
    have = {path.stem for path in FILES}
    rows = {Path(row["config_file"]).stem: row for row in table.values() if row.get("config_file")}
    return sorted((stem, row) for stem, row in rows.items() if stem in have)


@pytest.mark.skipif(not FILES, reason=NO_DATA)
@each(("stem", "row"), _stated(), ids=lambda value: str(value[0]))
def test_shapes_agree_with_the_table_of_startups(stem: str, row: dict[str, Any]) -> None:
    """Layers, heads and widths are those of the table people collected beside the files."""
    model = ModelShape.from_config(json.loads((DATA / "model-configs" / f"{stem}.json").read_text()))
    assert len(model.layers) == row["num_hidden_layers"]
    assert model.attention_heads == row["num_attention_heads"]
    assert model.hidden_size == row["hidden_size"]
    assert model.vocab_size == row["vocab_size"]
    assert model.max_context == row["max_position_embeddings"]
    if row["model_type"] != "nemotron-nas":  # the table counts its blocks as 64 heads
        assert model.kv_heads == row["num_key_value_heads"]
    if model.mla is None:  # for MLA the table has hidden size / heads, or a rotary width
        assert model.head_dim == row["head_dim"]
    elif row.get("mla"):
        assert model.mla == Mla(
            row["mla"]["kv_lora_rank"],
            row["mla"]["qk_rope_head_dim"],
            row["mla"]["qk_nope_head_dim"],
            row["mla"]["v_head_dim"],
            row["mla"]["q_lora_rank"],
        )
    counts = Counter(model.kinds)
    said = row.get("layer_type_counts") or {}
    assert counts[K.GATED_DELTA_NET] + counts[K.KIMI_DELTA] == said.get("linear_attention", 0) or K.KIMI_DELTA in counts
    if "sliding_attention" in said:
        assert (counts[K.SLIDING], counts[K.FULL]) == (said["sliding_attention"], said["full_attention"])
    if "mamba2" in said:
        assert (counts[K.MAMBA2], counts[K.FULL], counts[K.NONE]) == tuple(
            said[name] for name in ("mamba2", "attention", "mlp_or_moe")
        )
