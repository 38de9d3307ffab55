"""The parameters of one rank, one fused tensor at a time, as vLLM allocates them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from plimsoll.domain.units import MIB, ceil_div, round_up

VOCABULARY_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


class Storage(Enum):
    """How a tensor is kept, which decides whether quantisation touches it."""

    LINEAR = "linear"
    EXPERTS = "experts"
    PLAIN = "plain"
    FLOAT32 = "float32"


class Part(NamedTuple):
    """One tensor of one rank (or `stack` equal matrices in one tensor), under its module's name in the checkpoint."""

    name: str
    outputs: int
    inputs: int = 1
    storage: Storage = Storage.PLAIN
    stack: int = 1
    pieces: int = 1
    """How many matrices of the checkpoint are fused in it: each has a LoRA of its own."""

    @property
    def elements(self) -> int:
        """Its number of parameters."""
        return self.outputs * self.inputs * self.stack


class Ranks(NamedTuple):
    """Over how many ranks each kind of tensor is cut."""

    tensor: int = 1
    experts: int = 1
    by_expert: bool = False


def share(size: int, ranks: int) -> int:
    """What the largest of these ranks holds of a size, rounded up."""
    return ceil_div(size, ranks)


def padded_vocabulary(size: int) -> int:
    """The rows vLLM gives an embedding: up to the next 64."""
    return round_up(size, VOCABULARY_PADDING)


def linear(name: str, outputs: int, inputs: int, *, bias: int = 0, pieces: int = 1) -> list[Part]:
    """A matrix that quantisation may touch, with a bias of so many rows."""
    parts = [Part(name, outputs, inputs, Storage.LINEAR, 1, pieces)]
    if bias:
        parts.append(Part(name, bias))
    return parts


def norm(width: int, *, bias: bool = False, count: int = 1) -> list[Part]:
    """Normalisation weights, with a bias in a LayerNorm."""
    return [Part("norm", width)] * (count * (2 if bias else 1))


_SEGMENT = 2 * MIB  # torch asks the device for large tensors in steps of this
_LARGE = 10 * MIB
_NOT_SPLIT = MIB  # a remainder up to this size stays with its tensor
_STEP = 512
_NEVER_SPLIT = 20 * MIB  # max_split_size_mb:20, under which vLLM loads from 0.21 on


def held(size: int, *, whole_segments: bool = False) -> int:
    """What torch's allocator counts for a tensor of this size, alone in its segment where it is large.

    The startups show it to the fourth decimal: Qwen3-8B holds 2 MiB more than its tensors, one for the embedding and one
    for the head, both 1187 MiB; Gemma 3 27B holds 62 MiB more, one per layer. With `whole_segments` the rest of a very large
    tensor's last segment is never given to others: Gemma 3 12B holds 120 MiB more on 0.25.1 for it, Qwen2.5-1.5B 91 MiB.
    """
    if whole_segments and size >= _NEVER_SPLIT:
        return size + -size % _SEGMENT
    if size >= _LARGE and (left := -size % _SEGMENT) <= _NOT_SPLIT:
        return size + left
    return round_up(size, _STEP)
