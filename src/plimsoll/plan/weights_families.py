"""What a family's code has beside the matrices its config.json names: biases, norms, gates, rotary width.

Read from vllm/model_executor/models of 0.32.0. Only `ModelShape` is asked for sizes; this table answers what it does not
hold. A family that is not here is planned like Llama, with the wide band of `weights_bands`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from plimsoll.domain.model import ModelShape


class Family(NamedTuple):
    """The small print of one family."""

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    query_norm: str = ""
    """"head": one weight per head dimension; "full": one per projected column."""
    head_bias: bool = False
    positions: int | None = None
    """Learned positions: this many rows more than the context, or None where there are none."""
    rotary: float = 1.0
    """The part of a head that turns; 0 where there are no rotary positions."""
    router_bias: str = ""
    """"float32": a correction per expert kept in 32 bits; "plain": a bias of the model's type."""
    router_float32: bool = False
    expert_bias: bool = False
    sinks: bool = False
    shared_gate: bool = False
    interleaved_positions: bool = False
    """Multimodal rotary tables, which vLLM makes four times as long."""
    known: bool = True


_LLAMA = Family()
_QWEN2 = Family(qkv_bias=True)
_QWEN3 = Family(query_norm="head")
_OPT = Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, positions=2, rotary=0)
_NEOX = Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, rotary=0.25)
_PHI = _NEOX._replace(norms=1, head_bias=True, rotary=0.5)
_FALCON = Family(gated=False, norms=1, norm_bias=True)
_DEEPSEEK = Family(router_bias="float32")
_GLM = Family(qkv_bias=True, rotary=0.5)
_GPT2 = _OPT._replace(positions=0)

FAMILIES = MappingProxyType(
    {
        **dict.fromkeys(
            "llama mistral ministral3 mixtral granite granitemoe granitemoeshared granitemoehybrid bamba phi3 internlm2 "
            "internlm3 baichuan solar arcee smollm3 llama4_text nemotron-nas jamba dbrx gemma lfm2 lfm2_moe minimax "
            "minimax_text_01 minimax_m1 mllama_text_model falcon_h1 longcat_flash ernie4_5 exaone".split(),
            _LLAMA,
        ),
        "arcee": Family(gated=False),
        "dbrx": Family(norm_bias=True),
        "internlm": Family(qkv_bias=True, out_bias=True),
        **dict.fromkeys("qwen2 seed_oss mimo".split(), _QWEN2),
        **dict.fromkeys(
            "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text".split(), _QWEN2._replace(interleaved_positions=True)
        ),
        "qwen2_moe": _QWEN2._replace(shared_gate=True),
        **dict.fromkeys("qwen3 qwen3_moe".split(), _QWEN3),
        **dict.fromkeys(
            "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text".split(), _QWEN3._replace(interleaved_positions=True)
        ),
        "qwen3_next": _QWEN3._replace(shared_gate=True, rotary=0.25),
        **dict.fromkeys(
            "qwen3_5_text qwen3_5_moe_text".split(),
            _QWEN3._replace(shared_gate=True, rotary=0.25, interleaved_positions=True),
        ),
        "gemma2": Family(norms=4),
        **dict.fromkeys("gemma3 gemma3_text".split(), Family(norms=4, query_norm="head")),
        "gemma3n_text": Family(norms=5, query_norm="head"),
        "gemma4_text": Family(norms=4, query_norm="head"),
        "phi": _PHI,
        "phimoe": Family(qkv_bias=True, out_bias=True, norm_bias=True, head_bias=True),
        "opt": _OPT,
        "gpt2": _GPT2,
        "gpt_bigcode": _GPT2,
        "bloom": _OPT._replace(positions=None),
        "gpt_neox": _NEOX,
        "gptj": Family(gated=False, mlp_bias=True, norms=1, norm_bias=True, head_bias=True, rotary=0.25),
        "codegen": Family(gated=False, mlp_bias=True, norms=1, norm_bias=True, head_bias=True, rotary=0.25),
        "starcoder2": _NEOX._replace(rotary=1.0),
        "mpt": Family(gated=False, rotary=0),
        "stablelm": Family(norm_bias=True, rotary=0.25),
        **dict.fromkeys("falcon RefinedWeb RefinedWebModel".split(), _FALCON),
        **dict.fromkeys("cohere cohere2".split(), Family(norms=1)),
        "olmo": Family(norms=0, final_norm=False),
        **dict.fromkeys("olmo2 olmo3 olmoe".split(), Family(query_norm="full")),
        "exaone4": _QWEN3,
        **dict.fromkeys("glm chatglm".split(), _GLM),
        "glm4": _GLM._replace(norms=4),
        **dict.fromkeys("glm4v_text glm4v_moe_text".split(), _GLM._replace(norms=4, interleaved_positions=True)),
        "glm4_moe": _GLM._replace(router_bias="float32", router_float32=True, query_norm="head"),
        "glm4_moe_lite": _DEEPSEEK._replace(router_float32=True),
        **dict.fromkeys("deepseek deepseek_v2".split(), _LLAMA),
        **dict.fromkeys(
            "deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa dots1 pangu_ultra_moe kimi_linear deepseek_v4".split(), _DEEPSEEK
        ),
        "minimax_m2": Family(query_norm="full", router_bias="float32", router_float32=True, rotary=0.5),
        "gpt_oss": Family(qkv_bias=True, out_bias=True, router_bias="plain", expert_bias=True, sinks=True),
        "nemotron": Family(gated=False, norm_bias=True, rotary=0.5),
        "nemotron_h": Family(gated=False, norms=1, rotary=0, router_bias="float32", router_float32=True),
        "hunyuan_v1_dense": _QWEN3,
        "hunyuan_v1_moe": _QWEN3,
        "ernie4_5_moe": _DEEPSEEK,
        "bailing_moe_v2": _QWEN3._replace(router_bias="float32"),
        "mimo_v2_flash": Family(sinks=True, router_bias="float32", rotary=0.334),
        "whisper": _OPT._replace(positions=0),
    }
)
_UNKNOWN = Family(known=False)


def family_of(shape: ModelShape) -> Family:
    """The small print of this model's family."""
    family = FAMILIES.get(shape.text_model_type, _UNKNOWN)
    if shape.text_model_type == "falcon" and shape.kv_heads > 1:  # Falcon 40B and 180B: a norm for each branch
        return family._replace(norms=2)
    if shape.text_model_type == "phi" and shape.hidden_size == 2560:  # phi-2 turns 0.4 of a head, phi-1 and 1.5 the half
        return family._replace(rotary=0.4)
    return family
