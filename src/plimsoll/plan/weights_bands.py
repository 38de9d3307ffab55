"""How far an estimate from config.json alone may be off.

The bands are the largest residuals of each class in the published starts, rounded up, without the strays named here;
`python -m benchmarks.weights_accuracy` prints every residual, and what the bands would cover if each architecture were
judged by the others of its class alone.

    class                  models  residuals, said against measured                               band
    16-bit dense             23    -1.6 % (ROCm), -2.7 % (opt-125m, 6 MiB), else within 0.7 %     1 % and 8 MiB
    16-bit experts            4    within 0.03 %                                                  1 %
    16-bit multimodal        11    within 0.7 %                                                   1.5 %
    hybrid, 16-bit            1    -2.2 % (LoRA slots not stated)                                 -2 % .. +3 %
    8-bit                    12    -2.9 % (0.6.6), +5.2 % (0.5.5), else within 1.4 %              2 %
    4-bit, dense              6    within 0.8 %                                                   2 %
    4-bit, experts, hybrid    6    +2.4 % (kernel unknown), -9 % twice (checkpoint not stated),   -4 % .. +8 %
                                   -35 % (0.11.0 keeps w13 twice), else within 0.9 %
    bitsandbytes              3    +7.8 % (0.7, scales not expanded; an embedding model)          -8 % .. +3 %
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.model import ModelShape
from plimsoll.domain.units import MIB
from plimsoll.plan.weights_families import Family
from plimsoll.plan.weights_quantised import Scheme

# Tensors between 1 and 10 MiB share segments of 20 MiB, whose ends are lost: up to 6 MiB in opt-125m's 239 MiB.
ALLOCATOR_SLACK = 8 * MIB


class Band(NamedTuple):
    """Shares of the value below and above it, and the class it comes from."""

    below: float
    above: float
    why: str


def band_of(shape: ModelShape, family: Family, scheme: Scheme | None, *, unclear: bool, towers_known: bool) -> Band:
    """The band of the class this model and its storage belong to."""
    if unclear:
        return Band(0.5, 1.0, "quantised: the method does not say how many bits a weight has, so 4 to 16 are allowed for")
    if not family.known:
        return Band(0.15, 0.15, f"unknown family {shape.text_model_type[:40]!a}: planned like Llama")
    if shape.towers and not towers_known:
        return Band(0.05, 0.1, "multimodal: an encoder that is not described here")
    hybrid = any(layer.kind.keeps_state for layer in shape.layers)
    if scheme is not None:
        return _quantised(scheme, special=hybrid or shape.moe is not None)
    if hybrid:
        return Band(0.02, 0.03, "hybrid: parameters and tables from config.json")
    if shape.towers:
        return Band(0.015, 0.015, "multimodal: parameters, encoder and tables from config.json")
    if shape.moe is not None:
        return Band(0.01, 0.01, "16-bit experts: parameters and tables from config.json")
    return Band(0.01, 0.01, "16-bit dense: parameters and tables from config.json")


def _quantised(scheme: Scheme, *, special: bool) -> Band:
    if scheme.width == "nested":
        return Band(0.08, 0.03, "bitsandbytes: four bits and a scale per 64 weights")
    if scheme.width == "8":
        return Band(0.02, 0.02, "8-bit: parameters and scales from config.json")
    if special:
        return Band(0.04, 0.08, "4-bit experts or hybrid: kernels pad differently, and checkpoints quantise different parts")
    return Band(0.02, 0.02, "4-bit dense: parameters and scales from config.json")
