"""A config.json becomes a ModelShape: hand-checked models, every public file we have, and hostile input."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.domain.model import (
    FeedForward,
    Indexer,
    Layer,
    LayerKind,
    LinearAttention,
    Mamba,
    Mla,
    ModelShape,
    Quantization,
    RopeScaling,
    ShortConv,
)
from plimsoll.errors import BadInput

K = LayerKind
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
FILES = sorted((DATA / "model-configs").glob("*.json"))
NO_DATA = "the shared data folder is not beside the repository"

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "hybrid_override_pattern": "M-M-M-M*-M-",
    "num_hidden_layers": 11,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_groups": 8,
    "expand": 2,
    "mamba_ssm_cache_dtype": "float32",
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
}


def _cached(layer: Layer) -> int:
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
        "model_type": model_type,
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    return {**base, **keys}


# ---- Models checked by hand ------------------------------------------------------------------------------------------


def test_llama_3_1_8b() -> None:
    """Llama 3.1 8B has 32 full layers of 8 KV heads x 128, and llama3 scaling does not stretch its 131072 tokens."""
    llama = shape(LLAMA_8B)
    assert (len(llama.layers), llama.attention_heads, llama.kv_heads, llama.head_dim) == (32, 32, 8, 128)
    assert set(llama.kinds) == {K.FULL}
    assert sum(_cached(layer) for layer in llama.layers) * 2 == 131072  # bytes per token in bfloat16
    assert (llama.max_context, llama.default_context) == (131072, 131072)
    assert llama.rope == RopeScaling("llama3", 8.0, 8192)
    assert (llama.tie_word_embeddings, llama.dtype, llama.moe, llama.quantization) == (False, "bfloat16", None, None)
    assert llama.notes == ()


def test_qwen_2_5_72b_does_not_slide() -> None:
    """Qwen 2.5 states a sliding_window but switches it off with use_sliding_window."""
    qwen = shape(
        usual("qwen2", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8),
        sliding_window=131072,
        use_sliding_window=False,
        max_window_layers=80,
        vocab_size=152064,
    )
    assert (qwen.head_dim, qwen.kv_heads, qwen.vocab_size, qwen.sliding_window) == (128, 8, 152064, None)
    assert qwen.count(K.FULL) == 80


def test_mixtral_8x7b() -> None:
    """Mixtral's experts are as wide as intermediate_size, and every layer has them."""
    mixtral = shape(
        usual("mixtral", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=14336,
        sliding_window=None,
    )
    assert mixtral.moe is not None
    assert (mixtral.moe.experts, mixtral.moe.experts_per_token, mixtral.moe.intermediate_size) == (8, 2, 14336)
    assert {layer.feed_forward for layer in mixtral.layers} == {FeedForward.EXPERTS}
    assert mixtral.count(K.FULL) == 32


def test_mistral_7b_v0_1_slides_everywhere() -> None:
    """A sliding_window without layer_types holds for all layers."""
    mistral = shape(usual("mistral", sliding_window=4096))
    assert mistral.count(K.SLIDING) == 8
    assert {layer.window for layer in mistral.layers} == {4096}


def test_gemma_3_27b() -> None:
    """Gemma 3 27B nests its text model, states no pattern, and has 52 sliding and 10 full layers."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    gemma = ModelShape.from_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "patch_size": 14},
            "torch_dtype": "bfloat16",
        }
    )
    assert (gemma.count(K.SLIDING), gemma.count(K.FULL), gemma.sliding_window) == (52, 10, 1024)
    assert [n for n, kind in enumerate(gemma.kinds) if kind is K.FULL] == list(range(5, 62, 6))
    assert (gemma.model_type, gemma.text_model_type) == ("gemma3", "gemma3_text")
    assert (gemma.max_context, gemma.tie_word_embeddings, gemma.vocab_size) == (131072, True, 262208)
    assert [tower.what for tower in gemma.towers] == ["vision"]
    assert (gemma.towers[0].layers, gemma.towers[0].hidden_size) == (27, 1152)
    assert any("vocab_size 262208" in note for note in gemma.notes)


def test_gpt_oss_20b() -> None:
    """gpt-oss 20B has 12 layers that slide over 128 tokens and 12 full ones, the first of them sliding."""
    oss = shape(GPT_OSS_20B)
    assert (oss.count(K.SLIDING), oss.count(K.FULL), oss.kinds[0], oss.sliding_window) == (12, 12, K.SLIDING, 128)
    assert oss.quantization == Quantization("mxfp4", None, 4, 32, None, None, ("model.layers.*.self_attn",))
    assert shape(without(GPT_OSS_20B, "layer_types")).kinds == oss.kinds


def test_deepseek_v3() -> None:
    """DeepSeek V3 keeps one vector of 512 + 64 per token in each of 61 layers; the first three are dense."""
    v3 = shape(DEEPSEEK_V3)
    assert v3.mla == Mla(512, 64, 128, 128, 1536)
    assert (v3.count(K.MLA), v3.head_dim) == (61, 576)
    assert {(layer.kv_heads, layer.head_dim, layer.v_head_dim) for layer in v3.layers} == {(1, 576, 0)}
    assert sum(_cached(layer) for layer in v3.layers) * 2 * 64 == 4_497_408  # bytes per block of 64 tokens
    assert Counter(layer.feed_forward for layer in v3.layers) == {FeedForward.DENSE: 3, FeedForward.EXPERTS: 58}
    assert [layer.feed_forward for layer in v3.layers[:4]] == [FeedForward.DENSE] * 3 + [FeedForward.EXPERTS]
    assert v3.moe is not None
    assert (v3.moe.shared_experts, v3.moe.shared_intermediate_size) == (1, 2048)
    assert (v3.mtp_layers, v3.max_context, v3.indexer) == (1, 163840, None)
    assert v3.quantization == Quantization("fp8", "e4m3", 8, None, (128, 128))


def test_deepseek_v3_2_has_an_indexer_in_every_layer() -> None:
    """DeepSeek V3.2 adds an indexer of width 128 to each layer."""
    v32 = shape(DEEPSEEK_V3, model_type="deepseek_v32", index_head_dim=128, index_n_heads=64, index_topk=2048)
    assert v32.indexer == Indexer(128, 64)
    assert all(layer.indexer for layer in v32.layers)


def test_glm_5_2_shares_indexers() -> None:
    """From GLM 5.2 on, after the first three layers only every fourth owns an indexer."""
    glm = shape(
        DEEPSEEK_V3,
        model_type="glm_moe_dsa",
        num_hidden_layers=12,
        index_head_dim=128,
        index_topk=2048,
        index_topk_freq=4,
        index_skip_topk_offset=3,
    )
    assert [n for n, layer in enumerate(glm.layers) if layer.indexer] == [0, 1, 2, 6, 10]


def test_deepseek_v4() -> None:
    """DeepSeek V4 slides over latents of 512, compresses most layers, and indexes those of ratio 4."""
    v4 = shape(
        usual("deepseek_v4", num_hidden_layers=5, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64),
        kv_lora_rank=None,
        q_lora_rank=1024,
        sliding_window=128,
        compress_ratios=[0, 0, 4, 128, 4, 0],
        index_head_dim=128,
        index_n_heads=64,
        index_topk=512,
    )
    assert v4.kinds == (K.MLA_SLIDING, K.MLA_SLIDING, K.MLA_COMPRESSED, K.MLA_COMPRESSED, K.MLA_COMPRESSED)
    assert [layer.compress_ratio for layer in v4.layers] == [1, 1, 4, 128, 4]
    assert [layer.indexer for layer in v4.layers] == [False, False, True, False, True]
    assert v4.mla is not None
    assert v4.mla.cached_dim == 512
    assert {(layer.window, layer.head_dim, layer.kv_heads) for layer in v4.layers} == {(128, 512, 1)}


def test_qwen3_next() -> None:
    """Qwen3-Next 80B has 12 full layers, every fourth, and 36 gated delta nets."""
    qwen = shape(QWEN3_NEXT)
    assert (qwen.count(K.FULL), qwen.count(K.GATED_DELTA_NET), qwen.kinds[3]) == (12, 36, K.FULL)
    assert qwen.linear == LinearAttention(16, 32, 128, 128, 4)
    assert qwen.attention_output_gate
    assert qwen.moe is not None
    assert (qwen.moe.experts, qwen.moe.shared_experts, qwen.moe.shared_intermediate_size) == (512, 1, 512)
    layer_types = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert shape(QWEN3_NEXT, layer_types=layer_types).kinds == qwen.kinds


def test_nemotron_h() -> None:
    """Nemotron-H lists Mamba, attention and feed-forward as layers of their own."""
    nemotron = shape(NEMOTRON_H)
    assert Counter(nemotron.kinds) == {K.MAMBA2: 5, K.NONE: 5, K.FULL: 1}
    assert Counter(layer.feed_forward for layer in nemotron.layers) == {FeedForward.NONE: 6, FeedForward.DENSE: 5}
    assert nemotron.mamba == Mamba(8192, 128, 4, 128, 64, 8, "float32")
    assert nemotron.head_dim == 128
    named = ["mamba", "mlp"] * 3 + ["mamba", "attention", "mlp", "mamba", "mlp"]
    listed = without(NEMOTRON_H, "hybrid_override_pattern", "num_hidden_layers")
    assert shape(listed, layers_block_type=named).layers == nemotron.layers


def test_llama_4_scout() -> None:
    """Llama 4 Scout looks at chunks of 8192 in three layers of four, and one shared expert joins the 16."""
    text = usual("llama4_text", hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8)
    text |= {
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "max_position_embeddings": 10485760,
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192},
    }
    scout = ModelShape.from_config({"model_type": "llama4", "text_config": text})
    assert (scout.count(K.CHUNKED_LOCAL), scout.count(K.FULL), scout.chunk_size) == (36, 12, 8192)
    assert scout.kinds[:4] == (K.CHUNKED_LOCAL, K.CHUNKED_LOCAL, K.CHUNKED_LOCAL, K.FULL)
    assert (scout.max_context, scout.intermediate_size) == (10485760, 16384)
    assert scout.moe is not None
    assert (scout.moe.intermediate_size, scout.moe.shared_intermediate_size) == (8192, 8192)
    maverick = ModelShape.from_config({"model_type": "llama4", "text_config": text | {"interleave_moe_layer_step": 2}})
    assert [layer.feed_forward for layer in maverick.layers[:2]] == [FeedForward.DENSE, FeedForward.EXPERTS]


def test_phi_2_and_phi_3() -> None:
    """Phi-2 has as many KV heads as heads; Phi-3 mini 128k serves 4096 tokens by default because of LongRoPE."""
    phi2 = shape(without(usual("phi", hidden_size=2560, num_attention_heads=32), "num_key_value_heads"))
    assert (phi2.kv_heads, phi2.head_dim) == (32, 80)
    phi3 = shape(
        usual("phi3", hidden_size=3072, num_attention_heads=32, num_key_value_heads=32),
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
        sliding_window=262144,
    )
    assert (phi3.max_context, phi3.default_context, phi3.head_dim) == (131072, 4096, 96)
    assert phi3.rope == RopeScaling("longrope")


def test_opt_350m() -> None:
    """OPT-350m embeds in 512 dimensions and works in 1024; its feed-forward width is called ffn_dim."""
    opt = ModelShape.from_config(
        {
            "model_type": "opt",
            "hidden_size": 1024,
            "word_embed_proj_dim": 512,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "torch_dtype": "float16",
        }
    )
    assert (opt.embedding_size, opt.hidden_size, opt.intermediate_size, opt.kv_heads) == (512, 1024, 4096, 16)
    assert (opt.tie_word_embeddings, opt.dtype) == (True, "float16")


def test_gpt_j_and_gpt_2_speak_of_n_embd() -> None:
    """The GPT families say n_layer, n_head and n_embd, and leave the width at four times the latter."""
    keys = {"n_layer": 28, "n_head": 16, "n_embd": 4096, "n_positions": 2048, "n_inner": None, "vocab_size": 50400}
    gptj = ModelShape.from_config({"model_type": "gptj", **keys})
    assert (len(gptj.layers), gptj.kv_heads, gptj.head_dim, gptj.intermediate_size) == (28, 16, 256, 16384)
    assert (gptj.max_context, gptj.tie_word_embeddings) == (2048, False)
    assert ModelShape.from_config({"model_type": "gpt2", **keys}).tie_word_embeddings is True


def test_falcon_7b_40b_and_bigcode() -> None:
    """Multi-query Falcon has one KV head, the new architecture as many as it states, StarCoder one."""
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
    falcon |= {"vocab_size": 65024, "multi_query": True, "new_decoder_architecture": False}
    assert (shape(falcon).kv_heads, shape(falcon).head_dim) == (1, 64)
    assert shape(falcon).intermediate_size == 4 * 4544
    forty = shape(falcon, hidden_size=8192, num_attention_heads=128, num_kv_heads=8, new_decoder_architecture=True)
    assert (forty.kv_heads, forty.head_dim) == (8, 64)
    bigcode = shape(without(usual("gpt_bigcode", multi_query=True), "num_key_value_heads"))
    assert bigcode.kv_heads == 1


def test_chatglm_mpt_and_dbrx() -> None:
    """Three families with spellings all of their own."""
    glm = ModelShape.from_config(
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "ffn_hidden_size": 13696,
            "kv_channels": 128,
            "padded_vocab_size": 65024,
            "seq_length": 32768,
        }
    )
    assert (len(glm.layers), glm.kv_heads, glm.vocab_size, glm.max_context) == (28, 2, 65024, 32768)
    assert glm.intermediate_size == 13696
    mpt = ModelShape.from_config(
        {
            "model_type": "mpt",
            "d_model": 4096,
            "n_heads": 32,
            "n_layers": 32,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "vocab_size": 50432,
            "attn_config": {"alibi": True},
        }
    )
    assert (mpt.kv_heads, mpt.head_dim, mpt.intermediate_size, mpt.max_context) == (32, 128, 16384, 2048)
    dbrx = ModelShape.from_config(
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32768,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752},
        }
    )
    assert (dbrx.kv_heads, dbrx.head_dim) == (8, 128)
    assert dbrx.moe is not None
    assert (dbrx.moe.experts, dbrx.moe.experts_per_token, dbrx.moe.intermediate_size) == (16, 4, 10752)


# ---- Families with layers of several kinds ---------------------------------------------------------------------------


def test_gemma_2_and_cohere_2_and_exaone_4() -> None:
    """Where the file gives no list, the family's rhythm holds; Cohere's window counts one token more."""
    assert shape(usual("gemma2", sliding_window=4096)).kinds[:3] == (K.SLIDING, K.FULL, K.SLIDING)
    cohere = shape(usual("cohere2", sliding_window=4096, sliding_window_pattern=4))
    assert [n for n, kind in enumerate(cohere.kinds) if kind is K.FULL] == [3, 7]
    assert cohere.sliding_window == 4097
    exaone = shape(usual("exaone4", sliding_window=4096, sliding_window_pattern="LLLG", num_hidden_layers=6))
    assert exaone.kinds == (K.SLIDING, K.SLIDING, K.SLIDING, K.FULL, K.SLIDING, K.FULL)
    assert set(shape(usual("exaone4", sliding_window=None)).kinds) == {K.FULL}


def test_gemma_3n_and_4_share_and_widen() -> None:
    """Gemma 3n's last layers reuse earlier caches; Gemma 4's full layers have wider and fewer KV heads."""
    three = shape(usual("gemma3n_text", num_kv_shared_layers=3, intermediate_size=[1024] * 4 + [2048] * 4))
    assert [layer.shares_kv for layer in three.layers] == [False] * 5 + [True] * 3
    assert _cached(three.layers[7]) == 0
    assert (three.layers[0].intermediate_size, three.layers[7].intermediate_size) == (1024, 2048)
    assert three.per_layer_input_size == 256
    four = shape(
        usual("gemma4_text", num_hidden_layers=6, head_dim=256, sliding_window=1024, num_kv_shared_layers=0),
        num_key_value_heads=8,
        global_head_dim=512,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    )
    assert four.kinds == (K.SLIDING,) * 5 + (K.FULL,)
    assert shape(usual("gemma4_text")).kinds[-1] is K.FULL
    assert (four.layers[0].kv_heads, four.layers[0].head_dim) == (8, 256)
    assert (four.layers[5].kv_heads, four.layers[5].head_dim, four.layers[5].v_head_dim) == (2, 512, 512)
    assert {layer.feed_forward for layer in four.layers} == {FeedForward.DENSE_AND_EXPERTS}


def test_nemotron_nas_prunes_layers() -> None:
    """Nemotron-NAS gives each block its own attention and width, or none."""
    full = {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 5.25, "no_op": False}}
    pruned = {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.5, "no_op": False}}
    empty = {"attention": {"n_heads_in_group": 16, "no_op": False}, "ffn": {"ffn_mult": None, "no_op": True}}
    nas = shape(
        usual("nemotron-nas", hidden_size=8192, num_attention_heads=64, num_hidden_layers=3),
        num_key_value_heads=None,
        intermediate_size=None,
        block_configs=[full, pruned, empty],
    )
    assert nas.kinds == (K.FULL, K.NONE, K.FULL)
    assert [layer.kv_heads for layer in nas.layers] == [8, 0, 4]
    assert [layer.intermediate_size for layer in nas.layers] == [28672, 2816, None]
    assert nas.layers[2].feed_forward is FeedForward.NONE
    assert nas.kv_heads == 8


def test_jamba_bamba_zamba_and_falcon_h1() -> None:
    """Four ways to mix Mamba with attention."""
    jamba = shape(usual("jamba", num_experts=16, num_experts_per_tok=2))
    assert [n for n, kind in enumerate(jamba.kinds) if kind is K.FULL] == [4]
    assert jamba.count(K.MAMBA1) == 7
    assert jamba.mamba == Mamba(2048, 16, 4)
    assert [layer.feed_forward is FeedForward.EXPERTS for layer in jamba.layers] == [False, True] * 4
    sizes = {"mamba_n_heads": 32, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2}
    bamba = shape(usual("bamba", attn_layer_indices=[3, 6], **sizes))
    assert (bamba.count(K.FULL), bamba.count(K.MAMBA2)) == (2, 6)
    assert bamba.mamba == Mamba(2048, 128, 4, 32, 64, 1)
    zamba = {"n_mamba_heads": 32, "mamba_headdim": 64, "mamba_d_state": 64, "mamba_ngroups": 1, "mamba_d_conv": 4}
    zamba2 = shape(usual("zamba2", layers_block_type=["mamba"] * 6 + ["hybrid"] * 2, **zamba))
    assert (zamba2.count(K.FULL_AND_MAMBA2), zamba2.count(K.MAMBA2), zamba2.head_dim) == (2, 6, 128)
    falcon = shape(usual("falcon_h1", mamba_d_ssm=1536, mamba_n_groups=1, **(sizes | {"mamba_d_head": 48})))
    assert set(falcon.kinds) == {K.FULL_AND_MAMBA2}
    assert falcon.mamba is not None
    assert falcon.mamba.inner_size == 1536
    assert K.FULL_AND_MAMBA2.keeps_tokens
    assert K.FULL_AND_MAMBA2.keeps_state


def test_granite_4_hybrid_and_its_all_attention_sibling() -> None:
    """Granite hybrid lists "mamba" and "attention"; granite-4.0-micro lists attention only and needs no Mamba keys."""
    sizes = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
    granite = shape(usual("granitemoehybrid", layer_types=["mamba"] * 6 + ["attention"] * 2, **sizes))
    assert (granite.count(K.MAMBA2), granite.count(K.FULL)) == (6, 2)
    micro = shape(usual("granitemoehybrid", layer_types=["attention"] * 8, num_local_experts=0))
    assert (micro.count(K.FULL), micro.mamba, micro.moe) == (8, None, None)


def test_models_without_attention() -> None:
    """Pure Mamba has no heads at all, as in vLLM."""
    mamba = ModelShape.from_config(
        {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280, "state_size": 16}
        | {"conv_kernel": 4, "expand": 2, "intermediate_size": 5120}
    )
    assert (mamba.attention_heads, mamba.kv_heads, mamba.head_dim) == (0, 0, 0)
    assert set(mamba.kinds) == {K.MAMBA1}
    assert mamba.mamba == Mamba(5120, 16, 4)
    assert any("2048" in note for note in mamba.notes)
    two = ModelShape.from_config(
        {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768, "num_heads": 128}
        | {"head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4}
    )
    assert two.mamba == Mamba(8192, 128, 4, 128, 64, 8)
    assert {layer.feed_forward for layer in two.layers} == {FeedForward.NONE}


def test_kimi_linear_minimax_and_lfm2() -> None:
    """Kimi numbers its delta layers from 1, MiniMax writes 0 for lightning attention, LFM2 calls its layers conv."""
    kimi = shape(
        without(DEEPSEEK_V3, "n_routed_experts"),
        model_type="kimi_linear",
        num_hidden_layers=4,
        linear_attn_config={
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    )
    assert kimi.kinds == (K.KIMI_DELTA, K.KIMI_DELTA, K.KIMI_DELTA, K.MLA)
    assert kimi.linear == LinearAttention(32, 32, 128, 128, 4)
    minimax = shape(usual("minimax_text_01", attn_type_list=[0, 0, 0, 1] * 2, head_dim=128))
    assert (minimax.count(K.LINEAR), minimax.count(K.FULL)) == (6, 2)
    assert minimax.linear == LinearAttention(16, 16, 128, 128)
    lfm = shape(usual("lfm2", layer_types=["conv"] * 6 + ["full_attention"] * 2, conv_L_cache=3))
    assert (lfm.count(K.SHORT_CONV), lfm.short_conv) == (6, ShortConv(1024, 3))


def test_mimo_v2_has_other_heads_where_it_slides() -> None:
    """MiMo-V2's sliding layers have their own KV heads, its values are narrower, and its chunk size means nothing."""
    mimo = shape(
        usual("mimo_v2_flash", head_dim=192, v_head_dim=128, num_hidden_layers=3, hybrid_layer_pattern=[0, 1, 1]),
        sliding_window=128,
        attention_chunk_size=128,
        swa_num_key_value_heads=8,
        swa_num_attention_heads=16,
        swa_head_dim=192,
        swa_v_head_dim=128,
    )
    assert mimo.kinds == (K.FULL, K.SLIDING, K.SLIDING)
    assert [layer.kv_heads for layer in mimo.layers] == [4, 8, 8]
    assert [_cached(layer) for layer in mimo.layers] == [4 * 320, 8 * 320, 8 * 320]
    assert mimo.chunk_size is None


def test_step_laguna_and_minicpm3() -> None:
    """Heads may come per layer, per kind of layer, or from the parts of a latent that is not cached as one."""
    other = {"attention_type": "sliding_attention", "num_attention_heads": 32, "num_attention_groups": 8, "head_dim": 64}
    step = shape(
        without(usual("step3p5", num_attention_groups=4, sliding_window=512), "num_key_value_heads"),
        layer_types=["full_attention", "sliding_attention"] * 6,
        attention_other_setting=other,
    )
    assert [layer.kv_heads for layer in step.layers[:2]] == [4, 8]
    assert any("12 layers" in note for note in step.notes)
    laguna = shape(usual("laguna", num_attention_heads_per_layer=[16, 32] * 4))
    assert [layer.attention_heads for layer in laguna.layers[:2]] == [16, 32]
    minicpm = shape(usual("minicpm3", kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64))
    assert (minicpm.mla, minicpm.kv_heads, minicpm.head_dim, minicpm.kinds[0]) == (None, 16, 96, K.FULL)


def test_a_window_per_layer() -> None:
    """A list of windows makes each layer slide over its own, and null makes it full."""
    plamo = shape(usual("plamo3", sliding_window=[512, None] * 4))
    assert plamo.kinds[:2] == (K.SLIDING, K.FULL)
    assert [layer.window for layer in plamo.layers[:2]] == [512, None]


def test_encoders_keep_nothing() -> None:
    """BERT and EmbeddingGemma attend in both directions and have no cache; Whisper counts its decoder."""
    assert set(shape(usual("bert")).kinds) == {K.ENCODER}
    assert set(shape(usual("gemma3_text", use_bidirectional_attention=True)).kinds) == {K.ENCODER}
    whisper = ModelShape.from_config(
        {
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "d_model": 1280,
            "num_hidden_layers": 32,
            "encoder_layers": 32,
            "decoder_layers": 4,
            "decoder_attention_heads": 20,
            "decoder_ffn_dim": 5120,
            "vocab_size": 51866,
            "max_target_positions": 448,
        }
    )
    assert (len(whisper.layers), whisper.max_context, whisper.is_encoder_decoder) == (4, 448, True)


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, [1, 2]),
        ({"moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
        ({"moe_layers_enum": "2, 3"}, [2, 3]),
        ({"moe_layers": [0, 3]}, [0, 3]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [3]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}, [1, 2]),
        ({"num_dense_layers": 2}, [2, 3]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_which_layers_have_experts(keys: dict[str, Any], sparse: list[int]) -> None:
    """Each family has its own rule for which layers have experts."""
    model = shape(usual("qwen3_moe", num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, **keys))
    assert [n for n, layer in enumerate(model.layers) if layer.feed_forward is FeedForward.EXPERTS] == sparse


# ---- Context, nesting, quantisation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "context"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, 4096),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "x": {}}}, 8192),
        ({"rope_scaling": None}, 4096),
        ({"seq_length": 1024}, 1024),
        ({"model_max_length": 8192}, 8192),
    ],
)
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


@pytest.mark.parametrize(
    ("key", "quant", "expected"),
    [
        ("quantization_config", {"quant_method": "awq", "bits": 4, "group_size": 128}, ("awq", 4, 128, None)),
        ("quantization_config", {"quant_method": "gptq", "bits": 8, "group_size": -1}, ("gptq", 8, -1, None)),
        (
            "compression_config",
            {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}, "kv_cache_scheme": {"num_bits": 8}},
            ("compressed-tensors", 4, 128, "fp8"),
        ),
        (
            "quantization_config",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": "FP8"},
            ("modelopt", 4, 16, "fp8"),
        ),
        (
            "quantization_config",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            ("modelopt", 8, None, "fp8"),
        ),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", 4, None, None)),
        ("quantization_config", {"quant_method": "quark"}, ("quark", None, None, None)),
    ],
)
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


# ---- Hostile input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers should be a whole number from 1 to 4096, not 1000000000000"),
        ({"num_hidden_layers": 10**5000}, "num_hidden_layers should be a whole number from 1 to 4096"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "not true"),
        ({"num_hidden_layers": "32"}, "not '32'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"num_attention_heads": float("nan")}, "num_attention_heads"),
        ({"hidden_size": 8}, "32 attention heads do not fit"),
        ({"vocab_size": [1]}, "vocab_size"),
        ({"vocab_size": float("inf")}, "vocab_size"),
        ({"num_key_value_heads": {}}, "num_key_value_heads"),
        ({"tie_word_embeddings": "yes\nno"}, "tie_word_embeddings should be true or false, not 'yes\\nno'"),
        ({"rope_scaling": "yarn"}, "rope_scaling should be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "rope_scaling.factor"),
        ({"layer_types": ["full_attention"]}, "layer_types describes 1 layers, the model has 32"),
        ({"layer_types": [1] * 32}, "layer_types should be a list of strings"),
        ({"architectures": "x" * 10**6}, "architectures"),
        ({"quantization_config": [1]}, "quantization_config should be an object"),
        ({"hybrid_override_pattern": "MX" * 16}, "hybrid_override_pattern has 'X'"),
        ({"index_topk": 2048}, "index_head_dim is missing"),
        ({"layer_types": ["mamba"] * 32}, "ssm_state_size is missing"),
        ({"text_config": {"model_type": "quokka"}}, "text_config.hidden_size is missing"),
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
        assert all(_cached(layer) >= 0 for layer in read.layers)
        assert all("\n" not in note for note in read.notes)


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_arbitrary_json_is_read_or_refused(config: Any) -> None:
    """No JSON value makes the reader raise anything but BadInput."""
    read_or_refuse(config)


BASES = (LLAMA_8B, DEEPSEEK_V3, GPT_OSS_20B, QWEN3_NEXT, NEMOTRON_H)


@given(st.sampled_from(BASES), st.lists(st.sampled_from(KEYS), max_size=4), st.data())
@settings(max_examples=500, deadline=None)
def test_a_mutilated_config_is_read_or_refused(base: dict[str, Any], deleted: list[str], data: st.DataObject) -> None:
    """Deleting keys of a working config, and replacing others with anything, never escapes BadInput."""
    config = copy.deepcopy(without(base, *deleted))
    config.update(data.draw(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3)))
    families = ["llama", "gemma4_text", "mamba", "jamba", "zamba2", "nemotron-nas", "llama4_text", "minicpm3", "x"]
    if data.draw(st.booleans()):
        config["model_type"] = data.draw(st.sampled_from(families))
    read_or_refuse(config)


# ---- Every public file we have ---------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
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
@pytest.mark.parametrize(("stem", "row"), _stated(), ids=lambda value: value if isinstance(value, str) else "")
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
