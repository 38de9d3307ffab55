"""What the weights take on one GPU: of the rank that rules, the heaviest.

    |  first stage             |  ...  |  last stage            |     pipeline: by layers
    | embed, layers            | layers| layers, norm, lm_head  |     encoders and rotary tables on every stage
      each cut by tensor parallelism: rows or columns of the matrices, the vocabulary padded to 64;
      norms, routers, latent down-projections and (beyond the KV heads) k and v on every rank;
      experts over tensor x data ranks, by width or, with expert parallelism, by count.

`weights_from_tensors` is exact, `weights_from_total` nearly so; `weights_from_shape` needs no more than a config.json.
All three give what vLLM prints as "Model loading took": parameters, rotary tables and the allocator's rounding. A draft
model is another call; LoRA slots are `lora_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plimsoll.domain.estimate import Estimate
from plimsoll.domain.model import Layer, ModelShape, Quantization
from plimsoll.errors import BadInput
from plimsoll.plan.kv_settings import layers_by_stage
from plimsoll.plan.weights_bands import ALLOCATOR_SLACK, Band, band_of
from plimsoll.plan.weights_ends import end_parts, layer_extras, rotary_bytes
from plimsoll.plan.weights_families import Family, family_of
from plimsoll.plan.weights_feedforward import feed_forward_parts
from plimsoll.plan.weights_mixers import mixer_parts
from plimsoll.plan.weights_parts import Part, Ranks, Storage, held, padded_vocabulary, share
from plimsoll.plan.weights_quantised import Scheme, left_alone, named_scheme, part_bytes, scheme_of, sorted_rules
from plimsoll.plan.weights_towers import tower_parts

_FOUR_BYTES = frozenset({"float32", "float"})
_PROJECTIONS = frozenset({"self_attn.kv_b_proj"})
# Whose embedding table and head can have a LoRA too: `embedding_modules` in the models of vLLM 0.32.0. It takes a row of the
# rank for every word, on every rank of a tensor-parallel server.
_ADAPTED_WORDS = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Apertus", "Exaone", "Exaone4", "ExaoneMoe", "FalconH1", "Granite", "GraniteMoe", "GraniteMoeHybrid",
        "GraniteMoeShared", "GraniteSWA", "HyperCLOVAX", "InternLM3", "IQuestCoder", "Jamba", "K2Horizon", "LLaMA", "Lfm2",
        "Lfm2Moe", "Llama", "Llama4", "MiniCPM", "MiniCPM3", "Mixtral", "Nemotron", "NemotronH", "NemotronHPuzzle", "DeciLM",
        "Param2MoE", "Phi3", "PhiMoE", "Qwen3", "Qwen3Moe", "Qwen3_5", "Qwen3_5Moe", "Solar", "TeleChat2", "TeleChat3",
        "TeleFLM", "Ernie4_5",
    )
)  # fmt: skip
_ADAPTED_PLAIN = frozenset({"conv1d", "linear_attn.in_proj_ba", "self_attn.b_proj", "mamba.dt_proj"})
"""Matrices that no quantisation touches and that vLLM holds as linear layers all the same: they have slots, too."""


class Placement(NamedTuple):
    """Over how many GPUs the model is spread, and how."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    partition: tuple[int, ...] | None = None
    """Layers per stage, as VLLM_PP_LAYER_PARTITION gives them."""
    encoders: bool = True
    """False where --limit-mm-per-prompt is 0 for all they read, or --language-model-only: vLLM does not load them."""
    encoders_whole: bool = False
    """--mm-encoder-tp-mode data: every rank has the whole encoder."""
    whole_segments: bool = False
    """vLLM forbids the allocator to split large segments while it loads (0.21 and newer)."""
    wide_zeros: bool = False
    """AWQ's zero points take 16 bits: Machete, the kernel for Hopper cards, multiplies them by the scales (0.19 and newer)."""

    @property
    def ranks(self) -> Ranks:
        """Over how many ranks each kind of tensor is cut; experts also over the data-parallel ones."""
        experts = self.tensor_parallel * self.data_parallel
        return Ranks(self.tensor_parallel, experts, self.expert_parallel and experts > 1)


ONE_GPU = Placement()


def weights_from_shape(
    shape: ModelShape,
    placement: Placement = ONE_GPU,
    dtype: str | None = None,
    quantization: Quantization | str | None = None,
) -> Estimate:
    """The weights of the rank that rules, from the sizes in config.json; the checkpoint's own quantisation wins."""
    check_divides(shape, placement)
    family = family_of(shape)
    stored = shape.quantization or (named_scheme(quantization) if isinstance(quantization, str) else quantization)
    scheme = scheme_of(stored, shape.moe.expert_dtype if shape.moe else None, wide_zeros=placement.wide_zeros)
    unclear = scheme is None and (stored is not None or isinstance(quantization, str))
    if unclear:  # half a byte to two bytes a weight: the middle of what it may be
        scheme = scheme_of(Quantization("fp8", bits=8))
    storing = _Storing(item_bytes(dtype), scheme, stored.ignored if stored else (), placement.whole_segments)
    counted = _count(shape, placement, family, storing)
    found = _with_band(counted.heaviest, band_of(shape, family, scheme, unclear=unclear, towers_known=counted.towers_known))
    if scheme is None or scheme.expert_padding == (1, 1):
        return found
    # Which kernel runs depends on what is installed, and Triton's does not pad: gpt-oss-120b took 61.29 GiB with it, not 65.97.
    bare = _count(shape, placement, family, storing._replace(scheme=scheme._replace(expert_padding=(1, 1))))
    return found._replace(low=min(found.low, bare.heaviest))


def weights_from_tensors(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    shape: ModelShape,
    placement: Placement = ONE_GPU,
    dtype: str | None = None,
) -> Estimate:
    """The weights of the rank that rules, from the names, types and shapes in the headers of a checkpoint."""
    # Imported here because its many patterns are compiled at once, and most plans have no tensors to look at.
    from plimsoll.plan.weights_safetensors import EVERY_STAGE, NUMBERED_EXPERT, Cut, place_of, rank_bytes

    check_divides(shape, placement)
    ranks, item = placement.ranks, item_bytes(dtype)
    by_layer = [0] * len(shape.layers)
    singles: dict[tuple[int, str], int] = {}
    first = last = every = embedding = unsure = 0
    for name, kind, size in tensors:
        place = place_of(name, shape)
        if place.cut is Cut.SKIPPED or (place.layer == EVERY_STAGE and not placement.encoders):
            continue
        if place.layer == EVERY_STAGE and placement.encoders_whole:
            place = place._replace(cut=Cut.WHOLE)
        held_here = rank_bytes(name, kind, tuple(size), place.cut, shape, ranks, item)
        if placement.wide_zeros and name.endswith(".qzeros"):
            held_here *= 4
        if place.cut is Cut.UNKNOWN:
            unsure += held_here - held_here // placement.tensor_parallel
        if place.layer is None:
            last += held_here
        elif place.layer == EVERY_STAGE:
            every += held_here
        elif place.layer < 0:
            first += held_here
            embedding += held_here if place.cut is Cut.VOCABULARY and "per_layer" not in name else 0
        elif place.cut is Cut.EXPERTS and ranks.by_expert and (numbered := NUMBERED_EXPERT.search(name)):
            key = (place.layer, name[: numbered.start()] + name[numbered.end() :])
            singles[key] = singles.get(key, 0) + held_here
        else:
            by_layer[place.layer] += held_here
    for (number, _), all_experts in singles.items():
        count = shape.moe.experts if shape.moe is not None else 1
        by_layer[number] += all_experts * share(count, ranks.experts) // count
    if placement.pipeline_parallel > 1 and shape.tie_word_embeddings:
        last += embedding
    value = _heaviest(by_layer, placement, first, last) + every + rotary_bytes(shape, family_of(shape), item)
    scheme = scheme_of(shape.quantization)
    if scheme is not None and scheme.expert_padding != (1, 1):  # gpt-oss: a file of 60.8 GiB is held as 65.9
        padded = weights_from_shape(shape, placement, dtype)
        return Estimate(
            max(value, padded.value), value, max(value, padded.high), "checkpoint, its experts padded for the kernel"
        )
    if unsure:
        return Estimate(value, max(0, value - unsure), value, "checkpoint: tensors of unknown names are counted on every rank")
    return Estimate.exact(value, "checkpoint: every tensor by its name, type and shape")


def weights_from_total(total_bytes: int, shape: ModelShape, placement: Placement = ONE_GPU) -> Estimate:
    """The weights of the rank that rules, from the total in a checkpoint's index: the total times this rank's share.

    The total may hold MTP layers that vLLM does not load, and the share of a family we do not know is a guess; a
    checkpoint is not smaller in memory than by its MTP layers, so the band below is one layer in so many.
    """
    whole, here = weights_from_shape(shape), weights_from_shape(shape, placement)
    value = total_bytes * here.value // max(1, whole.value)
    below = 0.01 + shape.mtp_layers / len(shape.layers)
    above = 0.01 if family_of(shape).known or placement.ranks == Ranks() else 0.1
    return Estimate(
        value, int(value * (1 - below)), int(value * (1 + above)), "checkpoint: the index's total, by this rank's share"
    )


def parameters(shape: ModelShape) -> int:
    """How many parameters vLLM loads of the whole model, without MTP layers and without padding."""
    family, ranks = family_of(shape), Ranks()
    ends = end_parts(shape, family, 1)
    parts = [*ends.first, *ends.last]
    extras = layer_extras(shape, family)
    for layer in shape.layers:
        parts += mixer_parts(layer, shape, family, 1) + feed_forward_parts(layer, shape, family, ranks) + extras
    for tower in shape.towers:
        encoder = tower_parts(tower, shape, 1)
        parts += encoder.layer * encoder.layers + encoder.rest
    padding = padded_vocabulary(shape.vocab_size) - shape.vocab_size
    padded = sum(part.inputs for part in parts if part.name in ("embed_tokens", "lm_head"))
    return sum(part.elements for part in parts) - padding * padded


def routed_parameters(shape: ModelShape) -> int:
    """Those of them that belong to experts which a router picks: a token meets only some of them."""
    family, ranks = family_of(shape), Ranks()
    return sum(
        part.elements
        for layer in shape.layers
        for part in feed_forward_parts(layer, shape, family, ranks)
        if part.storage is Storage.EXPERTS
    )


def lora_bytes(shape: ModelShape, placement: Placement, max_loras: int, max_rank: int, dtype: str | None = None) -> Estimate:
    """The LoRA slots vLLM allocates at start: an A and a B of full rank for every matrix it can adapt, experts included.

    Of models that are not listed the band reaches up to where the words have one, too: which have differs by release.
    """
    family, ranks = family_of(shape), placement.ranks
    sizes = []
    for layer in shape.layers:
        parts = mixer_parts(layer, shape, family, ranks.tensor) + feed_forward_parts(layer, shape, family, ranks)
        touched = (part for part in parts if part.storage in (Storage.LINEAR, Storage.EXPERTS) or part.name in _ADAPTED_PLAIN)
        sizes.append(sum(part.stack * (part.pieces * part.inputs + part.outputs) for part in touched))
    each = max_loras * max_rank * item_bytes(dtype)
    words = shape.vocab_size + shape.hidden_size
    # A last stage of its own has the table as well where it is tied to the head.
    ends = words * (2 if placement.pipeline_parallel > 1 and shape.tie_word_embeddings else 1)
    low, high = each * _heaviest(sizes, placement), each * _heaviest(sizes, placement, words, ends)
    value = high if _ADAPTED_WORDS.intersection(shape.architectures) else low
    return Estimate(value, int(low * 0.9), int(high * 1.1), f"{max_loras} LoRA slots of rank {max_rank}")


def check_divides(shape: ModelShape, placement: Placement) -> None:
    """BadInput where vLLM would refuse the split."""
    tensor = placement.tensor_parallel
    if min(tensor, placement.pipeline_parallel, placement.data_parallel) < 1:
        raise BadInput("parallel sizes start at 1")
    if shape.attention_heads % tensor:
        raise BadInput(f"--tensor-parallel-size {tensor} does not divide the model's {shape.attention_heads} attention heads")
    if padded_vocabulary(shape.vocab_size) % tensor:
        rows = padded_vocabulary(shape.vocab_size)
        raise BadInput(f"--tensor-parallel-size {tensor} does not divide the padded vocabulary of {rows}")
    if placement.pipeline_parallel > len(shape.layers):
        raise BadInput(f"--pipeline-parallel-size {placement.pipeline_parallel} is more than the {len(shape.layers)} layers")


def item_bytes(dtype: str | None) -> int:
    """Bytes of an unquantised weight; a 32-bit checkpoint is served in 16 bits unless --dtype says otherwise."""
    return 4 if dtype in _FOUR_BYTES else 2


class _Storing(NamedTuple):
    item: int
    scheme: Scheme | None
    ignored: tuple[str, ...]
    whole_segments: bool

    def held(self, size: int) -> int:
        return held(size, whole_segments=self.whole_segments)


class _Counted(NamedTuple):
    heaviest: int
    towers_known: bool


def _count(shape: ModelShape, placement: Placement, family: Family, storing: _Storing) -> _Counted:
    """Bytes of the heaviest stage; layers that are alike are counted once."""
    ranks = placement.ranks
    ends = end_parts(shape, family, ranks.tensor)
    extras = _sum(layer_extras(shape, family), storing, (), ())
    rules, single = sorted_rules(storing.ignored) if storing.ignored else ((), {})
    seen: dict[tuple[Layer, tuple[str, ...]], int] = {}
    per_layer = []
    for number, layer in enumerate(shape.layers):
        key = (layer, single.get(number, ()))
        size = seen.get(key)
        if size is None:
            parts = mixer_parts(layer, shape, family, ranks.tensor) + feed_forward_parts(layer, shape, family, ranks)
            size = seen[key] = _sum(parts, storing, rules, key[1]) + extras
        per_layer.append(size)
    towers_known, every = True, storing.held(rotary_bytes(shape, family, storing.item))
    for tower in shape.towers if placement.encoders else ():
        encoder = tower_parts(tower, shape, 1 if placement.encoders_whole else ranks.tensor)
        towers_known = towers_known and encoder.known
        quantised = storing.scheme is not None and storing.scheme.towers
        how = storing if quantised else storing._replace(scheme=None)
        every += _sum(encoder.layer, how, rules, ()) * encoder.layers + _sum(encoder.rest, how, rules, ())
    last = _sum(ends.last, storing, (), ())
    if placement.pipeline_parallel > 1:
        last += _sum(ends.tied, storing, (), ())
    first = _sum(ends.first, storing, (), ())
    return _Counted(_heaviest(per_layer, placement, first, last) + every, towers_known)


def _heaviest(per_layer: Sequence[int], placement: Placement, first: int = 0, last: int = 0) -> int:
    """Of all pipeline stages, with what the first holds before its layers and the last after them."""
    spans = layers_by_stage(len(per_layer), placement.pipeline_parallel, placement.partition)
    totals = [sum(per_layer[span.start : span.stop]) for span in spans]
    totals[0] += first
    totals[-1] += last
    return max(totals)


def _sum(parts: Sequence[Part], storing: _Storing, rules: tuple[str, ...], single: tuple[str, ...]) -> int:
    item, scheme = storing.item, storing.scheme
    if scheme is None:
        return sum(storing.held(p.elements * (4 if p.storage is Storage.FLOAT32 else item)) for p in parts)
    total = 0
    for part in parts:
        alone = bool(rules or single) and left_alone(part.name, rules, single)
        size, scales = part_bytes(part, item, scheme, alone=alone)
        total += storing.held(size) + storing.held(scales)
        if part.name in _PROJECTIONS and size != part.elements * item:
            total += storing.held(part.elements * item)  # vLLM keeps a 16-bit copy of a quantised kv_b for decoding
    return total


def _with_band(value: int, band: Band) -> Estimate:
    low, high = int(value * (1 - band.below)) - ALLOCATOR_SLACK, int(value * (1 + band.above)) + ALLOCATOR_SLACK
    return Estimate(value, max(0, low), high, band.why)
