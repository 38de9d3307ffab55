"""Configurations that several tests of models begin with, and how they are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plimsoll.models.files import bundled_model
from plimsoll.models.shape import Layer, LayerKind, ModelShape

K = LayerKind
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
FILES = sorted((DATA / "model-configs").glob("*.json"))
NO_DATA = "the shared data folder is not beside the repository"


def bundled(name: str) -> dict[str, Any]:
    """The facts that the catalogue has of a model's own config.json."""
    model = bundled_model(name)
    assert model is not None
    return dict(model.config)


LLAMA_8B = bundled("meta-llama/Llama-3.1-8B-Instruct") | {"tie_word_embeddings": False}
DEEPSEEK_V3 = bundled("deepseek-ai/DeepSeek-V3")
GPT_OSS_20B = bundled("openai/gpt-oss-20b")
QWEN3_NEXT = bundled("Qwen/Qwen3-Next-80B-A3B-Instruct")
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504,
    "hybrid_override_pattern": "M-M-M-M*-M-", "num_hidden_layers": 11, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attention_head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4,
    "n_groups": 8, "expand": 2, "mamba_ssm_cache_dtype": "float32", "vocab_size": 131072, "max_position_embeddings": 8192,
}  # fmt: skip


def cached_elements(layer: Layer) -> int:
    """Elements one token adds to the layer's cache before compression."""
    keeps = layer.kind.keeps_tokens and not layer.shares_kv
    return layer.kv_heads * (layer.head_dim + layer.v_head_dim) if keeps else 0


def shape(config: dict[str, Any], **changes: Any) -> ModelShape:
    """The shape of a config with some keys changed; a change to None writes null."""
    return ModelShape.from_config({**config, **changes})


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """The config without these keys."""
    return {name: value for name, value in config.items() if name not in names}


def usual(model_type: str, **keys: Any) -> dict[str, Any]:
    """A small model with the usual keys, for rules that need no particular sizes."""
    base = {
        "model_type": model_type, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip
    return {**base, **keys}
