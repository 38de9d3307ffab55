"""Which layers share a block table, and what one block costs: vLLM 0.32's `get_kv_cache_groups`.

All groups draw their blocks from one pool, so every block costs what the dearest group needs:

    group 0 (full)      | full.0  | full.1  |         a block id belongs to one group at a time;
    group 1 (sliding)   | slide.0 | slide.2 |         short groups leave the rest of the block unused
    group 2 (sliding)   | slide.1 | padding |
                        |<-- bytes per block -->|
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from plimsoll.domain.units import ceil_div, round_up
from plimsoll.plan.kv_specs import (
    AttentionSpec,
    CannotGroupError,
    ChunkedSpec,
    FullSpec,
    KvSpec,
    Load,
    MlaSpec,
    RankSpecs,
    SlidingMlaSpec,
    SlidingSpec,
    StateSpec,
)

Layers = dict[str, KvSpec]


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
        """Tokens in a block."""
        return self.specs[0].block_size

    def blocks_at(self, load: Load) -> int:
        """Most blocks one request holds of this group."""
        return max(spec.blocks_at(load) for spec in self.kinds)


def groups_of(
    specs: RankSpecs, *, hybrid_manager: bool = True, interleaved: bool = False, tolerance: float = 1.5
) -> list[Group]:
    """The groups of a whole model's layers; CannotGroupError where vLLM would stop.

    `interleaved` is a cache layout with the block outermost. Types whose layer counts differ by less than
    `tolerance` are padded to the larger count instead of being split by the smaller.
    """
    layers: Layers = dict(specs)
    if not hybrid_manager:
        layers = _without_hybrid_manager(layers)
    if not layers:
        return []
    if _is_uniform(layers.values()):
        return [_merged(layers, list(layers))]
    if _is_one_type(layers):
        return [_of_one_type(layers)]
    if interleaved and len(_pages(layers)) > 1:
        return _packed(layers)
    unified = _with_equal_pages(layers)
    if unified is None:
        return [_fallback(layers)]
    return _of_equal_pages(unified, tolerance)


def bytes_per_block(groups: Iterable[Group], here: frozenset[str] | None = None, *, interleaved: bool = False) -> int:
    """What one block costs on a rank that has only the layers `here` (None: all of them)."""
    costs, alignments = [0], [1]
    for group in groups:
        if here is None:
            mine = group.kinds
        else:
            mine = Counter(spec for layer, spec in zip(group.layers, group.specs, strict=True) if layer in here)
        costs.append(sum(count * (spec.page_bytes if interleaved else spec.stride_bytes) for spec, count in mine.items()))
        alignments.extend(spec.alignment_bytes for spec in mine)
    return round_up(max(costs), math.lcm(*alignments)) if interleaved else max(costs)


def _pages(layers: Mapping[str, KvSpec]) -> set[int]:
    return {spec.page_bytes for spec in set(layers.values())}


def _is_uniform(specs: Iterable[KvSpec]) -> bool:
    distinct = list(dict.fromkeys(specs))
    return len(distinct) == 1 or distinct[0].merges_with(distinct)


def _is_one_type(layers: Mapping[str, KvSpec]) -> bool:
    distinct = list(dict.fromkeys(layers.values()))
    if len({(spec.block_size, spec.dcp_sharded) for spec in distinct}) > 1:
        return False
    return distinct[0].same_type_as(distinct)


def _merged(layers: Mapping[str, KvSpec], names: Sequence[str]) -> Group:
    """One group whose layers are all taken to be like the first, as vLLM's merge does."""
    return Group(tuple(names), (layers[names[0]],) * len(names))


def _of_one_type(layers: Mapping[str, KvSpec]) -> Group:
    return Group(tuple(layers), tuple(layers.values()))


def _without_hybrid_manager(layers: Layers) -> Layers:
    """Local attention becomes full attention, among the caches that DCP shards and among those it does not."""
    promoted = dict(layers)
    for replicated in (False, True):
        part = {
            name: spec
            for name, spec in layers.items()
            if replicated == (isinstance(spec, AttentionSpec) and not spec.dcp_sharded)
        }
        if part:
            promoted.update(_promoted(part))
    return promoted


def _promoted(layers: Layers) -> Layers:
    if _is_uniform(layers.values()) or _is_one_type(layers):
        return layers
    result = dict(layers)
    full_sizes = {spec.block_size for spec in layers.values() if isinstance(spec, FullSpec)}
    if full_sizes:
        block_size = full_sizes.pop() if len(full_sizes) == 1 else None
        result = {name: _as_full(spec, block_size) for name, spec in layers.items()}
    if not (_is_uniform(result.values()) or _is_one_type(result)):
        raise CannotGroupError("without the hybrid manager the layers' caches cannot be made one type")
    return result


def _as_full(spec: KvSpec, block_size: int | None) -> KvSpec:
    if isinstance(spec, SlidingMlaSpec):
        raise CannotGroupError("vLLM 0.32 cannot turn sliding-window MLA into full attention")
    if not isinstance(spec, SlidingSpec | ChunkedSpec):
        return spec
    size = block_size or spec.block_size
    padded = spec.page_padded
    if padded is not None:
        padded = max(padded, spec.unpadded_page_bytes * size // spec.block_size)
    kept = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
    window = spec.window if isinstance(spec, SlidingSpec) else None
    chunk = spec.chunk if isinstance(spec, ChunkedSpec) else None
    return FullSpec(**{**kept, "block_size": size, "page_padded": padded}, window=window, chunk=chunk)


def _with_equal_pages(layers: Layers) -> Layers | None:
    """Smaller pages made equal to the largest, by longer blocks where that divides, else by padding; None where neither."""
    largest = max(_pages(layers))
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


def _fallback(layers: Layers) -> Group:
    """MLA beside ordinary sliding-window layers: all of them allocated as full attention."""
    odd = any(isinstance(spec, SlidingMlaSpec | ChunkedSpec) for spec in layers.values())
    mla = any(isinstance(spec, MlaSpec) for spec in layers.values())
    sliding = any(isinstance(spec, SlidingSpec) for spec in layers.values())
    if odd or not (mla and sliding):
        raise CannotGroupError("an MLA layer's cache page does not divide the largest page, and cannot be padded")
    promoted = _promoted(layers)
    if not _is_one_type(promoted):
        raise CannotGroupError("an MLA layer's cache page does not divide the largest page, and cannot be padded")
    return _of_one_type(promoted)


def _of_equal_pages(layers: Layers, tolerance: float) -> list[Group]:
    """Groups of equal length: layers i, i+n, i+2n ... of a type go together, so that pipeline stages share evenly."""
    by_spec: dict[KvSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    buckets: list[tuple[list[KvSpec], list[str]]] = []
    for spec, names in by_spec.items():
        for specs, held in buckets:
            if _mergeable(specs, spec):
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


def _mergeable(specs: Sequence[KvSpec], spec: KvSpec) -> bool:
    try:
        return specs[0].merges_with([*specs, spec])
    except CannotGroupError:
        return False


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
    repeats = _least_padding([pack.repeats for pack in packs if pack.balanced], floor) if floor else None
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
        """Whether the bucket may be split down to one layer a group."""
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


def _least_padding(counts: Sequence[int], lowest: int) -> int:
    """The group length from `lowest` on that pads these counts least; the larger of two equals."""
    lowest = max(1, lowest)
    lengths = range(lowest, max(counts) + 1)
    if not lengths:
        return lowest
    return min(lengths, key=lambda length: (sum(-count % length for count in counts), -length))
