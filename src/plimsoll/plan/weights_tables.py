"""Tables that decide the size of a model's weights beside its config.json: family, encoder and quantisation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from plimsoll.models.shape import FAMILY_TABLE, Quantization
from plimsoll.units import ceil_div, round_up


@dataclass(frozen=True, slots=True)
class Family:
    """The parts of a family's code that its config.json does not name, read in vllm/model_executor/models of 0.32.0.

    The rows are in models/data/families.json; a family that is not there is planned like Llama, with a wide band.
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


FAMILIES: Mapping[str, Family] = {
    name: Family(**{field: value for field, value in row.items() if field != "names"})
    for row in FAMILY_TABLE["weights"]["rows"]
    for name in row["names"]
}
UNKNOWN_FAMILY = Family(known=False)


# The size of a quantised tensor, and which tensors are left unquantised.
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
    """Returns the quantisation that a --quantization flag alone fixes; None where the method does not fix the width."""
    row = FAMILY_TABLE["quantization_flags"]["rows"].get(flag.lower())
    if row is None:
        return None
    return Quantization(
        row.get("method", flag.lower()),
        bits=row["bits"],
        group_size=row.get("group"),
        block=tuple(row["block"]) if "block" in row else None,
    )


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
    """The module names a checkpoint leaves unquantised: those for every layer, and those for one."""
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
    return name.replace("shared_experts", "shared_expert").replace("block_sparse_moe", "mlp")


@lru_cache(maxsize=4096)
def left_alone(name: str, rules: tuple[str, ...], single: tuple[str, ...]) -> bool:
    """True if a layer's module is among those left unquantised."""
    full = f"model.layers.0.{name}"
    for rule in single:
        if rule == "*" or name == rule or name.startswith(f"{rule}.") or fnmatchcase(name, rule):
            return True
    for rule in rules:
        if rule.startswith("re:"):
            with suppress(re.error):  # the checkpoint's mistake; vLLM would not start either
                if re.match(rule[3:], full):
                    return True
        elif fnmatchcase(full, rule) or fnmatchcase(full, f"{rule}.*") or f".{rule}." in f".{full}.":
            return True
    return False


@dataclass(frozen=True, slots=True)
class Style:
    """The parts of an encoder's code that its config does not give."""

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
    width: int | None = None  # the encoder's width, where `hidden_size` in its config means the width of its output


STYLES: Mapping[str, Style] = {
    name: Style(**{field: value for field, value in row.items() if field != "names"})
    for row in FAMILY_TABLE["encoders"]["rows"]
    for name in row["names"]
}
# Encoders whose config does not describe them, in parameters: MobileNet v5 and the conformer of Gemma 3n (the published
# 5.44 B and 7.85 B less the 4.46 B and 6.87 B of the text), the fourth part of Llama 3.2 Vision that is "global" layers.
FIXED_ENCODERS = {"gemma3n": {"vision": 299_000_000, "audio": 681_000_000}}
GLOBAL_LAYERS = {"mllama": 8}
