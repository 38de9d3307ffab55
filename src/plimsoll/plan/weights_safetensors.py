"""Which part of a checkpoint's tensor one rank loads, by vLLM's rules for its name."""

from __future__ import annotations

import re
from enum import Enum
from math import prod
from typing import NamedTuple

from plimsoll.domain.model import ModelShape
from plimsoll.errors import BadInput
from plimsoll.plan.weights_parts import Ranks, padded_vocabulary, share

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


class Place(NamedTuple):
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


def place_of(name: str, shape: ModelShape) -> Place:
    """Where vLLM puts a tensor of this name."""
    if _SKIPPED.search(name):
        return Place(None, Cut.SKIPPED)
    if _TOWER.search(name):
        return Place(EVERY_STAGE, _matrix_cut(name))
    if (layer := _LAYER.search(name)) is not None:
        number = int(layer[1])
        if number >= len(shape.layers):  # the MTP layers of DeepSeek and GLM follow the last one
            return Place(None, Cut.SKIPPED)
        return Place(number, Cut.EXPERTS if _EXPERT.search(name) else _matrix_cut(name))
    if _EMBEDDING.search(name):
        return Place(-1, Cut.VOCABULARY)
    if _HEAD.search(name):
        return Place(None, Cut.SKIPPED if shape.tie_word_embeddings else Cut.VOCABULARY)
    if "per_layer" in name or "embed_positions" in name or "wpe" in name or "project_" in name or "altup" in name:
        return Place(-1, Cut.WHOLE)
    return Place(None, Cut.WHOLE if _WHOLE.search(name) else Cut.UNKNOWN)


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
