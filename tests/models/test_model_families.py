"""Families whose layers are of several kinds."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.models.shape import FeedForward, LinearAttention, Mamba, ModelShape, ShortConv
from tests.models.model_configs import (
    DEEPSEEK_V3,
    K,
    cached_elements,
    shape,
    usual,
    without,
)


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
    assert cached_elements(three.layers[7]) == 0
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
    assert [cached_elements(layer) for layer in mimo.layers] == [4 * 320, 8 * 320, 8 * 320]
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
            "model_type": "whisper", "is_encoder_decoder": True, "d_model": 1280, "num_hidden_layers": 32,
            "encoder_layers": 32, "decoder_layers": 4, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120,
            "vocab_size": 51866, "max_target_positions": 448,
        }
    )  # fmt: skip
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
