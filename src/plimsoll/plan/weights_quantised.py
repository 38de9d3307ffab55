"""What a tensor weighs once it is quantised, and which tensors are left alone.

Bytes per matrix, o outputs by i inputs (vllm/model_executor/layers/quantization of 0.32.0):

    fp8, int8      o*i      + scales: 4 per tensor, 4*o per channel, 4 per block of 128x128
    awq, gptq      o*i/2    + 2*o*ceil(i/group), and for awq the zero points o*ceil(i/group)/2, or 2*o*ceil(i/group) on Hopper
    mxfp4          o*i/2    + o*ceil(i/32); experts are padded first
    nvfp4          o*i/2    + o*ceil(i/16), the scales laid out in tiles of 128 by 4
    bitsandbytes   o*i/2    + 4 per 64 weights: vLLM undoes the double quantisation of the scales

Embeddings, head, norms, routers and convolutions stay as they are. So do the modules the checkpoint names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from plimsoll.domain.model import Quantization
from plimsoll.domain.units import ceil_div, round_up
from plimsoll.plan.weights_parts import Part, Storage

_ONLINE = frozenset({"fp8", "bitsandbytes", "fp8_per_tensor", "fp8_per_block", "ptpc_fp8", "mxfp8"})
_INT4 = ("awq", "gptq", "compressed-tensors", "auto-round", "auto_round", "inc", "moe_wna16", "quark", "torchao", "humming")
_NVFP4 = ("nvfp4", "modelopt_fp4", "modelopt")
_FLOAT_4 = ("fp4", "nvfp4", "mxfp4")

Sizes = Callable[[int, int], tuple[int, int]]
"""Outputs and inputs of a matrix to the bytes of its weights and of its scales."""


class Scheme(NamedTuple):
    """How the matrices of a model are stored."""

    linear_size: Sizes | None
    expert_size: Sizes
    width: str
    """"8", "4", or "nested" for bitsandbytes' four bits: which band applies."""
    towers: bool = False
    expert_padding: tuple[int, int] = (1, 1)
    """To which multiple an expert's width and the hidden size grow."""


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
        return _all(_eight(None) if bits == 8 else _blocks_of_64, "8" if bits == 8 else "nested", towers=True)
    if expert_dtype == "fp4":  # DeepSeek V4: fp8 in blocks everywhere but in the experts
        return Scheme(_eight(quantization.block or (128, 128)), _floats(16 if group == 16 else 32), "4")
    if bits == 8 or (bits is None and "fp8" in method):
        per_tensor = method in ("fp8", "modelopt") and quantization.block is None
        return _all(_per_tensor if per_tensor else _eight(quantization.block), "8", towers=method in _ONLINE)
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


def part_bytes(part: Part, item: int, scheme: Scheme | None, *, alone: bool) -> tuple[int, int]:
    """The bytes of one matrix and of its scales; `alone` where the checkpoint leaves its module alone."""
    if part.storage is Storage.FLOAT32:
        return part.elements * 4, 0
    is_expert = part.storage is Storage.EXPERTS
    size = None
    if scheme is not None and not alone and part.storage is not Storage.PLAIN:
        size = scheme.expert_size if is_expert else scheme.linear_size
    if scheme is None or size is None:
        return part.elements * item, 0
    outputs, inputs = part.outputs, part.inputs
    if is_expert and scheme.expert_padding != (1, 1):
        outputs, inputs = _padded_expert(part, scheme.expert_padding)
    weights, scales = size(outputs, inputs)
    return weights * part.stack, scales * part.stack


def _padded_expert(part: Part, padding: tuple[int, int]) -> tuple[int, int]:
    """vLLM rounds the experts' width and the hidden size up for its kernels: gpt-oss 2880 becomes 2944 by 3072."""
    width, hidden = padding
    if part.name.endswith("up_proj"):
        return 2 * round_up(part.outputs // 2, width), round_up(part.inputs, hidden)
    return round_up(part.outputs, hidden), round_up(part.inputs, width)


def _per_tensor(outputs: int, inputs: int) -> tuple[int, int]:
    return outputs * inputs, 4


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


def _blocks_of_64(outputs: int, inputs: int) -> tuple[int, int]:
    return outputs * inputs // 2, outputs * inputs // 16


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
