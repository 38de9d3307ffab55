"""What each layer of a model has: its heads, its window, what follows the mixing, and an indexer or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plimsoll.domain.model import FeedForward, Indexer, Layer, LayerKind, Moe
from plimsoll.domain.model_families import MAMBA_ONLY_FAMILIES
from plimsoll.domain.model_keys import CONTEXT_MAX, HEADS_MAX, LAYERS_MAX, Keys
from plimsoll.domain.model_kinds import Heads, pattern_of, window_list

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING


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
    hidden = text.count("hidden_size", "n_embd", "d_model")
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
    """What a list in the file says of single layers: heads, windows, ratios, pruned blocks."""
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
        return replace(layer, intermediate_size=-(-width // 256) * 256)  # up, to the next 256, as vLLM
    return replace(layer, intermediate_size=ffn.count("intermediate_size") or layer.intermediate_size)


def feed_forwards(text: Keys, family: str, kinds: Sequence[LayerKind], moe: Moe | None) -> list[FeedForward]:
    """What follows the mixing in every layer."""
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
    """Which layers have experts, by whichever of the many rules the file uses."""
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
        owns = [_owns_indexer(n, layer, text) for n, layer in enumerate(layers)]
    else:
        return None, tuple(layers)
    marked = (replace(a, indexer=True) if own and a.kind.keeps_tokens else a for a, own in zip(layers, owns, strict=True))
    return indexer, tuple(marked)


def _owns_indexer(number: int, layer: Layer, text: Keys) -> bool:
    """DeepSeek V4 indexes the layers of ratio 4; GLM 5.2 and later share one indexer among several layers."""
    if layer.kind in (LayerKind.MLA_COMPRESSED, LayerKind.MLA_SLIDING):
        return layer.compress_ratio == 4
    if text.is_word("index_topk_pattern"):
        pattern = text.word("index_topk_pattern") or ""
        return number >= len(pattern) or pattern[number] != "S"
    every = text.count("index_topk_freq", most=LAYERS_MAX) or 1
    offset = text.count("index_skip_topk_offset", least=0, most=LAYERS_MAX)
    return max(number - (2 if offset is None else offset) + 1, 0) % every == 0
