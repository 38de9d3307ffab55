"""The weights by a checkpoint itself (its tensors' headers, or its index's total), its parameters, and LoRA slots beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from math import prod

from plimsoll.errors import BadInput
from plimsoll.models.safetensors import BITS
from plimsoll.models.shape import FAMILY_TABLE, ModelShape
from plimsoll.plan.kv_layers import check_split, padded_vocabulary
from plimsoll.plan.settings import Settings
from plimsoll.plan.weights import (
    ONE_GPU,
    Ranks,
    Storage,
    StorageRules,
    end_parts,
    family_of,
    feed_forward_parts,
    has_wide_zeros,
    heaviest,
    item_bytes,
    layer_extras,
    mixer_parts,
    next_token_head,
    ranks_of,
    rotary_bytes,
    tower_parts,
    weights_from_shape,
)
from plimsoll.plan.weights_tables import scheme_of
from plimsoll.units import Estimate, ceil_div

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


# How a tensor is spread over the tensor-parallel ranks.
Cut = Enum("Cut", "VOCABULARY COLUMNS KEYS ROWS EXPERTS WHOLE SKIPPED UNKNOWN")
EVERY_STAGE = -2  # encoders


_NAMES: Mapping[str, str] = FAMILY_TABLE["tensor_names"]


_OR_END = r"(?:\.|$)"


def _named(what: str, end: str = r"\.") -> re.Pattern[str]:
    """Names with one of these words between dots, or at their end where that is allowed."""
    return re.compile(rf"(?:^|\.)(?:{_NAMES[what]}){end}")


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_SKIPPED = re.compile(r"(?:^|\.)mtp\.|rotary_emb\.inv_freq$|\.attn\.(?:masked_)?bias$|\.g_idx$|(?:^|\.)\w*position_ids$")
_TOWER, _EMBEDDING, _HEAD = _named("tower"), _named("embedding", r"\.weight$"), _named("head")
_EXPERT = re.compile(r"(?:^|\.)experts\.")
NUMBERED_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_KEYS, _COLUMNS, _ROWS = _named("keys"), _named("columns", _OR_END), _named("rows")
_WHOLE = re.compile(rf"norm|{_named('whole', _OR_END).pattern}|layer_?norm")


def place_of(name: str, shape: ModelShape) -> tuple[int | None, Cut]:
    """Returns the place of a tensor in vLLM and its cut: the number of a decoder layer, -1 before all of them, None after all,
    or EVERY_STAGE."""
    if _SKIPPED.search(name):
        return None, Cut.SKIPPED
    if _TOWER.search(name):
        return EVERY_STAGE, _matrix_cut(name)
    if (layer := _LAYER.search(name)) is not None:
        number = int(layer[1])
        if number >= len(shape.layers):  # the MTP layers of DeepSeek and GLM follow the last one
            return None, Cut.SKIPPED
        return number, Cut.EXPERTS if _EXPERT.search(name) else _matrix_cut(name)
    if _EMBEDDING.search(name):
        return -1, Cut.VOCABULARY
    if _HEAD.search(name):
        return None, Cut.SKIPPED if shape.tie_word_embeddings else Cut.VOCABULARY
    if "per_layer" in name or "embed_positions" in name or "wpe" in name or "project_" in name or "altup" in name:
        return -1, Cut.WHOLE
    return None, Cut.WHOLE if _WHOLE.search(name) else Cut.UNKNOWN


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
        elements = elements // max(1, shape[0]) * ceil_div(padded_vocabulary(shape[0]), tensor)
    elif cut is Cut.EXPERTS and ranks.by_expert:
        # A rank holds its share of the experts. `experts.7.w1` is one of many: its share is rounded up over all of them later.
        count = model.moe.experts if model.moe is not None else 1
        elements = elements * ceil_div(count, ranks.experts) // count if shape and shape[0] == count else elements
    elif cut is Cut.EXPERTS:  # its share of each, but all of a scale per output of w2
        per_output = _ROWS.search(name) is not None and (len(shape) < 2 or min(shape) == 1)
        elements = elements if per_output or elements == 1 else ceil_div(elements, ranks.experts)
    elif cut is Cut.KEYS:
        elements = ceil_div(elements, min(tensor, max(1, model.kv_heads))) if elements > 1 else elements
    elif cut is Cut.COLUMNS:
        elements = ceil_div(elements, tensor) if elements > 1 else elements
    elif cut is Cut.ROWS and len(shape) > 1 and min(shape) > 1:  # a bias, or a scale per output, is on every rank
        elements = ceil_div(elements, tensor)
    return -(-elements * bits // 8)


def weights_from_tensors(
    tensors: Iterable[tuple[str, str, Sequence[int]]], shape: ModelShape, settings: Settings = ONE_GPU
) -> Estimate:
    """The weights of the heaviest rank, from the names, types and shapes in the headers of a checkpoint."""
    check_split(shape, settings)
    ranks, item = ranks_of(settings), item_bytes(settings)
    wide_zeros = has_wide_zeros(settings)
    by_layer = [0] * len(shape.layers)
    singles: Counter[tuple[int, str]] = Counter()
    first = last = every = embedding = unsure = 0
    for name, kind, size in tensors:
        layer, cut = place_of(name, shape)
        if cut is Cut.SKIPPED or (layer == EVERY_STAGE and settings.language_model_only):
            continue
        if layer == EVERY_STAGE and settings.encoders_whole:
            cut = Cut.WHOLE
        held_here = rank_bytes(name, kind, tuple(size), cut, shape, ranks, item)
        if wide_zeros and name.endswith(".qzeros"):
            held_here *= 4
        if cut is Cut.UNKNOWN:
            unsure += held_here - held_here // settings.tensor_parallel
        if layer is None:
            last += held_here
        elif layer == EVERY_STAGE:
            every += held_here
        elif layer < 0:
            first += held_here
            embedding += held_here if cut is Cut.VOCABULARY and "per_layer" not in name else 0
        elif cut is Cut.EXPERTS and ranks.by_expert and (numbered := NUMBERED_EXPERT.search(name)):
            key = (layer, name[: numbered.start()] + name[numbered.end() :])
            singles[key] += held_here
        else:
            by_layer[layer] += held_here
    for (number, _), all_experts in singles.items():
        count = shape.moe.experts if shape.moe is not None else 1
        by_layer[number] += all_experts * ceil_div(count, ranks.experts) // count
    if settings.pipeline_parallel > 1 and shape.tie_word_embeddings:
        last += embedding
    family, scheme = family_of(shape), scheme_of(shape.quantization)
    ignored = shape.quantization.ignored if shape.quantization else ()
    last += next_token_head(shape, settings, family, StorageRules(item, scheme, ignored, whole_segments=False))
    value = heaviest(by_layer, settings, first, last) + every + rotary_bytes(shape, family, item)
    if scheme is not None and scheme.expert_padding != (1, 1):  # gpt-oss: a file of 60.8 GiB is held as 65.9
        padded = weights_from_shape(shape, settings)
        return Estimate(
            max(value, padded.value), value, max(value, padded.high), "checkpoint, its experts padded for the kernel"
        )
    if unsure:
        return Estimate(value, max(0, value - unsure), value, "checkpoint: tensors of unknown names are counted on every rank")
    return Estimate.exact(value, "checkpoint: every tensor by its name, type and shape")


def weights_from_total(total_bytes: int, shape: ModelShape, settings: Settings = ONE_GPU) -> Estimate:
    """The weights of the heaviest rank, from the total in a checkpoint's index: the total times this rank's share.

    The total may hold MTP layers that vLLM does not load, and the share of a family we do not know is a guess. In memory a
    checkpoint is smaller by its MTP layers at most, so the band below is one layer's part of the total.
    """
    whole, here = weights_from_shape(shape), weights_from_shape(shape, replace(settings, dtype="bfloat16"))
    value = total_bytes * here.value // max(1, whole.value)
    below = 0.01 + shape.mtp_layers / len(shape.layers)
    above = 0.01 if family_of(shape).known or ranks_of(settings) == Ranks() else 0.1
    return Estimate(
        value, int(value * (1 - below)), int(value * (1 + above)), "checkpoint: the index's total, by this rank's share"
    )


_ADAPTED_WORDS = frozenset(FAMILY_TABLE["lora_on_words"]["names"])
_ADAPTED_PLAIN = frozenset({"conv1d", "linear_attn.in_proj_ba", "self_attn.b_proj", "mamba.dt_proj"})
"""Matrices that no quantisation touches and that vLLM holds as linear layers all the same: they have slots, too."""


def parameters(shape: ModelShape) -> int:
    """The number of the whole model's parameters that vLLM loads, without MTP layers and without padding."""
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
    """The number of those parameters that belong to experts a router picks: a token uses only some of them."""
    family, ranks = family_of(shape), Ranks()
    return sum(
        part.elements
        for layer in shape.layers
        for part in feed_forward_parts(layer, shape, family, ranks)
        if part.storage is Storage.EXPERTS
    )


def lora_bytes(shape: ModelShape, settings: Settings) -> Estimate:
    """The LoRA slots vLLM allocates at start: an A and a B of full rank for every matrix it can adapt, experts included.

    For models that are not listed the band reaches up to slots for embedding and head as well: this differs by release.
    """
    family, ranks = family_of(shape), ranks_of(settings)
    sizes = []
    for layer in shape.layers:
        parts = mixer_parts(layer, shape, family, ranks.tensor) + feed_forward_parts(layer, shape, family, ranks)
        touched = (part for part in parts if part.storage in (Storage.LINEAR, Storage.EXPERTS) or part.name in _ADAPTED_PLAIN)
        sizes.append(sum(part.stack * (part.pieces * part.inputs + part.outputs) for part in touched))
    each = settings.max_loras * settings.max_lora_rank * item_bytes(settings)
    words = shape.vocab_size + shape.hidden_size
    # A last stage of its own has the table as well where it is tied to the head.
    ends = words * (2 if settings.pipeline_parallel > 1 and shape.tie_word_embeddings else 1)
    low, high = each * heaviest(sizes, settings), each * heaviest(sizes, settings, words, ends)
    value = high if _ADAPTED_WORDS.intersection(shape.architectures) else low
    return Estimate(value, int(low * 0.9), int(high * 1.1), f"{settings.max_loras} LoRA slots of rank {settings.max_lora_rank}")
