"""The states of Mamba, delta-net, linear-attention and convolution layers (vLLM's `mamba_utils.py`)."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.domain.model import LayerKind, LinearAttention, Mamba, ModelShape
from plimsoll.errors import BadInput
from plimsoll.plan.kv_settings import KvSettings
from plimsoll.plan.kv_specs import StateSpec

_KIMI_CONV_KERNEL = 4


def state_of(shape: ModelShape, settings: KvSettings) -> StateSpec:
    """One layer's state on one rank, not yet padded; BadInput where the shape lacks a size or TP does not divide one."""
    kinds = {kind for kind in shape.kinds if kind.keeps_state}
    if len(kinds) != 1:
        names = ", ".join(sorted(kinds))
        raise BadInput(f"a model with states of several kinds ({names}) is not one we can plan")
    kind = kinds.pop()
    conv = settings.model_dtype if settings.mamba_cache_dtype == "auto" else settings.mamba_cache_dtype
    if kind is LayerKind.SHORT_CONV:
        return _short_conv(shape, settings, conv)
    if kind in (LayerKind.MAMBA1, LayerKind.MAMBA2, LayerKind.FULL_AND_MAMBA2):
        if shape.mamba is None:
            raise BadInput("the model has Mamba layers but its config does not give their sizes")
        mamba = shape.mamba
        if mamba.ssm_dtype is None and shape.text_model_type == "nemotron_h":
            mamba = replace(mamba, ssm_dtype="float32")  # vLLM's default for this family alone
        return (_mamba1 if kind is LayerKind.MAMBA1 else _mamba2)(mamba, settings, conv)
    if shape.linear is None:
        raise BadInput(f"the model has {kind} layers but its config does not give their sizes")
    if kind is LayerKind.LINEAR:
        return _lightning(shape.linear, settings, conv)
    return _delta(shape.linear, settings, conv, kimi=kind is LayerKind.KIMI_DELTA)


def _mamba1(mamba: Mamba, settings: KvSettings, conv: str) -> StateSpec:
    inner = _shared(mamba.inner_size, settings.tp, "the Mamba inner size")
    shapes = ((mamba.conv_kernel - 1, inner), (inner, mamba.state_size))
    return _spec(settings, shapes, (conv, _temporal(mamba.ssm_dtype, settings, conv)), "mamba1")


def _mamba2(mamba: Mamba, settings: KvSettings, conv: str) -> StateSpec:
    if mamba.heads is None or mamba.head_dim is None or mamba.groups is None:
        raise BadInput("the config does not give the heads and groups of its Mamba 2 layers")
    tp = settings.tp
    groups = mamba.groups if mamba.groups % tp == 0 else tp  # a group is copied to every rank that has heads of it
    width = _shared(mamba.inner_size + 2 * groups * mamba.state_size, tp, "the Mamba convolution")
    shapes = (
        (mamba.conv_kernel - 1 + settings.num_spec, width),
        (_shared(mamba.heads, tp, "the Mamba heads"), mamba.head_dim, mamba.state_size),
    )
    checkpoints = 1 if settings.rules.keeps_checkpoints else 0
    return _spec(settings, shapes, (conv, _temporal(mamba.ssm_dtype, settings, conv)), "mamba2", checkpoints)


def _delta(linear: LinearAttention, settings: KvSettings, conv: str, *, kimi: bool) -> StateSpec:
    """Gated delta net (Qwen3-Next, Qwen3.5) and Kimi's delta attention, whose state is float32 unless told otherwise."""
    kernel = linear.conv_kernel or (_KIMI_CONV_KERNEL if kimi else None)
    if kernel is None:
        raise BadInput("the config does not give the convolution kernel of its linear attention")
    width = 2 * linear.key_heads * linear.key_head_dim + linear.value_heads * linear.value_head_dim
    shapes = (
        (kernel - 1 + settings.num_spec, _shared(width, settings.tp, "the linear attention's convolution")),
        (_shared(linear.value_heads, settings.tp, "the value heads"), linear.value_head_dim, linear.key_head_dim),
    )
    temporal = _temporal(linear.ssm_dtype, settings, "float32" if kimi else conv)
    return _spec(settings, shapes, (conv, temporal), "kda" if kimi else "gdn")


def _lightning(linear: LinearAttention, settings: KvSettings, conv: str) -> StateSpec:
    shape = (linear.value_heads // settings.tp, linear.value_head_dim, linear.value_head_dim)
    return _spec(settings, (shape,), (conv,), "linear")


def _short_conv(shape: ModelShape, settings: KvSettings, conv: str) -> StateSpec:
    if shape.short_conv is None:
        raise BadInput("the model has convolution layers but its config does not give their sizes")
    width = _shared(shape.short_conv.width, settings.tp, "the convolution")
    return _spec(settings, ((shape.short_conv.kernel - 1 + settings.num_spec, width),), (conv,), "short-conv")


def _spec(
    settings: KvSettings, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], mixer: str, checkpoints: int = 0
) -> StateSpec:
    return StateSpec(
        block_size=1,  # the caller knows it once the attention's block is chosen
        shapes=shapes,
        dtypes=dtypes,
        mixer=mixer,
        mode=settings.resolved_state_mode,
        spec_blocks=settings.num_spec,
        checkpoint_blocks=checkpoints,
        checkpoint_alignment=1 if checkpoints else None,
    )


def _temporal(ssm_dtype: str | None, settings: KvSettings, otherwise: str) -> str:
    if settings.mamba_ssm_cache_dtype != "auto":
        return settings.mamba_ssm_cache_dtype
    return (ssm_dtype if settings.rules.reads_state_dtype else None) or otherwise


def _shared(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise BadInput(f"--tensor-parallel-size {tp} does not divide {what} ({size})")
    return size // tp
