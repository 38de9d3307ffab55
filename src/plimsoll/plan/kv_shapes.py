"""From a model's shape to the caches of one rank, as vLLM 0.32's layers declare them on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from plimsoll.errors import BadInput
from plimsoll.models.shape import Layer, LayerKind, LinearAttention, Mamba, ModelShape
from plimsoll.plan.kv_specs import (
    DS_MLA_BYTES,
    DTYPE_BYTES,
    AttentionSpec,
    ChunkedSpec,
    FullSpec,
    KvSpec,
    MlaSpec,
    NamedSpec,
    RankSpecs,
    SlidingMlaSpec,
    SlidingSpec,
    StateSpec,
    packing,
    token_packing,
)
from plimsoll.units import ceil_div
from plimsoll.vllm.versions import Behaviour, Coverage

# What of a launch decides the KV cache, and where vLLM's releases differ in it.


@dataclass(frozen=True)
class KvRules:
    """How one release counts; read in its source."""

    reserves_null_block: bool
    """The start-up check leaves out the block vLLM keeps for itself (0.29.0)."""
    counts_all_batches: bool
    """Windows hold the tokens of every concurrent step, not of one (0.26.0)."""
    tokens_by_concurrency: bool
    """"KV cache size" is max_concurrency x max_model_len (0.21.0), before it was blocks // groups x block size."""
    group_tolerance: float
    """Types are padded to one length when the longest is shorter than this times the shortest."""
    keeps_checkpoints: bool
    """Mamba 2 under prefix caching keeps one more state (0.32.0)."""
    reads_state_dtype: bool
    """The config's word on the element type of a state is heard (0.13.0)."""
    v2_runner: bool
    """The second model runner is the default for every architecture it supports (0.29.0)."""
    hybrid_manager: bool
    """Layers of different types have groups of their own (0.9.1); before, a window was allocated like full attention."""
    chooses_block_by_backend: bool
    """The block size is the smallest that every attention backend takes (0.18.0); before, MLA had 64 or 128."""


@lru_cache(maxsize=64)
def rules_of(version: str) -> KvRules:
    """The rules of a release, given as text; newer ones than we know are taken to be like the newest."""
    try:
        is_half, is_quarter = (b.is_in(version) for b in (Behaviour.GROUPS_WITHIN_A_HALF, Behaviour.GROUPS_WITHIN_A_QUARTER))
    except ValueError as error:
        raise BadInput(str(error)) from None
    return KvRules(
        reserves_null_block=Behaviour.NULL_BLOCK.is_in(version),
        counts_all_batches=Behaviour.ALL_BATCHES_IN_FLIGHT.is_in(version),
        tokens_by_concurrency=Behaviour.TOKENS_BY_CONCURRENCY.is_in(version),
        group_tolerance=1.5 if is_half else 1.25 if is_quarter else 1.0,
        keeps_checkpoints=Behaviour.STATE_CHECKPOINTS.is_in(version),
        reads_state_dtype=Behaviour.STATE_DTYPE.is_in(version),
        v2_runner=Behaviour.V2_RUNNER_ALL.is_in(version),
        hybrid_manager=Behaviour.HYBRID_KV_MANAGER.is_in(version),
        chooses_block_by_backend=Behaviour.BLOCK_BY_BACKEND.is_in(version),
    )


@dataclass(frozen=True, kw_only=True)
class KvSettings:
    """The launch, as far as the KV cache depends on it. Sizes are those vLLM has resolved, not -1 or auto."""

    max_model_len: int
    auto_fit: bool = False
    """--max-model-len -1: `max_model_len` is the model's own, and vLLM lowers it to what fits."""
    context_limit: int | None = None
    """Upper end of the search for the largest context; None: `max_model_len`, as in vLLM."""
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    prefix_caching: bool = True
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pp_partition: tuple[int, ...] | None = None
    """VLLM_PP_LAYER_PARTITION."""
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    model_dtype: str = "bfloat16"
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    state_mode: str | None = None
    """--mamba-cache-mode; None: "align" under prefix caching, else "none"."""
    num_spec: int = 0
    """Speculative tokens a step."""
    prefill_lookahead: int = 0
    """Tokens a drafter of several modules reads ahead (`num_spec` for multi-layer MTP, else 0 or 1)."""
    mtp_layers: int = 0
    """Layers of the model's own MTP head that draft; each keeps a cache like the last attention layer."""
    hybrid_manager: bool | None = None
    """None: as vLLM decides it: on, but off for chunked local attention and before 0.9.1."""
    num_blocks_override: int | None = None
    v2_runner: bool | None = None
    """None: as the release's default on CUDA."""
    capability: int = 9
    """The GPU's major compute capability, which decides the attention backend and so the default block size."""
    interleaved: bool = False
    """The cache layout has the block outermost (BLHNC, BLNHC): DeepSeek V4, or VLLM_KV_CACHE_LAYOUT."""
    version: str = Coverage.KV_RULES.last

    @property
    def rules(self) -> KvRules:
        """How the release counts."""
        return rules_of(self.version)

    @property
    def in_flight_tokens(self) -> int:
        """Most tokens that are scheduled and not yet settled."""
        if not self.rules.counts_all_batches:
            return self.max_num_batched_tokens
        batches = self.pp
        if self.async_scheduling:
            v2_runner = self.rules.v2_runner if self.v2_runner is None else self.v2_runner
            if v2_runner:
                batches = self.pp + 1
            elif self.pp <= 1:
                batches = 2
        return batches * self.max_num_batched_tokens

    @property
    def resolved_state_mode(self) -> str:
        """What --mamba-cache-mode comes to."""
        if not self.prefix_caching:
            return "none"
        return self.state_mode if self.state_mode not in (None, "none") else "align"


def layers_by_stage(layers: int, stages: int, partition: tuple[int, ...] | None = None) -> list[range]:
    """The layers of each pipeline stage: the remainder goes to the stages before the last (vLLM's get_pp_indices)."""
    if partition is None:
        sizes = [layers // stages] * stages
        for back in range(2, layers % stages + 2):
            sizes[-back] += 1
    elif len(partition) == stages and sum(partition) == layers:
        sizes = list(partition)
    else:
        said = ",".join(map(str, partition))
        raise BadInput(f"VLLM_PP_LAYER_PARTITION={said} does not spread {layers} layers over {stages} stages")
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


# The states of Mamba, delta-net, linear-attention and convolution layers (vLLM's `mamba_utils.py`).

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


_DEFAULT_BLOCK = 16
_MLA_KINDS = (LayerKind.MLA, LayerKind.MLA_SLIDING, LayerKind.MLA_COMPRESSED)
_V4_BLOCK, _V4_WINDOW_BLOCK, _V4_BYTES, _V4_ALIGNMENT = 256, 64, 584, 576


def specs_of_all_stages(shape: ModelShape, settings: KvSettings) -> tuple[RankSpecs, ...]:
    """The caches of every pipeline stage on any of its TP ranks, first to last; BadInput where vLLM would refuse the split."""
    _check_split(shape, settings)
    reader = _Reader(shape, settings)
    spans = layers_by_stage(len(shape.layers), settings.pp, settings.pp_partition)
    return (*(reader.stage(span) for span in spans[:-1]), reader.stage(spans[-1]) + reader.drafting())


def is_interleaved(shape: ModelShape) -> bool:
    """Whether the model asks for a cache layout with the block outermost."""
    return LayerKind.MLA_COMPRESSED in shape.kinds


def cache_dtype_of(shape: ModelShape, settings: KvSettings) -> str:
    """What --kv-cache-dtype comes to for this model: `auto` takes the checkpoint's word, sparse MLA has formats of its own."""
    dtype = settings.kv_cache_dtype
    if dtype == "auto" and shape.quantization is not None and shape.quantization.kv_cache is not None:
        dtype = shape.quantization.kv_cache
    if LayerKind.MLA_COMPRESSED in shape.kinds:
        return "fp8_ds_mla"
    if not _is_sparse_mla(shape):
        return dtype
    if dtype == "bfloat16":
        dtype = "auto"
    if settings.capability == 12 and dtype in ("auto", "fp8", "fp8_e4m3"):
        return "fp8_ds_mla"
    if settings.capability == 9 and dtype.startswith("fp8"):
        return "fp8_ds_mla"  # FlashMLA's sparse kernels; on Blackwell FlashInfer keeps plain fp8
    return dtype


def block_size_of(shape: ModelShape, settings: KvSettings) -> int:
    """Tokens in an attention block before it is aligned with the states of a hybrid model."""
    if settings.block_size is not None:
        return settings.block_size
    if LayerKind.MLA_COMPRESSED in shape.kinds:
        return _V4_BLOCK
    if _is_sparse_mla(shape):
        return 64
    if any(layer.indexer for layer in shape.layers):
        return 128  # MiniMax M3: a cache page is one of its sparse blocks
    dtype = cache_dtype_of(shape, settings)
    if not any(layer.kind in _MLA_KINDS for layer in shape.layers):
        return 64 if settings.capability == 9 and dtype in ("fp8", "fp8_e4m3") and shape.head_dim == 512 else _DEFAULT_BLOCK
    if not settings.rules.chooses_block_by_backend:
        return {9: 64, 10: 128}.get(settings.capability, _DEFAULT_BLOCK)
    if settings.capability == 10:
        return 32
    return 64 if settings.capability == 9 and dtype.startswith("fp8") else _DEFAULT_BLOCK


def _is_sparse_mla(shape: ModelShape) -> bool:
    return shape.mla is not None and any(layer.indexer and layer.kind is LayerKind.MLA for layer in shape.layers)


def _check_split(shape: ModelShape, settings: KvSettings) -> None:
    tp, heads = settings.tp, shape.attention_heads
    if heads and heads % tp:
        raise BadInput(f"--tensor-parallel-size {tp} does not divide the model's {heads} attention heads")
    for kv_heads in {layer.kv_heads for layer in shape.layers if layer.kind not in _MLA_KINDS} - {0}:
        if kv_heads % tp and tp % kv_heads:
            raise BadInput(f"--tensor-parallel-size {tp} neither divides nor is a multiple of {kv_heads} key-value heads")
    for dtype in {settings.model_dtype, settings.mamba_cache_dtype, settings.mamba_ssm_cache_dtype} - {"auto"}:
        if dtype not in DTYPE_BYTES:
            raise BadInput(f"{dtype} is not an element type vLLM has; use bfloat16, float16 or float32")
    if settings.model_dtype == "auto":
        raise BadInput("the model's element type is not known; give --dtype")
    if settings.pp > len(shape.layers):
        raise BadInput(f"--pipeline-parallel-size {settings.pp} is more than the model's {len(shape.layers)} layers")
    if tp % settings.dcp:
        raise BadInput(f"--decode-context-parallel-size {settings.dcp} does not divide tensor parallel size {tp}")


class _Reader:
    """Declares the cache of each layer; layers that are alike share one spec."""

    def __init__(self, shape: ModelShape, settings: KvSettings) -> None:
        self.shape, self.settings = shape, settings
        self.cache_dtype = cache_dtype_of(shape, settings)
        self.dtype, self.quant = packing(self.cache_dtype, settings.model_dtype)
        self.block_size = block_size_of(shape, settings)
        self.state: StateSpec | None = None
        if any(layer.kind.keeps_state for layer in shape.layers):
            self._align_with_states()
        self._known: dict[Layer, list[tuple[str, KvSpec]]] = {}

    def stage(self, span: range) -> RankSpecs:
        layers = self.shape.layers
        return tuple(NamedSpec(f"layers.{index}.{part}", spec) for index in span for part, spec in self._caches(layers[index]))

    def drafting(self) -> RankSpecs:
        """The MTP head's layers are like the model's last attention layer, and live on the last stage."""
        keeping = [layer for layer in self.shape.layers if layer.kind.keeps_tokens and not layer.shares_kv]
        if not keeping or not self.settings.mtp_layers:
            return ()
        full = [layer for layer in keeping if layer.kind in (LayerKind.FULL, LayerKind.MLA)]
        caches = self._caches((full or keeping)[-1])
        first = len(self.shape.layers)
        return tuple(
            NamedSpec(f"layers.{first + extra}.{part}", spec)
            for extra in range(self.settings.mtp_layers)
            for part, spec in caches
        )

    def _caches(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        if layer.shares_kv:
            return []
        if layer not in self._known:
            self._known[layer] = list(_DECLARE[layer.kind](self, layer))
        return self._known[layer]

    def _align_with_states(self) -> None:
        """Attention blocks long enough that a page holds a state, and the states padded to it."""
        shape, settings = self.shape, self.settings
        mode = settings.resolved_state_mode
        state = state_of(shape, settings)
        attention = next((layer for layer in shape.layers if layer.kind.keeps_tokens and not layer.shares_kv), None)
        padded = None
        if attention is not None:
            mla = attention.kind in _MLA_KINDS
            token = self._mla(attention) if mla else self._attention(attention, FullSpec)
            token_bytes = replace(token, block_size=1).page_bytes
            step = max(_DEFAULT_BLOCK, self.block_size, 128 if mla else 0)
            self.block_size = max(self.block_size, step * ceil_div(state.page_bytes, step * token_bytes))
            if self.block_size * token_bytes != state.page_bytes:
                padded = self.block_size * token_bytes
        block_size = settings.max_model_len if mode == "none" else self.block_size
        self.state = replace(state, block_size=block_size, page_padded=padded)

    def _attention(self, layer: Layer, declare: Callable[..., AttentionSpec], **more: object) -> AttentionSpec:
        heads = max(1, layer.kv_heads // self.settings.tp)
        slots, content = token_packing(self.quant, heads, layer.head_dim, layer.v_head_dim)
        return declare(
            block_size=self.block_size, heads=heads, head_size=layer.head_dim, head_size_v=layer.v_head_dim,
            dtype=self.dtype, quant=self.quant, head_slots=slots, content_bytes=content, **more,
        )  # fmt: skip

    def _mla(self, layer: Layer) -> MlaSpec:
        return MlaSpec(
            block_size=self.block_size, head_size=layer.head_dim, dtype=self.dtype, quant=self.quant,
            content_bytes=DS_MLA_BYTES.get(self.cache_dtype), cache_dtype=self.cache_dtype, leader=layer.indexer,
        )  # fmt: skip

    def _indexer(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        """The keys a sparse layer is searched by: fp8 with a float32 scale for every 128 under MLA, 16 bit elsewhere."""
        if not layer.indexer or self.shape.indexer is None:
            return []
        width = self.shape.indexer.head_dim
        if layer.kind is LayerKind.MLA:
            return [("indexer", MlaSpec(block_size=self.block_size, head_size=_scaled(width), dtype="uint8", indexer=True))]
        keys = MlaSpec(block_size=self.block_size, head_size=width, dtype="bfloat16", indexer=True, tp_shards=None)
        return [("indexer", keys)]

    def full(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        return [("attn", self._attention(layer, FullSpec)), *self._indexer(layer)]

    def sliding(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        if layer.window is None:
            raise BadInput("a sliding-window layer does not say how wide its window is")
        return [("attn", self._attention(layer, SlidingSpec, window=layer.window))]

    def chunked(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        chunk = layer.window or self.shape.chunk_size
        if chunk is None:
            raise BadInput("a chunked-attention layer does not say how long its chunks are")
        return [("attn", self._attention(layer, ChunkedSpec, chunk=chunk))]

    def latent(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        return [("attn", self._mla(layer)), *self._indexer(layer)]

    def latent_sliding(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        if LayerKind.MLA_COMPRESSED in self.shape.kinds:
            return self.compressed(replace(layer, compress_ratio=1))
        if layer.window is None:
            raise BadInput("a sliding-window layer does not say how wide its window is")
        spec = SlidingMlaSpec(
            block_size=self.block_size, head_size=layer.head_dim, dtype=self.dtype, quant=self.quant,
            content_bytes=DS_MLA_BYTES.get(self.cache_dtype), cache_dtype=self.cache_dtype, window=layer.window,
        )  # fmt: skip
        return [("attn", spec)]

    def kept_state(self, _: Layer) -> list[tuple[str, KvSpec]]:
        assert self.state is not None, "the states were read before the layers"
        return [("state", self.state)]

    def full_and_state(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        return [*self.full(layer), *self.kept_state(layer)]

    def nothing(self, _: Layer) -> list[tuple[str, KvSpec]]:
        return []

    def compressed(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        """DeepSeek V4 (`models/deepseek_v4`): a window of latents, one latent per `ratio` tokens, and what compresses them."""
        ratio = layer.compress_ratio
        packed = {"quant": "fp8", "dtype": "uint8", "content_bytes": _V4_BYTES, "cache_dtype": "fp8_ds_mla",
                  "alignment": _V4_ALIGNMENT, "version": "deepseek_v4", "head_size": layer.head_dim}  # fmt: skip
        caches: list[tuple[str, KvSpec]] = []
        if layer.window is not None:
            window = SlidingMlaSpec(block_size=_V4_WINDOW_BLOCK, window=layer.window, **packed)  # type: ignore[arg-type]
            caches.append(("swa_cache", window))
        if ratio <= 1:
            return caches
        latents = MlaSpec(block_size=self.block_size, tokens_per_state=ratio, **packed)  # type: ignore[arg-type]
        caches += [("attn", latents), ("compressor", _compressor(layer.head_dim, ratio))]
        if layer.indexer and self.shape.indexer is not None:
            width = self.shape.indexer.head_dim
            keys = MlaSpec(
                block_size=self.block_size, head_size=_scaled(width), dtype="uint8", tokens_per_state=ratio,
                alignment=_V4_ALIGNMENT,
            )  # fmt: skip
            caches += [("indexer", keys), ("indexer.compressor", _compressor(width, ratio))]
        return caches


def _scaled(width: int) -> int:
    """Bytes of fp8 keys with a float32 scale for every 128 of them."""
    return width + width // 128 * 4


def _compressor(width: int, ratio: int) -> SlidingMlaSpec:
    if ratio not in (4, 128):
        raise BadInput(f"compress ratio {ratio} is not one of DeepSeek V4's (4 and 128)")
    overlap = 2 if ratio == 4 else 1
    return SlidingMlaSpec(
        block_size=4 if ratio == 4 else 8, head_size=2 * overlap * width, dtype="float32",
        window=overlap * ratio, alignment=_V4_ALIGNMENT,
    )  # fmt: skip


_DECLARE: dict[LayerKind, Callable[[_Reader, Layer], list[tuple[str, KvSpec]]]] = {
    LayerKind.FULL: _Reader.full,
    LayerKind.SLIDING: _Reader.sliding,
    LayerKind.CHUNKED_LOCAL: _Reader.chunked,
    LayerKind.MLA: _Reader.latent,
    LayerKind.MLA_SLIDING: _Reader.latent_sliding,
    LayerKind.MLA_COMPRESSED: _Reader.compressed,
    LayerKind.FULL_AND_MAMBA2: _Reader.full_and_state,
    LayerKind.MAMBA1: _Reader.kept_state,
    LayerKind.MAMBA2: _Reader.kept_state,
    LayerKind.GATED_DELTA_NET: _Reader.kept_state,
    LayerKind.KIMI_DELTA: _Reader.kept_state,
    LayerKind.LINEAR: _Reader.kept_state,
    LayerKind.SHORT_CONV: _Reader.kept_state,
    LayerKind.ENCODER: _Reader.nothing,
    LayerKind.NONE: _Reader.nothing,
}
assert set(_DECLARE) == set(LayerKind), "every kind of layer declares its cache"
