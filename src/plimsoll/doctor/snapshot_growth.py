"""What grew between two snapshots of one server: live memory that is neither weights, KV cache nor graphs."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from plimsoll.doctor.snapshot_facts import DeviceFacts, sized, told
from plimsoll.doctor.snapshot_named import Named
from plimsoll.doctor.snapshot_parts import FIXED, Category
from plimsoll.domain.finding import Code, Evidence, Finding, Remedy, Severity
from plimsoll.domain.memory_snapshot import NO_STACK, Snapshot

MEANINGFUL_BYTES = 128 << 20
_START_SHARE = 0.5  # more live memory than that again, and mostly what a start makes: the server was still starting
_PLACES_KEPT = 10
_PLACES_TOLD = 3
_BY_SIZE = "blocks of "


class Grown(NamedTuple):
    """Live memory of one place in the code, or of one size where no stack was recorded, now less before."""

    what: str
    category: Category
    bytes: int
    blocks: int


class Growth(NamedTuple):
    """Now less before, in bytes."""

    live: int  # without weights, KV cache and graphs
    fixed: int  # those three
    pinned: int
    releasable: int
    was_starting: bool  # the first snapshot was taken before the server was complete: nothing follows from the rest
    is_large: bool  # far more than before, which traffic rarely makes
    by_category: tuple[tuple[Category, int], ...]
    places: tuple[Grown, ...]


class _Held(NamedTuple):
    bytes: Counter[tuple[str, Category]]
    blocks: Counter[tuple[str, Category]]


def growth_between(
    before: Snapshot, before_named: Named, now: Snapshot, now_named: Named,
    before_facts: tuple[DeviceFacts, ...], now_facts: tuple[DeviceFacts, ...],
) -> Growth:  # fmt: skip
    """Compare two snapshots of the same process."""
    old, new = _held(before, before_named), _held(now, now_named)
    places = [
        Grown(what, category, new.bytes[what, category] - old.bytes[what, category],
              new.blocks[what, category] - old.blocks[what, category])
        for what, category in new.bytes.keys() | old.bytes.keys()
    ]  # fmt: skip
    by_category: Counter[Category] = Counter()
    for place in places:
        by_category[place.category] += place.bytes
    more = sum(by_category.values())
    is_large = more > sum(old.bytes.values()) * _START_SHARE
    made_at_start = sum(place.bytes for place in places if place.category in FIXED or _is_new_kind(place, old))
    fixed = sum(size for category, size in by_category.items() if category in FIXED)
    grown = sorted((place for place in places if place.bytes > 0), key=lambda place: (-place.bytes, place.what))
    return Growth(
        live=sum(by_category.values()) - fixed,
        fixed=fixed,
        pinned=sum(each.pinned for each in now_facts) - sum(each.pinned for each in before_facts),
        releasable=sum(each.releasable for each in now_facts) - sum(each.releasable for each in before_facts),
        was_starting=is_large and made_at_start * 2 >= more,
        is_large=is_large,
        by_category=tuple(sorted(((c, size) for c, size in by_category.items() if size), key=lambda pair: -pair[1])),
        places=tuple([place for place in grown if place.category not in FIXED][:_PLACES_KEPT]),
    )


def _is_new_kind(place: Grown, old: _Held) -> bool:
    """Without stacks, what is made at the start is told by this: no block of its size was there before."""
    return place.what.startswith(_BY_SIZE) and not old.blocks[place.what, place.category]


def _held(snapshot: Snapshot, named: Named) -> _Held:
    """Live bytes and blocks by place. Blocks without a stack go by size: what is fixed is in both and cancels out."""
    sizes: Counter[tuple[str, Category]] = Counter()
    blocks: Counter[tuple[str, Category]] = Counter()
    told_stacks: dict[int, str] = {}
    for segment, row in zip(snapshot.segments, named.blocks, strict=True):
        for block, named_as in zip(segment.blocks, row, strict=True):
            if named_as is None:
                continue
            category = named_as
            if block.stack == NO_STACK:
                what = f"{_BY_SIZE}{sized(block.size)}"
                if category is not Category.GRAPHS:
                    category = Category.UNKNOWN
            else:
                what = told_stacks.get(block.stack) or told(snapshot.stack_of(block.stack))
                told_stacks[block.stack] = what
            sizes[what, category] += block.size
            blocks[what, category] += 1
    return _Held(sizes, blocks)


def growth_finding(growth: Growth, source: str) -> Finding | None:
    """A finding where live memory grew enough to matter; memory that torch can return is no growth."""
    if growth.was_starting or growth.live < MEANINGFUL_BYTES:
        return None
    grown = ", ".join(
        f"{sized(size)} of {'unknown purpose' if category is Category.UNKNOWN else category}"
        for category, size in growth.by_category
        if size > 0 and category not in FIXED
    )
    because = (
        f"Between the two snapshots live memory that is neither weights, KV cache nor CUDA graphs grew by "
        f"{sized(growth.live)} ({grown}). Two points are not a trend: a longer prompt than any before, a new adapter or "
        f"kernels used for the first time grow once and then stay."
    )
    if growth.is_large:
        because += " It grew by more than half: if the server was still starting then, this says nothing."
    if growth.pinned > 0:
        because += f" The gaps beside live blocks grew by {sized(growth.pinned)}."
    told_places = [
        Evidence(source, f"{place.what}: {sized(place.bytes)} more in {place.blocks:+,} blocks ({place.category})")
        for place in growth.places[:_PLACES_TOLD]
    ]
    return Finding(
        Code.GPU_GROWTH,
        Severity.WARNING,
        0.3 if growth.is_large else 0.4,
        f"{sized(growth.live)} more live GPU memory than in the first snapshot",
        because,
        tuple(told_places),
        (
            Remedy(
                "take a third snapshot after the same traffic again", "growth that goes on is trouble, a step that stays is not"
            ),
            Remedy(
                "lower --gpu-memory-utilization by the growth you saw, divided by the card's memory",
                "it leaves room for a plateau; costs KV cache",
                "--gpu-memory-utilization",
            ),
            Remedy(
                "lower --max-num-batched-tokens",
                "it bounds the largest step; costs time to first token",
                "--max-num-batched-tokens",
            ),
        ),
        (
            "resetting or switching off the prefix cache: it lives inside the fixed KV cache and frees nothing",
            "emptying torch's cache: it returns free segments, and what grew is live",
            "restarting at a fixed used percentage: a healthy vLLM sits above 90 % from its first minute",
        ),
    )
