"""How each layer of a model mixes tokens, from whichever of the many descriptions a config.json has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from plimsoll.domain.model import LayerKind, Mla
from plimsoll.domain.model_families import (
    ENCODER_FAMILIES,
    FULL_EVERY,
    MAMBA1_FAMILIES,
    MAMBA_ONLY_FAMILIES,
    WINDOW_NEEDS_A_FLAG,
    WINDOW_PLUS_ONE,
)
from plimsoll.domain.model_keys import CONTEXT_MAX, LAYERS_MAX, Keys
from plimsoll.errors import BadInput

T = TypeVar("T")
FULL, SLIDING, NONE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.NONE

# The spellings of layer_types and layers_block_type; the linear ones depend on the family.
_BY_NAME = {
    "full_attention": FULL,
    "attention": FULL,
    "global_attention": FULL,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "qwen_sparse_attention": FULL,
    "sliding_attention": SLIDING,
    "sliding_window_attention": SLIDING,
    "local_attention": SLIDING,
    "chunked_attention": LayerKind.CHUNKED_LOCAL,
    "hybrid": LayerKind.FULL_AND_MAMBA2,
    "conv": LayerKind.SHORT_CONV,
    "mlp": NONE,
    "moe": NONE,
}
_MAMBA2_KEYS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")


@dataclass(frozen=True, slots=True)
class Heads:
    """What all attention layers of the model have unless a layer says otherwise."""

    family: str
    attention: int
    kv: int
    head_dim: int
    v_head_dim: int
    window: int | None
    mla: Mla | None


def sliding_window(text: Keys, family: str) -> int | None:
    """The window of the layers that slide, or None where nothing does."""
    if text.is_list("sliding_window"):
        return None  # a value per layer: `_by_window_list` reads it
    window = text.count("sliding_window", "sliding_window_size", least=-1, most=CONTEXT_MAX)
    needs_flag = family.startswith(WINDOW_NEEDS_A_FLAG) and not family.startswith("mimo_v2")
    flag = text.flag("use_sliding_window")
    if window is None or window <= 0 or flag is False or (needs_flag and not flag):
        return None
    return window + 1 if family in WINDOW_PLUS_ONE else window


def window_list(text: Keys) -> tuple[int, ...] | None:
    """A window per layer (PLaMo 3, openPangu), 0 for a layer that does not slide."""
    for key in ("sliding_window", "interleaved_sliding_window"):
        if text.is_list(key):
            return text.counts(key, most=CONTEXT_MAX, null=0)
    return None


def layer_kinds(text: Keys, heads: Heads, layers: int, notes: list[str]) -> list[LayerKind]:
    """The kind of every layer, from the first description of them that the file has."""
    for describe in _DESCRIPTIONS:
        kinds = describe(text, heads, layers, notes)
        if kinds is not None:
            break
    else:
        kinds = [SLIDING if heads.window else FULL] * layers
    if not text.is_word("use_bidirectional_attention") and text.flag("use_bidirectional_attention"):
        return [LayerKind.ENCODER] * layers  # EmbeddingGemma; Gemma 4 writes "vision" here and stays a decoder
    if heads.family.startswith("gemma4"):
        kinds[-1] = FULL  # transformers sees to it, whatever the list or the rhythm says
    return [_settled(kind, text, heads) for kind in kinds]


def _settled(kind: LayerKind, text: Keys, heads: Heads) -> LayerKind:
    """The kind once windows, chunks and latents are known: a layer that slides without a window is a full one."""
    if kind is LayerKind.CHUNKED_LOCAL and not text.has("attention_chunk_size") and heads.window:
        kind = SLIDING  # Rnj-1 calls its sliding layers chunked
    if kind is SLIDING and not heads.window and window_list(text) is None:
        kind = FULL
    if heads.mla is not None and kind in (FULL, SLIDING):
        return LayerKind.MLA if kind is FULL else LayerKind.MLA_SLIDING
    return kind


def _first(items: Sequence[T], name: str, layers: int, notes: list[str]) -> Sequence[T]:
    """One item per layer; vLLM too ignores what a list has beyond the last layer."""
    if len(items) < layers:
        raise BadInput(f"config.json: {name} describes {len(items)} layers, the model has {layers}")
    if len(items) > layers:
        notes.append(f"{name} describes {len(items)} layers; the first {layers} were taken.")
    return items[:layers]


def _linear_kind(text: Keys, family: str) -> LayerKind:
    """What "linear_attention" or "mamba" means here."""
    if text.has("linear_num_value_heads", "linear_num_key_heads"):
        return LayerKind.GATED_DELTA_NET
    if text.has("linear_attn_config"):
        return LayerKind.KIMI_DELTA
    if text.has(*_MAMBA2_KEYS) or family == "mamba2":
        return LayerKind.MAMBA2
    if text.has("mamba_d_state", "mamba_expand") or family in MAMBA1_FAMILIES or family == "jamba":
        return LayerKind.MAMBA1
    return LayerKind.LINEAR


def _by_names(names: Sequence[str], key: str, text: Keys, heads: Heads, notes: list[str]) -> list[LayerKind]:
    linear = _linear_kind(text, heads.family)
    unknown: str | None = None
    kinds = []
    for name in names:
        kind = _BY_NAME.get(name)
        if name == "linear_attention":
            kind = linear
        elif name in ("mamba", "mamba2"):
            kind = linear if linear in (LayerKind.MAMBA1, LayerKind.MAMBA2) else LayerKind.MAMBA2
        if kind is None:
            unknown = unknown or name
            kind = FULL
        kinds.append(kind)
    if unknown is not None:
        notes.append(f"{key} has {unknown[:40]!a}, which is not known here; such layers are counted as full attention.")
    return kinds


def _by_block_configs(text: Keys, _heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """Nemotron-NAS: every block says whether it has attention."""
    blocks = text.children("block_configs")
    if blocks is None:
        return None
    kinds = []
    for block in blocks[:layers]:
        attention = block.child("attention")
        if attention is None:
            return None  # NemotronH-Puzzle: block_configs vary the experts, another key gives the kinds
        pruned = attention.flag("no_op") or attention.flag("replace_with_linear")
        kinds.append(NONE if pruned else FULL)
    _first(blocks, "block_configs", layers, notes)
    return kinds


def _by_pattern(text: Keys, _heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """Nemotron-H: one letter per layer."""
    if not text.has("hybrid_override_pattern"):
        return None
    letters = {"*": FULL, "M": LayerKind.MAMBA2, "-": NONE, "E": NONE}
    pattern = pattern_of(text)
    if unknown := next((letter for letter in pattern if letter not in letters), None):
        raise BadInput(f"config.json: hybrid_override_pattern has {unknown!a}, only M, *, - and E are known")
    return [letters[letter] for letter in _first(pattern, "hybrid_override_pattern", layers, notes)]


def pattern_of(text: Keys) -> str:
    """Nemotron-H's pattern without the bars that only mark pipeline stages; empty where there is none."""
    return (text.word("hybrid_override_pattern") or "").replace("|", "")


def _by_list(text: Keys, heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    for key in ("layers_block_type", "layer_types"):
        names = text.words(key)
        if names:
            return _by_names(_first(names, key, layers, notes), key, text, heads, notes)
    return None


def _by_hybrid_layers(text: Keys, _heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """MiMo-V2: 1 for a sliding layer."""
    pattern = text.counts("hybrid_layer_pattern", most=1)
    if pattern is None:
        return None
    return [SLIDING if slides else FULL for slides in _first(pattern, "hybrid_layer_pattern", layers, notes)]


def _by_compression(text: Keys, _heads: Heads, layers: int, _notes: list[str]) -> list[LayerKind] | None:
    """DeepSeek V4: how many tokens one compressed latent stands for; the list goes on with the MTP layers."""
    ratios = text.counts("compress_ratios", most=CONTEXT_MAX)
    if ratios is None:
        return None
    taken = _first(ratios, "compress_ratios", layers, [])
    return [LayerKind.MLA_COMPRESSED if ratio > 1 else LayerKind.MLA_SLIDING for ratio in taken]


def _by_linear_config(text: Keys, _heads: Heads, layers: int, _notes: list[str]) -> list[LayerKind] | None:
    """Kimi Linear: the delta layers by number, counted from 1."""
    linear = text.child("linear_attn_config")
    if linear is None:
        return None
    delta = frozenset(linear.counts("kda_layers", most=LAYERS_MAX) or ())
    return [LayerKind.KIMI_DELTA if n in delta else FULL for n in range(1, layers + 1)]


def _by_attention_types(text: Keys, _heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """MiniMax: 1 for attention, 0 for lightning attention."""
    types = text.counts("attn_type_list", most=2)
    if types is None:
        return None
    return [FULL if kind == 1 else LayerKind.LINEAR for kind in _first(types, "attn_type_list", layers, notes)]


# Bamba, LFM2 and Zamba2 number the layers that have attention.
_CHOSEN_LAYERS = (
    ("attn_layer_indices", FULL, LayerKind.MAMBA2),
    ("full_attn_idxs", FULL, LayerKind.SHORT_CONV),
    ("hybrid_layer_ids", LayerKind.FULL_AND_MAMBA2, LayerKind.MAMBA2),
)


def _by_interval(text: Keys, heads: Heads, layers: int, _notes: list[str]) -> list[LayerKind] | None:
    """Families that give a rhythm instead of a list."""
    if heads.family in MAMBA_ONLY_FAMILIES:
        return [_linear_kind(text, heads.family)] * layers
    if heads.family == "falcon_h1":
        return [LayerKind.FULL_AND_MAMBA2] * layers
    if heads.family in ENCODER_FAMILIES:
        return [LayerKind.ENCODER] * layers
    every = text.count("full_attention_interval", "layer_group_size", most=LAYERS_MAX)
    if every is not None:
        other = _linear_kind(text, heads.family)
        return [FULL if n % every == 0 else other for n in range(1, layers + 1)]
    if (period := text.count("attn_layer_period", most=LAYERS_MAX)) is not None:  # Jamba
        offset = text.count("attn_layer_offset", least=0, most=LAYERS_MAX) or 0
        other = _linear_kind(text, heads.family)
        return [FULL if n % period == offset else other for n in range(layers)]
    for key, chosen, other in _CHOSEN_LAYERS:
        if (numbers := text.counts(key, most=LAYERS_MAX)) is not None:
            these = frozenset(numbers)
            return [chosen if n in these else other for n in range(layers)]
    return None


def _by_chunks(text: Keys, heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """Llama 4: the layers with rotary positions look at their own chunk only."""
    if not heads.family.startswith("llama4"):
        return None
    if text.count("attention_chunk_size", least=0, most=CONTEXT_MAX) in (None, 0):
        return [FULL] * layers
    rope = text.counts("no_rope_layers", most=1)
    if not rope:
        every = text.count("no_rope_layer_interval", most=LAYERS_MAX) or 4
        rope = tuple(int(n % every != 0) for n in range(1, layers + 1))
    return [LayerKind.CHUNKED_LOCAL if has else FULL for has in _first(rope, "no_rope_layers", layers, notes)]


def _by_window_list(text: Keys, heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """Families whose sliding layers follow a pattern, or that name a window per layer."""
    if (windows := window_list(text)) is not None:
        return [SLIDING if w else FULL for w in _first(windows, "sliding_window", layers, notes)]
    if heads.window is None:
        return None
    if text.is_word("sliding_window_pattern"):  # EXAONE 4: "LLLG", and the last layer is global
        letters = text.word("sliding_window_pattern") or "G"
        slides = [letters[n % len(letters)] == "L" and n < layers - 1 for n in range(layers)]
        return [SLIDING if one else FULL for one in slides]
    every = text.count("sliding_window_pattern", "global_attn_every_n_layers", least=0, most=LAYERS_MAX)
    every = FULL_EVERY.get(heads.family) if every is None else every
    if every:
        return [FULL if n % every == 0 else SLIDING for n in range(1, layers + 1)]
    if heads.family in ("gpt_oss", "step3p5"):
        return [SLIDING if n % 2 == 0 else FULL for n in range(layers)]
    if text.flag("use_sliding_window"):
        first = text.count("max_window_layers", least=0, most=LAYERS_MAX) or 0
        return [SLIDING if n >= first else FULL for n in range(layers)]
    return None


_Describe = Callable[[Keys, Heads, int, list[str]], list[LayerKind] | None]
_DESCRIPTIONS: tuple[_Describe, ...] = (
    _by_block_configs,
    _by_pattern,
    _by_hybrid_layers,
    _by_compression,
    _by_linear_config,
    _by_attention_types,
    _by_list,
    _by_interval,
    _by_chunks,
    _by_window_list,
)
