"""A category for every block in use: by the stack that asked for it, else by sizes, else by sizes and what a log states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.doctor.snapshot_parts import Category, category_of_stack, is_of_profile_run
from plimsoll.domain.measured import PRINTED_TOLERANCE
from plimsoll.domain.memory_snapshot import DEFAULT_POOL, FREE, NO_STACK, Block, Segment, Snapshot

_MIB = 1 << 20
_LAYERS = 4  # fewer equal blocks are chance
_FEW_LAYERS = 8  # so few equal blocks need three sizes that agree, more need two
_LAYER_SIZE = _MIB
_LAYER_SHARE = 0.005  # of the live bytes, all equal blocks together
_ONE_HUGE_SHARE = 0.25  # of the live bytes
_ONE_HUGE_TIMES = 4  # as large as the next largest
_KV_UNUSED = 0.01  # of the KV cache's memory: vLLM makes whole blocks for all layers and leaves the rest


class LogHints(NamedTuple):
    """What a log of the same server states, per device; used only where no stack was recorded."""

    weights_bytes: int | None = None  # "Model loading took"
    kv_bytes: int | None = None  # "Available KV cache memory", or as set by --kv-cache-memory-bytes


class Named(NamedTuple):
    """The category of each block, as segments and blocks lie in the snapshot; free blocks have none."""

    blocks: tuple[tuple[Category | None, ...], ...]
    by_size: frozenset[Category]  # where sizes, not stacks, were the reason


def categories(snapshot: Snapshot, hints: LogHints | None = None) -> Named:
    """Name every block that is in use."""
    stacks = [category_of_stack(snapshot.stack_of(stack)) for stack in range(len(snapshot.stacks))]
    lasting = [category is Category.ACTIVATIONS and is_of_profile_run(snapshot.stack_of(stack))
               for stack, category in enumerate(stacks)]  # fmt: skip
    devices = {segment.device for segment in snapshot.segments}
    sizes = {device: _Sizes(snapshot, device, stacks, hints or LogHints()) for device in devices}
    by_size: set[Category] = set()
    named = []
    for segment in snapshot.segments:
        known = sizes[segment.device]
        row: list[Category | None] = []
        for block in segment.blocks:
            if block.state == FREE:
                row.append(None)
                continue
            category = stacks[block.stack]
            if block.stack == NO_STACK:
                category = known.category(segment, block)
                by_size.add(category)
            elif segment.pool != DEFAULT_POOL and category not in (Category.WEIGHTS, Category.KV, Category.LORA):
                category = Category.GRAPHS
            elif lasting[block.stack] and known.has_kv:
                category = Category.WORKSPACE  # the KV cache comes after the trial run: what outlived it is cuBLAS's and such
            row.append(category)
        named.append(tuple(row))
    return Named(tuple(named), frozenset(by_size - {Category.UNKNOWN}))


def _asked(block: Block) -> int:
    """Equal requests may get blocks of different sizes; blocks of equal requests are told by what was asked for."""
    return block.requested or block.size


class _Sizes:
    """What sizes tell of one device's blocks without a stack."""

    def __init__(self, snapshot: Snapshot, device: int, stacks: list[Category], hints: LogHints) -> None:
        live = list(_live(snapshot, device))
        by_stack = {stacks[block.stack] for _, block in live if block.stack != NO_STACK}
        self.has_kv = Category.KV in by_stack
        total = sum(block.size for _, block in live)
        pools: Counter[tuple[int, int]] = Counter()
        for segment, block in live:
            pools[segment.pool] += block.size
        # Graphs are a small part of a server. A private pool with half of everything is one that sleep mode keeps apart.
        self.graph_pools = {pool for pool, held in pools.items() if pool != DEFAULT_POOL and held * 2 < total}
        self.counts: Counter[int] = Counter()
        self.held: Counter[int] = Counter()  # bytes by what was asked for
        for segment, block in live:
            if block.stack == NO_STACK and segment.pool not in self.graph_pools:
                self.counts[_asked(block)] += 1
                self.held[_asked(block)] += block.size
        self.named = dict.fromkeys(self._layers(total), Category.WEIGHTS_OR_KV)
        if (huge := self._huge(total, is_alone=len(live) == 1)) and _may_be_kv(self.held[huge], hints.kv_bytes):
            self.named[huge] = Category.KV
        if not by_stack & {Category.KV, Category.WEIGHTS}:
            self._use(hints)

    def _layers(self, total: int) -> set[int]:
        """Sizes of which there is one per layer: several different ones, equally often. One size alone may be anything."""
        often = {
            asked: count for asked, count in self.counts.items()
            if count >= _LAYERS and asked >= _LAYER_SIZE and self.held[asked] >= max(1, int(_LAYER_SHARE * total))
        }  # fmt: skip
        agreeing: Counter[int] = Counter(often.values())
        layers = [count for count, sizes in agreeing.items() if sizes >= (3 if count < _FEW_LAYERS else 2)]
        if not layers:
            return set()
        number = max(layers, key=lambda count: (sum(self.held[asked] for asked in often if often[asked] == count), count))
        # A few more than layers: another tensor has the same size by chance.
        return {asked for asked, count in often.items() if count % number == 0 or number <= count <= number + number // 4}

    def _huge(self, total: int, *, is_alone: bool) -> int:
        """The one block far larger than all others, or 0."""
        largest = sorted(self.counts, reverse=True)[:2]
        if not largest or is_alone or self.counts[largest[0]] != 1 or largest[0] < _ONE_HUGE_SHARE * total:
            return 0
        return largest[0] if len(largest) == 1 or largest[0] >= _ONE_HUGE_TIMES * largest[1] else 0

    def _use(self, hints: LogHints) -> None:
        """Equal blocks that make up the KV cache as the log has it; then what is too much to be anything but weights."""
        if hints.kv_bytes is None:
            return
        fitting = [asked for asked, held in self.held.items() if _may_be_kv(held, hints.kv_bytes)]
        if len(fitting) != 1:
            return
        self.named[fitting[0]] = Category.KV
        if hints.weights_bytes is None:
            return
        rest = {asked: held for asked, held in self.held.items() if asked != fitting[0]}
        others = sum(rest.values()) - hints.weights_bytes
        if others < -PRINTED_TOLERANCE:
            return  # weights that are not all here: the log is another server's, or they sleep
        # All that is no weights has `others` bytes together, so a larger group has weights in it.
        taken = 0
        for asked in sorted(rest, key=lambda asked: (asked not in self.named, -asked)):  # what repeats by layers first
            held = rest[asked]
            if held > others + PRINTED_TOLERANCE and taken + held <= hints.weights_bytes + PRINTED_TOLERANCE:
                self.named[asked] = Category.WEIGHTS
                taken += held

    def category(self, segment: Segment, block: Block) -> Category:
        """A block without a stack."""
        return Category.GRAPHS if segment.pool in self.graph_pools else self.named.get(_asked(block), Category.UNKNOWN)


def _may_be_kv(held: int, stated: int | None) -> bool:
    return stated is None or stated * (1 - _KV_UNUSED) - PRINTED_TOLERANCE <= held <= stated + PRINTED_TOLERANCE


def _live(snapshot: Snapshot, device: int) -> Iterator[tuple[Segment, Block]]:
    for segment in snapshot.segments:
        if segment.device == device:
            for block in segment.blocks:
                if block.state != FREE:
                    yield segment, block
