"""Vision and audio encoders beside the language model, by the code that vLLM runs for each."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.model import ModelShape, Tower
from plimsoll.plan.weights_parts import Part, linear, norm, share


class Style(NamedTuple):
    """What an encoder's code has beside the sizes its config gives."""

    gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    norms: int = 2
    positions: int = 0
    """Rows of learned positions."""
    frames: int = 1
    """Frames per patch."""
    merge: int = 2
    """Patches joined along each side before they enter the language model."""
    mergers: int = 1
    inner: str = "merged"
    """Width between the two matrices of the projector: the merged patch, or the language model's hidden size."""
    projector: str = "merger"
    """"merger": two matrices; "single": one; "pixtral" and "llama4": as those do."""
    skipped: int = 0
    """Layers at the end that vLLM does not load."""
    patch_bias: bool = True
    width: int | None = None
    """The encoder's width, where `hidden_size` in its config means what it puts out."""


_QWEN2_5 = Style(gated=True, norm_bias=False, frames=2, patch_bias=False)
_QWEN3 = Style(frames=2, positions=2304)
_SIGLIP = Style(positions=4096, projector="single")
_CLIP = Style(positions=577, inner="hidden", merge=1, skipped=1, patch_bias=False)

STYLES = {
    "qwen2_vl": Style(frames=2, patch_bias=False, width=1280),
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": _QWEN3._replace(mergers=4),
    "qwen3_vl_moe": _QWEN3._replace(mergers=4),
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": _SIGLIP,
    "gemma4": Style(gated=True, bias=False, norm_bias=False, norms=4, positions=20480, projector="single", patch_bias=False),
    "llama4": Style(positions=577, projector="llama4", patch_bias=False),
    "mistral3": Style(gated=True, bias=False, norm_bias=False, projector="pixtral", patch_bias=False),
    "pixtral": Style(gated=True, bias=False, norm_bias=False, projector="pixtral", patch_bias=False),
    "llava": _CLIP,
    "llava_next": _CLIP,
    "internvl": Style(positions=1025, inner="hidden"),
    "internvl_chat": Style(positions=1025, inner="hidden"),
    "kimi_k25": Style(positions=4096),
    "kimi_vl": Style(positions=4096),
    "mllama": Style(positions=1601, merge=1, projector="single"),
}
# Encoders whose config does not describe them, in parameters: MobileNet v5 and the conformer of Gemma 3n (the published
# 5.44 B and 7.85 B less the 4.46 B and 6.87 B of the text), the fourth part of Llama 3.2 Vision that is "global" layers.
_FIXED = {"gemma3n": {"vision": 299_000_000, "audio": 681_000_000}}
_GLOBAL_LAYERS = {"mllama": 8}


class Encoder(NamedTuple):
    """The parameters one rank holds of an encoder: one layer, how often it comes, the rest, and whether its code is known."""

    layer: list[Part]
    layers: int
    rest: list[Part]
    known: bool


def tower_parts(tower: Tower, shape: ModelShape, ranks: int) -> Encoder:
    """An encoder as vLLM builds it."""
    fixed = _FIXED.get(shape.model_type, {}).get(tower.what)
    if fixed is not None:
        return Encoder([], 0, [Part(tower.what, share(fixed, ranks))], known=True)
    style = STYLES.get(shape.model_type) if tower.what == "vision" else None
    known = style is not None
    style = style or Style()
    width = style.width or tower.hidden_size
    layers = tower.layers
    if not width or not layers:
        return Encoder([], 0, [], known=False)
    inner = tower.intermediate_size if tower.intermediate_size and style.width is None else 4 * width
    count = max(1, layers - style.skipped + _GLOBAL_LAYERS.get(shape.model_type, 0))
    pixels = 3 * (tower.patch_size or 14) ** 2 * style.frames
    rest = [Part("patch", width, pixels + (1 if style.patch_bias else 0)), Part("positions", style.positions, width)]
    rest += _projector(width, inner, shape.hidden_size, style, ranks)
    return Encoder(_layer(width, inner, style, ranks), count, rest, known)


def _layer(width: int, inner: int, style: Style, ranks: int) -> list[Part]:
    own, rows = share(width, ranks), share(inner, ranks)
    up = rows * (2 if style.gated else 1)
    bias = style.bias
    return [
        *linear("visual.qkv", 3 * own, width, bias=3 * own if bias else 0),
        *linear("visual.proj", width, own, bias=width if bias else 0),
        *linear("visual.up_proj", up, width, bias=up if bias else 0),
        *linear("visual.down_proj", width, rows, bias=width if bias else 0),
        *norm(width, bias=style.norm_bias, count=style.norms),
    ]


def _projector(width: int, inner: int, hidden: int, style: Style, ranks: int) -> list[Part]:
    if style.projector == "single":
        return [Part("projector", width + 1, hidden), *norm(width, count=3)]
    if style.projector == "pixtral":  # a merger of four patches into one, then two matrices; on every rank
        return [Part("projector", width, 4 * width), Part("projector", hidden, width), Part("projector", hidden, hidden)]
    if style.projector == "llama4":
        between = 4096  # projector_input_dim and projector_output_dim of both published sizes
        return [
            Part("projector", share(between, ranks), inner),
            Part("projector", between, share(between, ranks)),
            Part("projector", share(hidden, ranks), between),
        ]
    merged = width * style.merge**2
    middle = hidden if style.inner == "hidden" else merged
    one = [
        *linear("visual.merger.fc1", share(middle, ranks), merged, bias=middle),
        *linear("visual.merger.fc2", hidden, share(middle, ranks), bias=hidden),
        *norm(width, bias=style.norm_bias),
    ]
    return one * style.mergers
