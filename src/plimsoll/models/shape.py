"""What a memory planner needs to know of a model, read once from its config.json.

`ModelShape.from_config` is the only door: no other code looks at the keys of a config.json. Sizes mean what vLLM 0.32
means by them. A layer's cache costs `kv_heads * (head_dim + v_head_dim)` elements per token whatever its kind, because
an MLA layer is described as it is cached: one head, the latent and the rotary part together, no separate value.
What the file does not say is None, or carries a sentence in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How one layer mixes tokens, which decides what it keeps of a request."""

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
        """Whether the layer's memory grows with the request (up to a window, where it has one)."""
        return self in _KEEPS_TOKENS

    @property
    def keeps_state(self) -> bool:
        """Whether the layer keeps a state of fixed size per request."""
        return self in _KEEPS_STATE


_KEEPS_TOKENS = frozenset(
    {
        LayerKind.FULL,
        LayerKind.SLIDING,
        LayerKind.CHUNKED_LOCAL,
        LayerKind.MLA,
        LayerKind.MLA_SLIDING,
        LayerKind.MLA_COMPRESSED,
        LayerKind.FULL_AND_MAMBA2,
    }
)
_KEEPS_STATE = frozenset(
    {
        LayerKind.MAMBA1,
        LayerKind.MAMBA2,
        LayerKind.FULL_AND_MAMBA2,
        LayerKind.GATED_DELTA_NET,
        LayerKind.KIMI_DELTA,
        LayerKind.LINEAR,
        LayerKind.SHORT_CONV,
    }
)


class FeedForward(StrEnum):
    """What follows the mixing in one layer."""

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
    """How the position encoding was stretched; `max_context` has it applied as vLLM 0.32 applies it."""

    kind: str
    factor: float | None = None
    original_context: int | None = None


@dataclass(frozen=True)
class Mla:
    """The ranks and widths of multi-head latent attention (of DeepSeek V4, whose file gives only their sum, too)."""

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
    """How the weights are stored. `bits` is None where layers differ or the method does not say."""

    method: str
    algorithm: str | None = None
    bits: int | None = None
    group_size: int | None = None
    block: tuple[int, ...] | None = None
    kv_cache: str | None = None
    """The cache type the checkpoint asks for, such as "fp8"; what vLLM uses under --kv-cache-dtype auto."""
    ignored: tuple[str, ...] = ()


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
    default_context: int  # what vLLM takes when --max-model-len is not given; shorter than `max_context` under LongRoPE only
    embedding_size: int  # width of the token embeddings: the hidden size, except in OPT-350m
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    intermediate_size: int | None = None
    rope: RopeScaling | None = None
    sliding_window: int | None = None
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
        """How many layers are of one of these kinds."""
        return sum(layer.kind in kinds for layer in self.layers)
