"""What stands beside the language model in a config.json: encoders, next-token heads, quantisation."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.domain.model import Quantization, Tower
from plimsoll.domain.model_keys import LAYERS_MAX, Keys

_TOWERS = (
    ("vision", ("vision_config", "visual", "vision_tower_config", "vit_config", "img_processor", "vision")),
    ("audio", ("audio_config", "audio_encoder_config", "sound_config", "audio_processor", "encoder_config")),
)
# Every name that means "leave these modules alone".
_IGNORED = (
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "llm_int8_skip_modules",
)
# Methods that say their width by their name.
_BITS = {
    "fp8": 8,
    "fbgemm_fp8": 8,
    "ptpc_fp8": 8,
    "modelopt": None,
    "modelopt_fp4": 4,
    "mxfp4": 4,
    "gpt_oss_mxfp4": 4,
    "mxfp8": 8,
    "experts_int8": 8,
}
_ALGORITHM = {"FP8": (8, None), "FP8_PER_CHANNEL_PER_TOKEN": (8, None), "FP8_PB_WO": (8, 128), "NVFP4": (4, 16)}
_GROUP = {"mxfp4": 32, "gpt_oss_mxfp4": 32, "mxfp8": 32, "modelopt_fp4": 16}


def encoder_towers(parts: Sequence[Keys]) -> tuple[Tower, ...]:
    """The vision and audio encoders that the file describes, with the sizes it gives under usual names."""
    towers = []
    for what, names in _TOWERS:
        inner = next((inner for part in parts if (inner := part.part(*names)) is not None), None)
        if inner is not None:
            towers.append(_tower(what, inner))
    if (layers := parts[0].size("vision_n_layers")) is not None:  # DeepSeek V4
        top = parts[0]
        sizes = (top.size("vision_dim"), top.size("vision_n_heads"), top.size("vision_inter_dim"))
        towers.append(Tower("vision", layers, *sizes, top.size("vision_patch_size")))
    return tuple(towers)


def _tower(what: str, keys: Keys) -> Tower:
    return Tower(
        what=what,
        layers=keys.size("depth", "num_hidden_layers", "vt_num_hidden_layers", "encoder_layers", "layers", "num_layers"),
        hidden_size=keys.size("embed_dim", "hidden_size", "vt_hidden_size", "d_model", "width", "dim"),
        heads=keys.size(
            "num_heads", "num_attention_heads", "vt_num_attention_heads", "encoder_attention_heads", "heads", "n_heads"
        ),
        intermediate_size=keys.size("intermediate_size", "vt_intermediate_size", "encoder_ffn_dim", "mlp_dim"),
        patch_size=keys.size("patch_size"),
    )


def next_token_layers(text: Keys) -> int:
    """Layers that predict several tokens at once (MTP); vLLM loads them only for speculative decoding."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers")
    return text.count(*names, least=0, most=LAYERS_MAX) or 0


def read_quantization(parts: Sequence[Keys], notes: list[str]) -> Quantization | None:
    """How the weights are quantised, from wherever the file says it (vLLM: the top level, else the text part)."""
    for part in parts:
        quant = part.child("quantization_config") or part.child("compression_config")
        if quant is not None:
            return _quantization(quant, notes)
    return None


def _quantization(outer: Keys, notes: list[str]) -> Quantization:
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
    ignored = next((words for name in _IGNORED if quant.is_list(name) and (words := quant.words(name))), None)
    return Quantization(
        method=method,
        algorithm=algorithm or quant.word("format") or quant.word("fmt"),
        bits=bits,
        group_size=group,
        block=block,
        kv_cache=_kv_cache(quant),
        ignored=ignored or (),
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
    known_bits, known_group = _ALGORITHM.get((algorithm or "").upper(), (_BITS.get(method), _GROUP.get(method)))
    bits = bits or known_bits
    if bits is None:
        notes.append(f"The quantisation method {method[:40]!a} does not say how many bits a weight has.")
    return bits, group or known_group


def _kv_cache(quant: Keys) -> str | None:
    """The cache type the checkpoint carries scales for."""
    if (scheme := quant.part("kv_cache_scheme")) is not None:
        bits, kind = scheme.count("num_bits", most=64), scheme.word("type") or "float"
        if bits is None:
            return None
        return {(8, "float"): "fp8", (4, "float"): "nvfp4"}.get((bits, kind), f"{kind}{bits}")
    said = quant.word("kv_cache_scheme", "kv_cache_quant_algo")
    return said.lower() if said else None
