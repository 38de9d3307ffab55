"""Counts the KV blocks a launch gets and what they hold: vLLM 0.32's planner in plain integers.

    available bytes ──> blocks (smallest rank) ──> tokens, concurrency
    layer specs ──> groups ──> bytes per block ──┘
                      └──> blocks of one request at max_model_len ──> the start-up check

Block 0 is the null block: vLLM counts it among `num_blocks` and never hands it out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property

from plimsoll.plan.kv_layers import (
    AttentionSpec,
    CannotGroupError,
    ChunkedSpec,
    FullSpec,
    KvSpec,
    Load,
    MlaSpec,
    NamedSpec,
    RankSpecs,
    SlidingMlaSpec,
    SlidingSpec,
    StateSpec,
    in_flight_tokens,
    state_mode_of,
)
from plimsoll.plan.settings import Settings
from plimsoll.units import ceil_div
from plimsoll.vllm.versions import Behaviour

# Layers that share a block table form a group (vLLM 0.32's `get_kv_cache_groups`). All groups draw their blocks from one pool,
# so every block costs what the dearest group needs:
#
#   group 0 (full)      | full.0  | full.1  |         a block id belongs to one group at a time;
#   group 1 (sliding)   | slide.0 | slide.2 |         short groups leave the rest of the block unused
#   group 2 (sliding)   | slide.1 | padding |
#                       |<- bytes per block ->|

Layers = dict[str, KvSpec]
# Types are padded to one length when the longest is shorter than this times the shortest.
_GROUP_TOLERANCES = ((Behaviour.GROUPS_WITHIN_A_HALF, 1.5), (Behaviour.GROUPS_WITHIN_A_QUARTER, 1.25))


@dataclass(frozen=True)
class Group:
    """Layers under one block table; `specs` has the spec of each, in the same order."""

    layers: tuple[str, ...]
    specs: tuple[KvSpec, ...]

    @cached_property
    def kinds(self) -> Counter[KvSpec]:
        """How many layers have each spec."""
        return Counter(self.specs)

    @property
    def block_size(self) -> int:
        return self.specs[0].block_size

    def blocks_at(self, load: Load) -> int:
        """Most blocks one request holds of this group."""
        return max(spec.blocks_at(load) for spec in self.kinds)

    def described(self, load: Load) -> GroupPlan:
        kinds = {_kind(spec) for spec in self.kinds}
        kind = kinds.pop() if len(kinds) == 1 else "mixed"
        windows = {spec.window for spec in self.kinds if isinstance(spec, SlidingSpec)}
        window = windows.pop() if kind.startswith("sliding") and len(windows) == 1 else None
        return GroupPlan(len(self.layers), kind, self.block_size, self.blocks_at(load), window)


def groups_of(
    specs: RankSpecs, *, hybrid_manager: bool = True, interleaved: bool = False, tolerance: float = 1.5
) -> list[Group]:
    """The groups of a whole model's layers; CannotGroupError where vLLM would stop.

    `interleaved` is a cache layout with the block outermost. Types whose layer counts differ by less than
    `tolerance` are padded to the larger count instead of being split by the smaller.
    """
    layers: Layers = dict(specs)
    if not hybrid_manager:  # among the caches that DCP shards and among those it does not
        unsharded: Layers = {
            name: spec for name, spec in layers.items() if isinstance(spec, AttentionSpec) and not spec.dcp_sharded
        }
        sharded = {name: spec for name, spec in layers.items() if name not in unsharded}
        layers = layers | _promoted(sharded) | _promoted(unsharded)
    if not layers:
        return []
    if _is_uniform(layers.values()):
        return [_merged(layers, list(layers))]
    if _is_one_type(layers):
        return [_of_one_type(layers)]
    if interleaved and len({spec.page_bytes for spec in layers.values()}) > 1:
        return _packed(layers)
    unified = _with_equal_pages(layers)
    if unified is not None:
        return _of_equal_pages(unified, tolerance)
    # MLA beside ordinary sliding-window layers: all of them are allocated as full attention.
    odd = any(isinstance(spec, SlidingMlaSpec | ChunkedSpec) for spec in layers.values())
    if not odd and any(isinstance(spec, SlidingSpec) for spec in layers.values()):
        promoted = _promoted(layers)
        if _is_one_type(promoted):
            return [_of_one_type(promoted)]
    raise CannotGroupError("an MLA layer's cache page does not divide the largest page, and cannot be padded")


def bytes_per_block(groups: Iterable[Group], here: frozenset[str] | None = None) -> int:
    """Returns the bytes of one block on a rank that has only the layers `here` (None: all of them)."""
    costs = [0]
    for group in groups:
        mine = group.kinds
        if here is not None:
            mine = Counter(spec for layer, spec in zip(group.layers, group.specs, strict=True) if layer in here)
        costs.append(sum(count * spec.page_bytes for spec, count in mine.items()))
    return max(costs)


def _is_uniform(specs: Iterable[KvSpec]) -> bool:
    distinct = list(dict.fromkeys(specs))
    return len(distinct) == 1 or distinct[0].merges_with(distinct)


def _is_one_type(layers: Mapping[str, KvSpec]) -> bool:
    distinct = list(dict.fromkeys(layers.values()))
    if len({(spec.block_size, spec.dcp_sharded) for spec in distinct}) > 1:
        return False
    return distinct[0].same_type_as(distinct)


def _merged(layers: Mapping[str, KvSpec], names: Sequence[str]) -> Group:
    # All layers are taken to be like the first, as vLLM's merge does.
    return Group(tuple(names), (layers[names[0]],) * len(names))


def _of_one_type(layers: Mapping[str, KvSpec]) -> Group:
    return Group(tuple(layers), tuple(layers.values()))


def _promoted(layers: Layers) -> Layers:
    """Local attention made full attention, so that all layers are of one type."""
    if not layers or _is_uniform(layers.values()) or _is_one_type(layers):
        return layers
    result = dict(layers)
    full_sizes = {spec.block_size for spec in layers.values() if isinstance(spec, FullSpec)}
    for name, spec in layers.items() if full_sizes else ():
        if isinstance(spec, SlidingMlaSpec):
            raise CannotGroupError("vLLM 0.32 cannot turn sliding-window MLA into full attention")
        if isinstance(spec, SlidingSpec | ChunkedSpec):
            size = next(iter(full_sizes)) if len(full_sizes) == 1 else spec.block_size
            kept = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
            kept["block_size"] = size
            if spec.page_padded is not None:
                kept["page_padded"] = max(spec.page_padded, spec.unpadded_page_bytes * size // spec.block_size)
            kept |= {"window": spec.window} if isinstance(spec, SlidingSpec) else {"chunk": spec.chunk}
            result[name] = FullSpec(**kept)
    if not (_is_uniform(result.values()) or _is_one_type(result)):
        raise CannotGroupError("without the hybrid manager the layers' caches cannot be made one type")
    return result


def _with_equal_pages(layers: Layers) -> Layers | None:
    """Smaller pages made equal to the largest, by longer blocks where that divides, else by padding; None where neither."""
    largest = max(spec.page_bytes for spec in layers.values())
    fitted: dict[KvSpec, KvSpec] = {}
    for spec in dict.fromkeys(layers.values()):
        page = spec.page_bytes
        if page == largest:
            fitted[spec] = spec
        elif isinstance(spec, StateSpec):
            fitted[spec] = replace(spec, page_padded=largest)
        elif largest % page == 0:
            fitted[spec] = replace(spec, block_size=spec.block_size * (largest // page))
        elif isinstance(spec, AttentionSpec) and not isinstance(spec, MlaSpec):
            fitted[spec] = replace(spec, page_padded=largest)
        else:
            return None  # sparse MLA indexes its cache in whole rows, so an MLA page cannot be padded
        if fitted[spec].page_bytes != largest:
            raise CannotGroupError("pages of different layers cannot be made equal; vLLM stops here")
    return {name: fitted[spec] for name, spec in layers.items()}


def _of_equal_pages(layers: Layers, tolerance: float) -> list[Group]:
    """Groups of equal length: layers i, i+n, i+2n ... of a type go together, so that pipeline stages share evenly."""
    by_spec: dict[KvSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    buckets: list[tuple[list[KvSpec], list[str]]] = []
    for spec, names in by_spec.items():
        for specs, held in buckets:
            with suppress(CannotGroupError):
                if specs[0].merges_with([*specs, spec]):
                    specs.append(spec)
                    held.extend(names)
                    break
        else:
            buckets.append(([spec], list(names)))
    counts = [len(names) for _, names in buckets]
    size = max(counts) if max(counts) < min(counts) * tolerance else min(counts)
    groups: list[Group] = []
    for _, names in buckets:
        parts = ceil_div(len(names), size)
        groups.extend(_merged(layers, names[part::parts]) for part in range(parts))
    return groups


def _packed(layers: Layers) -> list[Group]:
    """Groups for a layout with the block outermost, where pages of different sizes lie side by side in a block."""
    buckets: list[Layers] = []
    for name, spec in layers.items():
        for bucket in buckets:
            if _is_one_type({**bucket, name: spec}):
                bucket[name] = spec
                break
        else:
            buckets.append({name: spec})
    packs = [_Bucket(bucket) for bucket in buckets]
    floor = max((pack.repeats for pack in packs if pack.balanced and len(pack.by_page) > 1), default=0)
    repeats = None
    if floor:  # the group length that pads least; the larger of two equals
        counts = [pack.repeats for pack in packs if pack.balanced]
        lengths = range(floor, max(counts) + 1)
        repeats = min(lengths, key=lambda length: (sum(-count % length for count in counts), -length))
    anchor = max(pack.widest(len(pack.layers) if pack.is_state(repeats) else pack.parts(repeats)) for pack in packs)
    groups: list[Group] = []
    for pack in packs:
        parts = pack.parts(repeats)
        if anchor and pack.is_state(repeats):
            states = max(anchor // pack.first.page_bytes, 1)
            parts = max(parts, ceil_div(len(pack.layers), states))
        groups.extend(pack.split(parts))
    return groups


class _Bucket:
    """Layers of one type in a packed cache; balanced when every page size has equally many."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.first = next(iter(layers.values()))
        self.by_page: dict[int, list[str]] = {}
        for name, spec in layers.items():
            self.by_page.setdefault(spec.page_bytes, []).append(name)
        self.balanced = len({len(names) for names in self.by_page.values()}) == 1
        self.repeats = max(len(names) for names in self.by_page.values())

    def parts(self, repeats: int | None) -> int:
        return ceil_div(self.repeats, repeats) if self.balanced and repeats is not None else 1

    def widest(self, parts: int) -> int:
        return sum(ceil_div(len(names), parts) * page for page, names in self.by_page.items())

    def is_state(self, repeats: int | None) -> bool:
        """True if the bucket may be split down to one layer a group."""
        return isinstance(self.first, StateSpec) or (repeats is None and isinstance(self.first, SlidingSpec))

    def split(self, parts: int) -> list[Group]:
        if parts == 1:
            return [_of_one_type(self.layers)]
        pattern = list(zip(*self.by_page.values(), strict=False))  # as vLLM: one layer of each page size a repeat
        if len(pattern) * len(self.by_page) < len(self.layers):
            raise CannotGroupError("layers of uneven page sizes cannot be split over packed groups; vLLM stops here")
        groups = []
        for part in range(parts):
            names = [name for repeat in pattern[part::parts] for name in repeat]
            if not names:
                raise CannotGroupError("a packed cache group would be empty; vLLM stops here")
            groups.append(Group(tuple(names), tuple(self.layers[name] for name in names)))
        return groups


class WhyRefused(StrEnum):
    """The one of vLLM's three checks that stops the start."""

    NO_MEMORY = "no-memory"  # "No available memory for the cache blocks."
    TOO_LONG = "too-long"  # "To serve at least one request with the model's max seq len ..."
    NOTHING_FITS = "nothing-fits"  # "Cannot auto-fit max_model_len ..."


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
    window: int | None = None  # tokens that a sliding group looks back at


@dataclass(frozen=True)
class KvPlan:
    """The cache that vLLM builds in the memory; the figures of the rank with the fewest blocks."""

    block_size: int
    bytes_per_block: int
    num_blocks: int
    tokens: int  # what vLLM prints as "GPU KV cache size"
    max_concurrency: float | None  # None for a model that keeps nothing, or more than is counted
    groups: tuple[GroupPlan, ...]
    max_model_len: int  # as auto-fit leaves it
    blocks_per_request: int
    bytes_for_one_request: int
    fits_one_request: bool
    largest_context_that_fits: int
    bytes_per_block_by_rank: tuple[int, ...]
    refusal: KvRefusal | None = None


def plan_kv(
    specs_per_rank: Sequence[RankSpecs],
    settings: Settings,
    available_bytes: int | Sequence[int],
    longest: int | None = None,
) -> KvPlan:
    """Plan the cache of these ranks (TP ranks are alike: one per pipeline stage is enough).

    The largest context that fits is looked for up to `longest`, or the command's own. CannotGroupError where vLLM refuses the
    layers themselves; too little memory is the plan's `refusal`.
    """
    available = [available_bytes] * len(specs_per_rank) if isinstance(available_bytes, int) else list(available_bytes)
    assert len(available) == len(specs_per_rank) > 0, "one amount of memory for each rank"
    groups = _model_groups(specs_per_rank, settings)
    length, refusal = settings.context, None
    longest = longest or length
    if not groups:  # an encoder keeps nothing; vLLM still makes the null block
        return KvPlan(
            block_size=settings.block_size or 16, bytes_per_block=0, num_blocks=1, tokens=0, max_concurrency=None, groups=(),
            max_model_len=length, blocks_per_request=0, bytes_for_one_request=0, fits_one_request=True,
            largest_context_that_fits=longest, bytes_per_block_by_rank=(0,) * len(available),
        )  # fmt: skip
    pool = _Pool(groups, specs_per_rank, available, settings)
    cost = pool.block_bytes[pool.per_rank.index(pool.num_blocks)]
    if settings.auto_fit:
        length = pool.largest_context(length)
        if length == 0:
            length = settings.context
            refusal = KvRefusal(WhyRefused.NOTHING_FITS, pool.blocks_at(1) * cost, min(pool.checked), 0)
    refusal = refusal or pool.refusal(length)
    blocks = pool.blocks_at(length)
    concurrency = pool.num_blocks / blocks
    if Behaviour.TOKENS_BY_CONCURRENCY.is_in(settings.release):
        tokens = int(concurrency * length)
    else:
        tokens = pool.num_blocks // len(groups) * min(group.block_size for group in groups) * settings.decode_context_parallel
    # DeepSeek V4's compressors have tiny blocks of their own, which "block size" never means.
    usual = [group.block_size for group in groups if not isinstance(group.specs[0], SlidingMlaSpec)]
    return KvPlan(
        block_size=min(usual or [group.block_size for group in groups]),
        bytes_per_block=cost,
        num_blocks=pool.num_blocks,
        tokens=tokens,
        max_concurrency=concurrency,
        groups=tuple(group.described(pool.load(length)) for group in groups),
        max_model_len=length,
        blocks_per_request=blocks,
        bytes_for_one_request=blocks * cost,
        fits_one_request=refusal is None,
        largest_context_that_fits=pool.largest_context(longest),
        bytes_per_block_by_rank=tuple(pool.block_bytes),
        refusal=refusal,
    )


class _Pool:
    """The memory of all ranks, cut into blocks of the same groups."""

    def __init__(self, groups: list[Group], specs: Sequence[RankSpecs], available: Sequence[int], settings: Settings) -> None:
        heres = [None] if len(specs) == 1 else [frozenset(name for name, _ in rank) for rank in specs]
        self.block_bytes = [bytes_per_block(groups, here) for here in heres]
        if not all(self.block_bytes):
            raise CannotGroupError("a pipeline stage has no layer that keeps a cache; vLLM cannot size its blocks")
        pages = {spec.page_bytes for group in groups for spec in group.kinds}
        if len(pages) > 1 and len(groups) > 1 and not settings.interleaved:
            raise CannotGroupError("groups of different page sizes need a cache layout with the block outermost")
        if (override := settings.num_gpu_blocks_override) is not None:
            available = [override * cost for cost in self.block_bytes]
        self.per_rank = [max(0, memory // cost) for memory, cost in zip(available, self.block_bytes, strict=True)]
        self.num_blocks = min(self.per_rank)
        reserved = 1 if Behaviour.NULL_BLOCK.is_in(settings.release) else 0
        self.checked = [memory - reserved * cost for memory, cost in zip(available, self.block_bytes, strict=True)]
        # Equal groups need equally many blocks, so each is counted once.
        self._counts = Counter(tuple(group.kinds) for group in groups)
        self._conditions = in_flight_tokens(settings), settings.decode_context_parallel, state_mode_of(settings)

    def load(self, length: int) -> Load:
        return Load(length, *self._conditions)

    def blocks_at(self, length: int) -> int:
        load = self.load(length)
        return sum(groups * max(spec.blocks_at(load) for spec in specs) for specs, groups in self._counts.items())

    def largest_context(self, limit: int, rank: int | None = None) -> int:
        """The longest request up to `limit` that passes the check, on one rank or on all; 0 where one token does not."""
        ranks = range(len(self.block_bytes)) if rank is None else [rank]
        budget = min(self.checked[index] // self.block_bytes[index] for index in ranks)
        return bisect_right(range(1, limit + 1), budget, key=self.blocks_at)

    def refusal(self, length: int) -> KvRefusal | None:
        """The refusal of the first rank that fails vLLM's check, or None where all pass."""
        blocks = self.blocks_at(length)
        for rank, (memory, cost) in enumerate(zip(self.checked, self.block_bytes, strict=True)):
            if memory <= 0:
                return KvRefusal(WhyRefused.NO_MEMORY, blocks * cost, memory, 0)
            if blocks * cost > memory:
                return KvRefusal(WhyRefused.TOO_LONG, blocks * cost, memory, self.largest_context(length, rank))
        return None


def _model_groups(specs_per_rank: Sequence[RankSpecs], settings: Settings) -> list[Group]:
    """Groups of the whole model: a pipeline stage has its part of each."""
    merged: dict[str, KvSpec] = {}
    for specs in specs_per_rank:
        for name, spec in specs:
            if merged.setdefault(name, spec) != spec:
                raise CannotGroupError(f"the ranks disagree on the cache of layer {name}")
    chunked = any(isinstance(spec, ChunkedSpec) for spec in merged.values())
    by_default = Behaviour.HYBRID_KV_MANAGER.is_in(settings.release) and not chunked
    return groups_of(
        tuple(NamedSpec(name, spec) for name, spec in merged.items()),
        hybrid_manager=by_default if settings.hybrid_manager is None else settings.hybrid_manager,
        interleaved=settings.interleaved,
        tolerance=next((limit for change, limit in _GROUP_TOLERANCES if change.is_in(settings.release)), 1.0),
    )


def _kind(spec: KvSpec) -> str:
    if isinstance(spec, StateSpec):
        return "state"
    if isinstance(spec, SlidingSpec):
        return "sliding-mla" if isinstance(spec, SlidingMlaSpec) else "sliding"
    if isinstance(spec, MlaSpec):
        return "indexer" if spec.indexer else "mla"
    return "chunked" if isinstance(spec, ChunkedSpec) else "full"
