"""The KV cache that each layer of a model keeps on one rank, as vLLM 0.32's layers declare it on CUDA.

    KvSpec                   a block holds `block_size` tokens and costs `page_bytes` (`v1/kv_cache_interface.py`)
    ├── AttentionSpec        a page is heads x states x content
    │   ├── FullSpec         every token of the request
    │   │   └── MlaSpec      one latent a token (LatentSpec); also the sparse indexer's keys
    │   ├── SlidingSpec      the last `window` tokens, and what is in flight
    │   │   └── SlidingMlaSpec
    │   └── ChunkedSpec      the current chunk, and what is in flight
    └── StateSpec            Mamba, gated delta net, KDA, linear attention, short convolution: one state a block

Two specs are equal exactly when vLLM's are, because equality decides the grouping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.models.shape import Layer, LayerKind, ModelShape
from plimsoll.plan.settings import Settings
from plimsoll.units import ceil_div, round_up
from plimsoll.vllm.versions import Behaviour

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip

PER_TOKEN_HEAD = frozenset({"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"})
DS_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_SCALE_BYTES = 4  # per-token-head scales are float32, one for the key and one for the value


VOCABULARY_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


def padded_vocabulary(size: int) -> int:
    """The rows vLLM gives an embedding: up to the next 64."""
    return round_up(size, VOCABULARY_PADDING)


class CannotGroupError(BadInput):
    """vLLM's planner refuses this set of layers, whatever the memory."""


@dataclass(frozen=True)
class Load:
    """The values that decide how many blocks one request may hold."""

    max_model_len: int
    in_flight_tokens: int = 0  # tokens scheduled but not yet settled: one whole batch for every concurrent step
    dcp: int = 1
    state_mode: str = "none"


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """The cache of one layer."""

    block_size: int
    dcp_sharded: bool = False
    page_padded: int | None = None

    @property
    def unpadded_page_bytes(self) -> int:
        """The page's bytes without the padding that makes pages equal."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        if self.page_padded is None:
            return self.unpadded_page_bytes
        if self.page_padded < self.unpadded_page_bytes:
            raise CannotGroupError("a layer's cache page or state is larger than the page it is padded to; vLLM stops here")
        return self.page_padded

    def blocks_at(self, load: Load) -> int:
        """Most blocks one request of `load.max_model_len` tokens can hold."""
        raise NotImplementedError

    def same_type_as(self, others: Sequence[KvSpec]) -> bool:
        """True if all of them need the same number of blocks at any length."""
        return all(isinstance(other, type(self)) and other.type_key() == self.type_key() for other in others)

    def type_key(self) -> tuple[object, ...]:
        """The values that are equal in layers of one class and the same type."""
        return ()

    def merges_with(self, others: Sequence[KvSpec]) -> bool:
        """True if vLLM folds these layers into one spec."""
        return all(other.merge_key() == self.merge_key() for other in others)

    def merge_key(self) -> tuple[object, ...]:
        """The values that are equal in all layers folded into one spec."""
        return (self,)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KvSpec):
    """Keys and values of tokens."""

    heads: int
    head_size: int
    head_size_v: int
    dtype: str
    quant: str = "none"
    dcp_sharded: bool = True
    tp_shards: int | None = None
    head_slots: int | None = None
    content_bytes: int | None = None  # bytes of one head and state where they do not follow from the head size
    tokens_per_state: int = 1

    @property
    def unpadded_page_bytes(self) -> int:
        content = self.content_bytes
        if content is None:
            content = (self.head_size + self.head_size_v) * DTYPE_BYTES[self.dtype]
        slots = self.heads if self.head_slots is None else self.head_slots
        return slots * (self.block_size // self.tokens_per_state) * content

    def attention_key(self) -> tuple[object, ...]:
        """The values that are equal in all layers of one group, whatever their windows."""
        return tuple(getattr(self, name) for name in _ATTENTION_FIELDS)


@dataclass(frozen=True, kw_only=True)
class FullSpec(AttentionSpec):
    """Attention over the whole request; also local attention that is allocated in the same way."""

    window: int | None = None
    chunk: int | None = None

    def blocks_at(self, load: Load) -> int:
        length = load.max_model_len
        if self.dcp_sharded and load.dcp > 1:
            length = ceil_div(length, load.dcp)
        return ceil_div(length, self.block_size)

    def same_type_as(self, others: Sequence[KvSpec]) -> bool:
        return all(isinstance(other, FullSpec) for other in others)

    def merges_with(self, others: Sequence[KvSpec]) -> bool:
        if not all(isinstance(other, FullSpec) and not isinstance(other, MlaSpec) for other in others):
            return False
        full = [other for other in others if isinstance(other, FullSpec)]
        windows = {spec.window for spec in full} - {None}
        chunks = {spec.chunk for spec in full} - {None}
        if len(windows) > 1 or len(chunks) > 1:
            raise CannotGroupError("layers with different windows cannot share a group of full attention")
        key = self.attention_key()
        return all(spec.attention_key() == key for spec in full) and not (windows and chunks)


@dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """Multi-head latent attention: one vector a token, the same on every TP rank; pages are padded to the alignment."""

    heads: int = 1
    head_size_v: int = 0
    tp_shards: int | None = 1
    cache_dtype: str | None = None
    alignment: int | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        padded = round_up(self.unpadded_page_bytes, self.alignment or 1)
        if padded != self.unpadded_page_bytes:
            object.__setattr__(self, "page_padded", padded)


@dataclass(frozen=True, kw_only=True)
class MlaSpec(LatentSpec, FullSpec):
    """Latents of every token of the request."""

    indexer: bool = False  # the cache is the sparse indexer's, not the latents'
    leader: bool = False

    merges_with = KvSpec.merges_with

    def merge_key(self) -> tuple[object, ...]:
        return (MlaSpec, self.attention_key(), self.cache_dtype, self.version, self.indexer, self.leader)


@dataclass(frozen=True, kw_only=True)
class SlidingSpec(AttentionSpec):
    """Attention over the last `window` tokens."""

    window: int

    def blocks_at(self, load: Load) -> int:
        if self.dcp_sharded and load.dcp > 1:
            raise CannotGroupError("decode context parallelism does not support sliding-window layers")
        held = min(self.window - 1 + load.in_flight_tokens, load.max_model_len)
        return ceil_div(held, self.block_size) + 1  # the window may begin inside a block

    def type_key(self) -> tuple[object, ...]:
        return (self.window,)


@dataclass(frozen=True, kw_only=True)
class SlidingMlaSpec(LatentSpec, SlidingSpec):
    """A sliding window of latents."""

    def merge_key(self) -> tuple[object, ...]:  # as in vLLM, without the head size
        return (
            SlidingMlaSpec, self.dcp_sharded, self.tp_shards, self.cache_dtype, self.tokens_per_state, self.version,
            self.window,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChunkedSpec(AttentionSpec):
    """Attention inside chunks of fixed length (Llama 4)."""

    chunk: int

    def blocks_at(self, load: Load) -> int:
        return ceil_div(min(self.chunk + load.in_flight_tokens, load.max_model_len), self.block_size)

    def type_key(self) -> tuple[object, ...]:
        return (self.chunk,)


@dataclass(frozen=True, kw_only=True)
class StateSpec(KvSpec):
    """A state of fixed size: a block holds one, whatever `block_size` says."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mixer: str = "mamba2"
    mode: str = "none"
    spec_blocks: int = 0
    checkpoint_blocks: int = 0
    checkpoint_alignment: int | None = None

    @property
    def unpadded_page_bytes(self) -> int:
        return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def blocks_at(self, load: Load) -> int:
        if load.state_mode == "align":
            return 2 + self.spec_blocks + self.checkpoint_blocks
        if load.state_mode == "all":  # until 0.31
            return ceil_div(load.max_model_len, self.block_size)
        return 1 + self.spec_blocks

    def type_key(self) -> tuple[object, ...]:
        return (self.spec_blocks, self.checkpoint_blocks, self.checkpoint_alignment, self.page_bytes)


_ATTENTION_FIELDS = tuple(field.name for field in fields(AttentionSpec))


class NamedSpec(NamedTuple):
    """One layer's cache under a name that is unique in the whole model."""

    layer: str
    spec: KvSpec


RankSpecs = tuple[NamedSpec, ...]


@lru_cache(maxsize=256)
def packing(kv_cache_dtype: str, model_dtype: str) -> tuple[str, str]:
    """The element type and the quantisation of a cache that --kv-cache-dtype names; BadInput for a name vLLM refuses."""
    if kv_cache_dtype == "auto":
        return model_dtype, "none"
    if kv_cache_dtype in ("bfloat16", "float16", "half", "float32", "float"):
        return {"half": "float16", "float": "float32"}.get(kv_cache_dtype, kv_cache_dtype), "none"
    if kv_cache_dtype == "int8_per_token_head":
        return "int8", kv_cache_dtype
    if kv_cache_dtype in PER_TOKEN_HEAD or kv_cache_dtype == "nvfp4_ds_mla":
        return "uint8", kv_cache_dtype
    if kv_cache_dtype.startswith("nvfp4"):
        return "uint8", "nvfp4"
    if kv_cache_dtype.startswith("fp8"):
        return "uint8", "fp8"
    raise BadInput(f"--kv-cache-dtype {kv_cache_dtype} is not one we can plan; use auto, bfloat16, fp8 or nvfp4")


def token_packing(quant: str, heads: int, head_size: int, head_size_v: int) -> tuple[int | None, int | None]:
    """Head slots and bytes per head and token where a backend packs them its own way; (None, None) where it does not."""
    if quant in PER_TOKEN_HEAD:
        share = 2 if quant == "int4_per_token_head" else 1
        return None, head_size // share + head_size_v // share + 2 * _SCALE_BYTES
    if quant == "nvfp4":
        if head_size != head_size_v:
            raise BadInput("nvfp4 needs keys and values of one head size")
        return 2 * heads, head_size // 2 + head_size // 16  # packed fp4, and one fp8 scale for 16 elements
    return None, None


def in_flight_tokens(settings: Settings) -> int:
    """Most tokens that are scheduled and not yet settled: one batch for every concurrent step."""
    batches = 1
    if Behaviour.ALL_BATCHES_IN_FLIGHT.is_in(settings.release):
        batches = settings.pipeline_parallel
        if settings.async_scheduling and (settings.v2_runner or batches <= 1):
            batches += 1
    return batches * settings.max_num_batched_tokens


def state_mode_of(settings: Settings) -> str:
    """Returns the --mamba-cache-mode in force: under prefix caching "align" unless another is given, else "none"."""
    if not settings.prefix_caching:
        return "none"
    return "align" if settings.mamba_cache_mode == "none" else settings.mamba_cache_mode


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


_KIMI_CONV_KERNEL = 4
_MAMBAS = (LayerKind.MAMBA1, LayerKind.MAMBA2, LayerKind.FULL_AND_MAMBA2)


def state_of(shape: ModelShape, settings: Settings) -> StateSpec:
    """The state of a Mamba, delta-net, linear-attention or convolution layer on one rank (vLLM's `mamba_utils.py`), unpadded.

    BadInput where the shape lacks a size or tensor parallelism does not divide one.
    """
    kinds = {kind for kind in shape.kinds if kind.keeps_state}
    if len(kinds) != 1:
        names = ", ".join(sorted(kinds))
        raise BadInput(f"a model with states of several kinds ({names}) is not one we can plan")
    kind = kinds.pop()
    tp, drafted, mamba, linear = settings.tensor_parallel, settings.speculative_tokens, shape.mamba, shape.linear
    conv = settings.model_dtype if settings.mamba_cache_dtype == "auto" else settings.mamba_cache_dtype
    ssm = mamba.ssm_dtype if mamba is not None else linear.ssm_dtype if linear is not None else None
    if kind in _MAMBAS and ssm is None and shape.text_model_type == "nemotron_h":
        ssm = "float32"  # vLLM's default for this family alone
    if settings.mamba_ssm_cache_dtype != "auto":
        temporal = settings.mamba_ssm_cache_dtype
    else:
        usual = "float32" if kind is LayerKind.KIMI_DELTA else conv
        temporal = (ssm if Behaviour.STATE_DTYPE.is_in(settings.release) else None) or usual
    checkpoints, dtypes = 0, tuple[str, ...]((conv, temporal))
    shapes: tuple[tuple[int, ...], ...]
    if kind is LayerKind.SHORT_CONV:
        if shape.short_conv is None:
            raise BadInput("the model has convolution layers but its config does not give their sizes")
        width = _shared(shape.short_conv.width, tp, "the convolution")
        mixer, dtypes, shapes = "short-conv", (conv,), ((shape.short_conv.kernel - 1 + drafted, width),)
    elif kind in _MAMBAS:
        if mamba is None:
            raise BadInput("the model has Mamba layers but its config does not give their sizes")
        if kind is LayerKind.MAMBA1:
            inner = _shared(mamba.inner_size, tp, "the Mamba inner size")
            mixer, shapes = "mamba1", ((mamba.conv_kernel - 1, inner), (inner, mamba.state_size))
        else:
            if mamba.heads is None or mamba.head_dim is None or mamba.groups is None:
                raise BadInput("the config does not give the heads and groups of its Mamba 2 layers")
            groups = mamba.groups if mamba.groups % tp == 0 else tp  # a group is copied to every rank that has heads of it
            width = _shared(mamba.inner_size + 2 * groups * mamba.state_size, tp, "the Mamba convolution")
            heads = _shared(mamba.heads, tp, "the Mamba heads")
            mixer, shapes = "mamba2", ((mamba.conv_kernel - 1 + drafted, width), (heads, mamba.head_dim, mamba.state_size))
            checkpoints = 1 if Behaviour.STATE_CHECKPOINTS.is_in(settings.release) else 0
    elif linear is None:
        raise BadInput(f"the model has {kind} layers but its config does not give their sizes")
    elif kind is LayerKind.LINEAR:
        mixer, dtypes = "linear", (conv,)
        shapes = ((linear.value_heads // tp, linear.value_head_dim, linear.value_head_dim),)
    else:  # gated delta net (Qwen3-Next, Qwen3.5) and Kimi's delta attention, whose state is float32 by default
        kernel = linear.conv_kernel or (_KIMI_CONV_KERNEL if kind is LayerKind.KIMI_DELTA else None)
        if kernel is None:
            raise BadInput("the config does not give the convolution kernel of its linear attention")
        width = 2 * linear.key_heads * linear.key_head_dim + linear.value_heads * linear.value_head_dim
        width = _shared(width, tp, "the linear attention's convolution")
        heads = _shared(linear.value_heads, tp, "the value heads")
        mixer = "kda" if kind is LayerKind.KIMI_DELTA else "gdn"
        shapes = ((kernel - 1 + drafted, width), (heads, linear.value_head_dim, linear.key_head_dim))
    return StateSpec(
        block_size=1,  # the caller sets it once the attention's block is chosen
        shapes=shapes, dtypes=dtypes, mixer=mixer, mode=state_mode_of(settings), spec_blocks=drafted,
        checkpoint_blocks=checkpoints, checkpoint_alignment=1 if checkpoints else None,
    )  # fmt: skip


def _shared(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise BadInput(f"--tensor-parallel-size {tp} does not divide {what} ({size})")
    return size // tp


_DEFAULT_BLOCK = 16
_MLA_KINDS = (LayerKind.MLA, LayerKind.MLA_SLIDING, LayerKind.MLA_COMPRESSED)
_V4_BLOCK, _V4_WINDOW_BLOCK, _V4_BYTES, _V4_ALIGNMENT = 256, 64, 584, 576


def specs_of_all_stages(shape: ModelShape, settings: Settings) -> tuple[RankSpecs, ...]:
    """The caches of every pipeline stage on any of its TP ranks, first to last; BadInput where vLLM would refuse the split."""
    check_split(shape, settings)
    reader = _LayerCaches(shape, settings)
    spans = layers_by_stage(len(shape.layers), settings.pipeline_parallel, settings.pipeline_partition)
    return (*(reader.stage(span) for span in spans[:-1]), reader.stage(spans[-1]) + reader.drafting())


def _capability(settings: Settings) -> int:
    """The card's major compute capability, which decides the attention backend; of an unknown card, Hopper's."""
    return settings.compute_capability[0] if settings.compute_capability else 9


def cache_dtype_of(shape: ModelShape, settings: Settings) -> str:
    """Returns the --kv-cache-dtype in force for this model: `auto` follows the checkpoint; sparse MLA has its own formats."""
    dtype = settings.kv_cache_dtype
    if dtype == "auto" and shape.quantization is not None and shape.quantization.kv_cache is not None:
        dtype = shape.quantization.kv_cache
    if LayerKind.MLA_COMPRESSED in shape.kinds:
        return "fp8_ds_mla"
    if not _is_sparse_mla(shape):
        return dtype
    if dtype == "bfloat16":
        dtype = "auto"
    capability = _capability(settings)
    if capability == 12 and dtype in ("auto", "fp8", "fp8_e4m3"):
        return "fp8_ds_mla"
    if capability == 9 and dtype.startswith("fp8"):
        return "fp8_ds_mla"  # FlashMLA's sparse kernels; on Blackwell FlashInfer keeps plain fp8
    return dtype


def block_size_of(shape: ModelShape, settings: Settings) -> int:
    """Tokens in an attention block before it is aligned with the states of a hybrid model."""
    if settings.block_size is not None:
        return settings.block_size
    if LayerKind.MLA_COMPRESSED in shape.kinds:
        return _V4_BLOCK
    if _is_sparse_mla(shape):
        return 64
    if any(layer.indexer for layer in shape.layers):
        return 128  # MiniMax M3: a cache page is one of its sparse blocks
    dtype, capability = cache_dtype_of(shape, settings), _capability(settings)
    if not any(layer.kind in _MLA_KINDS for layer in shape.layers):
        return 64 if capability == 9 and dtype in ("fp8", "fp8_e4m3") and shape.head_dim == 512 else _DEFAULT_BLOCK
    if not Behaviour.BLOCK_BY_BACKEND.is_in(settings.release):
        return {9: 64, 10: 128}.get(capability, _DEFAULT_BLOCK)
    if capability == 10:
        return 32
    return 64 if capability == 9 and dtype.startswith("fp8") else _DEFAULT_BLOCK


def _is_sparse_mla(shape: ModelShape) -> bool:
    return shape.mla is not None and any(layer.indexer and layer.kind is LayerKind.MLA for layer in shape.layers)


def check_split(shape: ModelShape, settings: Settings) -> None:
    """Raises BadInput where vLLM would refuse to spread the model over these ranks."""
    tp, heads, rows = settings.tensor_parallel, shape.attention_heads, padded_vocabulary(shape.vocab_size)
    if min(tp, settings.pipeline_parallel, settings.data_parallel) < 1:
        raise BadInput("parallel sizes start at 1")
    if heads % tp:
        raise BadInput(f"--tensor-parallel-size {tp} does not divide the model's {heads} attention heads")
    if rows % tp:
        raise BadInput(f"--tensor-parallel-size {tp} does not divide the padded vocabulary of {rows}")
    for kv_heads in {layer.kv_heads for layer in shape.layers if layer.kind not in _MLA_KINDS} - {0}:
        if kv_heads % tp and tp % kv_heads:
            raise BadInput(f"--tensor-parallel-size {tp} neither divides nor is a multiple of {kv_heads} key-value heads")
    for dtype in {settings.model_dtype, settings.mamba_cache_dtype, settings.mamba_ssm_cache_dtype} - {"auto"}:
        if dtype not in DTYPE_BYTES:
            raise BadInput(f"{dtype} is not an element type vLLM has; use bfloat16, float16 or float32")
    if settings.pipeline_parallel > len(shape.layers):
        raise BadInput(
            f"--pipeline-parallel-size {settings.pipeline_parallel} is more than the model's {len(shape.layers)} layers"
        )
    if tp % settings.decode_context_parallel:
        raise BadInput(
            f"--decode-context-parallel-size {settings.decode_context_parallel} does not divide tensor parallel size {tp}"
        )


class _LayerCaches:
    """Declares the cache of each layer; layers that are alike share one spec."""

    def __init__(self, shape: ModelShape, settings: Settings) -> None:
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
        if not keeping or not self.settings.drafts_with_own_head:
            return ()
        full = [layer for layer in keeping if layer.kind in (LayerKind.FULL, LayerKind.MLA)]
        caches = self._caches((full or keeping)[-1])
        first = len(self.shape.layers)
        return tuple(
            NamedSpec(f"layers.{first + extra}.{part}", spec) for extra in range(self.shape.mtp_layers) for part, spec in caches
        )

    def _caches(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        if layer.shares_kv:
            return []
        if layer not in self._known:
            self._known[layer] = self._declared(layer)
        return self._known[layer]

    def _declared(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        kind, caches = layer.kind, list[tuple[str, KvSpec]]()
        is_v4 = LayerKind.MLA_COMPRESSED in self.shape.kinds
        if kind is LayerKind.MLA_COMPRESSED:
            return self._compressed(layer, layer.compress_ratio)
        if kind is LayerKind.MLA_SLIDING and is_v4:
            return self._compressed(layer, 1)
        if kind in (LayerKind.SLIDING, LayerKind.MLA_SLIDING) and layer.window is None:
            raise BadInput("a sliding-window layer does not say how wide its window is")
        if kind in (LayerKind.FULL, LayerKind.FULL_AND_MAMBA2):
            caches = [("attn", self._attention(layer, FullSpec)), *self._indexer(layer)]
        elif kind is LayerKind.SLIDING:
            caches = [("attn", self._attention(layer, SlidingSpec, window=layer.window))]
        elif kind is LayerKind.CHUNKED_LOCAL:
            chunk = layer.window or self.shape.chunk_size
            if chunk is None:
                raise BadInput("a chunked-attention layer does not say how long its chunks are")
            caches = [("attn", self._attention(layer, ChunkedSpec, chunk=chunk))]
        elif kind is LayerKind.MLA:
            caches = [("attn", self._latent(layer, MlaSpec, leader=layer.indexer)), *self._indexer(layer)]
        elif kind is LayerKind.MLA_SLIDING:
            caches = [("attn", self._latent(layer, SlidingMlaSpec, window=layer.window))]
        if kind.keeps_state:
            assert self.state is not None, "the states were read before the layers"
            caches.append(("state", self.state))
        return caches

    def _align_with_states(self) -> None:
        """Attention blocks long enough that a page holds a state, and the states padded to it."""
        shape, settings = self.shape, self.settings
        mode = state_mode_of(settings)
        state = state_of(shape, settings)
        attention = next((layer for layer in shape.layers if layer.kind.keeps_tokens and not layer.shares_kv), None)
        padded = None
        if attention is not None:
            mla = attention.kind in _MLA_KINDS
            token = self._latent(attention, MlaSpec) if mla else self._attention(attention, FullSpec)
            token_bytes = replace(token, block_size=1).page_bytes
            step = max(_DEFAULT_BLOCK, self.block_size, 128 if mla else 0)
            self.block_size = max(self.block_size, step * ceil_div(state.page_bytes, step * token_bytes))
            if self.block_size * token_bytes != state.page_bytes:
                padded = self.block_size * token_bytes
        block_size = settings.context if mode == "none" else self.block_size
        self.state = replace(state, block_size=block_size, page_padded=padded)

    def _attention(self, layer: Layer, declare: Callable[..., AttentionSpec], **more: object) -> AttentionSpec:
        heads = max(1, layer.kv_heads // self.settings.tensor_parallel)
        slots, content = token_packing(self.quant, heads, layer.head_dim, layer.v_head_dim)
        return declare(
            block_size=self.block_size, heads=heads, head_size=layer.head_dim, head_size_v=layer.v_head_dim,
            dtype=self.dtype, quant=self.quant, head_slots=slots, content_bytes=content, **more,
        )  # fmt: skip

    def _latent(self, layer: Layer, declare: Callable[..., AttentionSpec], **more: object) -> AttentionSpec:
        return declare(
            block_size=self.block_size, head_size=layer.head_dim, dtype=self.dtype, quant=self.quant,
            content_bytes=DS_MLA_BYTES.get(self.cache_dtype), cache_dtype=self.cache_dtype, **more,
        )  # fmt: skip

    def _indexer(self, layer: Layer) -> list[tuple[str, KvSpec]]:
        """The search keys of a sparse layer: under MLA fp8 with a float32 scale for every 128 of them, else 16 bits."""
        if not layer.indexer or self.shape.indexer is None:
            return []
        width = self.shape.indexer.head_dim
        if layer.kind is LayerKind.MLA:
            return [("indexer", MlaSpec(block_size=self.block_size, head_size=_scaled(width), dtype="uint8", indexer=True))]
        keys = MlaSpec(block_size=self.block_size, head_size=width, dtype="bfloat16", indexer=True, tp_shards=None)
        return [("indexer", keys)]

    def _compressed(self, layer: Layer, ratio: int) -> list[tuple[str, KvSpec]]:
        """DeepSeek V4 (`models/deepseek_v4`): a window of latents, one latent per `ratio` tokens, and their compressor."""
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
