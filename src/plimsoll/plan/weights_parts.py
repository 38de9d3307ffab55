"""The parameters of one rank, one fused tensor at a time, as vLLM allocates them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.models.shape import ModelShape, Quantization, Tower
from plimsoll.units import MIB, ceil_div, round_up


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's code has beside the matrices its config.json names, read in vllm/model_executor/models of 0.32.0.

    A family that is not in FAMILIES is planned like Llama, with a wide band.
    """

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    query_norm: str = ""  # "head": one weight per head dimension; "full": one per projected column
    head_bias: bool = False
    positions: int | None = None  # learned positions: this many rows more than the context, or None where there are none
    rotary: float = 1.0  # the part of a head that turns; 0 where there are no rotary positions
    router_bias: str = ""  # "float32": a correction per expert kept in 32 bits; "plain": a bias of the model's type
    router_float32: bool = False
    expert_bias: bool = False
    sinks: bool = False
    shared_gate: bool = False
    interleaved_positions: bool = False  # multimodal rotary tables, which vLLM makes four times as long
    known: bool = True


_LLAMA = Family()
_QWEN2 = Family(qkv_bias=True)
_QWEN3 = Family(query_norm="head")
_OPT = Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, positions=2, rotary=0)
_NEOX = Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, rotary=0.25)
_PHI = replace(_NEOX, norms=1, head_bias=True, rotary=0.5)
_FALCON = Family(gated=False, norms=1, norm_bias=True)
_DEEPSEEK = Family(router_bias="float32")
_GLM = Family(qkv_bias=True, rotary=0.5)
_GPT2 = replace(_OPT, positions=0)

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
            "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text".split(), replace(_QWEN2, interleaved_positions=True)
        ),
        "qwen2_moe": replace(_QWEN2, shared_gate=True),
        **dict.fromkeys("qwen3 qwen3_moe".split(), _QWEN3),
        **dict.fromkeys(
            "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text".split(), replace(_QWEN3, interleaved_positions=True)
        ),
        "qwen3_next": replace(_QWEN3, shared_gate=True, rotary=0.25),
        **dict.fromkeys(
            "qwen3_5_text qwen3_5_moe_text".split(), replace(_QWEN3, shared_gate=True, rotary=0.25, interleaved_positions=True)
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
        "bloom": replace(_OPT, positions=None),
        "gpt_neox": _NEOX,
        "gptj": Family(gated=False, mlp_bias=True, norms=1, norm_bias=True, head_bias=True, rotary=0.25),
        "codegen": Family(gated=False, mlp_bias=True, norms=1, norm_bias=True, head_bias=True, rotary=0.25),
        "starcoder2": replace(_NEOX, rotary=1.0),
        "mpt": Family(gated=False, rotary=0),
        "stablelm": Family(norm_bias=True, rotary=0.25),
        **dict.fromkeys("falcon RefinedWeb RefinedWebModel".split(), _FALCON),
        **dict.fromkeys("cohere cohere2".split(), Family(norms=1)),
        "olmo": Family(norms=0, final_norm=False),
        **dict.fromkeys("olmo2 olmo3 olmoe".split(), Family(query_norm="full")),
        "exaone4": _QWEN3,
        **dict.fromkeys("glm chatglm".split(), _GLM),
        "glm4": replace(_GLM, norms=4),
        **dict.fromkeys("glm4v_text glm4v_moe_text".split(), replace(_GLM, norms=4, interleaved_positions=True)),
        "glm4_moe": replace(_GLM, router_bias="float32", router_float32=True, query_norm="head"),
        "glm4_moe_lite": replace(_DEEPSEEK, router_float32=True),
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
        "bailing_moe_v2": replace(_QWEN3, router_bias="float32"),
        "mimo_v2_flash": Family(sinks=True, router_bias="float32", rotary=0.334),
        "whisper": replace(_OPT, positions=0),
    }
)
_UNKNOWN = Family(known=False)


def family_of(shape: ModelShape) -> Family:
    """The small print of this model's family."""
    family = FAMILIES.get(shape.text_model_type, _UNKNOWN)
    if shape.text_model_type == "falcon" and shape.kv_heads > 1:  # Falcon 40B and 180B: a norm for each branch
        return replace(family, norms=2)
    if shape.text_model_type == "phi" and shape.hidden_size == 2560:  # phi-2 turns 0.4 of a head, phi-1 and 1.5 the half
        return replace(family, rotary=0.4)
    return family


VOCABULARY_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


class Storage(Enum):
    """How a tensor is kept, which decides whether quantisation touches it."""

    LINEAR = "linear"
    EXPERTS = "experts"
    PLAIN = "plain"
    FLOAT32 = "float32"


class RankTensor(NamedTuple):
    """One tensor of one rank (or `stack` equal matrices in one tensor), under its module's name in the checkpoint."""

    name: str
    outputs: int
    inputs: int = 1
    storage: Storage = Storage.PLAIN
    stack: int = 1
    pieces: int = 1  # how many matrices of the checkpoint are fused in it: each has a LoRA of its own

    @property
    def elements(self) -> int:
        """Its number of parameters."""
        return self.outputs * self.inputs * self.stack


class Ranks(NamedTuple):
    """Over how many ranks each kind of tensor is cut."""

    tensor: int = 1
    experts: int = 1
    by_expert: bool = False


def share(size: int, ranks: int) -> int:
    """What the largest of these ranks holds of a size, rounded up."""
    return ceil_div(size, ranks)


def padded_vocabulary(size: int) -> int:
    """The rows vLLM gives an embedding: up to the next 64."""
    return round_up(size, VOCABULARY_PADDING)


def linear(name: str, outputs: int, inputs: int, *, bias: int = 0, pieces: int = 1) -> list[RankTensor]:
    """A matrix that quantisation may touch, with a bias of so many rows."""
    parts = [RankTensor(name, outputs, inputs, Storage.LINEAR, 1, pieces)]
    if bias:
        parts.append(RankTensor(name, bias))
    return parts


def norm(width: int, *, bias: bool = False, count: int = 1) -> list[RankTensor]:
    """Normalisation weights, with a bias in a LayerNorm."""
    return [RankTensor("norm", width)] * (count * (2 if bias else 1))


_SEGMENT = 2 * MIB  # torch asks the device for large tensors in steps of this
_LARGE = 10 * MIB
_NOT_SPLIT = MIB  # a remainder up to this size stays with its tensor
_STEP = 512
_NEVER_SPLIT = 20 * MIB  # max_split_size_mb:20, under which vLLM loads from 0.21 on


def held(size: int, *, whole_segments: bool = False) -> int:
    """What torch's allocator counts for a tensor of this size, alone in its segment where it is large.

    The startups show it to the fourth decimal: Qwen3-8B holds 2 MiB more than its tensors, one for the embedding and one
    for the head, both 1187 MiB; Gemma 3 27B holds 62 MiB more, one per layer. With `whole_segments` the rest of a very large
    tensor's last segment is never given to others: Gemma 3 12B holds 120 MiB more on 0.25.1 for it, Qwen2.5-1.5B 91 MiB.
    """
    if whole_segments and size >= _NEVER_SPLIT:
        return size + -size % _SEGMENT
    if size >= _LARGE and (left := -size % _SEGMENT) <= _NOT_SPLIT:
        return size + left
    return round_up(size, _STEP)


# What a tensor weighs once it is quantised, and which tensors are left alone.
#
# Bytes per matrix, o outputs by i inputs (vllm/model_executor/layers/quantization of 0.32.0):
#
# fp8, int8      o*i      + scales: 4 per tensor, 4*o per channel, 4 per block of 128x128
# awq, gptq      o*i/2    + 2*o*ceil(i/group), and for awq the zero points o*ceil(i/group)/2, or 2*o*ceil(i/group) on Hopper
# mxfp4          o*i/2    + o*ceil(i/32); experts are padded first
# nvfp4          o*i/2    + o*ceil(i/16), the scales laid out in tiles of 128 by 4
# bitsandbytes   o*i/2    + 4 per 64 weights: vLLM undoes the double quantisation of the scales
#
# Embeddings, head, norms, routers and convolutions stay as they are. So do the modules the checkpoint names.

_ONLINE = frozenset({"fp8", "bitsandbytes", "fp8_per_tensor", "fp8_per_block", "ptpc_fp8", "mxfp8"})
_INT4 = ("awq", "gptq", "compressed-tensors", "auto-round", "auto_round", "inc", "moe_wna16", "quark", "torchao", "humming")
_NVFP4 = ("nvfp4", "modelopt_fp4", "modelopt")
_FLOAT_4 = ("fp4", "nvfp4", "mxfp4")
_MIXING = ("modelopt", "modelopt_mixed", "compressed-tensors")

Sizes = Callable[[int, int], tuple[int, int]]
"""Outputs and inputs of a matrix to the bytes of its weights and of its scales."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of a model are stored."""

    linear_size: Sizes | None
    expert_size: Sizes
    width: str  # "8", "4", "mixed", or "nested" for bitsandbytes' four bits: which band applies
    towers: bool = False
    expert_padding: tuple[int, int] = (1, 1)  # to which multiple an expert's width and the hidden size grow
    mlp_size: Sizes | None = None  # of feed-forward matrices, where they are stored otherwise than the attention's


def scheme_of(quantization: Quantization | None, expert_dtype: str | None = None, *, wide_zeros: bool = False) -> Scheme | None:
    """The scheme behind a checkpoint's quantization_config or a --quantization flag; None where we cannot say."""
    if quantization is None:
        return None
    method, bits = quantization.method.lower(), quantization.bits
    group = quantization.group_size if quantization.group_size and quantization.group_size > 0 else None
    algorithm = (quantization.algorithm or "").lower()
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return Scheme(None, _floats(32), "4", expert_padding=(128, 256))
    if method == "experts_int8":
        return Scheme(None, _eight(None), "8")
    if method.startswith("bitsandbytes"):
        if bits == 8:
            return _all(_eight(None), "8", towers=True)
        return _all(lambda o, i: (o * i // 2, o * i // 16), "nested", towers=True)
    if expert_dtype == "fp4":  # DeepSeek V4: fp8 in blocks everywhere but in the experts
        return Scheme(_eight(quantization.block or (128, 128)), _floats(16 if group == 16 else 32), "4")
    if bits is None and method in _MIXING:  # four bits in feed-forwards and experts, eight in attention, as ModelOpt mixes them
        return Scheme(lambda o, i: (o * i, 4), _floats(16), "mixed", mlp_size=_floats(16))
    if bits == 8 or (bits is None and "fp8" in method):
        per_tensor = method in ("fp8", "modelopt") and quantization.block is None
        return _all((lambda o, i: (o * i, 4)) if per_tensor else _eight(quantization.block), "8", towers=method in _ONLINE)
    if bits == 4:
        if "mxfp4" in algorithm:
            return _all(_floats(32), "4")
        if method in _NVFP4 or any(name in algorithm for name in _FLOAT_4) or group == 16:
            return _all(_floats(16), "4")
        if method.startswith(_INT4):
            zeros = (2.0 if wide_zeros else 0.5) if method.startswith("awq") else 0.0
            return Scheme(_int4(group, zeros), _int4(group, min(zeros, 0.5)), "4")  # experts have kernels of their own
    return None


def _all(size: Sizes, width: str, *, towers: bool = False) -> Scheme:
    return Scheme(size, size, width, towers)


def named_scheme(flag: str) -> Quantization | None:
    """What a --quantization flag alone says; None where the method does not fix the width."""
    name = flag.lower()
    if name in ("awq", "awq_marlin", "gptq", "gptq_marlin"):
        return Quantization(name, bits=4, group_size=128)
    if name in ("nvfp4", "modelopt_fp4"):
        return Quantization("modelopt_fp4", bits=4, group_size=16)
    if name == "fp8_per_block":
        return Quantization("fp8", bits=8, block=(128, 128))
    if name in ("mxfp4", "bitsandbytes"):
        return Quantization(name, bits=4)
    if name in ("fp8", "fbgemm_fp8", "ptpc_fp8", "experts_int8", "fp8_per_tensor", "modelopt", "mxfp8"):
        return Quantization(name, bits=8)
    return None


def part_bytes(part: RankTensor, item: int, scheme: Scheme | None, *, alone: bool) -> tuple[int, int]:
    """The bytes of one matrix and of its scales; `alone` where the checkpoint leaves its module alone."""
    if part.storage is Storage.FLOAT32:
        return part.elements * 4, 0
    is_expert = part.storage is Storage.EXPERTS
    size = None
    if scheme is not None and not alone and part.storage is not Storage.PLAIN:
        is_mlp = scheme.mlp_size is not None and part.name.startswith("mlp.")
        size = scheme.expert_size if is_expert else scheme.mlp_size if is_mlp else scheme.linear_size
    if scheme is None or size is None:
        return part.elements * item, 0
    outputs, inputs = part.outputs, part.inputs
    if is_expert and scheme.expert_padding != (1, 1):
        outputs, inputs = _padded_expert(part, scheme.expert_padding)
    weights, scales = size(outputs, inputs)
    return weights * part.stack, scales * part.stack


def _padded_expert(part: RankTensor, padding: tuple[int, int]) -> tuple[int, int]:
    """vLLM rounds the experts' width and the hidden size up for its kernels: gpt-oss 2880 becomes 2944 by 3072."""
    width, hidden = padding
    if part.name.endswith("up_proj"):
        return 2 * round_up(part.outputs // 2, width), round_up(part.inputs, hidden)
    return round_up(part.outputs, hidden), round_up(part.inputs, width)


def _eight(block: tuple[int, ...] | None) -> Sizes:
    if block is None or len(block) < 2:
        return lambda outputs, inputs: (outputs * inputs, 4 * outputs)
    rows, columns = block[0], block[1]
    return lambda outputs, inputs: (outputs * inputs, 4 * ceil_div(outputs, rows) * ceil_div(inputs, columns))


def _int4(group: int | None, zeros: float) -> Sizes:
    def size(outputs: int, inputs: int) -> tuple[int, int]:
        groups = outputs * ceil_div(inputs, group or inputs)
        return outputs * inputs // 2, 2 * groups + int(groups * zeros)

    return size


def _floats(group: int) -> Sizes:
    return lambda outputs, inputs: (outputs * inputs // 2, round_up(outputs, 128) * round_up(ceil_div(inputs, group), 4))


@lru_cache(maxsize=64)
def sorted_rules(ignored: tuple[str, ...]) -> tuple[tuple[str, ...], dict[int, tuple[str, ...]]]:
    """The names a checkpoint leaves alone: those for every layer, and those for one."""
    general: list[str] = []
    single: dict[int, list[str]] = {}
    for entry in ignored:
        plain = re.search(r"layers\.(\d+)(?:\.|(?=\*)|$)(.*)", entry) if not entry.startswith("re:") else None
        if plain is None:
            general.append(_usual(entry))
        elif not plain[2].endswith("norm"):
            single.setdefault(int(plain[1]), []).append(_usual(plain[2]) or "*")
    return tuple(general), {number: tuple(sorted(set(rules))) for number, rules in single.items()}


def _usual(name: str) -> str:
    """One spelling for what families spell differently."""
    return name.replace("shared_experts", "shared_expert").replace("block_sparse_moe", "mlp")


@lru_cache(maxsize=4096)
def left_alone(name: str, rules: tuple[str, ...], single: tuple[str, ...]) -> bool:
    """Whether a module of a layer is among those left alone."""
    full = f"model.layers.0.{name}"
    for rule in single:
        if rule == "*" or name == rule or name.startswith(f"{rule}.") or fnmatchcase(name, rule):
            return True
    for rule in rules:
        if rule.startswith("re:"):
            if _matches(rule[3:], full):
                return True
        elif fnmatchcase(full, rule) or fnmatchcase(full, f"{rule}.*") or f".{rule}." in f".{full}.":
            return True
    return False


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:  # the checkpoint's mistake; vLLM would not start either
        return False


BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
        "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # fmt: skip
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


class Cut(Enum):
    """How a tensor is spread over the tensor-parallel ranks."""

    VOCABULARY = "vocabulary"
    COLUMNS = "columns"
    KEYS = "keys"
    ROWS = "rows"
    EXPERTS = "experts"
    WHOLE = "whole"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


EVERY_STAGE = -2  # encoders


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor goes: a decoder layer, before (-1) or after (None) all of them, or every stage; and how it is cut."""

    layer: int | None
    cut: Cut


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|audio\w*|multi_modal_projector|mm_\w+|mlp1|embed_vision|embed_audio|patch_merger)\."
)
_SKIPPED = re.compile(r"(?:^|\.)mtp\.|rotary_emb\.inv_freq$|\.attn\.(?:masked_)?bias$|\.g_idx$|(?:^|\.)\w*position_ids$")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|embed_tokens_per_layer|wte|word_embeddings|embed_in|tok_embeddings|embeddings)\.weight$"
)
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.")
NUMBERED_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_KEYS = re.compile(r"(?:^|\.)(?:k_proj|v_proj)\.")
_COLUMNS = re.compile(
    r"(?:^|\.)(?:q_proj|qkv_proj|qkv|query_key_value|Wqkv|c_attn|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj|w1|w3"
    r"|fc1|c_fc|fc_in|dense_h_to_4h|linear_fc1|in_proj|in_proj_\w+|conv1d|A_log|D|dt_bias|q_norm_full|g_proj|b_proj|f_b_proj"
    r"|g_b_proj|dt_proj|q_conv1d|k_conv1d|v_conv1d|output_gate|mixer\.norm|mamba\.norm|sinks)(?:\.|$)"
)
_ROWS = re.compile(
    r"(?:^|\.)(?:o_proj|out_proj|down_proj|w2|fc2|c_proj|fc_out|dense_4h_to_h|linear_fc2|x_proj|proj"
    r"|(?:self_attention|attention|self_attn)\.dense)\."
)
_WHOLE = re.compile(
    r"norm|(?:^|\.)(?:gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|indexer|wq_b|wk|weights_proj|f_a_proj|g_a_proj"
    r"|per_layer_\w+|embed_positions|wpe|layer_scalar|altup|laurel|ln_\w+|ln\d|bias|e_score_correction_bias|fc\d_latent_proj"
    r"|correction_coefs|prediction_coefs|modality_router|merging_layer|linear_\d|image_newline)(?:\.|$)|layer_?norm"
)


def place_of(name: str, shape: ModelShape) -> TensorPlace:
    """Where vLLM puts a tensor of this name."""
    if _SKIPPED.search(name):
        return TensorPlace(None, Cut.SKIPPED)
    if _TOWER.search(name):
        return TensorPlace(EVERY_STAGE, _matrix_cut(name))
    if (layer := _LAYER.search(name)) is not None:
        number = int(layer[1])
        if number >= len(shape.layers):  # the MTP layers of DeepSeek and GLM follow the last one
            return TensorPlace(None, Cut.SKIPPED)
        return TensorPlace(number, Cut.EXPERTS if _EXPERT.search(name) else _matrix_cut(name))
    if _EMBEDDING.search(name):
        return TensorPlace(-1, Cut.VOCABULARY)
    if _HEAD.search(name):
        return TensorPlace(None, Cut.SKIPPED if shape.tie_word_embeddings else Cut.VOCABULARY)
    if "per_layer" in name or "embed_positions" in name or "wpe" in name or "project_" in name or "altup" in name:
        return TensorPlace(-1, Cut.WHOLE)
    return TensorPlace(None, Cut.WHOLE if _WHOLE.search(name) else Cut.UNKNOWN)


def _matrix_cut(name: str) -> Cut:
    if _KEYS.search(name):
        return Cut.KEYS
    if _ROWS.search(name):
        return Cut.ROWS
    if _COLUMNS.search(name):
        return Cut.COLUMNS
    return Cut.WHOLE if _WHOLE.search(name) else Cut.UNKNOWN


def rank_bytes(name: str, dtype: str, shape: tuple[int, ...], cut: Cut, model: ModelShape, ranks: Ranks, item: int) -> int:
    """The bytes the fullest rank holds of one tensor; plain floats are kept in the served type."""
    bits = BITS.get(dtype)
    if bits is None:
        raise BadInput(f"safetensors: {name[:80]!a} has the type {dtype[:20]!a}, which is not known here")
    if dtype in _FLOATS and not name.endswith(("scale", "scale_inv", "scales", "A_log", "correction_bias", "absmax")):
        bits = item * 8
    elements = prod(shape)
    tensor = ranks.tensor
    if cut is Cut.VOCABULARY and shape:
        elements = elements // max(1, shape[0]) * share(padded_vocabulary(shape[0]), tensor)
    elif cut is Cut.EXPERTS:
        elements = _expert_elements(name, shape, model, ranks)
    elif cut is Cut.KEYS:
        elements = share(elements, min(tensor, max(1, model.kv_heads))) if elements > 1 else elements
    elif cut is Cut.COLUMNS:
        elements = share(elements, tensor) if elements > 1 else elements
    elif cut is Cut.ROWS and len(shape) > 1 and min(shape) > 1:  # a bias, or a scale per output, is on every rank
        elements = share(elements, tensor)
    return -(-elements * bits // 8)


def _expert_elements(name: str, shape: tuple[int, ...], model: ModelShape, ranks: Ranks) -> int:
    """By expert, a rank holds its share of the experts; else its share of each, but all of a scale per output of w2."""
    elements = prod(shape)
    count = model.moe.experts if model.moe is not None else 1
    if ranks.by_expert:  # `experts.7.w1` is one of many: the share of one expert, rounded up over all of them later
        return elements * share(count, ranks.experts) // count if shape and shape[0] == count else elements
    per_output = _ROWS.search(name) is not None and (len(shape) < 2 or min(shape) == 1)
    return elements if per_output or elements == 1 else share(elements, ranks.experts)


@dataclass(frozen=True, slots=True)
class Style:
    """What an encoder's code has beside the sizes its config gives."""

    gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    norms: int = 2
    positions: int = 0  # rows of learned positions
    frames: int = 1  # frames per patch
    merge: int = 2  # patches joined along each side before they enter the language model
    mergers: int = 1
    inner: str = "merged"
    """Width between the two matrices of the projector: the merged patch, or the language model's hidden size."""
    projector: str = "merger"  # "merger": two matrices; "single": one; "pixtral" and "llama4": as those do
    skipped: int = 0  # layers at the end that vLLM does not load
    patch_bias: bool = True
    width: int | None = None  # the encoder's width, where `hidden_size` in its config means what it puts out


_QWEN2_5 = Style(gated=True, norm_bias=False, frames=2, patch_bias=False)
_QWEN3_TOWER = Style(frames=2, positions=2304)
_SIGLIP = Style(positions=4096, projector="single")
_CLIP = Style(positions=577, inner="hidden", merge=1, skipped=1, patch_bias=False)

STYLES = {
    "qwen2_vl": Style(frames=2, patch_bias=False, width=1280),
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": replace(_QWEN3_TOWER, mergers=4),
    "qwen3_vl_moe": replace(_QWEN3_TOWER, mergers=4),
    "qwen3_5": _QWEN3_TOWER,
    "qwen3_5_moe": _QWEN3_TOWER,
    "gemma3": _SIGLIP,
    "gemma4": Style(gated=True, bias=False, norm_bias=False, norms=4, positions=20480, projector="single", patch_bias=False),
    "llama4": Style(positions=577, projector="llama4", patch_bias=False),
    "mistral3": Style(gated=True, bias=False, norm_bias=False, projector="pixtral", patch_bias=False),
    "pixtral": Style(gated=True, bias=False, norm_bias=False, projector="pixtral", patch_bias=False),
    "llava": _CLIP,
    "llava_next": _CLIP,
    "internvl": Style(positions=1025, inner="hidden"),
    "internvl_chat": Style(positions=1025, inner="hidden"),
    "kimi_k25": Style(positions=4096),
    "kimi_vl": Style(positions=4096),
    "mllama": Style(positions=1601, merge=1, projector="single"),
}
# Encoders whose config does not describe them, in parameters: MobileNet v5 and the conformer of Gemma 3n (the published
# 5.44 B and 7.85 B less the 4.46 B and 6.87 B of the text), the fourth part of Llama 3.2 Vision that is "global" layers.
_FIXED = {"gemma3n": {"vision": 299_000_000, "audio": 681_000_000}}
_GLOBAL_LAYERS = {"mllama": 8}


class Encoder(NamedTuple):
    """The parameters one rank holds of an encoder: one layer, how often it comes, the rest, and whether its code is known."""

    layer: list[RankTensor]
    layers: int
    rest: list[RankTensor]
    known: bool


def tower_parts(tower: Tower, shape: ModelShape, ranks: int) -> Encoder:
    """An encoder as vLLM builds it."""
    fixed = _FIXED.get(shape.model_type, {}).get(tower.what)
    if fixed is not None:
        return Encoder([], 0, [RankTensor(tower.what, share(fixed, ranks))], known=True)
    style = STYLES.get(shape.model_type) if tower.what == "vision" else None
    known = style is not None
    style = style or Style()
    width = style.width or tower.hidden_size
    layers = tower.layers
    if not width or not layers:
        return Encoder([], 0, [], known=False)
    inner = tower.intermediate_size if tower.intermediate_size and style.width is None else 4 * width
    count = max(1, layers - style.skipped + _GLOBAL_LAYERS.get(shape.model_type, 0))
    pixels = 3 * (tower.patch_size or 14) ** 2 * style.frames
    rest = [
        RankTensor("patch", width, pixels + (1 if style.patch_bias else 0)),
        RankTensor("positions", style.positions, width),
    ]
    rest += _projector(width, inner, shape.hidden_size, style, ranks)
    layer = _layer(width, inner, style, ranks)
    if shape.model_type == "gemma4" and tower.what == "audio":  # conformers: two feed-forwards, attention, a gated convolution
        layer = layer * 2
    return Encoder(layer, count, rest, known)


def _layer(width: int, inner: int, style: Style, ranks: int) -> list[RankTensor]:
    own, rows = share(width, ranks), share(inner, ranks)
    up = rows * (2 if style.gated else 1)
    bias = style.bias
    return [
        *linear("visual.qkv", 3 * own, width, bias=3 * own if bias else 0),
        *linear("visual.proj", width, own, bias=width if bias else 0),
        *linear("visual.up_proj", up, width, bias=up if bias else 0),
        *linear("visual.down_proj", width, rows, bias=width if bias else 0),
        *norm(width, bias=style.norm_bias, count=style.norms),
    ]


def _projector(width: int, inner: int, hidden: int, style: Style, ranks: int) -> list[RankTensor]:
    if style.projector == "single":
        return [RankTensor("projector", width + 1, hidden), *norm(width, count=3)]
    if style.projector == "pixtral":  # a merger of four patches into one, then two matrices; on every rank
        return [
            RankTensor("projector", width, 4 * width),
            RankTensor("projector", hidden, width),
            RankTensor("projector", hidden, hidden),
        ]
    if style.projector == "llama4":
        between = 4096  # projector_input_dim and projector_output_dim of both published sizes
        return [
            RankTensor("projector", share(between, ranks), inner),
            RankTensor("projector", between, share(between, ranks)),
            RankTensor("projector", share(hidden, ranks), between),
        ]
    merged = width * style.merge**2
    middle = hidden if style.inner == "hidden" else merged
    one = [
        *linear("visual.merger.fc1", share(middle, ranks), merged, bias=middle),
        *linear("visual.merger.fc2", hidden, share(middle, ranks), bias=hidden),
        *norm(width, bias=style.norm_bias),
    ]
    return one * style.mergers
