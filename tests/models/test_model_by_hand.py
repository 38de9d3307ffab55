"""Well-known models, each held against what its authors and vLLM's own sources say."""

from __future__ import annotations

from collections import Counter

from plimsoll.models.shape import FeedForward, Indexer, LinearAttention, Mamba, Mla, ModelShape, Quantization, RopeScaling
from tests.models.model_configs import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    LLAMA_8B,
    NEMOTRON_H,
    QWEN3_NEXT,
    K,
    cached_elements,
    shape,
    usual,
    without,
)


def test_llama_3_1_8b() -> None:
    """Llama 3.1 8B has 32 full layers of 8 KV heads x 128, and llama3 scaling does not stretch its 131072 tokens."""
    llama = shape(LLAMA_8B)
    assert (len(llama.layers), llama.attention_heads, llama.kv_heads, llama.head_dim) == (32, 32, 8, 128)
    assert set(llama.kinds) == {K.FULL}
    assert sum(cached_elements(layer) for layer in llama.layers) * 2 == 131072  # bytes per token in bfloat16
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
    assert sum(cached_elements(layer) for layer in v3.layers) * 2 * 64 == 4_497_408  # bytes per block of 64 tokens
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
            "model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512, "ffn_dim": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16",
        }
    )  # fmt: skip
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
            "model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32,
            "multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 13696, "kv_channels": 128,
            "padded_vocab_size": 65024, "seq_length": 32768,
        }
    )  # fmt: skip
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
