"""Step times by measured kernels: matrix products by shape, attention, all-reduce, experts, and the host.

A kernel's time is its ideal time by the data sheet times a ratio that was measured (data/silicon.json, which
lab/write_silicon_table.py makes). A card that nobody measured borrows the ratios of its generation, with a wider band; a model
or a card that is not in the table is left to the data sheet.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import Gpu, gpu_named
from plimsoll.models.shape import Layer, ModelShape
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.settings import Settings as LaunchSettings
from plimsoll.plan.weights import Ranks, RankTensor, Storage, end_parts, family_of, feed_forward_parts, mixer_parts
from plimsoll.plan.weights_checkpoint import parameters, routed_parameters
from plimsoll.simulate.settings import (
    FP8_BYTES,
    EngineLimits,
    Sheet,
    StepTime,
    captured_sizes,
    experts_of,
    padded,
    sheet_time,
)
from plimsoll.simulate.trace import Floats

# A card of the same generation, by the architecture that its code is compiled for.
RELATIVES = {
    "sm_80": "A100 SXM 80GB", "sm_86": "A100 SXM 80GB", "sm_89": "L40S", "sm_90": "H100 SXM 80GB", "sm_100": "B200",
    "sm_103": "B200", "sm_120": "RTX PRO 6000 Blackwell Server", "sm_121": "RTX PRO 6000 Blackwell Server",
}  # fmt: skip
MEASURED_BAND, RELATIVE_BAND, SHEET_BAND = (0.9, 1.1), (0.8, 1.3), (0.85, 1.5)
"""A step may take so many times as long: as wide as benchmarks/clock.py found them on recorded runs."""
PCIE_BAND = 0.2  # more at the slow end, where cards speak over PCIe: the links of two machines differ by a factor of two
LEAST_BYTES = 0.9  # of a parameter: products of 4-bit weights are not in the table

SMALL_NS = 1_500.0  # no kernel is shorter
SMALL_KERNELS = 5  # of a layer beside products and attention: norms, rotation, cache write, activation
ELEMENTWISE_SHARE = 0.8  # of the bandwidth, in such kernels
# The host's part, from our own runs on an H200 (benchmarks/clock.py names them).
SYNC_HOST_NS = 1_500_000.0  # more where the next step is scheduled only when the last one is done
PROMPT_LAYER_NS = 125_000.0  # of a layer in a step with prompts, whose attention no graph holds
EAGER_LAYER_NS = 450_000.0  # of a layer with --enforce-eager, where the host is what a step waits for
UNFUSED = 2.0  # times the bytes that such kernels move where nothing is compiled
SUSTAINED = 0.06  # extra time of compute-bound products in a card that is busy all the time, as a share
UNEVEN = 1.15  # attention over requests of unlike length, with kernels that split it evenly (all but Hopper's and Blackwell's)
FRONT_NS = 13_000_000  # from a request's arrival to the scheduler, and from a first token to the client
SAMPLED_PASSES = 4  # over the logits of a request, in 32 bits


class StepClock(NamedTuple):
    """Step times without a fit to a run, their band, and their basis."""

    step_time: StepTime
    band: tuple[float, float]  # factors on a step's time: lowest and highest
    basis: str


@cache
def _table() -> Mapping[str, Any]:
    return json.loads(files("plimsoll.simulate").joinpath("data/silicon.json").read_text(encoding="utf-8"))


class _Chip(NamedTuple):
    """A card's own rates with the ratios of the table's card."""

    rows: Mapping[str, Any]
    bandwidth: float
    flops: Mapping[str, float]
    relief: Mapping[str, float]  # the card's own dense rate over that of the measured one, at most 1
    uneven: float  # how much longer attention takes over requests of unlike length

    def products(self, tokens: Floats, outputs: int, inputs: int, kind: str) -> Floats:
        """Nanoseconds of a matrix product, for each number of tokens."""
        table = _table()
        size = 1.0 if kind == "fp8" else 2.0
        moved = size * (outputs * inputs + tokens * inputs) + 2.0 * tokens * outputs
        ideal = np.maximum(2.0 * tokens * outputs * inputs / self.flops[kind], moved / self.bandwidth)
        ratios = np.array(self.rows["gemm"][kind])
        for size_now, grid in ((inputs, table["inner"]), (outputs, table["columns"])):
            at = float(np.interp(math.log(size_now), np.log(grid), np.arange(len(grid))))
            low = min(int(at), len(grid) - 2)
            # The last axis first: ratios by tokens are left.
            ratios = ratios[..., low] * (1 - (at - low)) + ratios[..., low + 1] * (at - low)
        excess = np.interp(np.log(tokens), np.log(table["tokens"]), ratios) - 1
        # Where computing is the limit, the power limit causes most of the excess: a slower card of its kind stays below it.
        is_computing = ideal > moved / self.bandwidth
        excess = np.where(is_computing, self.relief[kind] * (excess + SUSTAINED), excess)
        return np.maximum(SMALL_NS, 1e9 * ideal * (1 + excess))

    def all_reduce(self, moved: Floats, cards: int) -> Floats:
        """Nanoseconds to add up `moved` bytes over `cards` cards."""
        by_cards = self.rows["all_reduce"]
        sizes, took = np.array(by_cards[min(by_cards, key=lambda known: abs(math.log(int(known) / cards)))]).T
        inside = np.exp(np.interp(np.log(moved), np.log(sizes), np.log(took)))
        return 1e3 * np.where(moved > sizes[-1], took[-1] * moved / sizes[-1], inside)

    def experts(self, tokens: Floats, up: RankTensor, down: RankTensor, count: int, chosen: float, kind: str) -> Floats:
        """Nanoseconds of the routed experts of a layer: those of this rank, `chosen` of `count` for each token."""
        size = 1.0 if kind == "fp8" else 2.0
        weights = float(up.outputs * up.inputs + down.outputs * down.inputs)
        reached = up.stack * (1 - (1 - chosen / count) ** tokens)
        here = tokens * chosen * up.stack / count
        ideal = np.maximum(2.0 * here * weights / self.flops[kind], size * weights * reached / self.bandwidth)
        shapes = self.rows["experts"].get(kind) or self.rows["experts"]["bfloat16"]
        near = min(
            shapes,
            key=lambda one: abs(math.log(one[0] * one[1] / (down.outputs * down.inputs))) + abs(math.log(one[3] / count)),
        )
        return np.maximum(SMALL_NS, 1e9 * ideal * np.interp(np.log(tokens), np.log(_table()["moe_tokens"]), near[4]))

    def nearest(self, name: str, wanted: Sequence[float]) -> list[float]:
        """Returns the further figures of the row whose first ones are nearest to `wanted`."""
        row = min(self.rows[name], key=lambda one: sum(abs(math.log(a / b)) for a, b in zip(one, wanted, strict=False)))
        return [float(value) for value in row[len(wanted) :]]


def _card_of(card: Gpu) -> tuple[_Chip, tuple[float, float], str] | None:
    cards = _table()["cards"]
    name, band, basis = card.name, MEASURED_BAND, f"kernels measured on {card.name}"
    if name not in cards:
        name, band = RELATIVES.get(card.arch, ""), RELATIVE_BAND
        basis = f"kernels measured on {name}, by the data sheet of {card.name}"
    if name not in cards:
        return None
    rows = cards[name]
    bandwidth = float(card.bandwidth_bytes_per_s or 0) or (rows["bandwidth"] if band is MEASURED_BAND else 0.0)
    flops = {"bfloat16": float(card.bf16_flops or 0), "fp8": float(card.fp8_flops or 0)}
    flops = {kind: flops[kind] or (rows["flops"].get(kind, 0.0) if band is MEASURED_BAND else 0.0) for kind in rows["flops"]}
    flops = {kind: rate for kind, rate in flops.items() if rate}
    if not bandwidth or "bfloat16" not in flops:
        return None
    relief = {kind: min(1.0, rate / rows["flops"][kind]) for kind, rate in flops.items()}
    uneven = UNEVEN if band is MEASURED_BAND and card.arch not in ("sm_90", "sm_100", "sm_103") else 1.0
    return _Chip(rows, bandwidth, flops, relief, uneven), band, basis


def planned_clock(ledger: Ledger, shape: ModelShape, limits: EngineLimits) -> StepClock | None:
    """Step times of a planned server by measured kernels, else by the data sheet; None where no sheet gives its rates."""
    launch = ledger.settings
    try:
        card = gpu_named(ledger.card.name)
    except BadInput:
        return None
    total, routed = parameters(shape), routed_parameters(shape)
    elsewhere = routed * (1 - 1 / launch.data_parallel) if launch.expert_parallel else 0.0
    of_one = ledger.weights.value * launch.tensor_parallel * launch.pipeline_parallel / max(1.0, total - elsewhere)
    return measured_clock(shape, launch, card, limits, of_one) or sheet_clock(ledger, shape, limits)


def sheet_clock(ledger: Ledger, shape: ModelShape, limits: EngineLimits) -> StepClock | None:
    """Step times of a planned server by the data sheet alone; None where no sheet gives its rates."""
    try:
        card = gpu_named(ledger.card.name)
    except BadInput:
        return None
    times = sheet_time(sheet_of(ledger, shape), card, limits)
    basis = f"the data sheet of {ledger.settings.tensor_parallel} x {card.name}"
    return None if times is None else StepClock(times, SHEET_BAND, basis)


def sheet_of(ledger: Ledger, shape: ModelShape) -> Sheet:
    """Returns the figures of a planned server that decide its step times by the data sheet."""
    launch, total, routed = ledger.settings, parameters(shape), routed_parameters(shape)
    counts = (shape.moe.experts, shape.moe.experts_per_token) if shape.moe is not None else (None, None)
    return Sheet(
        weights_bytes=ledger.weights.value,
        block_bytes=ledger.kv_plan.bytes_per_block,
        parameters=total,
        routed=routed,
        experts=experts_of(total, routed, *counts),
        cards=launch.tensor_parallel,
        stages=launch.pipeline_parallel,
        is_eager=launch.enforce_eager,
    )


def measured_clock(
    shape: ModelShape, launch: LaunchSettings, card: Gpu, limits: EngineLimits, bytes_a_parameter: float
) -> StepClock | None:
    """Step times by measured kernels; None where neither the card nor its generation was measured, or the model has layers or
    weights of a kind that was not: states, latent attention, 4 bits."""
    found = _card_of(card)
    is_other = shape.mla is not None or any(layer.kind.keeps_state for layer in shape.layers)
    if found is None or is_other or bytes_a_parameter < LEAST_BYTES:
        return None
    chip, band, basis = found
    if launch.tensor_parallel > 1 and not chip.rows["nvlink"]:
        band = (band[0], band[1] + PCIE_BAND)
    kind = "fp8" if "fp8" in chip.flops and FP8_BYTES[0] <= bytes_a_parameter <= FP8_BYTES[1] else "bfloat16"
    most, sizes = limits.max_num_batched_tokens, captured_sizes(limits, is_eager=launch.enforce_eager)
    marks = np.unique(np.concatenate((np.array(sizes, dtype=np.int64), np.geomspace(1, most, 100).astype(np.int64), [most])))
    marks = marks[marks <= most]
    took, attention = np.zeros(len(marks)), np.zeros(4)
    for layer, count in Counter(shape.layers).items():
        of_layer, of_attention = _layer(chip, shape, layer, launch, marks.astype(np.float64), kind)
        took += count * of_layer
        attention += count * np.array(of_attention)
    fixed, each, per_context, per_pair = attention.tolist()
    ends = end_parts(shape, family_of(shape), launch.tensor_parallel)
    head = next((part for part in (*ends.last, *ends.tied) if part.inputs > 1), None)
    if head is not None:
        few, many = chip.products(np.array([32.0, 256.0]), head.outputs, head.inputs, "bfloat16").tolist()
        fixed, each = fixed + few, each + max(0.0, many - few) / 224
    each += 1e9 * 4.0 * SAMPLED_PASSES * shape.vocab_size / launch.tensor_parallel / chip.bandwidth
    took = np.maximum.accumulate(took) + fixed
    if launch.enforce_eager:
        took = np.maximum(took, EAGER_LAYER_NS * len(shape.layers))
    table = np.interp(padded(sizes, most), marks, took + (0.0 if limits.async_scheduling else SYNC_HOST_NS))
    times = StepTime(
        base_ns=round(table[1]),
        token_ns=max(0, round((table[-1] - table[most // 2]) / max(1, most - most // 2))),
        seq_ns=round(each),
        ctx_ps=round(1e3 * per_context),
        by_tokens=np.rint(table).astype(np.int64),
        pair_fs=max(1, round(1e6 * per_pair / 2)),
        prompt_ns=0 if launch.enforce_eager else round(PROMPT_LAYER_NS * len(shape.layers)),
        front_ns=FRONT_NS,
    )
    return StepClock(times, band, basis)


def _layer(
    chip: _Chip, shape: ModelShape, layer: Layer, launch: LaunchSettings, tokens: Floats, kind: str
) -> tuple[Floats, tuple[float, float, float, float]]:
    """Nanoseconds of a layer by tokens, and of its attention: fixed, for a request, for a token of context, for a pair."""
    cards, family = launch.tensor_parallel, family_of(shape)
    ranks = Ranks(cards, cards * (launch.data_parallel if launch.expert_parallel else 1), launch.expert_parallel)
    parts = [*mixer_parts(layer, shape, family, cards), *feed_forward_parts(layer, shape, family, ranks)]
    took = np.full_like(tokens, SMALL_KERNELS * SMALL_NS)
    width = 8.0 * shape.hidden_size
    for part in parts:
        if part.storage is Storage.LINEAR and part.inputs > 1:
            took += chip.products(tokens, part.outputs, part.inputs, kind)
            width += part.outputs
        elif part.name.endswith(".gate"):
            took += SMALL_NS
    routed = [part for part in parts if part.storage is Storage.EXPERTS]
    if len(routed) == 2 and shape.moe is not None:
        # With expert parallelism every rank's tokens come to each, and their sums go back.
        sharing = launch.data_parallel if launch.expert_parallel else 1
        chosen = shape.moe.experts_per_token or 1
        took += chip.experts(tokens * sharing, routed[0], routed[1], shape.moe.experts, chosen, kind)
        if sharing > 1:
            took += chip.all_reduce(2.0 * shape.hidden_size * tokens * sharing, sharing)
    moved = 2.0 * width * tokens * (UNFUSED if launch.enforce_eager else 1.0)
    took += 1e9 * moved / (ELEMENTWISE_SHARE * chip.bandwidth)
    if cards > 1:
        took += 2 * chip.all_reduce(2.0 * shape.hidden_size * tokens, cards)
    if not layer.kind.keeps_tokens:
        return took, (0.0, 0.0, 0.0, 0.0)
    heads, own = (layer.attention_heads or shape.attention_heads) / cards, max(1.0, (layer.kv_heads or shape.kv_heads) / cards)
    wide = layer.head_dim or shape.head_dim
    size = 1.0 if launch.kv_cache_dtype.startswith("fp8") else 2.0
    fixed, each, read = chip.nearest("decode", (heads, own, wide, size))
    (ratio,) = chip.nearest("prefill", (heads, wide))
    return took, (
        1e3 * fixed,
        1e3 * each,
        1e9 * chip.uneven * read * 2.0 * size * own * wide / chip.bandwidth if layer.window is None else 0.0,
        1e9 * ratio * 4.0 * heads * wide / chip.flops["bfloat16"] if layer.window is None else 0.0,
    )
