"""What a snapshot holds, device by device: live memory by what it is for, gaps that live blocks pin, memory torch can return.

torch gives a segment back to the device when all of it is free, and does so by itself before it raises an out-of-memory
error. A gap beside live blocks stays, and serves only requests that fit into it. Of an expandable segment it gives back
whole pages (2 MiB in the pool for small requests, else 20 MiB) and keeps the rest of each gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.snapshot_named import Named
from plimsoll.doctor.snapshot_parts import Category, below_vllm
from plimsoll.domain.memory_snapshot import DEFAULT_POOL, FREE, LIVE, Block, Frame, Segment, Snapshot

_MIB = 1 << 20
SMALL_PAGE, LARGE_PAGE = 2 * _MIB, 20 * _MIB
SMALL_REQUEST = _MIB  # up to here torch serves from the pool for small requests
_PIN_SHARE = 0.05  # of its segment, at most: what a small live block is
_PIN_BYTES = 16 * _MIB  # gaps that are worth naming who holds them
_PINS_KEPT = 20
_STACKS_KEPT = 20
_FRAMES_TOLD = 4


class Hole(NamedTuple):
    """A gap in a segment of the common pool that also holds live blocks."""

    segment: int
    address: int
    size: int
    pinned: int  # what of it torch cannot return to the device; all of it unless the segment is expandable


class Pin(NamedTuple):
    """A large segment that little live memory keeps."""

    segment: int
    live_bytes: int
    live_blocks: int
    gap_bytes: int
    block: Block  # the only live one, or the largest
    category: Category


class Part(NamedTuple):
    """Live memory for one purpose."""

    category: Category
    bytes: int
    blocks: int
    is_by_size: bool  # named by its size, because no stack was recorded


class StackUse(NamedTuple):
    """Live memory that one place in the code asked for."""

    stack: int
    category: Category
    bytes: int
    blocks: int


class DeviceFacts(NamedTuple):
    """One device's share of a snapshot, in bytes."""

    device: int
    reserved: int
    allocated: int
    active: int  # allocated, and given back but still in use by another stream
    releasable: int  # free segments, and whole free pages of expandable ones: torch returns them before it fails
    pinned: int  # gaps that live blocks hold
    private_reserved: int
    private_free: int  # only of use to the pool that has it
    rounding: int | None  # asked for less than given, in all live blocks; None where it was not recorded
    segments: int
    expandable_segments: int
    largest_free: int  # the largest free block of the common pool, wherever it lies
    holes: tuple[Hole, ...]
    parts: tuple[Part, ...]
    pins: tuple[Pin, ...]
    stacks: tuple[StackUse, ...]

    @property
    def largest_hole(self) -> int:
        """The largest gap beside live blocks."""
        return max((hole.size for hole in self.holes), default=0)


def device_facts(snapshot: Snapshot, named: Named) -> tuple[DeviceFacts, ...]:
    """The facts of each device that holds anything."""
    devices: dict[int, list[int]] = defaultdict(list)
    for place, segment in enumerate(snapshot.segments):
        devices[segment.device].append(place)
    return tuple(_of_device(snapshot, named, device, places) for device, places in sorted(devices.items()))


def _of_device(snapshot: Snapshot, named: Named, device: int, places: Sequence[int]) -> DeviceFacts:
    segments = [snapshot.segments[place] for place in places]
    holes = [hole for place in places for hole in _holes(snapshot.segments[place], place)]
    common = [segment for segment in segments if segment.pool == DEFAULT_POOL]
    private = [segment for segment in segments if segment.pool != DEFAULT_POOL]
    whole = sum(segment.size for segment in common if _is_free(segment))
    live = [block for segment in segments for block in segment.blocks if block.state == LIVE]
    pins = [pin for place in places if (pin := _pin(snapshot.segments[place], place, named)) is not None]
    asked = [block.requested for block in live]
    return DeviceFacts(
        device=device,
        reserved=sum(segment.size for segment in segments),
        allocated=sum(block.size for block in live),
        active=sum(block.size for segment in segments for block in segment.blocks if block.state != FREE),
        releasable=whole + sum(hole.size - hole.pinned for hole in holes),
        pinned=sum(hole.pinned for hole in holes),
        private_reserved=sum(segment.size for segment in private),
        private_free=sum(block.size for segment in private for block in segment.blocks if block.state == FREE),
        rounding=None if None in asked else sum(block.size for block in live) - sum(size or 0 for size in asked),
        segments=len(segments),
        expandable_segments=sum(segment.is_expandable for segment in segments),
        largest_free=max((b.size for segment in common for b in segment.blocks if b.state == FREE), default=0),
        holes=tuple(holes),
        parts=_parts(snapshot, named, places),
        pins=tuple(sorted(pins, key=lambda pin: -pin.gap_bytes)[:_PINS_KEPT]),
        stacks=_stacks(snapshot, named, places),
    )


def _is_free(segment: Segment) -> bool:
    return all(block.state == FREE for block in segment.blocks)


def _holes(segment: Segment, place: int) -> list[Hole]:
    if segment.pool != DEFAULT_POOL or _is_free(segment):
        return []
    return [
        Hole(place, block.address, block.size, block.size - _whole_pages(segment, block))
        for block in segment.blocks
        if block.state == FREE
    ]


def _whole_pages(segment: Segment, block: Block) -> int:
    """The bytes of a free block that torch can unmap. A mapped stretch begins where a page does."""
    if not segment.is_expandable:
        return 0
    page = SMALL_PAGE if segment.is_small else LARGE_PAGE
    start = block.address - segment.address
    return max(0, (start + block.size) // page - -(-start // page)) * page


def _pin(segment: Segment, place: int, named: Named) -> Pin | None:
    """The segment as one that little memory pins, if it is one."""
    gap = sum(hole.pinned for hole in _holes(segment, place))
    if gap < _PIN_BYTES:
        return None
    held = [
        (block, category) for block, category in zip(segment.blocks, named.blocks[place], strict=True) if category is not None
    ]
    live = sum(block.size for block, _ in held)
    if live > _PIN_SHARE * segment.size:
        return None
    block, category = max(held, key=lambda pair: pair[0].size)
    return Pin(place, live, len(held), gap, block, category)


def _parts(snapshot: Snapshot, named: Named, places: Sequence[int]) -> tuple[Part, ...]:
    sizes: dict[Category, list[int]] = defaultdict(list)
    for place in places:
        for block, category in zip(snapshot.segments[place].blocks, named.blocks[place], strict=True):
            if category is not None:
                sizes[category].append(block.size)
    parts = [Part(category, sum(held), len(held), category in named.by_size) for category, held in sizes.items()]
    return tuple(sorted(parts, key=lambda part: -part.bytes))


def _stacks(snapshot: Snapshot, named: Named, places: Sequence[int]) -> tuple[StackUse, ...]:
    held: dict[tuple[int, Category], list[int]] = defaultdict(list)
    for place in places:
        for block, category in zip(snapshot.segments[place].blocks, named.blocks[place], strict=True):
            if category is not None and block.stack:
                held[block.stack, category].append(block.size)
    uses = [StackUse(stack, category, sum(sizes), len(sizes)) for (stack, category), sizes in held.items()]
    return tuple(sorted(uses, key=lambda use: -use.bytes)[:_STACKS_KEPT])


def sized(size: int) -> str:
    """Bytes for people, fine enough to compare a gap with a request: 546.0 MiB, 3.42 GiB, 105.3 GiB."""
    if abs(size) >= 10 << 30:
        return f"{size / (1 << 30):,.1f} GiB"
    if abs(size) >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    return f"{size / _MIB:.1f} MiB" if abs(size) >= _MIB // 10 else f"{size:,} bytes"


def told(frames: Sequence[Frame], most: int = _FRAMES_TOLD) -> str:
    """A stack in one line: the innermost places in vLLM's code, else the innermost that have a file."""
    ours = [frame for frame in frames if below_vllm(frame.filename) is not None]
    shown = ours or [frame for frame in frames if frame.filename not in ("", "??")] or list(frames)
    parts = [
        f"{below_vllm(frame.filename) or frame.filename.rpartition('/')[2]}:{frame.line} {frame.name}" for frame in shown[:most]
    ]
    return ", called from ".join(parts) if parts else "no stack was recorded"
