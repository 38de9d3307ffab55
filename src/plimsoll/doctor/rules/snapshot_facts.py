"""A snapshot device by device: live memory by purpose, gaps that live blocks pin, memory torch can return.

torch gives a segment back to the device when all of it is free, and does so by itself before it raises an out-of-memory
error. A gap beside live blocks stays, and serves only requests that fit into it. Of an expandable segment it gives back
whole pages (2 MiB in the pool for small requests, else 20 MiB) and keeps the rest of each gap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from plimsoll.doctor.words import words

LIVE = "live"  # a tensor uses it
PENDING = "pending"  # given back, but another stream may still be using it
FREE = "free"  # kept by torch for the next request

NO_STACK = 0  # the stack of whatever was recorded without one
DEFAULT_POOL = (0, 0)  # any other pool is private: CUDA graphs, or a feature that keeps memory apart


class StackFrame(NamedTuple):
    """One line of code on the way to an allocation."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    size: int
    state: str  # LIVE, PENDING or FREE
    stack: int  # a place in `Snapshot.stacks`; NO_STACK where none was recorded


class Segment(NamedTuple):
    """Memory that torch took from the device in one piece; of an expandable segment, one unbroken mapped stretch."""

    device: int
    address: int
    size: int
    stream: int
    is_small: bool  # of the pool for requests of up to 1 MiB
    pool: tuple[int, int]
    is_expandable: bool
    blocks: tuple[Block, ...]


class FailedRequest(NamedTuple):
    """One request that torch could not serve: an out-of-memory error as the recorded history has it."""

    device: int
    size: int
    device_free: int | None  # what the device still had
    stream: int | None
    time_us: int | None
    stack: int
    events_after: int  # recorded events between the failure and the end: what was freed since is not seen as it was


class Snapshot(NamedTuple):
    """One file, read: stacks hold places in `frames`, innermost first, and equal ones are kept once."""

    segments: tuple[Segment, ...]
    frames: tuple[StackFrame, ...]
    stacks: tuple[tuple[int, ...], ...]
    failures: tuple[FailedRequest, ...] = ()  # the last ones, oldest first
    events: int = 0  # recorded allocator events of all devices

    @property
    def has_stacks(self) -> bool:
        """True if anybody recorded where memory was asked for."""
        return len(self.stacks) > 1

    def stack_of(self, stack: int) -> tuple[StackFrame, ...]:
        """The frames of a stack, innermost first."""
        return tuple(self.frames[place] for place in self.stacks[stack])


class Category(StrEnum):
    """The purpose of a piece of GPU memory."""

    WEIGHTS = "weights"
    KV = "KV cache"
    GRAPHS = "CUDA graphs"
    WORKSPACE = "workspace"
    LOGITS = "sampler and logits"
    ACTIVATIONS = "activations"
    MULTIMODAL = "multimodal encoder"
    LORA = "LoRA"
    COLLECTIVES = "collectives"
    UNKNOWN = "unknown"


FIXED = frozenset((Category.WEIGHTS, Category.KV, Category.GRAPHS))  # made at the start, then stays


def below_vllm(filename: str) -> str | None:
    """A file's path below vLLM's package, also where the folders above it were cut off; None for anybody else's file."""
    _, found, rest = f"/{filename}".replace("\\", "/").rpartition("/vllm/")
    return rest if found else None


def category_of_stack(frames: Sequence[StackFrame]) -> Category:
    """The purpose of memory that this stack asked for; UNKNOWN where no rule matches."""
    files = {path for frame in frames if (path := below_vllm(frame.filename)) is not None}
    names = {frame.name.rpartition(".")[2] for frame in frames if below_vllm(frame.filename) is not None}
    for row in words("stacks"):
        if not names.isdisjoint(row["functions"]) or any(path.startswith(tuple(row["files"])) for path in files):
            return Category(row["category"])
    return Category.UNKNOWN


_MIB = 1 << 20
_NOT_GRAPHS = (Category.WEIGHTS, Category.KV, Category.LORA)  # which sleep mode keeps in private pools, too
BlockCategories = tuple[tuple[Category | None, ...], ...]  # as segments and blocks lie in the snapshot; free blocks have none


def categories(snapshot: Snapshot) -> BlockCategories:
    """The purpose of every block that is in use, by its stack; without one only CUDA graphs are known, by their pool."""
    stacks = [category_of_stack(snapshot.stack_of(stack)) for stack in range(len(snapshot.stacks))]
    lasting = [  # asked for by vLLM's trial run at the start: what is still live of it once the server is up is no activation
        category is Category.ACTIVATIONS
        and any(frame.name == "profile_run" and below_vllm(frame.filename) is not None for frame in snapshot.stack_of(stack))
        for stack, category in enumerate(stacks)
    ]
    held: Counter[tuple[int, tuple[int, int] | None]] = Counter()  # by device and pool, and in all
    has_kv = set()
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.state != FREE:
                held.update({(segment.device, segment.pool): block.size, (segment.device, None): block.size})
                has_kv |= {segment.device} if stacks[block.stack] is Category.KV else set()

    def category_of(segment: Segment, block: Block) -> Category | None:
        category, is_private = stacks[block.stack], segment.pool != DEFAULT_POOL
        if block.state == FREE:
            return None
        if block.stack == NO_STACK:
            # Graphs are a small part of a server. A private pool with half of everything is one that sleep mode keeps apart.
            is_small = held[segment.device, segment.pool] * 2 < held[segment.device, None]
            return Category.GRAPHS if is_private and is_small else category
        if is_private and category not in _NOT_GRAPHS:
            return Category.GRAPHS
        # The KV cache comes after the trial run: what outlived it is cuBLAS's and such.
        return Category.WORKSPACE if lasting[block.stack] and segment.device in has_kv else category

    return tuple(tuple(category_of(segment, block) for block in segment.blocks) for segment in snapshot.segments)


SMALL_PAGE, LARGE_PAGE = 2 * _MIB, 20 * _MIB
SMALL_REQUEST = _MIB  # up to here torch serves from the pool for small requests
_PIN_SHARE = 0.05  # of its segment, at most: what a small live block is
_PIN_BYTES = 16 * _MIB  # gaps that are worth naming who holds them
_PINS_KEPT = 20
_FRAMES_TOLD = 4


class Gap(NamedTuple):
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


class CategoryUse(NamedTuple):
    """Live memory for one purpose."""

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
    segments: int
    expandable_segments: int
    largest_free: int  # the largest free block of the common pool, wherever it lies
    holes: tuple[Gap, ...]
    parts: tuple[CategoryUse, ...]
    pins: tuple[Pin, ...]


def device_facts(snapshot: Snapshot, named: BlockCategories) -> tuple[DeviceFacts, ...]:
    """The facts of each device that holds anything."""
    devices: dict[int, list[int]] = defaultdict(list)
    for place, segment in enumerate(snapshot.segments):
        devices[segment.device].append(place)
    return tuple(_of_device(snapshot, named, device, places) for device, places in sorted(devices.items()))


def _of_device(snapshot: Snapshot, named: BlockCategories, device: int, places: Sequence[int]) -> DeviceFacts:
    segments = [snapshot.segments[place] for place in places]
    private = [segment for segment in segments if segment.pool != DEFAULT_POOL]
    whole, holes, pins = [], [], []  # free segments, gaps in others, and large segments that little keeps
    by_category: dict[Category, list[int]] = defaultdict(list)
    for place, segment in zip(places, segments, strict=True):
        held = [(b, category) for b, category in zip(segment.blocks, named[place], strict=True) if category is not None]
        for block, category in held:
            by_category[category].append(block.size)
        if segment.pool != DEFAULT_POOL:
            continue
        gaps = [Gap(place, b.address, b.size, b.size - _whole_pages(segment, b)) for b in segment.blocks if b.state == FREE]
        if len(gaps) == len(segment.blocks):
            whole += gaps
            continue
        holes += gaps
        pinned, in_use = sum(gap.pinned for gap in gaps), sum(block.size for block, _ in held)
        if pinned >= _PIN_BYTES and in_use <= _PIN_SHARE * segment.size:  # little memory pins it
            largest, category = max(held, key=lambda pair: pair[0].size)
            pins.append(Pin(place, in_use, len(held), pinned, largest, category))
    parts = [CategoryUse(category, sum(sizes), len(sizes)) for category, sizes in by_category.items()]
    return DeviceFacts(
        device=device, reserved=sum(segment.size for segment in segments),
        allocated=sum(block.size for segment in segments for block in segment.blocks if block.state == LIVE),
        active=sum(block.size for segment in segments for block in segment.blocks if block.state != FREE),
        releasable=sum(gap.size for gap in whole) + sum(hole.size - hole.pinned for hole in holes),
        pinned=sum(hole.pinned for hole in holes),
        private_reserved=sum(segment.size for segment in private),
        private_free=sum(block.size for segment in private for block in segment.blocks if block.state == FREE),
        segments=len(segments), expandable_segments=sum(segment.is_expandable for segment in segments),
        largest_free=max((gap.size for gap in (*holes, *whole)), default=0),
        holes=tuple(holes), parts=tuple(sorted(parts, key=lambda part: -part.bytes)),
        pins=tuple(sorted(pins, key=lambda pin: -pin.gap_bytes)[:_PINS_KEPT]),
    )  # fmt: skip


def _whole_pages(segment: Segment, block: Block) -> int:
    """The bytes of a free block that torch can unmap. A mapped stretch begins where a page does."""
    if not segment.is_expandable:
        return 0
    page = SMALL_PAGE if segment.is_small else LARGE_PAGE
    start = block.address - segment.address
    return max(0, (start + block.size) // page - -(-start // page)) * page


def sized(size: int) -> str:
    """Bytes for people, fine enough to compare a gap with a request: 546.0 MiB, 3.42 GiB, 105.3 GiB."""
    if abs(size) >= 10 << 30:
        return f"{size / (1 << 30):,.1f} GiB"
    if abs(size) >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    return f"{size / _MIB:.1f} MiB" if abs(size) >= _MIB // 10 else f"{size:,} bytes"


def format_stack(frames: Sequence[StackFrame], most: int = _FRAMES_TOLD) -> str:
    """A stack in one line: the innermost places in vLLM's code, else the innermost that have a file."""
    ours = [frame for frame in frames if below_vllm(frame.filename) is not None]
    shown = ours or [frame for frame in frames if frame.filename not in ("", "??")] or list(frames)
    parts = [
        f"{below_vllm(frame.filename) or frame.filename.rpartition('/')[2]}:{frame.line} {frame.name}" for frame in shown[:most]
    ]
    return ", called from ".join(parts) if parts else "no stack was recorded"
