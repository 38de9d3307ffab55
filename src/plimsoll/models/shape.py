"""The shape of a model for a memory planner: its sizes and how each layer mixes tokens, however its config.json spells them.

`ModelShape.from_config` is the only entry: no other code looks at the keys of a config.json. Sizes mean what vLLM 0.32
means by them. A layer's cache costs `kv_heads * (head_dim + v_head_dim)` elements per token whatever its kind, because
an MLA layer is described as it is cached: one head, the latent and the rotary part together, no separate value.
A value that the file does not give is None, or has a sentence in `notes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plimsoll.errors import BadInput
from plimsoll.units import round_up

if TYPE_CHECKING:
    from plimsoll.models.config import Keys


class LayerKind(StrEnum):
    """The way one layer mixes tokens, which decides what it keeps of a request."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED_LOCAL = "chunked-local"
    MLA = "mla"
    MLA_SLIDING = "mla-sliding"
    MLA_COMPRESSED = "mla-compressed"
    """DeepSeek V4: a sliding window of latents, and beside it one latent per `compress_ratio` tokens."""
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    FULL_AND_MAMBA2 = "full-and-mamba2"
    """Falcon-H1 and Zamba2 run attention and Mamba in one layer and keep the memory of both."""
    GATED_DELTA_NET = "gated-delta-net"
    KIMI_DELTA = "kimi-delta"
    LINEAR = "linear"
    SHORT_CONV = "short-conv"
    ENCODER = "encoder"  # attention in both directions over the whole prompt: nothing is kept
    NONE = "none"  # no mixing at all: a layer that is only a feed-forward block, or whose attention was pruned

    @property
    def keeps_tokens(self) -> bool:
        """True if the layer's memory grows with the request (up to a window, where it has one)."""
        return self in _KEEPS_TOKENS

    @property
    def keeps_state(self) -> bool:
        """True if the layer keeps a state of fixed size per request."""
        return self in _KEEPS_STATE


_KEEPS_TOKENS = frozenset(map(LayerKind, "full sliding chunked-local mla mla-sliding mla-compressed full-and-mamba2".split()))
_KEEPS_STATE = frozenset(map(LayerKind, "mamba1 mamba2 full-and-mamba2 gated-delta-net kimi-delta linear short-conv".split()))


class FeedForward(StrEnum):
    """The block after the mixing in one layer."""

    DENSE = "dense"
    EXPERTS = "experts"
    DENSE_AND_EXPERTS = "dense-and-experts"
    NONE = "none"


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Heads and widths are those of its cache, and 0 where it keeps no tokens."""

    kind: LayerKind
    feed_forward: FeedForward = FeedForward.DENSE
    attention_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None
    intermediate_size: int | None = None
    shares_kv: bool = False
    indexer: bool = False
    compress_ratio: int = 1


@dataclass(frozen=True)
class RopeScaling:
    """The stretch of the position encoding; `max_context` includes it as vLLM 0.32 applies it."""

    kind: str
    factor: float | None = None
    original_context: int | None = None


@dataclass(frozen=True)
class Mla:
    """The ranks and widths of multi-head latent attention, also for DeepSeek V4, whose file gives only their sum."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    q_lora_rank: int | None = None

    @property
    def cached_dim(self) -> int:
        """Width of the one vector an MLA layer keeps per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class Indexer:
    """The small attention that picks what a sparse layer looks at; `Layer.indexer` says which layers own one."""

    head_dim: int
    heads: int | None = None


@dataclass(frozen=True)
class Moe:
    """The experts; `Layer.feed_forward` says which layers have them."""

    experts: int
    experts_per_token: int | None = None
    intermediate_size: int | None = None
    shared_experts: int = 0
    shared_intermediate_size: int | None = None  # width of all shared experts of one layer together
    latent_size: int | None = None  # width the experts work in, where it is not the hidden size
    expert_dtype: str | None = None


@dataclass(frozen=True)
class Mamba:
    """The state of a Mamba layer. Heads, head width and groups are those of Mamba 2 and None for Mamba 1."""

    inner_size: int
    state_size: int
    conv_kernel: int
    heads: int | None = None
    head_dim: int | None = None
    groups: int | None = None
    ssm_dtype: str | None = None


@dataclass(frozen=True)
class LinearAttention:
    """The state of a gated delta net, Kimi delta or lightning-attention layer."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int | None = None
    ssm_dtype: str | None = None


@dataclass(frozen=True)
class ShortConv:
    """The state of an LFM2 convolution layer."""

    width: int
    kernel: int


@dataclass(frozen=True)
class Tower:
    """A vision or audio encoder beside the language model."""

    what: str
    layers: int | None = None
    hidden_size: int | None = None
    heads: int | None = None
    intermediate_size: int | None = None
    patch_size: int | None = None


@dataclass(frozen=True)
class Quantization:
    """The format the weights are stored in. `bits` is None where layers differ or the method does not fix it."""

    method: str
    algorithm: str | None = None
    bits: int | None = None
    group_size: int | None = None
    block: tuple[int, ...] | None = None
    kv_cache: str | None = None
    """The cache type the checkpoint asks for, such as "fp8"; what vLLM uses under --kv-cache-dtype auto."""
    ignored: tuple[str, ...] = ()
    by_name: bool = False
    """Whether the model's name alone says so, not a file of it: which parts stay in 16 bits is then a guess."""


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, in vLLM's terms."""

    architectures: tuple[str, ...]
    model_type: str
    text_model_type: str
    hidden_size: int
    layers: tuple[Layer, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int  # as the file gives it, for MLA the cached width; `layers` has the values of layers that differ (Gemma 4)
    v_head_dim: int
    vocab_size: int
    max_context: int  # the longest --max-model-len the file allows
    default_context: int  # vLLM's when --max-model-len is not given; shorter than `max_context` under LongRoPE only
    embedding_size: int  # width of the token embeddings: the hidden size, except in OPT-350m
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    intermediate_size: int | None = None
    rope: RopeScaling | None = None
    chunk_size: int | None = None
    attention_output_gate: bool = False
    per_layer_input_size: int | None = None
    per_layer_vocab_size: int | None = None
    mla: Mla | None = None
    indexer: Indexer | None = None
    moe: Moe | None = None
    mamba: Mamba | None = None
    linear: LinearAttention | None = None
    short_conv: ShortConv | None = None
    towers: tuple[Tower, ...] = ()
    mtp_layers: int = 0
    is_encoder_decoder: bool = False
    reads_items_whole: bool = False  # attends to a picture or film in both directions, so that it must fit one batch
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Read a parsed config.json; BadInput names the key that is missing or makes no sense."""
        from plimsoll.models.config import read_shape  # here, because the reader needs the types above

        return read_shape(config)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        return tuple(layer.kind for layer in self.layers)

    def count(self, *kinds: LayerKind) -> int:
        return sum(layer.kind in kinds for layer in self.layers)


# Facts that a config.json omits because its family's code has them: vLLM 0.32's rules and transformers' defaults. Defaults are
# listed only for families whose published files omit keys: Gemma 3 states no heads, LLaVA's text_config almost nothing.
with (Path(__file__).parent / "data" / "families.json").open("rb") as _file:
    FAMILY_TABLE: Mapping[str, Any] = json.load(_file)
_FAMILIES = {what: frozenset(row["names"]) for what, row in FAMILY_TABLE["families"].items()}
FULL_EVERY: Mapping[str, int] = FAMILY_TABLE["full_every"]["layers"]
DEFAULTS: Mapping[str, Mapping[str, object]] = FAMILY_TABLE["defaults"]
MLA_FAMILIES, MAMBA1_FAMILIES, MAMBA_ONLY_FAMILIES = _FAMILIES["mla"], _FAMILIES["mamba1"], _FAMILIES["mamba_only"]
ENCODER_FAMILIES, WINDOW_PLUS_ONE = _FAMILIES["encoder"], _FAMILIES["window_plus_one"]
WINDOW_NEEDS_A_FLAG = tuple(_FAMILIES["window_needs_a_flag"])
TIED, UNTIED = _FAMILIES["tied"], _FAMILIES["untied"]
KNOWN = TIED | UNTIED | _FAMILIES["say_so_themselves"]

# Far beyond any model, and small enough that nothing we build from them can grow large.
LAYERS_MAX = 4096
HEADS_MAX = 1 << 16
WIDTH_MAX = 1 << 24
VOCAB_MAX = 1 << 28
CONTEXT_MAX = 1 << 40
EXPERTS_MAX = 1 << 20
LIST_MAX = 1 << 17
TEXT_MAX = 512

# Reads how each layer mixes tokens from any of the many descriptions that a config.json may have.

T = TypeVar("T")
FULL, SLIDING, NONE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.NONE

_BY_NAME = {name: LayerKind(kind) for name, kind in FAMILY_TABLE["layer_names"]["kinds"].items()}
_MAMBA2_KEYS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads and widths of all attention layers, unless a layer has its own."""

    family: str
    attention: int
    kv: int
    head_dim: int
    v_head_dim: int
    window: int | None
    mla: Mla | None


def sliding_window(text: Keys, family: str) -> int | None:
    """The window of the sliding layers, or None where no layer slides."""
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
    is_both_ways = not text.is_word("use_bidirectional_attention") and text.flag("use_bidirectional_attention")
    if is_both_ways or heads.family in ENCODER_FAMILIES:
        return [LayerKind.ENCODER] * layers  # EmbeddingGemma; Gemma 4 writes "vision" here and stays a decoder
    kinds = _listed(text, heads, layers, notes) or _in_rhythm(text, heads, layers, notes)
    kinds = kinds or [SLIDING if heads.window else FULL] * layers
    if heads.family.startswith("gemma4"):
        kinds[-1] = FULL  # transformers sets it, whatever the list or the rhythm says

    def settled(kind: LayerKind) -> LayerKind:  # a layer that slides without a window is a full one
        if kind is LayerKind.CHUNKED_LOCAL and not text.has("attention_chunk_size") and heads.window:
            kind = SLIDING  # Rnj-1 calls its sliding layers chunked
        if kind is SLIDING and not heads.window and window_list(text) is None:
            kind = FULL
        if heads.mla is not None and kind in (FULL, SLIDING):
            return LayerKind.MLA if kind is FULL else LayerKind.MLA_SLIDING
        return kind

    return [settled(kind) for kind in kinds]


def _first(items: Sequence[T], name: str, layers: int, notes: list[str]) -> Sequence[T]:
    """One item per layer; like vLLM, ignores a list's items beyond the last layer."""
    if len(items) < layers:
        raise BadInput(f"config.json: {name} describes {len(items)} layers, the model has {layers}")
    if len(items) > layers:
        notes.append(f"{name} describes {len(items)} layers; the first {layers} were taken.")
    return items[:layers]


def _linear_kind(text: Keys, family: str) -> LayerKind:
    """Returns the kind that "linear_attention" or "mamba" means in this file."""
    if text.has("linear_num_value_heads", "linear_num_key_heads"):
        return LayerKind.GATED_DELTA_NET
    if text.has("linear_attn_config"):
        return LayerKind.KIMI_DELTA
    if text.has(*_MAMBA2_KEYS) or family == "mamba2":
        return LayerKind.MAMBA2
    if text.has("mamba_d_state", "mamba_expand") or family in MAMBA1_FAMILIES or family == "jamba":
        return LayerKind.MAMBA1
    return LayerKind.LINEAR


def _listed(text: Keys, heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """The kinds from a list with an entry for each layer, under any family's name for it."""
    blocks = text.children("block_configs")
    attentions = [block.child("attention") for block in blocks[:layers]] if blocks is not None else []
    if blocks is not None and None not in attentions:  # Nemotron-NAS; NemotronH-Puzzle's vary the experts alone
        _first(blocks, "block_configs", layers, notes)
        pruned = [a is not None and (a.flag("no_op") or a.flag("replace_with_linear")) for a in attentions]
        return [NONE if without else FULL for without in pruned]
    if text.has("hybrid_override_pattern"):  # Nemotron-H: one letter per layer
        letters = {"*": FULL, "M": LayerKind.MAMBA2, "-": NONE, "E": NONE}
        pattern = pattern_of(text)
        if unknown := next((letter for letter in pattern if letter not in letters), None):
            raise BadInput(f"config.json: hybrid_override_pattern has {unknown!a}, only M, *, - and E are known")
        return [letters[letter] for letter in _first(pattern, "hybrid_override_pattern", layers, notes)]
    for key, most, chosen, other, is_chosen in _NUMBERED:
        if (numbers := text.counts(key, most=most)) is not None:
            # DeepSeek V4's list goes on with the MTP layers.
            kept = _first(numbers, key, layers, [] if key == "compress_ratios" else notes)
            return [chosen if is_chosen(number) else other for number in kept]
    if (kimi := text.child("linear_attn_config")) is not None:  # Kimi Linear: the delta layers by number, counted from 1
        delta = frozenset(kimi.counts("kda_layers", most=LAYERS_MAX) or ())
        return [LayerKind.KIMI_DELTA if n in delta else FULL for n in range(1, layers + 1)]
    named = next((key for key in ("layers_block_type", "layer_types") if text.words(key)), None)
    if named is None:
        return None
    linear = _linear_kind(text, heads.family)
    mamba = linear if linear in (LayerKind.MAMBA1, LayerKind.MAMBA2) else LayerKind.MAMBA2
    by_name = _BY_NAME | {"linear_attention": linear, "mamba": mamba, "mamba2": mamba}
    names = _first(text.words(named) or (), named, layers, notes)
    if strange := next((name for name in names if name not in by_name), None):
        notes.append(f"{named} has {strange[:40]!a}, which is not known here; such layers are counted as full attention.")
    return [by_name.get(name, FULL) for name in names]


def pattern_of(text: Keys) -> str:
    """Nemotron-H's pattern without the bars that only mark pipeline stages; empty where there is none."""
    return (text.word("hybrid_override_pattern") or "").replace("|", "")


# MiMo-V2 marks the layers that slide, DeepSeek V4 says how many tokens one latent stands for, MiniMax marks full attention.
_NUMBERED: tuple[tuple[str, int, LayerKind, LayerKind, Callable[[int], bool]], ...] = (
    ("hybrid_layer_pattern", 1, SLIDING, FULL, bool),
    ("compress_ratios", CONTEXT_MAX, LayerKind.MLA_COMPRESSED, LayerKind.MLA_SLIDING, lambda ratio: ratio > 1),
    ("attn_type_list", 2, FULL, LayerKind.LINEAR, lambda kind: kind == 1),
)
# Bamba, LFM2 and Zamba2 number the layers that have attention.
_CHOSEN_LAYERS = (
    ("attn_layer_indices", FULL, LayerKind.MAMBA2),
    ("full_attn_idxs", FULL, LayerKind.SHORT_CONV),
    ("hybrid_layer_ids", LayerKind.FULL_AND_MAMBA2, LayerKind.MAMBA2),
)


def _in_rhythm(text: Keys, heads: Heads, layers: int, notes: list[str]) -> list[LayerKind] | None:
    """The kinds from a family's rule or a rhythm in the file."""
    family, one = heads.family, range(1, layers + 1)
    if family in MAMBA_ONLY_FAMILIES:
        return [_linear_kind(text, family)] * layers
    if family == "falcon_h1":
        return [LayerKind.FULL_AND_MAMBA2] * layers
    if (every := text.count("full_attention_interval", "layer_group_size", most=LAYERS_MAX)) is not None:
        return [FULL if n % every == 0 else _linear_kind(text, family) for n in one]
    if (period := text.count("attn_layer_period", most=LAYERS_MAX)) is not None:  # Jamba
        offset = text.count("attn_layer_offset", least=0, most=LAYERS_MAX) or 0
        return [FULL if n % period == offset else _linear_kind(text, family) for n in range(layers)]
    for key, chosen, other in _CHOSEN_LAYERS:
        if (numbers := text.counts(key, most=LAYERS_MAX)) is not None:
            these = frozenset(numbers)
            return [chosen if n in these else other for n in range(layers)]
    if family.startswith("llama4"):  # the layers with rotary positions look at their own chunk only
        if text.count("attention_chunk_size", least=0, most=CONTEXT_MAX) in (None, 0):
            return [FULL] * layers
        every = text.count("no_rope_layer_interval", most=LAYERS_MAX) or 4
        rope = text.counts("no_rope_layers", most=1) or tuple(int(n % every != 0) for n in one)
        return [LayerKind.CHUNKED_LOCAL if has else FULL for has in _first(rope, "no_rope_layers", layers, notes)]
    if (windows := window_list(text)) is not None:
        return [SLIDING if w else FULL for w in _first(windows, "sliding_window", layers, notes)]
    if heads.window is None:
        return None
    if text.is_word("sliding_window_pattern"):  # EXAONE 4: "LLLG", and the last layer is global
        letters = text.word("sliding_window_pattern") or "G"
        return [SLIDING if letters[n % len(letters)] == "L" and n < layers - 1 else FULL for n in range(layers)]
    every = text.count("sliding_window_pattern", "global_attn_every_n_layers", least=0, most=LAYERS_MAX)
    every = FULL_EVERY.get(family) if every is None else every
    if every:
        return [FULL if n % every == 0 else SLIDING for n in one]
    if family in ("gpt_oss", "step3p5"):
        return [SLIDING if n % 2 == 0 else FULL for n in range(layers)]
    if text.flag("use_sliding_window"):
        first = text.count("max_window_layers", least=0, most=LAYERS_MAX) or 0
        return [SLIDING if n >= first else FULL for n in range(layers)]
    return None


def build_layers(text: Keys, heads: Heads, kinds: Sequence[LayerKind], moe: Moe | None) -> list[Layer]:
    """Every layer with its own heads, window and feed-forward block."""
    widths = text.counts("intermediate_size") if text.is_list("intermediate_size") else None
    width = None if widths is not None else dense_width(text, heads.family)
    shared = text.count("num_kv_shared_layers", least=0, most=LAYERS_MAX) or 0
    first_shared = len(kinds) - shared if 0 < shared < len(kinds) else len(kinds)
    double = bool(text.flag("use_double_wide_mlp"))
    blocks = feed_forwards(text, heads.family, kinds, moe)
    layers = []
    for n, kind in enumerate(kinds):
        own = widths[n] if widths is not None and n < len(widths) else width
        if double and n >= first_shared and own is not None:
            own *= 2
        layer = Layer(kind, blocks[n], intermediate_size=own, shares_kv=n >= first_shared and kind.keeps_tokens)
        layers.append(_with_heads(layer, text, heads) if kind.keeps_tokens else layer)
    return _varied(layers, text, heads)


def dense_width(text: Keys, family: str) -> int | None:
    """The width of a dense feed-forward block, where the file or the family says it."""
    names = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner")
    width = text.count_or_largest(*names, "ffn_dim", "decoder_ffn_dim")
    if not width and text.has("ffn_config"):
        ffn = text.child("ffn_config")
        width = ffn.count("ffn_hidden_size") if ffn is not None else None
    if family == "lfm2":
        width = text.count("block_ff_dim") or width
        if width and text.flag("block_auto_adjust_ff_dim") is not False:  # two thirds, up to the next multiple (Lfm2MLP)
            return round_up(2 * width // 3, text.count("block_multiple_of") or 256)
    hidden = text.count("hidden_size", "n_embd", "n_embed", "d_model")
    if not width and hidden and family in ("gpt2", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt", "codegen"):
        return hidden * (text.count("expansion_ratio", most=1024) or 4)
    return width or None


def _with_heads(layer: Layer, text: Keys, heads: Heads) -> Layer:
    """The layer with the heads of its kind."""
    window = heads.window if layer.kind in (SLIDING, LayerKind.MLA_SLIDING, LayerKind.MLA_COMPRESSED) else None
    plain = replace(layer, attention_heads=heads.attention, kv_heads=heads.kv, window=window)
    if layer.kind in (LayerKind.MLA, LayerKind.MLA_SLIDING, LayerKind.MLA_COMPRESSED):
        return replace(plain, kv_heads=1, head_dim=heads.head_dim, v_head_dim=0)
    if layer.kind is SLIDING and text.has("swa_num_key_value_heads"):  # MiMo-V2
        head_dim = text.count("swa_head_dim") or heads.head_dim
        return replace(
            plain,
            attention_heads=text.count("swa_num_attention_heads", most=HEADS_MAX) or heads.attention,
            kv_heads=text.need("swa_num_key_value_heads", most=HEADS_MAX),
            head_dim=head_dim,
            v_head_dim=text.count("swa_v_head_dim") or head_dim,
        )
    if layer.kind is FULL and heads.family.startswith("gemma4") and text.count("global_head_dim"):
        head_dim = text.need("global_head_dim")
        kv = text.count("num_global_key_value_heads", most=HEADS_MAX) if text.flag("attention_k_eq_v") else None
        return replace(plain, kv_heads=kv or heads.kv, head_dim=head_dim, v_head_dim=head_dim)
    return replace(plain, head_dim=heads.head_dim, v_head_dim=heads.v_head_dim)


def _varied(layers: list[Layer], text: Keys, heads: Heads) -> list[Layer]:
    """Returns the layers with the values that lists in the file give single ones: heads, windows, ratios, pruned blocks."""
    per_layer = text.counts("num_attention_heads_per_layer", most=HEADS_MAX) or ()
    windows = window_list(text) or ()
    ratios = text.counts("compress_ratios", most=CONTEXT_MAX) or ()
    blocks = text.children("block_configs") or ()
    other = text.child("attention_other_setting")
    varied = []
    for n, general in enumerate(layers):
        layer = general
        if n < len(per_layer) and layer.kind.keeps_tokens:
            layer = replace(layer, attention_heads=per_layer[n])
        if n < len(windows) and layer.kind is SLIDING:
            layer = replace(layer, window=windows[n])
        if n < len(ratios):
            layer = replace(layer, compress_ratio=max(1, ratios[n]))
        if n < len(blocks):
            layer = _from_block(layer, blocks[n], text, heads)
        if other is not None and layer.kind is SLIDING and other.word("attention_type") == "sliding_attention":
            head_dim = other.count("head_dim") or heads.head_dim
            layer = replace(
                layer,
                attention_heads=other.count("num_attention_heads", most=HEADS_MAX) or heads.attention,
                kv_heads=other.count("num_attention_groups", most=HEADS_MAX) or heads.kv,
                head_dim=head_dim,
                v_head_dim=head_dim,
            )
        varied.append(layer)
    return varied


def _from_block(layer: Layer, block: Keys, text: Keys, heads: Heads) -> Layer:
    """A Nemotron-NAS block: its own KV heads, its own width, or neither."""
    attention, ffn = block.child("attention"), block.child("ffn")
    if attention is not None and layer.kind is FULL:
        group = attention.count("n_heads_in_group", most=HEADS_MAX)
        kv = heads.attention // group if group else heads.kv
        layer = replace(layer, kv_heads=max(1, kv), window=attention.count("window_length", most=CONTEXT_MAX))
    if ffn is None:
        return layer
    if ffn.flag("no_op") or ffn.flag("replace_with_linear"):
        return replace(layer, feed_forward=FeedForward.NONE, intermediate_size=None)
    if (times := ffn.factor("ffn_mult", most=1024)) is not None:
        width = int(2 * times * text.need("hidden_size", "n_embd", "d_model") / 3)
        return replace(layer, intermediate_size=round_up(width, 256))  # as vLLM
    return replace(layer, intermediate_size=ffn.count("intermediate_size") or layer.intermediate_size)


def feed_forwards(text: Keys, family: str, kinds: Sequence[LayerKind], moe: Moe | None) -> list[FeedForward]:
    """Returns the feed-forward block of every layer."""
    if family in MAMBA_ONLY_FAMILIES:
        return [FeedForward.NONE] * len(kinds)
    if family == "zamba2":  # the block that Zamba2 shares between layers brings the only feed-forward there is
        shared = LayerKind.FULL_AND_MAMBA2
        return [FeedForward.DENSE if kind is shared else FeedForward.NONE for kind in kinds]
    if family == "nemotron_h" or text.has("hybrid_override_pattern"):
        letters = {"E": FeedForward.EXPERTS, "-": FeedForward.DENSE}
        names = {"moe": FeedForward.EXPERTS, "mlp": FeedForward.DENSE}
        blocks = [letters.get(letter, FeedForward.NONE) for letter in pattern_of(text)]
        blocks = blocks or [names.get(name, FeedForward.NONE) for name in text.words("layers_block_type") or ()]
        return (blocks + [FeedForward.NONE] * len(kinds))[: len(kinds)]
    if moe is None:
        return [FeedForward.DENSE] * len(kinds)
    if family.startswith("gemma4"):
        return [FeedForward.DENSE_AND_EXPERTS] * len(kinds)
    if family == "longcat_flash":  # of two attention sublayers, the first also starts the experts
        both = (FeedForward.DENSE_AND_EXPERTS, FeedForward.DENSE)
        return [both[n % 2] for n in range(len(kinds))]
    sparse = expert_layers(text, len(kinds))
    return [FeedForward.EXPERTS if one else FeedForward.DENSE for one in sparse]


def expert_layers(text: Keys, layers: int) -> list[bool]:
    """Returns for each layer whether it has experts, by any of the many rules a file may use."""
    numbers = range(layers)
    if (names := text.words("mlp_layer_types")) is not None:
        return [n < len(names) and names[n] != "dense" for n in numbers]
    if text.is_list("moe_layer_freq"):
        freq = text.counts("moe_layer_freq") or ()
        return [n < len(freq) and freq[n] != 0 for n in numbers]
    if text.is_word("moe_layers_enum"):  # Step 3: "4,5,6"
        listed = frozenset((text.word("moe_layers_enum") or "").replace(" ", "").split(","))
        return [str(n) in listed for n in numbers]
    if chosen := frozenset(text.counts("moe_layers", most=LAYERS_MAX) or ()):
        return [n in chosen for n in numbers]
    most = LAYERS_MAX
    first = text.count("first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped", least=0, most=most)
    first = first or text.count_or_largest("moe_layer_start_index", most=most) or 0
    last = text.count_or_largest("moe_layer_end_index", most=most)
    dense = frozenset(text.counts("mlp_only_layers", most=most) or ())
    step = text.count("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", least=0, most=most) or 1
    freq_step = text.count("moe_layer_freq", least=0, most=most) or 1
    period = text.count("expert_layer_period", most=most) or 1
    offset = text.count("expert_layer_offset", least=0, most=most) or 0
    return [
        n >= first
        and (last is None or n <= last)
        and n not in dense
        and (n + 1) % step == 0
        and n % freq_step == 0
        and (period == 1 or n % period == offset)
        for n in numbers
    ]


def with_indexers(layers: Sequence[Layer], text: Keys) -> tuple[Indexer | None, tuple[Layer, ...]]:
    """The sparse-attention indexer, and the layers marked that own one."""
    sparse = text.child("sparse_attention_config")
    if sparse is not None and sparse.has("sparse_index_dim") and sparse.flag("use_sparse_attention") is not False:
        freq = sparse.counts("sparse_attention_freq") or ()
        indexer = Indexer(sparse.need("sparse_index_dim"), sparse.count("sparse_num_index_heads", most=HEADS_MAX))
        owns = [n < len(freq) and freq[n] != 0 for n in range(len(layers))]
    elif text.has("index_topk"):
        indexer = Indexer(text.need("index_head_dim"), text.count("index_n_heads", most=HEADS_MAX))
        # GLM 5.2 and later share one indexer among several layers.
        pattern = (text.word("index_topk_pattern") or "") if text.is_word("index_topk_pattern") else None
        every = text.count("index_topk_freq", most=LAYERS_MAX) or 1
        offset = text.count("index_skip_topk_offset", least=0, most=LAYERS_MAX)
        owns = []
        for n, layer in enumerate(layers):
            if layer.kind in (LayerKind.MLA_COMPRESSED, LayerKind.MLA_SLIDING):  # DeepSeek V4
                owns.append(layer.compress_ratio == 4)
            elif pattern is not None:
                owns.append(n >= len(pattern) or pattern[n] != "S")
            else:
                owns.append(max(n - (2 if offset is None else offset) + 1, 0) % every == 0)
    else:
        return None, tuple(layers)
    marked = (replace(a, indexer=True) if own and a.kind.keeps_tokens else a for a, own in zip(layers, owns, strict=True))
    return indexer, tuple(marked)
