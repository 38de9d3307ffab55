"""How many KV blocks a launch gets and what they hold: vLLM 0.32's planner in plain integers.

    available bytes ──> blocks (smallest rank) ──> tokens, concurrency
    layer specs ──> groups ──> bytes per block ──┘
                      └──> blocks of one request at max_model_len ──> the start-up check

Block 0 is the null block: vLLM counts it among `num_blocks` and never hands it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from plimsoll.plan.kv_groups import Group, bytes_per_block, groups_of
from plimsoll.plan.kv_settings import KvSettings
from plimsoll.plan.kv_shapes import specs_of_all_stages
from plimsoll.plan.kv_specs import (
    CannotGroupError,
    ChunkedSpec,
    KvSpec,
    Load,
    MlaSpec,
    NamedSpec,
    RankSpecs,
    SlidingMlaSpec,
    SlidingSpec,
    StateSpec,
)

__all__ = ["GroupPlan", "KvPlan", "KvRefusal", "KvSettings", "WhyRefused", "plan_kv", "specs_of_all_stages"]


class WhyRefused(StrEnum):
    """Which of vLLM's three checks stops the start."""

    NO_MEMORY = "no-memory"
    """"No available memory for the cache blocks.\""""
    TOO_LONG = "too-long"
    """"To serve at least one request with the model's max seq len ...\""""
    NOTHING_FITS = "nothing-fits"
    """"Cannot auto-fit max_model_len ...\""""


@dataclass(frozen=True)
class KvRefusal:
    """The numbers in vLLM's message; those of `TOO_LONG` are the bytes it compares, less the null block."""

    why: WhyRefused
    needed_bytes: int
    available_bytes: int
    estimated_max_len: int


@dataclass(frozen=True)
class GroupPlan:
    """One group of layers under one block table."""

    layers: int
    kind: str
    block_size: int
    blocks_per_request: int
    window: int | None = None
    """Tokens that a sliding group looks back at."""


@dataclass(frozen=True)
class KvPlan:
    """What vLLM makes of the memory; the figures of the rank with the fewest blocks."""

    block_size: int
    bytes_per_block: int
    num_blocks: int
    tokens: int
    """What vLLM prints as "GPU KV cache size"."""
    max_concurrency: float | None
    """None for a model that keeps nothing."""
    groups: tuple[GroupPlan, ...]
    max_model_len: int
    """As auto-fit leaves it."""
    blocks_per_request: int
    bytes_for_one_request: int
    fits_one_request: bool
    largest_context_that_fits: int
    bytes_per_block_by_rank: tuple[int, ...]
    refusal: KvRefusal | None = None


def plan_kv(specs_per_rank: Sequence[RankSpecs], settings: KvSettings, available_bytes: int | Sequence[int]) -> KvPlan:
    """Plan the cache of these ranks (TP ranks are alike: one per pipeline stage is enough).

    CannotGroupError where vLLM refuses the layers themselves; too little memory is told in the plan.
    """
    available = [available_bytes] * len(specs_per_rank) if isinstance(available_bytes, int) else list(available_bytes)
    assert len(available) == len(specs_per_rank) > 0, "one amount of memory for each rank"
    groups = _model_groups(specs_per_rank, settings)
    if not groups:
        return _nothing_kept(settings, len(available))
    pool = _Pool(groups, specs_per_rank, available, settings)
    limit = settings.context_limit or settings.max_model_len
    length, refusal = settings.max_model_len, None
    if settings.auto_fit:
        length = pool.largest_context(settings.max_model_len)
        if length == 0:
            refusal = KvRefusal(WhyRefused.NOTHING_FITS, pool.needed(1), min(pool.checked), 0)
            length = settings.max_model_len
    refusal = refusal or pool.refusal(length)
    blocks = pool.blocks_at(length)
    rank = pool.ruling_rank
    concurrency = pool.num_blocks / blocks
    if settings.rules.tokens_by_concurrency:
        tokens = int(concurrency * length)
    else:
        tokens = pool.num_blocks // len(groups) * min(group.block_size for group in groups) * settings.dcp
    return KvPlan(
        block_size=_block_size(groups),
        bytes_per_block=pool.block_bytes[rank],
        num_blocks=pool.num_blocks,
        tokens=tokens,
        max_concurrency=concurrency,
        groups=tuple(_described(group, pool.load(length)) for group in groups),
        max_model_len=length,
        blocks_per_request=blocks,
        bytes_for_one_request=blocks * pool.block_bytes[rank],
        fits_one_request=refusal is None,
        largest_context_that_fits=pool.largest_context(limit),
        bytes_per_block_by_rank=tuple(pool.block_bytes),
        refusal=refusal,
    )


class _Pool:
    """The memory of all ranks, cut into blocks of the same groups."""

    def __init__(self, groups: list[Group], specs: Sequence[RankSpecs], available: Sequence[int], settings: KvSettings) -> None:
        self.settings = settings
        self.block_bytes = _block_bytes(groups, specs, settings)
        override = settings.num_blocks_override
        if override is not None:
            available = [override * cost for cost in self.block_bytes]
        self.per_rank = [max(0, memory // cost) for memory, cost in zip(available, self.block_bytes, strict=True)]
        self.num_blocks = min(self.per_rank)
        self.ruling_rank = self.per_rank.index(self.num_blocks)
        reserved = 1 if settings.rules.reserves_null_block else 0
        self.checked = [memory - reserved * cost for memory, cost in zip(available, self.block_bytes, strict=True)]
        # Equal groups need equally many blocks, so each is counted once.
        self._counts = Counter(tuple(group.kinds) for group in groups)

    def load(self, length: int) -> Load:
        settings = self.settings
        return Load(length, settings.in_flight_tokens, settings.dcp, settings.resolved_state_mode)

    def blocks_at(self, length: int) -> int:
        load = self.load(length)
        return sum(
            groups * max(spec.blocks_at(load) for spec in specs) for specs, groups in self._counts.items()
        )  # fmt: skip

    def needed(self, length: int) -> int:
        return self.blocks_at(length) * self.block_bytes[self.ruling_rank]

    def largest_context(self, limit: int, rank: int | None = None) -> int:
        """The longest request up to `limit` that passes the check, of one rank or of all; 0 where one token does not."""
        ranks = range(len(self.block_bytes)) if rank is None else [rank]
        budget = min(self.checked[index] // self.block_bytes[index] for index in ranks)
        fits, beyond = 0, limit + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if self.blocks_at(middle) <= budget:
                fits = middle
            else:
                beyond = middle
        return fits

    def refusal(self, length: int) -> KvRefusal | None:
        """What the first rank that fails vLLM's check would say."""
        blocks = self.blocks_at(length)
        for rank, (memory, cost) in enumerate(zip(self.checked, self.block_bytes, strict=True)):
            if memory <= 0:
                return KvRefusal(WhyRefused.NO_MEMORY, blocks * cost, memory, 0)
            if blocks * cost > memory:
                return KvRefusal(WhyRefused.TOO_LONG, blocks * cost, memory, self.largest_context(length, rank))
        return None


def _model_groups(specs_per_rank: Sequence[RankSpecs], settings: KvSettings) -> list[Group]:
    """Groups of the whole model: a pipeline stage has its part of each."""
    merged: dict[str, KvSpec] = {}
    for specs in specs_per_rank:
        for name, spec in specs:
            if merged.setdefault(name, spec) != spec:
                raise CannotGroupError(f"the ranks disagree on the cache of layer {name}")
    retained = max(0, settings.prefill_lookahead - 1)
    named = tuple(
        NamedSpec(
            name, replace(spec, retained=retained) if isinstance(spec, SlidingSpec) and spec.retained != retained else spec
        )
        for name, spec in merged.items()
    )
    chunked = any(isinstance(spec, ChunkedSpec) for spec in merged.values())
    by_default = settings.rules.hybrid_manager and not chunked
    return groups_of(
        named,
        hybrid_manager=by_default if settings.hybrid_manager is None else settings.hybrid_manager,
        interleaved=settings.interleaved,
        tolerance=settings.rules.group_tolerance,
    )


def _block_bytes(groups: list[Group], specs_per_rank: Sequence[RankSpecs], settings: KvSettings) -> list[int]:
    costs = []
    for specs in specs_per_rank:
        here = None if len(specs_per_rank) == 1 else frozenset(name for name, _ in specs)
        costs.append(bytes_per_block(groups, here, interleaved=settings.interleaved))
    if not all(costs):
        raise CannotGroupError("a pipeline stage has no layer that keeps a cache; vLLM cannot size its blocks")
    pages = {spec.page_bytes for group in groups for spec in group.kinds}
    if len(pages) > 1 and len(groups) > 1 and not settings.interleaved:
        raise CannotGroupError("groups of different page sizes need a cache layout with the block outermost")
    return costs


def _block_size(groups: list[Group]) -> int:
    """The smallest block of a group; DeepSeek V4's compressors have tiny ones of their own, which nobody means."""
    usual = [group.block_size for group in groups if not isinstance(group.specs[0], SlidingMlaSpec)]
    return min(usual or [group.block_size for group in groups])


def _described(group: Group, load: Load) -> GroupPlan:
    kinds = {_kind(spec) for spec in group.kinds}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    windows = {spec.window for spec in group.kinds if isinstance(spec, SlidingSpec)}
    window = windows.pop() if kind.startswith("sliding") and len(windows) == 1 else None
    return GroupPlan(len(group.layers), kind, group.block_size, group.blocks_at(load), window)


def _kind(spec: KvSpec) -> str:
    if isinstance(spec, StateSpec):
        return "state"
    if isinstance(spec, SlidingSpec):
        return "sliding-mla" if isinstance(spec, SlidingMlaSpec) else "sliding"
    if isinstance(spec, MlaSpec):
        return "indexer" if spec.indexer else "mla"
    return "chunked" if isinstance(spec, ChunkedSpec) else "full"


def _nothing_kept(settings: KvSettings, ranks: int) -> KvPlan:
    """An encoder keeps nothing; vLLM still makes the null block."""
    limit = settings.context_limit or settings.max_model_len
    return KvPlan(
        block_size=settings.block_size or 16,
        bytes_per_block=0,
        num_blocks=1,
        tokens=0,
        max_concurrency=None,
        groups=(),
        max_model_len=settings.max_model_len,
        blocks_per_request=0,
        bytes_for_one_request=0,
        fits_one_request=True,
        largest_context_that_fits=limit,
        bytes_per_block_by_rank=(0,) * ranks,
    )
