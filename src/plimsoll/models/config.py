"""Reads a config.json into a `ModelShape`: the one place that knows how each family spells its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.models.shape import (
    CONTEXT_MAX,
    DEFAULTS,
    EXPERTS_MAX,
    FAMILY_TABLE,
    HEADS_MAX,
    KNOWN,
    LAYERS_MAX,
    LIST_MAX,
    MAMBA_ONLY_FAMILIES,
    MLA_FAMILIES,
    TEXT_MAX,
    TIED,
    UNTIED,
    VOCAB_MAX,
    WIDTH_MAX,
    Heads,
    LayerKind,
    LinearAttention,
    Mamba,
    Mla,
    ModelShape,
    Moe,
    Quantization,
    RopeScaling,
    ShortConv,
    Tower,
    build_layers,
    dense_width,
    layer_kinds,
    pattern_of,
    sliding_window,
    with_indexers,
)


@dataclass(frozen=True, slots=True)
class Keys:
    """One object of a config.json. Null counts as absent, and a value of the wrong type is BadInput."""

    _values: Mapping[str, object]
    _path: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)  # transformers' values for keys that are absent altogether
    defaulted: dict[str, object] = field(default_factory=dict)  # the defaults that were used: the file did not give them

    def has(self, *names: str) -> bool:
        return any(self._values.get(name) is not None for name in names)

    def _find(self, names: Sequence[str]) -> tuple[str, object]:
        for name in names:
            if (value := self._values.get(name)) is not None:
                return name, value
        if not any(name in self._values for name in names):
            for name in names:
                if (value := self.defaults.get(name)) is not None:
                    self.defaulted[name] = value
                    return name, value
        return names[0], None

    def _checked(self, names: Sequence[str], wanted: str, is_right: Callable[[Any], bool]) -> Any:
        """The value of the first of these keys that has one; None where none has."""
        name, value = self._find(names)
        if value is not None and not is_right(value):
            raise self._wrong(name, wanted, value)
        return value

    def _wrong(self, name: str, wanted: str, value: object) -> BadInput:
        return BadInput(f"config.json: {self._path}{name} should be {wanted}, not {_shown(value)}")

    def missing(self, name: str) -> BadInput:
        return BadInput(f"config.json: {self._path}{name} is missing")

    def count(self, *names: str, least: int = 1, most: int = WIDTH_MAX) -> int | None:
        """The first of these keys that has a value, as a whole number within bounds."""
        name, value = self._find(names)
        if value is None:
            return None
        number = _whole(value)
        if number is None or not least <= number <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}", value)
        return number

    def need(self, *names: str, most: int = WIDTH_MAX) -> int:
        """Like `count`, for a key without which there is no shape."""
        number = self.count(*names, most=most)
        if number is None:
            raise self.missing(names[0])
        return number

    def count_or_largest(self, *names: str, least: int = 0, most: int = WIDTH_MAX) -> int | None:
        """Like `count`, but a list (one value per layer or per modality) stands for its largest value."""
        name, value = self._find(names)
        if isinstance(value, (list, tuple)):
            return max(self.counts(name, least=least, most=most) or (), default=None)
        return self.count(*names, least=least, most=most)

    def counts(self, name: str, *, least: int = 0, most: int = WIDTH_MAX, null: int | None = None) -> tuple[int, ...] | None:
        """A list of whole numbers, in which null may stand for one of them."""
        items = self.items(name)
        if items is None:
            return None
        wholes = (null if item is None else _whole(item) for item in items)
        numbers = tuple(number for number in wholes if number is not None and least <= number <= most)
        if len(numbers) != len(items):
            raise self._wrong(name, f"a list of whole numbers from {least} to {most}", items)
        return numbers

    def items(self, name: str) -> Sequence[object] | None:
        wanted = f"a list of at most {LIST_MAX} values"
        listed: Sequence[object] | None = self._checked(
            (name,), wanted, lambda value: isinstance(value, (list, tuple)) and len(value) <= LIST_MAX
        )
        return listed

    def words(self, name: str) -> tuple[str, ...] | None:
        """A list of short strings."""
        items = self.items(name)
        if items is not None and not all(isinstance(item, str) and len(item) <= TEXT_MAX for item in items):
            raise self._wrong(name, "a list of strings", items)
        return None if items is None else tuple(str(item) for item in items)

    def word(self, *names: str) -> str | None:
        text: str | None = self._checked(
            names, "a short string", lambda value: isinstance(value, str) and len(value) <= TEXT_MAX
        )
        return text

    def flag(self, name: str) -> bool | None:
        value: bool | None = self._checked((name,), "true or false", lambda value: isinstance(value, bool))
        return value

    def factor(self, name: str, *, most: float = 1e6) -> float | None:
        """A positive number that need not be whole."""
        value = self._checked(
            (name,), f"a number above 0 and up to {most:g}", lambda value: type(value) in (int, float) and 0 < value <= most
        )
        return None if value is None else float(value)

    def child(self, name: str) -> Keys | None:
        """A nested object, or None where it is absent or empty."""
        value = self._checked((name,), "an object", lambda value: isinstance(value, Mapping))
        return Keys(value, f"{self._path}{name}.") if value else None

    def part(self, *names: str) -> Keys | None:
        """The first of these keys that holds an object, where a family may write something else; None if none does."""
        name = next((name for name in names if isinstance(self._find((name,))[1], Mapping)), None)
        return self.child(name) if name else None

    def children(self, name: str) -> tuple[Keys, ...] | None:
        items = self.items(name)
        if items is None:
            return None
        found = [Keys(item, f"{self._path}{name}[{place}].") for place, item in enumerate(items) if isinstance(item, Mapping)]
        if len(found) < len(items):
            raise self._wrong(name, "a list of objects", items)
        return tuple(found)

    def values(self) -> Iterable[Keys]:
        """The nested objects of this one, whatever they are called; other values are skipped."""
        return (
            Keys(value, f"{self._path}{name}.") for name, value in self._values.items() if isinstance(value, Mapping) and value
        )

    def is_word(self, name: str) -> bool:
        """True if the key holds a string, for keys that may also hold something else."""
        return isinstance(self._find((name,))[1], str)

    def is_list(self, name: str) -> bool:
        """True if the key holds a list, for keys that may also hold something else."""
        return isinstance(self._find((name,))[1], (list, tuple))

    def size(self, *names: str) -> int | None:
        """A size that only describes something; None, not an error, where it is not a sensible whole number."""
        _, value = self._find(names)
        number = _whole(value)
        return number if number is not None and 0 < number <= WIDTH_MAX else None


def _whole(value: object) -> int | None:
    """4096 or 4096.0; never true, which is an int to Python."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(value: object) -> str:
    """A value in one short line, without walking into values that may be deep or long."""
    if isinstance(value, (bool, float)):
        return repr(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "such a list" if value else "an empty list"
    return f"a {type(value).__name__}"


_SPELLINGS: Mapping[str, Sequence[str]] = FAMILY_TABLE["spellings"]
_BITS = FAMILY_TABLE["bits"]


def encoder_towers(parts: Sequence[Keys]) -> tuple[Tower, ...]:
    """The vision and audio encoders that the file describes, with the sizes it gives under usual names."""
    towers = []
    for what in ("vision", "audio"):
        named = (part.part(*_SPELLINGS[f"{what}_tower"]) for part in parts)
        inner = next((inner for inner in named if inner is not None), None)
        if inner is not None:
            towers.append(_tower(what, inner))
    if (layers := parts[0].size("vision_n_layers")) is not None:  # DeepSeek V4
        top = parts[0]
        sizes = (top.size("vision_dim"), top.size("vision_n_heads"), top.size("vision_inter_dim"))
        towers.append(Tower("vision", layers, *sizes, top.size("vision_patch_size")))
    if parts[-1].size("encoder_layers") is not None:  # Whisper, whose file is flat
        towers.append(_tower("audio", parts[-1]))
    return tuple(towers)


def _tower(what: str, keys: Keys) -> Tower:
    layers, hidden, heads, width = (keys.size(*_SPELLINGS[f"tower_{name}"]) for name in ("layers", "hidden", "heads", "width"))
    return Tower(what, layers, hidden, heads, width, keys.size("patch_size"))


def _quantization(parts: Sequence[Keys], notes: list[str]) -> Quantization | None:
    """The weights' quantisation, from the part of the file that has it (vLLM: the top level, else the text part)."""
    found = (part.child("quantization_config") or part.child("compression_config") for part in parts)
    outer = next((quant for quant in found if quant is not None), None)
    if outer is None:
        return None
    quant = outer.part("quantization") or outer  # ModelOpt's older layout
    algorithm = quant.word("quant_algo") or outer.word("quant_algo")
    method = (outer.word("quant_method") or quant.word("quant_method") or "").lower().replace("_tensors", "-tensors")
    if not method:
        producer = outer.part("producer")
        method = (producer.word("name") if producer is not None else None) or "unknown"
        if method == "unknown":
            notes.append("quantization_config names no quant_method.")
    bits, group = _width(quant, method, algorithm, notes)
    block = quant.counts("weight_block_size", least=1) if quant.is_list("weight_block_size") else None
    ignored = next((words for name in _SPELLINGS["left_alone"] if quant.is_list(name) and (words := quant.words(name))), None)
    if (scheme := quant.part("kv_cache_scheme")) is not None:  # the cache type the checkpoint carries scales for
        cache_bits, kind = scheme.count("num_bits", most=64), scheme.word("type") or "float"
        cache = {(8, "float"): "fp8", (4, "float"): "nvfp4", (None, kind): None}.get((cache_bits, kind), f"{kind}{cache_bits}")
    else:
        cache = (quant.word("kv_cache_scheme", "kv_cache_quant_algo") or "").lower() or None
    return Quantization(
        method=method,
        algorithm=algorithm or quant.word("format") or quant.word("fmt"),
        bits=bits,
        group_size=group,
        block=block,
        kv_cache=cache,
        ignored=ignored or (),
        by_name=bool(outer.flag("by_name")),
    )


def _width(quant: Keys, method: str, algorithm: str | None, notes: list[str]) -> tuple[int | None, int | None]:
    """Bits per weight and weights per scale."""
    if algorithm == "MIXED_PRECISION":
        notes.append("Layers are quantised differently (MIXED_PRECISION), so one width does not describe them.")
        return None, None
    bits = quant.count("bits", "w_bit", most=64)
    group = quant.count("group_size", "q_group_size", least=-1)  # -1: one scale per output channel
    if (groups := quant.part("config_groups")) is not None:
        weights = [w for g in groups.values() if (w := g.part("weights")) is not None]
        widths = {(w.count("num_bits", most=64), w.count("group_size", least=-1)) for w in weights}
        if len(widths) > 1:
            notes.append("config_groups quantise layers differently, so one width does not describe them.")
            return None, None
        for width, size in widths:
            bits, group = bits or width, group or size
    if quant.flag("load_in_4bit"):
        bits = bits or 4
    elif quant.flag("load_in_8bit"):
        bits = bits or 8
    known_bits, known_group = _BITS["algorithms"].get((algorithm or "").upper()) or _BITS["methods"].get(method, (None, None))
    bits = bits or known_bits
    if bits is None:
        notes.append(f"The quantisation method {method[:40]!a} does not say how many bits a weight has.")
    return bits, group or known_group


_NESTING_MAX = 4
# Rope types whose stretch is already in max_position_embeddings (vLLM's _get_and_verify_max_len).
_ALREADY_STRETCHED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})


def read_shape(config: Mapping[str, object]) -> ModelShape:
    """The shape a config.json describes."""
    if not isinstance(config, Mapping):
        raise BadInput("config.json: the top level should be an object")
    parts = _parts(Keys(config))
    top, plain = parts[0], parts[-1]
    model_type = top.word("model_type") or ""
    family = plain.word("model_type") or model_type
    family = FAMILY_TABLE["like_families"]["names"].get(family, family)
    text = replace(plain, defaults=DEFAULTS.get(family) or DEFAULTS.get(f"{family}_text") or {}, defaulted={})
    notes: list[str] = []
    if family not in KNOWN:
        name = f"{family[:60]!a}" if family else "missing, so the family"
        notes.append(f"model_type {name} is not known here; its keys were read as the usual ones.")
    encoder_decoder = bool(top.flag("is_encoder_decoder"))
    shape = _shape_of_text(text, family, notes, encoder_decoder=encoder_decoder)
    if encoder_decoder:
        frames = text.count("max_source_positions", "max_position_embeddings", most=CONTEXT_MAX)
        said = "An encoder-decoder model: the encoder reads the whole input at once, the decoder writes the answer."
        if frames is None or not shape.layers:
            said += " Its cross-attention, weights and cache, is not counted."
        else:
            width = shape.kv_heads * shape.head_dim * len(shape.layers) * 2
            heard = ", 30 s of speech," if "whisper" in (model_type, family) else ""
            said += (
                f" Not counted of its cross-attention, in 16 bits: {2 * frames * width / 2**20:.0f} MiB of cache a request"
                f" for {frames:,} frames{heard} and {4 * shape.hidden_size * width / 2**20:.0f} MiB of weights."
            )
        notes.append(said)
    # True if the output head reuses the embeddings: as the file says, innermost part first, else as the family does.
    usual = True if family in TIED else False if family in UNTIED else None
    flags = (part.flag("tie_word_embeddings") for part in reversed(parts))
    tied = next((flag for flag in flags if flag is not None), usual)
    # The type of unquantised weights, such as "bfloat16"; None makes vLLM look into the weight files.
    typed = (part for part in parts if part.is_word("dtype") or part.is_word("torch_dtype"))
    dtype = next((part.word("dtype", "torch_dtype") or "" for part in typed), "")
    if text.defaulted:
        said = ", ".join(f"{name} {value}" for name, value in sorted(text.defaulted.items()))
        notes.append(f"The file leaves out what transformers then assumes for {family}: {said}.")
    return replace(
        shape,
        architectures=top.words("architectures") or plain.words("architectures") or (),
        model_type=model_type or family,
        tie_word_embeddings=tied,
        dtype=dtype.removeprefix("torch.") or None,
        towers=encoder_towers(parts),
        quantization=_quantization(parts, notes),
        is_encoder_decoder=encoder_decoder,
        reads_items_whole=text.is_word("use_bidirectional_attention") and text.word("use_bidirectional_attention") == "vision",
        notes=tuple(notes),
    )


def _parts(top: Keys) -> list[Keys]:
    """The file's top level, then the objects that lead to the language model."""
    parts = [top]
    for _ in range(_NESTING_MAX):
        # A file may also name a text_config by a string, or hold an unrelated "decoder" list: only objects count.
        inner = parts[-1].part(*_SPELLINGS["text_part"])
        if inner is None:
            break
        parts.append(inner)
    return parts


def _shape_of_text(text: Keys, family: str, notes: list[str], *, encoder_decoder: bool) -> ModelShape:
    """The language model itself."""
    hidden = text.need(*_SPELLINGS["hidden"])
    count = text.count("decoder_layers", "num_decoder_layers", most=LAYERS_MAX) if encoder_decoder else None
    if not count and family == "longcat_flash":  # every layer has two attention sublayers, each with a cache of its own
        count = 2 * text.need("num_layers", most=LAYERS_MAX // 2)
    if not count and not text.has(*_SPELLINGS["layers"]):  # Nemotron-H may state its layers only by listing them
        listed = len(pattern_of(text) or text.words("layers_block_type") or ())
        count = listed if listed <= LAYERS_MAX else None
    count = count or text.need(*_SPELLINGS["layers"], most=LAYERS_MAX)
    mla = _mla(text, family, notes)
    heads = _heads(text, family, hidden, mla)
    kinds = layer_kinds(text, heads, count, notes)
    moe = _moe(text, family)
    layers = build_layers(text, heads, kinds, moe)
    indexer, marked = with_indexers(layers, text)
    longest, default, rope = _context(text, family, notes)
    gate = text.flag("attn_output_gate")
    # Layers that predict several tokens at once (MTP); vLLM loads them only for speculative decoding, and assumes one in
    # Qwen3.5.
    mtp = text.count(*_SPELLINGS["mtp_layers"], least=0, most=LAYERS_MAX)
    has_conv = LayerKind.SHORT_CONV in kinds
    return ModelShape(
        architectures=(),
        model_type=family,
        text_model_type=family,
        hidden_size=hidden,
        layers=marked,
        attention_heads=heads.attention,
        kv_heads=heads.kv,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        vocab_size=text.need("padded_vocab_size", "vocab_size", most=VOCAB_MAX),
        max_context=longest,
        default_context=default,
        embedding_size=text.count("word_embed_proj_dim") or hidden,
        intermediate_size=dense_width(text, family),
        rope=rope,
        chunk_size=text.count("attention_chunk_size", most=CONTEXT_MAX) if LayerKind.CHUNKED_LOCAL in kinds else None,
        attention_output_gate=family.startswith(("qwen3_next", "qwen3_5")) if gate is None else gate,
        per_layer_input_size=text.count("hidden_size_per_layer_input", least=0) or None,
        per_layer_vocab_size=text.count("vocab_size_per_layer_input", least=0, most=VOCAB_MAX) or None,
        mla=mla,
        indexer=indexer,
        moe=moe,
        mamba=_mamba(text, family, hidden, kinds),
        linear=_linear(text, hidden, kinds),
        short_conv=ShortConv(text.count("conv_dim") or hidden, text.need("conv_L_cache")) if has_conv else None,
        mtp_layers=int(family.startswith("qwen3_5")) if mtp is None else mtp,
    )


def _mla(text: Keys, family: str, notes: list[str]) -> Mla | None:
    """The latent attention, where vLLM would use it (its is_deepseek_mla and use_mla)."""
    if text.has("compress_ratios") and text.has("head_dim"):  # DeepSeek V4 gives the whole width instead of the rank
        rotary = text.count("qk_rope_head_dim", least=0) or 0
        latent = text.need("head_dim") - rotary
        if latent < 1:
            raise BadInput("config.json: qk_rope_head_dim should be less than head_dim")
        return Mla(latent, rotary, q_lora_rank=text.count("q_lora_rank", least=0) or None)
    rank = text.count("kv_lora_rank", least=0) or 0
    if not rank or text.flag("is_causal") is False or (family in KNOWN and family not in MLA_FAMILIES):
        return None
    if family not in KNOWN:
        notes.append("kv_lora_rank is given, so its attention layers are counted as latent attention (MLA).")
    rope = text.count("qk_rope_head_dim", least=0)
    if rope is None:
        raise text.missing("qk_rope_head_dim")
    return Mla(
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=text.count("qk_nope_head_dim", least=0),
        v_head_dim=text.count("v_head_dim", least=0),
        q_lora_rank=text.count("q_lora_rank", least=0) or None,
    )


def _heads(text: Keys, family: str, hidden: int, mla: Mla | None) -> Heads:
    """Heads and their widths, as vLLM's get_head_size and get_total_num_kv_heads find them."""
    window = sliding_window(text, family)
    if family in MAMBA_ONLY_FAMILIES:
        return Heads(family, 0, 0, 0, 0, None, None)
    attention = text.need("decoder_attention_heads", *_SPELLINGS["heads"], most=HEADS_MAX)
    kv = _kv_heads(text, family, attention)
    if mla is not None:
        return Heads(family, attention, kv, mla.cached_dim, 0, window, mla)
    if family == "minicpm3":
        head_dim = text.need("qk_nope_head_dim") + text.need("qk_rope_head_dim")
    else:
        said = text.count("head_dim", "attention_head_dim", "hidden_size_per_head", least=0)
        # Zamba2's shared block sees the hidden state and the embedding side by side.
        head_dim = said or (2 if family == "zamba2" else 1) * hidden // attention
    if not head_dim:
        raise BadInput(f"config.json: {attention} attention heads do not fit in a hidden size of {hidden}")
    states_values = family.startswith("mimo_v2") or family not in KNOWN
    v_head_dim = text.count("v_head_dim", least=0) if states_values else None
    return Heads(family, attention, kv, head_dim, v_head_dim or head_dim, window, None)


def _kv_heads(text: Keys, family: str, attention: int) -> int:
    new_falcon = text.flag("new_decoder_architecture") or family == "RefinedWeb"
    if text.flag("multi_query") and not new_falcon:
        return 1
    if text.flag("multi_query_attention") is False:  # ChatGLM states its groups even where it does not use them
        return attention
    attention_config = text.part("attn_config")
    if attention_config is not None and (kv := attention_config.count("kv_n_heads", most=HEADS_MAX)):
        return kv
    if family == "minicpm3":
        return attention
    kv = text.count_or_largest(*_SPELLINGS["kv_heads"], most=HEADS_MAX)
    if not kv and (blocks := text.children("block_configs")):  # Nemotron-NAS: the KV heads of the first attention block
        groups = (a.count("n_heads_in_group", most=HEADS_MAX) for b in blocks if (a := b.child("attention")) is not None)
        group = next((group for group in groups if group), None)
        kv = max(1, attention // group) if group else None
    return kv or attention


def _moe(text: Keys, family: str) -> Moe | None:
    source = text.part("ffn_config") or text  # DBRX
    experts = source.count_or_largest(*_SPELLINGS["experts"], most=EXPERTS_MAX)
    if not experts:  # NemotronH-Puzzle prunes experts per block; vLLM makes room for the largest
        blocks = text.children("block_configs") or ()
        experts = max((block.count("n_routed_experts", least=0, most=EXPERTS_MAX) or 0 for block in blocks), default=0)
    if experts < 2:
        return None
    width = source.count_or_largest(*_SPELLINGS["expert_width"]) or None
    shared = text.count_or_largest(*_SPELLINGS["shared_experts"], most=EXPERTS_MAX)
    each = text.count("moe_shared_expert_intermediate_size", least=0)
    total = text.count(*_SPELLINGS["shared_width"], least=0)
    if family.startswith("llama4"):
        shared, total = 1, width
    if shared is None:
        shared = 1 if total or each else 0
    one = each or width
    if not total and shared and one:
        total = shared * one
    return Moe(
        experts=experts,
        experts_per_token=source.count_or_largest(*_SPELLINGS["experts_per_token"], most=EXPERTS_MAX) or None,
        intermediate_size=width,
        shared_experts=shared,
        shared_intermediate_size=total or None,
        latent_size=text.count("moe_latent_size", "routed_expert_hidden_size", least=0) or None,
        expert_dtype=text.word("expert_dtype") or ("fp4" if family == "deepseek_v4" else None),
    )


def _context(text: Keys, family: str, notes: list[str]) -> tuple[int, int, RopeScaling | None]:
    """The longest context, the default one, and the rope scaling behind them."""
    stated = [n for name in _SPELLINGS["context"] if (n := text.count(name, most=CONTEXT_MAX)) is not None]
    longest = text.count("model_max_length", most=CONTEXT_MAX) or min(stated, default=None)
    if longest is None:
        longest = 2048
        notes.append("The file states no maximum length; vLLM then assumes 2048 tokens.")
    outer = text.child("rope_scaling") or text.child("rope_parameters")
    found: list[Keys] = []  # the position encodings: one, or one per kind of layer
    if outer is not None:
        found = [outer] if outer.has("rope_type", "type", "factor") else list(outer.values())[:16]
    kinds = {"su": "longrope", "mrope": "default"}
    ropes = [
        RopeScaling(
            kind=kinds.get(kind := rope.word("rope_type", "type") or "default", kind),
            factor=rope.factor("factor"),
            original_context=rope.count("original_max_position_embeddings", most=CONTEXT_MAX),
        )
        for rope in found
    ]
    factor = 1.0
    for rope in ropes:
        if rope.kind not in _ALREADY_STRETCHED and rope.factor is not None:
            factor = rope.factor
    if "gemma3" not in family:
        longest = int(longest * factor)  # down, as vLLM
    if not 0 < longest <= CONTEXT_MAX:
        raise BadInput(f"config.json: rope_scaling stretches the context beyond {CONTEXT_MAX} tokens")
    default = longest
    if any(rope.kind == "longrope" for rope in ropes):
        default = text.count("original_max_position_embeddings", most=CONTEXT_MAX) or longest
    stretched = next((rope for rope in ropes if rope.kind != "default"), None)
    return longest, default, stretched


def _mamba(text: Keys, family: str, hidden: int, kinds: Sequence[LayerKind]) -> Mamba | None:
    """The Mamba state, by the key names of any family that has one."""
    two = LayerKind.MAMBA2 in kinds or LayerKind.FULL_AND_MAMBA2 in kinds
    if not two and LayerKind.MAMBA1 not in kinds:
        return None
    dtype = text.word("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    state = text.need("ssm_state_size", "mamba_d_state", "state_size")
    kernel = text.need("conv_kernel", "mamba_d_conv", "d_conv")
    expand = text.factor("mamba_expand", most=1024) or text.factor("expand", most=1024)
    if not two:
        inner = text.count("intermediate_size", "d_inner") if family in MAMBA_ONLY_FAMILIES else None
        if inner is None and expand is None:
            raise text.missing("mamba_expand")
        return Mamba(inner or int((expand or 1) * hidden), state, kernel, ssm_dtype=dtype)
    names = ["mamba_num_heads", "mamba_n_heads", "n_mamba_heads", *(["num_heads"] if family == "mamba2" else [])]
    heads = text.need(*names, most=HEADS_MAX)
    width_names = ("mamba_head_dim", "mamba_d_head", "mamba_headdim", *(["head_dim"] if family == "mamba2" else []))
    automatic = any(text.is_word(name) for name in width_names)  # Bamba may write "auto"
    head_dim = None if automatic else text.count(*width_names)
    inner = text.count("mamba_d_ssm")
    if inner is None and (family == "nemotron_h" or expand is None):
        inner = heads * head_dim if head_dim else None
    if inner is None:
        if expand is None:
            raise text.missing("mamba_expand")
        inner = int(expand * hidden)
    groups = text.need("n_groups", "mamba_n_groups", "mamba_ngroups", most=HEADS_MAX)
    return Mamba(inner, state, kernel, heads, head_dim or max(1, inner // heads), groups, dtype)


def _linear(text: Keys, hidden: int, kinds: Sequence[LayerKind]) -> LinearAttention | None:
    """The state of the layers with linear attention."""
    dtype = text.word("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if LayerKind.GATED_DELTA_NET in kinds:
        return LinearAttention(
            key_heads=text.need("linear_num_key_heads", most=HEADS_MAX),
            value_heads=text.need("linear_num_value_heads", most=HEADS_MAX),
            key_head_dim=text.need("linear_key_head_dim"),
            value_head_dim=text.need("linear_value_head_dim"),
            conv_kernel=text.need("linear_conv_kernel_dim"),
            ssm_dtype=dtype,
        )
    if LayerKind.KIMI_DELTA in kinds and (kimi := text.child("linear_attn_config")) is not None:
        heads, width = kimi.need("num_heads", most=HEADS_MAX), kimi.need("head_dim")
        return LinearAttention(heads, heads, width, width, kimi.need("short_conv_kernel_size"), dtype)
    if LayerKind.LINEAR in kinds:
        heads = text.need(*_SPELLINGS["heads"], most=HEADS_MAX)
        width = text.count("head_dim", least=0) or max(1, hidden // heads)
        return LinearAttention(heads, heads, width, width, None, dtype)
    return None
