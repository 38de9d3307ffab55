"""Every public config.json we have is read, and agrees with what its server printed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from plimsoll.models.shape import Mla, ModelShape
from tests.each import each
from tests.models.model_configs import (
    DATA,
    FILES,
    NO_DATA,
    K,
)

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
