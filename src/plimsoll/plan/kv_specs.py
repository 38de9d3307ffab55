"""What one layer keeps in the KV cache of one rank, in vLLM 0.32's terms (`v1/kv_cache_interface.py`).

    KvSpec                   a block holds `block_size` tokens and costs `page_bytes`
    ├── AttentionSpec        a page is heads x states x content
    │   ├── FullSpec         every token of the request
    │   │   └── MlaSpec      one latent a token; also the sparse indexer's keys
    │   ├── SlidingSpec      the last `window` tokens, and what is in flight
    │   │   └── SlidingMlaSpec
    │   └── ChunkedSpec      the current chunk, and what is in flight
    └── StateSpec            Mamba, gated delta net, KDA, linear attention, short convolution: one state a block

Two specs are equal exactly when vLLM's are, because equality decides the grouping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.units import ceil_div, round_up

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip

PER_TOKEN_HEAD = frozenset({"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"})
DS_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_SCALE_BYTES = 4  # per-token-head scales are float32, one for the key and one for the value


class CannotGroupError(BadInput):
    """vLLM's planner refuses this set of layers, whatever the memory."""


@dataclass(frozen=True)
class Load:
    """What decides how many blocks one request may hold."""

    max_model_len: int
    in_flight_tokens: int = 0
    """Tokens scheduled but not yet settled: one whole batch for every concurrent step."""
    dcp: int = 1
    state_mode: str = "none"


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """The cache of one layer."""

    block_size: int
    dcp_sharded: bool = False
    stride_alignment: int | None = None
    """Bytes between physical blocks are a multiple of this."""
    stride_kernel: int | None = None
    """Or of a whole kernel block of up to so many tokens."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    @property
    def stride_bytes(self) -> int:
        """Bytes from one block of this layer to its next: the page, aligned as the kernels need it."""
        return round_up(self.page_bytes, self.alignment_bytes)

    @property
    def alignment_bytes(self) -> int:
        """What the distance between blocks must be a multiple of."""
        if self.stride_kernel is None:
            return self.stride_alignment or 1
        kernel = math.gcd(self.stride_kernel, self.block_size)
        return 1 if kernel == self.block_size else replace(self, block_size=kernel).page_bytes

    def blocks_at(self, load: Load) -> int:
        """Most blocks one request of `load.max_model_len` tokens can hold."""
        raise NotImplementedError

    def same_type_as(self, others: Sequence[KvSpec]) -> bool:
        """Whether all of them need the same number of blocks at any length."""
        raise NotImplementedError

    def merges_with(self, others: Sequence[KvSpec]) -> bool:
        """Whether vLLM folds these layers into one spec."""
        return all(other == self for other in others)


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
    page_padded: int | None = None
    head_slots: int | None = None
    content_bytes: int | None = None
    """Bytes of one head and state where they do not follow from the head size."""
    tokens_per_state: int = 1

    @property
    def unpadded_page_bytes(self) -> int:
        """The page without what was added to make pages equal."""
        content = self.content_bytes
        if content is None:
            content = (self.head_size + self.head_size_v) * DTYPE_BYTES[self.dtype]
        slots = self.heads if self.head_slots is None else self.head_slots
        return slots * (self.block_size // self.tokens_per_state) * content

    @property
    def page_bytes(self) -> int:
        if self.page_padded is None:
            return self.unpadded_page_bytes
        if self.page_padded < self.unpadded_page_bytes:
            raise CannotGroupError("a layer's cache page is larger than the page it is padded to; vLLM stops here")
        return self.page_padded

    def attention_key(self) -> tuple[object, ...]:
        """What must be equal in all layers of one group, whatever their windows."""
        return tuple(getattr(self, name) for name in _ATTENTION_FIELDS)


@dataclass(frozen=True, kw_only=True)
class FullSpec(AttentionSpec):
    """Attention over the whole request; also local attention that is allocated as if it were."""

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
class MlaSpec(FullSpec):
    """Multi-head latent attention: one vector a token, the same on every TP rank."""

    heads: int = 1
    head_size_v: int = 0
    tp_shards: int | None = 1
    cache_dtype: str | None = None
    alignment: int | None = None
    version: str | None = None
    indexer: bool = False
    """The cache is the sparse indexer's, not the latents'."""
    leader: bool = False

    def __post_init__(self) -> None:
        _pad_to_alignment(self, self.alignment)

    def merges_with(self, others: Sequence[KvSpec]) -> bool:
        mla = [other for other in others if isinstance(other, MlaSpec)]
        return len(mla) == len(others) and all(other.merge_key() == self.merge_key() for other in mla)

    def merge_key(self) -> tuple[object, ...]:
        """What must be equal in all MLA layers of one group."""
        return (self.attention_key(), self.cache_dtype, self.version, self.indexer, self.leader)


@dataclass(frozen=True, kw_only=True)
class SlidingSpec(AttentionSpec):
    """Attention over the last `window` tokens."""

    window: int
    retained: int = 0
    """Tokens kept below the window for drafters that read them again."""

    def blocks_at(self, load: Load) -> int:
        if self.dcp_sharded and load.dcp > 1:
            raise CannotGroupError("decode context parallelism does not support sliding-window layers")
        held = min(self.window - 1 + self.retained + load.in_flight_tokens, load.max_model_len)
        return ceil_div(held, self.block_size) + 1  # the window may begin inside a block

    def same_type_as(self, others: Sequence[KvSpec]) -> bool:
        return all(isinstance(other, SlidingSpec) and other.window == self.window for other in others)


@dataclass(frozen=True, kw_only=True)
class SlidingMlaSpec(SlidingSpec):
    """A sliding window of latents."""

    heads: int = 1
    head_size_v: int = 0
    tp_shards: int | None = 1
    cache_dtype: str | None = None
    alignment: int | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        _pad_to_alignment(self, self.alignment)

    def same_type_as(self, others: Sequence[KvSpec]) -> bool:
        return all(isinstance(other, SlidingMlaSpec) and other.window == self.window for other in others)

    def merges_with(self, others: Sequence[KvSpec]) -> bool:
        mla = [other for other in others if isinstance(other, SlidingMlaSpec)]
        return len(mla) == len(others) and all(other.merge_key() == self.merge_key() for other in mla)

    def merge_key(self) -> tuple[object, ...]:
        """What vLLM compares before it folds them; the head size is not among it."""
        return (
            self.dcp_sharded, self.tp_shards, self.cache_dtype, self.tokens_per_state, self.version, self.window,
            self.retained, self.stride_alignment, self.stride_kernel,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChunkedSpec(AttentionSpec):
    """Attention inside chunks of fixed length (Llama 4)."""

    chunk: int

    def blocks_at(self, load: Load) -> int:
        return ceil_div(min(self.chunk + load.in_flight_tokens, load.max_model_len), self.block_size)

    def same_type_as(self, others: Sequence[KvSpec]) -> bool:
        return all(isinstance(other, ChunkedSpec) and other.chunk == self.chunk for other in others)


@dataclass(frozen=True, kw_only=True)
class StateSpec(KvSpec):
    """A state of fixed size: a block holds one, whatever `block_size` says."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_padded: int | None = None
    mixer: str = "mamba2"
    mode: str = "none"
    spec_blocks: int = 0
    checkpoint_blocks: int = 0
    checkpoint_alignment: int | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the state itself."""
        return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_bytes(self) -> int:
        if self.page_padded is None:
            return self.state_bytes
        if self.page_padded < self.state_bytes:
            raise CannotGroupError("a layer's state is larger than the page it is padded to; vLLM stops here")
        return self.page_padded

    def blocks_at(self, load: Load) -> int:
        if load.state_mode == "align":
            return 2 + self.spec_blocks + self.checkpoint_blocks
        if load.state_mode == "all":  # until 0.31
            return ceil_div(load.max_model_len, self.block_size)
        return 1 + self.spec_blocks

    def same_type_as(self, others: Sequence[KvSpec]) -> bool:
        return all(isinstance(other, StateSpec) and other.type_key() == self.type_key() for other in others)

    def type_key(self) -> tuple[object, ...]:
        """What must be equal in states that may share a group."""
        return (self.spec_blocks, self.checkpoint_blocks, self.checkpoint_alignment, self.page_bytes)


_ATTENTION_FIELDS = tuple(field.name for field in fields(AttentionSpec))


class NamedSpec(NamedTuple):
    """One layer's cache under the name that is its own in the whole model."""

    layer: str
    spec: KvSpec


RankSpecs = tuple[NamedSpec, ...]


def _pad_to_alignment(spec: MlaSpec | SlidingMlaSpec, alignment: int | None) -> None:
    if alignment is None:
        return
    padded = round_up(spec.unpadded_page_bytes, alignment)
    if padded != spec.unpadded_page_bytes:
        object.__setattr__(spec, "page_padded", padded)


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
