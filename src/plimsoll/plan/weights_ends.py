"""What a model has outside its layers: embeddings, head, positions, and the tables that are no parameters."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.model import LayerKind, ModelShape
from plimsoll.plan.weights_families import Family
from plimsoll.plan.weights_parts import Part, linear, norm, padded_vocabulary, share

_ALTUP_INPUTS = 4  # Gemma 3n's altup_num_inputs and laurel_rank, equal in both published sizes
_LAUREL_RANK = 64
# Shortened as vLLM shortens them: the stretch is in the table, not in max_position_embeddings.
_FROM_ORIGINAL = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling"})


class Ends(NamedTuple):
    """What the first stage holds before its layers, and the last after them."""

    first: list[Part]
    last: list[Part]
    tied: list[Part]
    """The embedding again, where a last stage of its own needs it for a tied head."""


def end_parts(shape: ModelShape, family: Family, ranks: int) -> Ends:
    """Embeddings, head and what else belongs to no layer."""
    rows = share(padded_vocabulary(shape.vocab_size), ranks)
    embedding = Part("embed_tokens", rows, shape.embedding_size)
    first = [embedding]
    if family.positions is not None:
        first.append(Part("positions", shape.max_context + family.positions, shape.hidden_size))
    if shape.text_model_type == "bloom":
        first += norm(shape.hidden_size, bias=True)
    if shape.embedding_size != shape.hidden_size:  # OPT-350m works in a narrower space than its layers
        first += linear("project_in", shape.hidden_size, shape.embedding_size)
        first += linear("project_out", shape.embedding_size, shape.hidden_size)
    first += _per_layer_inputs(shape, ranks)
    last: list[Part] = norm(shape.hidden_size, bias=family.norm_bias) if family.final_norm else []
    if shape.tie_word_embeddings:
        tied = [embedding]
    else:
        tied = []
        last.append(Part("lm_head", rows, shape.embedding_size))
    if family.head_bias:
        last.append(Part("lm_head", rows))
    return Ends(first, last, tied)


def _per_layer_inputs(shape: ModelShape, ranks: int) -> list[Part]:
    """Gemma 3n and 4: a second, wide embedding that feeds every layer."""
    width = shape.per_layer_input_size
    if not width:
        return []
    columns = width * len(shape.layers)
    rows = share(padded_vocabulary(shape.per_layer_vocab_size or shape.vocab_size), ranks)
    parts = [
        Part("embed_tokens_per_layer", rows, columns),
        Part("per_layer_model_projection", share(columns, ranks), shape.hidden_size),
        *norm(width),
    ]
    if shape.text_model_type == "gemma3n_text":
        both_ways = 2 * (_ALTUP_INPUTS - 1)
        parts += [Part("altup_projections", share(shape.hidden_size, ranks), shape.hidden_size)] * both_ways
    return parts


def layer_extras(shape: ModelShape, family: Family) -> list[Part]:
    """The small tensors of every layer: norms, and what Gemma 3n and 4 add."""
    hidden = shape.hidden_size
    parts = norm(hidden, bias=family.norm_bias, count=family.norms)
    if width := shape.per_layer_input_size:
        parts += [Part("per_layer_input_gate", width, hidden), Part("per_layer_projection", hidden, width)]
        if shape.text_model_type == "gemma3n_text":
            routers = _ALTUP_INPUTS * (1 + _ALTUP_INPUTS + hidden) + 2 * hidden
            parts += [Part("altup", routers), Part("laurel", 2 * _LAUREL_RANK + 1, hidden)]
        else:
            parts += norm(hidden)
    return parts


def rotary_bytes(shape: ModelShape, family: Family, item: int) -> int:
    """The cosine and sine tables, one per kind of rotary positions, kept on every rank beside the parameters.

    The startups show them: Gemma 3 4B loads 8.58 GiB with 8.01 GiB of parameters, because a linear factor of 8 makes a
    table of 1,048,576 rows.
    """
    kinds = {layer.kind for layer in shape.layers if layer.kind.keeps_tokens}
    if not family.rotary or not kinds:
        return 0
    width = shape.mla.qk_rope_head_dim if shape.mla is not None else int(shape.head_dim * family.rotary)
    rows = shape.max_context
    rope = shape.rope
    two_kinds = shape.text_model_type.startswith(("gemma3", "gemma4")) and LayerKind.SLIDING in kinds
    plain = rows if two_kinds else 0
    if rope is not None and rope.factor:
        if two_kinds:
            rows = int(rows * rope.factor) if rope.kind == "linear" else rows
        elif rope.kind in _FROM_ORIGINAL and rope.original_context:
            rows = int(rope.original_context * rope.factor)
        elif rope.kind == "dynamic":
            rows = int(rows / rope.factor)
    if rope is not None and rope.kind == "longrope":
        rows += shape.default_context
    if family.interleaved_positions:
        rows *= 4
    wide = max((layer.head_dim for layer in shape.layers), default=0) if two_kinds else width
    return (rows * (wide or width) + plain * width) * item
