"""Families by hand: each held against what its authors and vLLM's own sources say."""

from __future__ import annotations

from typing import Any

from plimsoll.models.shape import Indexer, LinearAttention, Mamba, Mla, ModelShape, Quantization, RopeScaling, ShortConv
from tests.each import each
from tests.models.model_configs import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    LLAMA_8B,
    NEMOTRON_H,
    QWEN3_NEXT,
    cached_elements,
    usual,
    without,
)

# One letter for the kind of a layer, and one for what follows the mixing in it.
KINDS = {
    "full": "F", "sliding": "S", "chunked-local": "C", "mla": "L", "mla-sliding": "l", "mla-compressed": "c", "mamba1": "1",
    "mamba2": "M", "full-and-mamba2": "H", "gated-delta-net": "G", "kimi-delta": "K", "linear": "N", "short-conv": "V",
    "encoder": "E", "none": "-",
}  # fmt: skip
FEEDS = {"dense": "d", "experts": "e", "dense-and-experts": "b", "none": "-"}


def fact(model: ModelShape, name: str) -> object:
    """One fact of a shape: its kinds or feed-forwards as letters, a field, a field of a part, or a field of every layer."""
    if name == "kinds":
        return "".join(KINDS[kind] for kind in model.kinds)
    if name == "feeds":
        return "".join(FEEDS[layer.feed_forward] for layer in model.layers)
    if name == "cached":
        return [cached_elements(layer) for layer in model.layers]
    part, _, field = name.partition(".")
    if part == "layers":
        return [getattr(layer, field) for layer in model.layers]
    if part == "towers":
        return [getattr(tower, field) for tower in model.towers]
    return getattr(getattr(model, part), field) if field else getattr(model, name)


def check(config: dict[str, Any], facts: dict[str, object]) -> None:
    model = ModelShape.from_config(config)
    assert {name: fact(model, name) for name in facts} == facts


GEMMA_3_TEXT = {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
SCOUT_TEXT = usual(
    "llama4_text", hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
    attention_chunk_size=8192, intermediate_size=8192, intermediate_size_mlp=16384, num_local_experts=16,
    num_experts_per_tok=1, interleave_moe_layer_step=1, no_rope_layers=[], max_position_embeddings=10485760,
    rope_scaling={"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192},
)  # fmt: skip
GPT = {"n_layer": 28, "n_head": 16, "n_embd": 4096, "n_positions": 2048, "n_inner": None, "vocab_size": 50400}
FALCON = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
          "vocab_size": 65024, "multi_query": True, "new_decoder_architecture": False}  # fmt: skip
BAMBA = {"mamba_n_heads": 32, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2}
GRANITE = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}

WELL_KNOWN: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "Llama 3.1 8B: 131072 bytes a token in bfloat16; llama3 scaling does not stretch its context": (
        LLAMA_8B,
        {"kinds": "F" * 32, "attention_heads": 32, "kv_heads": 8, "head_dim": 128, "max_context": 131072, "dtype": "bfloat16",
         "default_context": 131072, "rope": RopeScaling("llama3", 8.0, 8192), "tie_word_embeddings": False, "moe": None,
         "quantization": None, "notes": (), "cached": [131072 // 2 // 32] * 32}),
    "Qwen 2.5 states a sliding_window but switches it off": (
        usual("qwen2", hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, sliding_window=131072,
              use_sliding_window=False, max_window_layers=80, vocab_size=152064),
        {"kinds": "F" * 8, "head_dim": 128, "kv_heads": 8, "vocab_size": 152064, "sliding_window": None}),
    "Mixtral's experts are as wide as intermediate_size, and every layer has them": (
        usual("mixtral", num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336, sliding_window=None),
        {"kinds": "F" * 8, "feeds": "e" * 8, "moe.experts": 8, "moe.experts_per_token": 2, "moe.intermediate_size": 14336}),
    "Mistral 7B v0.1: a sliding_window without layer_types holds for all layers": (
        usual("mistral", sliding_window=4096), {"kinds": "S" * 8, "layers.window": [4096] * 8}),
    "Gemma 3 27B nests its text model, states no pattern, and has 52 sliding and 10 full layers": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": GEMMA_3_TEXT,
         "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "patch_size": 14}, "torch_dtype": "bfloat16"},
        {"kinds": "SSSSSF" * 10 + "SS", "sliding_window": 1024, "model_type": "gemma3", "text_model_type": "gemma3_text",
         "max_context": 131072, "tie_word_embeddings": True, "vocab_size": 262208, "towers.what": ["vision"],
         "towers.layers": [27], "towers.hidden_size": [1152]}),
    "gpt-oss 20B has 12 layers that slide over 128 tokens and 12 full ones": (
        GPT_OSS_20B,
        {"kinds": "SF" * 12, "sliding_window": 128, "quantization": Quantization("mxfp4", None, 4, 32, None, None, (
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"))}),
    "gpt-oss without its list": (without(GPT_OSS_20B, "layer_types"), {"kinds": "SF" * 12}),
    "DeepSeek V3 keeps one vector of 512 + 64 per token in each of 61 layers; the first three are dense": (
        DEEPSEEK_V3,
        {"kinds": "L" * 61, "feeds": "ddd" + "e" * 58, "mla": Mla(512, 64, 128, 128, 1536), "head_dim": 576,
         "layers.kv_heads": [1] * 61, "layers.v_head_dim": [0] * 61, "cached": [576] * 61, "moe.shared_experts": 1,
         "moe.shared_intermediate_size": 2048, "mtp_layers": 1, "max_context": 163840, "indexer": None,
         "quantization": Quantization("fp8", "e4m3", 8, None, (128, 128))}),
    "DeepSeek V3.2 adds an indexer of width 128 to each layer": (
        DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
        {"indexer": Indexer(128, 64), "layers.indexer": [True] * 61}),
    "From GLM 5.2 on, after the first three layers only every fourth owns an indexer": (
        DEEPSEEK_V3 | {"model_type": "glm_moe_dsa", "num_hidden_layers": 8, "index_head_dim": 128, "index_topk": 2048,
                       "index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"layers.indexer": [True, True, True, False, False, False, True, False]}),
    "DeepSeek V4 slides over latents of 512, compresses most layers, and indexes those of ratio 4": (
        usual("deepseek_v4", num_hidden_layers=5, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, kv_lora_rank=None,
              q_lora_rank=1024, sliding_window=128, compress_ratios=[0, 0, 4, 128, 4, 0], index_head_dim=128, index_n_heads=64,
              index_topk=512),
        {"kinds": "llccc", "layers.compress_ratio": [1, 1, 4, 128, 4], "layers.indexer": [False, False, True, False, True],
         "mla.cached_dim": 512, "layers.window": [128] * 5, "layers.head_dim": [512] * 5, "layers.kv_heads": [1] * 5}),
    "Qwen3-Next 80B has 12 full layers, every fourth, and 36 gated delta nets": (
        QWEN3_NEXT,
        {"kinds": "GGGF" * 12, "linear": LinearAttention(16, 32, 128, 128, 4), "attention_output_gate": True,
         "moe.experts": 512, "moe.shared_experts": 1, "moe.shared_intermediate_size": 512}),
    "Qwen3-Next by a list": (
        QWEN3_NEXT | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}, {"kinds": "GGGF" * 12}),
    "Nemotron-H lists Mamba, attention and feed-forward as layers of their own": (
        NEMOTRON_H,
        {"kinds": "M-M-M-MF-M-", "feeds": "-d-d-d--d-d", "mamba": Mamba(8192, 128, 4, 128, 64, 8, "float32"), "head_dim": 128}),
    "Nemotron-H by names": (
        without(NEMOTRON_H, "hybrid_override_pattern", "num_hidden_layers")
        | {"layers_block_type": ["mamba", "mlp"] * 3 + ["mamba", "attention", "mlp", "mamba", "mlp"]},
        {"kinds": "M-M-M-MF-M-", "feeds": "-d-d-d--d-d"}),
    "Llama 4 Scout looks at chunks of 8192 in three layers of four, and one shared expert joins the 16": (
        {"model_type": "llama4", "text_config": SCOUT_TEXT},
        {"kinds": "CCCF" * 12, "chunk_size": 8192, "max_context": 10485760, "intermediate_size": 16384,
         "moe.intermediate_size": 8192, "moe.shared_intermediate_size": 8192, "feeds": "e" * 48}),
    "Llama 4 Maverick has experts in every other layer": (
        {"model_type": "llama4", "text_config": SCOUT_TEXT | {"interleave_moe_layer_step": 2}}, {"feeds": "de" * 24}),
    "Phi-2 has as many KV heads as heads": (
        without(usual("phi", hidden_size=2560, num_attention_heads=32), "num_key_value_heads"),
        {"kv_heads": 32, "head_dim": 80}),
    "Phi-3 mini 128k serves 4096 tokens by default because of LongRoPE": (
        usual("phi3", hidden_size=3072, num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=131072,
              original_max_position_embeddings=4096, sliding_window=262144,
              rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [2.0]}),
        {"max_context": 131072, "default_context": 4096, "head_dim": 96, "rope": RopeScaling("longrope")}),
    "OPT-350m embeds in 512 dimensions and works in 1024; its feed-forward width is called ffn_dim": (
        {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512, "ffn_dim": 4096, "num_hidden_layers": 24,
         "num_attention_heads": 16, "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16"},
        {"embedding_size": 512, "hidden_size": 1024, "intermediate_size": 4096, "kv_heads": 16, "tie_word_embeddings": True,
         "dtype": "float16"}),
    "GPT-J says n_layer, n_head and n_embd, and leaves the width at four times the latter": (
        {"model_type": "gptj", **GPT},
        {"kinds": "F" * 28, "kv_heads": 16, "head_dim": 256, "intermediate_size": 16384, "max_context": 2048,
         "tie_word_embeddings": False}),
    "GPT-2 ties its head": ({"model_type": "gpt2", **GPT}, {"tie_word_embeddings": True}),
    "Multi-query Falcon has one KV head": (FALCON, {"kv_heads": 1, "head_dim": 64, "intermediate_size": 4 * 4544}),
    "Falcon's new architecture has as many KV heads as it states": (
        FALCON | {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True},
        {"kv_heads": 8, "head_dim": 64}),
    "StarCoder has one KV head": (without(usual("gpt_bigcode", multi_query=True), "num_key_value_heads"), {"kv_heads": 1}),
    "ChatGLM's spellings are all of its own": (
        {"model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32,
         "multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 13696, "kv_channels": 128,
         "padded_vocab_size": 65024, "seq_length": 32768},
        {"kinds": "F" * 28, "kv_heads": 2, "vocab_size": 65024, "max_context": 32768, "intermediate_size": 13696}),
    "MPT's too": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2048,
         "vocab_size": 50432, "attn_config": {"alibi": True}},
        {"kv_heads": 32, "head_dim": 128, "intermediate_size": 16384, "max_context": 2048}),
    "and DBRX's": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352,
         "attn_config": {"kv_n_heads": 8}, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752}},
        {"kv_heads": 8, "head_dim": 128, "moe.experts": 16, "moe.experts_per_token": 4, "moe.intermediate_size": 10752}),
}  # fmt: skip
SEVERAL_KINDS: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "Gemma 2 alternates": (usual("gemma2", sliding_window=4096), {"kinds": "SF" * 4}),
    "Cohere's window counts one token more": (
        usual("cohere2", sliding_window=4096, sliding_window_pattern=4), {"kinds": "SSSF" * 2, "sliding_window": 4097}),
    "EXAONE 4 writes a pattern, and the last layer is global": (
        usual("exaone4", sliding_window=4096, sliding_window_pattern="LLLG", num_hidden_layers=6), {"kinds": "SSSFSF"}),
    "EXAONE 4 without a window": (usual("exaone4", sliding_window=None), {"kinds": "F" * 8}),
    "Gemma 3n's last layers reuse earlier caches": (
        usual("gemma3n_text", num_kv_shared_layers=3, intermediate_size=[1024] * 4 + [2048] * 4),
        {"layers.shares_kv": [False] * 5 + [True] * 3, "cached": [1024 * 2] * 5 + [0] * 3, "per_layer_input_size": 256,
         "layers.intermediate_size": [1024] * 4 + [2048] * 4}),
    "Gemma 4's full layers have wider and fewer KV heads": (
        usual("gemma4_text", num_hidden_layers=6, head_dim=256, sliding_window=1024, num_kv_shared_layers=0,
              num_key_value_heads=8, global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True,
              num_experts=128, top_k_experts=8, moe_intermediate_size=704),
        {"kinds": "SSSSSF", "layers.kv_heads": [8] * 5 + [2], "layers.head_dim": [256] * 5 + [512],
         "layers.v_head_dim": [256] * 5 + [512], "feeds": "b" * 6}),
    "Gemma 4 ends with a full layer": (usual("gemma4_text", sliding_window=1024), {"kinds": "SSSSSFSF"}),
    "Nemotron-NAS gives each block its own attention and width, or none": (
        usual("nemotron-nas", hidden_size=8192, num_attention_heads=64, num_hidden_layers=3, num_key_value_heads=None,
              intermediate_size=None, block_configs=[
                  {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 5.25, "no_op": False}},
                  {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.5, "no_op": False}},
                  {"attention": {"n_heads_in_group": 16, "no_op": False}, "ffn": {"ffn_mult": None, "no_op": True}}]),
        {"kinds": "F-F", "layers.kv_heads": [8, 0, 4], "layers.intermediate_size": [28672, 2816, None], "feeds": "dd-",
         "kv_heads": 8}),
    "Jamba": (
        usual("jamba", num_experts=16, num_experts_per_tok=2),
        {"kinds": "1111F111", "mamba": Mamba(2048, 16, 4), "feeds": "de" * 4}),
    "Bamba": (
        usual("bamba", attn_layer_indices=[3, 6], **BAMBA), {"kinds": "MMMFMMFM", "mamba": Mamba(2048, 128, 4, 32, 64, 1)}),
    "Zamba2": (
        usual("zamba2", layers_block_type=["mamba"] * 6 + ["hybrid"] * 2, n_mamba_heads=32, mamba_headdim=64,
              mamba_d_state=64, mamba_ngroups=1, mamba_d_conv=4),
        {"kinds": "MMMMMMHH", "head_dim": 128}),
    "Falcon-H1": (
        usual("falcon_h1", mamba_d_ssm=1536, mamba_n_groups=1, **(BAMBA | {"mamba_d_head": 48})),
        {"kinds": "H" * 8, "mamba.inner_size": 1536}),
    "Granite hybrid lists mamba and attention": (
        usual("granitemoehybrid", layer_types=["mamba"] * 6 + ["attention"] * 2, **GRANITE), {"kinds": "MMMMMMFF"}),
    "granite-4.0-micro lists attention only and needs no Mamba keys": (
        usual("granitemoehybrid", layer_types=["attention"] * 8, num_local_experts=0),
        {"kinds": "F" * 8, "mamba": None, "moe": None}),
    "Mamba has no heads at all, as in vLLM": (
        {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 4, "vocab_size": 50280, "state_size": 16,
         "conv_kernel": 4, "expand": 2, "intermediate_size": 5120},
        {"attention_heads": 0, "kv_heads": 0, "head_dim": 0, "kinds": "1111", "mamba": Mamba(5120, 16, 4)}),
    "Mamba 2": (
        {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 4, "vocab_size": 32768, "num_heads": 128,
         "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4},
        {"mamba": Mamba(8192, 128, 4, 128, 64, 8), "feeds": "----"}),
    "Kimi numbers its delta layers from 1": (
        without(DEEPSEEK_V3, "n_routed_experts")
        | {"model_type": "kimi_linear", "num_hidden_layers": 4, "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}},
        {"kinds": "KKKL", "linear": LinearAttention(32, 32, 128, 128, 4)}),
    "MiniMax writes 0 for lightning attention": (
        usual("minimax_text_01", attn_type_list=[0, 0, 0, 1] * 2, head_dim=128),
        {"kinds": "NNNF" * 2, "linear": LinearAttention(16, 16, 128, 128)}),
    "LFM2 calls its layers conv": (
        usual("lfm2", layer_types=["conv"] * 6 + ["full_attention"] * 2, conv_L_cache=3),
        {"kinds": "VVVVVVFF", "short_conv": ShortConv(1024, 3)}),
    "MiMo-V2's sliding layers have their own KV heads, its values are narrower, and its chunk size means nothing": (
        usual("mimo_v2_flash", head_dim=192, v_head_dim=128, num_hidden_layers=3, hybrid_layer_pattern=[0, 1, 1],
              sliding_window=128, attention_chunk_size=128, swa_num_key_value_heads=8, swa_num_attention_heads=16,
              swa_head_dim=192, swa_v_head_dim=128),
        {"kinds": "FSS", "layers.kv_heads": [4, 8, 8], "cached": [4 * 320, 8 * 320, 8 * 320], "chunk_size": None}),
    "Step has other heads in its sliding layers; a list that is too long is cut": (
        without(usual("step3p5", num_attention_groups=4, sliding_window=512), "num_key_value_heads")
        | {"layer_types": ["full_attention", "sliding_attention"] * 6, "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 32, "num_attention_groups": 8, "head_dim": 64}},
        {"layers.kv_heads": [4, 8] * 4, "notes": ("layer_types describes 12 layers; the first 8 were taken.",)}),
    "Laguna has heads per layer": (
        usual("laguna", num_attention_heads_per_layer=[16, 32] * 4), {"layers.attention_heads": [16, 32] * 4}),
    "MiniCPM3's latents are not cached as one": (
        usual("minicpm3", kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
        {"mla": None, "kv_heads": 16, "head_dim": 96, "kinds": "F" * 8}),
    "PLaMo has a window per layer, and null makes it full": (
        usual("plamo3", sliding_window=[512, None] * 4), {"kinds": "SF" * 4, "layers.window": [512, None] * 4}),
    "BERT keeps nothing": (usual("bert"), {"kinds": "E" * 8}),
    "nor does EmbeddingGemma": (usual("gemma3_text", use_bidirectional_attention=True), {"kinds": "E" * 8}),
    "Whisper counts its decoder": (
        {"model_type": "whisper", "is_encoder_decoder": True, "d_model": 1280, "num_hidden_layers": 32, "encoder_layers": 32,
         "decoder_layers": 4, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "vocab_size": 51866,
         "max_target_positions": 448},
        {"kinds": "F" * 4, "max_context": 448, "is_encoder_decoder": True}),
}  # fmt: skip


@each("name", [*WELL_KNOWN, *SEVERAL_KINDS], ids=str)
def test_a_family_has_the_shape_that_its_authors_give_it(name: str) -> None:
    """Layers, heads, widths, states, experts and context are those worked out by hand; the name says what is peculiar."""
    check(*(WELL_KNOWN | SEVERAL_KINDS)[name])


def test_what_transformers_assumes_is_said() -> None:
    """A file that leaves something out carries a note: Gemma 3's vocabulary, the 2048 tokens of a file without a length."""
    gemma = ModelShape.from_config({"model_type": "gemma3", "text_config": GEMMA_3_TEXT})
    assert any("vocab_size 262208" in note for note in gemma.notes)
    mamba = ModelShape.from_config(SEVERAL_KINDS["Mamba has no heads at all, as in vLLM"][0])
    assert any("2048" in note for note in mamba.notes)


@each(
    ("keys", "feeds"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, "deed"),
        ({"moe_layer_freq": [0, 1, 0, 1]}, "dede"),
        ({"moe_layers_enum": "2, 3"}, "ddee"),
        ({"moe_layers": [0, 3]}, "edde"),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "dded"),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, "ddde"),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}, "deed"),
        ({"num_dense_layers": 2}, "ddee"),
        ({}, "eeee"),
    ],
)
def test_which_layers_have_experts(keys: dict[str, Any], feeds: str) -> None:
    """Each family has its own rule for which layers have experts."""
    check(usual("qwen3_moe", num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, **keys), {"feeds": feeds})
