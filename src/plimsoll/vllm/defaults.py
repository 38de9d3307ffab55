"""vLLM's default batch, in sequences and tokens: it depends on the release and on the card.

Read in `engine/arg_utils.py` of each release (`get_batch_defaults` and its forerunners) and, for the first engine, in
`config.py`. The figures are those of `vllm serve`; the offline `LLM` class has others.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.units import GIB
from plimsoll.vllm.versions import Behaviour


class BatchLimits(NamedTuple):
    """max_num_seqs and max_num_batched_tokens before the model's context is looked at."""

    sequences: int
    tokens: int


class _Rule(NamedTuple):
    since: Behaviour
    large_from_bytes: int  # cards with at least this much memory get `large`
    large: BatchLimits
    small: BatchLimits
    excludes_a100: bool = False
    largest_from_bytes: int | None = None
    largest: BatchLimits | None = None
    large_names: tuple[str, ...] = ()  # before memory was looked at, the name was


_RULES: tuple[_Rule, ...] = (
    _Rule(Behaviour.V1_ENGINE, 1 << 62, BatchLimits(1024, 8192), BatchLimits(1024, 2048), large_names=("h100", "h200")),
    _Rule(Behaviour.FEWER_SEQUENCES, 1 << 62, BatchLimits(1024, 8192), BatchLimits(256, 2048), large_names=("h100", "h200")),
    _Rule(Behaviour.BATCH_BY_MEMORY, 70 * GIB, BatchLimits(1024, 8192), BatchLimits(256, 2048)),
    _Rule(Behaviour.A100_BATCH, 70 * GIB, BatchLimits(1024, 8192), BatchLimits(256, 2048), excludes_a100=True),
    _Rule(
        Behaviour.LARGEST_BATCH,
        70 * GIB,
        BatchLimits(1024, 8192),
        BatchLimits(256, 2048),
        excludes_a100=True,
        largest_from_bytes=160 * GIB,
        largest=BatchLimits(1024, 16384),
    ),
)


def batch_limits(release: str, gpu_name: str, gpu_bytes: int) -> BatchLimits | None:
    """Returns the defaults of the second engine (V1); None for releases that ran the first one by default."""
    rules = [rule for rule in _RULES if rule.since.is_in(release)]
    if not rules:
        return None
    rule = rules[-1]
    name = gpu_name.lower()
    if rule.largest is not None and rule.largest_from_bytes is not None and gpu_bytes >= rule.largest_from_bytes:
        return rule.largest
    if any(n in name for n in rule.large_names):
        return rule.large
    if gpu_bytes >= rule.large_from_bytes and not (rule.excludes_a100 and "a100" in name):
        return rule.large
    return rule.small


def batch_limits_v0(context: int, *, chunked: bool) -> BatchLimits:
    """The first engine: a batch holds the longest prompt unless prompts are chunked (on by itself above 32k)."""
    return BatchLimits(256, 2048 if chunked else max(context, 2048))
