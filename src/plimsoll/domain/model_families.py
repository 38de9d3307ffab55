"""What a config.json leaves unsaid because its family's code says it: vLLM 0.32's rules and transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Families vLLM caches as multi-head latent attention where kv_lora_rank is given (its is_deepseek_mla).
MLA_FAMILIES = _names(
    """
    axk1 bailing_hybrid bailing_hybrid_v3 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41
    dots3_note glm4_moe_lite glm5_next glm5_next_text glm_moe_dsa hy_v4 kimi_k2 kimi_linear longcat_flash
    pangu_ultra_moe
    """
)
MAMBA1_FAMILIES = frozenset({"mamba", "falcon_mamba"})
MAMBA_ONLY_FAMILIES = MAMBA1_FAMILIES | {"mamba2"}
ENCODER_FAMILIES = _names("bert roberta xlm-roberta xlm-roberta-xl distilbert modernbert nomic_bert new gte camembert electra")
# Whose sliding_window means nothing unless use_sliding_window is true.
WINDOW_NEEDS_A_FLAG = ("qwen2", "qwen3", "mimo", "dots1", "smollm3")
# Every n-th layer is full attention and the others slide, where the file has neither layer_types nor its own pattern.
FULL_EVERY = MappingProxyType(
    {
        "gemma2": 2,
        "gemma3_text": 6,
        "gemma3": 6,
        "gemma3n_text": 5,
        "gemma4_text": 6,
        "cohere2": 4,
        "olmo3": 4,
        "exaone4": 4,
        "afmoe": 4,
    }
)
# The window counts the token itself on top of sliding_window (vLLM's commandr.py).
WINDOW_PLUS_ONE = frozenset({"cohere2", "cohere2_moe"})

TIED = (
    _names(
        """
    bloom cohere cohere2 ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n_text
    gemma4_text gpt2 gpt_bigcode lfm2 lfm2_moe mamba minicpm minicpm3 mpt opt RefinedWeb RefinedWebModel smollm3
    starcoder2 whisper zamba2
    """
    )
    | ENCODER_FAMILIES
)
UNTIED = _names(
    """
    afmoe apertus arcee axk1 baichuan bailing_hybrid bailing_hybrid_v3 bailing_moe bailing_moe_v2 bamba chatglm
    codegen cohere2_moe dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41 dots1
    dots3_note exaone4 exaone_moe falcon_h1 glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm5_next
    glm5_next_text glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 internlm internlm2 internlm3 jamba kimi_k2 kimi_linear laguna
    llama llama4_text longcat_flash mamba2 mimo mimo_v2 mimo_v2_flash minimax minimax_m1 minimax_m2 minimax_m3
    minimax_m3_text minimax_text_01 ministral3 mistral mixtral mllama_text_model muse_glimmer_text nemotron
    nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe orion pangu_ultra_moe persimmon phi phi3 phi3_v
    phi4mm phimoe qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text
    seed_oss solar stablelm step3_text step3p5 step3p7
    """
)
# Their files say whether the embeddings are tied, and where one does not, we do not know.
_SAY_SO_THEMSELVES = frozenset({"exaone", "plamo2", "plamo3", "telechat2"})
KNOWN = TIED | UNTIED | _SAY_SO_THEMSELVES

_MAMBA_GROUP_OF_ONE = {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_GEMMA = {"head_dim": 256}

# Only for families whose published files lean on them: Gemma 3 states no heads, LLaVA's text_config almost nothing.
DEFAULTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
        },
        "mistral": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        "gemma": _GEMMA,
        "gemma2": _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096},
        "gemma3_text": _GEMMA
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
        },
        "gemma3n_text": _GEMMA
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 262400,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            "num_kv_shared_layers": 15,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
        "gemma4_text": _GEMMA
        | {
            "global_head_dim": 512,
            "vocab_size": 262144,
            "sliding_window": 512,
            "max_position_embeddings": 131072,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
        "falcon": {"multi_query": True, "max_position_embeddings": 2048},
        "gpt_bigcode": {"multi_query": True},
        "cohere2": {"sliding_window": 4096},
        "olmo3": {"sliding_window": 4096},
        "mpt": {"max_seq_len": 2048},
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v2": _DEEPSEEK,
        "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
        "jamba": {
            "num_key_value_heads": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        "bamba": _MAMBA_GROUP_OF_ONE,
        "granitemoehybrid": _MAMBA_GROUP_OF_ONE,
        "falcon_h1": _MAMBA_GROUP_OF_ONE,
        "zamba2": {"mamba_ngroups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
        "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
        "falcon_mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
        "mamba2": {"state_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8},
        "nemotron_h": {"n_groups": 8, "head_dim": 128},
    }
)
