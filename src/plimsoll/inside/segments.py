"""A walk over the segments that torch holds: what of its free memory it could really give back to the device.

torch gives back a segment that is free as a whole. Of an expandable segment it gives back every whole page that is free:
2 MiB in the pool for small requests, else 20 MiB. A private pool (CUDA graphs, sleep mode) keeps what it has.
A walk makes Python objects of every block while the worker waits, so walks are rare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SMALL_PAGE_BYTES = 2 << 20
LARGE_PAGE_BYTES = 20 << 20
WALK_EVERY_S = 30.0
WALK_SHARE = 0.001  # of the time, at most


class Walk(NamedTuple):
    """What one walk found of one device, in bytes."""

    reserved: int
    active: int
    releasable: int
    private_reserved: int
    private_whole_free: int  # segments of private pools that are free and yet cannot be given back
    largest_free_block: int  # of the common pool: the largest request that needs nothing new from the device
    expandable_segments: int
    segments: int
    blocks: int


def walk(segments: Iterable[Mapping[str, Any]], device: int) -> Walk:
    """Add up what torch.cuda.memory_snapshot() lists for one device."""
    reserved = active = releasable = private = private_free = largest = expandable = count = blocks = 0
    for segment in segments:
        if segment.get("device", device) != device:
            continue
        size = segment["total_size"]
        gaps = [(start, held) for start, held, is_free in _blocks(segment) if is_free]
        free = sum(held for _, held in gaps)
        is_expandable = segment.get("is_expandable") is True
        count += 1
        blocks += len(segment["blocks"])
        reserved += size
        active += size - free
        expandable += is_expandable
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            private += size
            private_free += size if free == size else 0
            continue
        largest = max(largest, max((held for _, held in gaps), default=0))
        if free == size:
            releasable += size
        elif is_expandable:
            page = SMALL_PAGE_BYTES if segment.get("segment_type") == "small" else LARGE_PAGE_BYTES
            releasable += sum(_whole_pages(start, held, page) for start, held in gaps)
    return Walk(reserved, active, releasable, private, private_free, largest, expandable, count, blocks)


def _blocks(segment: Mapping[str, Any]) -> Iterable[tuple[int, int, bool]]:
    """Each block as where it starts in its segment, its size and whether it is free; blocks fill a segment in order."""
    start = 0
    for block in segment["blocks"]:
        yield start, block["size"], block["state"] == "inactive"
        start += block["size"]


def _whole_pages(start: int, size: int, page: int) -> int:
    """The bytes of a gap that are whole pages. A listed stretch of an expandable segment begins where a page does."""
    return max(0, (start + size) // page - -(-start // page)) * page


class WalkClock:
    """Says when the next walk may be: not often, and less often where one takes long."""

    def __init__(self) -> None:
        self.walked_at: float | None = None
        self.took_s = 0.0

    def is_due(self, now: float) -> bool:
        """Whether enough time has passed since the last one, for what it took."""
        return self.walked_at is None or now - self.walked_at >= max(WALK_EVERY_S, self.took_s / WALK_SHARE)

    def note(self, now: float, took_s: float) -> None:
        """A walk was made."""
        self.walked_at, self.took_s = now, took_s
