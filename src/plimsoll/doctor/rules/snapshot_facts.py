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
from plimsoll.vllm.log_lines import PRINTED_TOLERANCE

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
    requested: int | None  # what was asked for, before torch rounded it up; None where that was not recorded
    state: str  # LIVE, PENDING or FREE
    stack: int  # a place in `Snapshot.stacks`; NO_STACK where none was recorded

    @property
    def asked(self) -> int:
        """By which equal requests are told: they may get blocks of different sizes."""
        return self.requested or self.size


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
    WEIGHTS_OR_KV = "weights or KV cache"
    GRAPHS = "CUDA graphs"
    WORKSPACE = "workspace"
    LOGITS = "sampler and logits"
    ACTIVATIONS = "activations"
    MULTIMODAL = "multimodal encoder"
    LORA = "LoRA"
    COLLECTIVES = "collectives"
    UNKNOWN = "unknown"


FIXED = frozenset((Category.WEIGHTS, Category.KV, Category.WEIGHTS_OR_KV, Category.GRAPHS))  # made at the start, then stays


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
_LAYERS = 4  # fewer equal blocks are chance
_FEW_LAYERS = 8  # so few equal blocks need three sizes that agree, more need two
_LAYER_SIZE = _MIB
_LAYER_SHARE = 0.005  # of the live bytes, all equal blocks together
_ONE_HUGE_SHARE = 0.25  # of the live bytes
_ONE_HUGE_TIMES = 4  # as large as the next largest
_KV_UNUSED = 0.01  # of the KV cache's memory: vLLM makes whole blocks for all layers and leaves the rest


class LogHints(NamedTuple):
    """Sizes that a log of the same server states, per device; used only where no stack was recorded."""

    weights_bytes: int | None = None  # "Model loading took"
    kv_bytes: int | None = None  # "Available KV cache memory", or as set by --kv-cache-memory-bytes


class BlockCategories(NamedTuple):
    """The category of each block, as segments and blocks lie in the snapshot; free blocks have none."""

    blocks: tuple[tuple[Category | None, ...], ...]
    by_size: frozenset[Category]  # where sizes, not stacks, were the reason


def categories(snapshot: Snapshot, hints: LogHints | None = None) -> BlockCategories:
    """Name every block that is in use."""
    stacks = [category_of_stack(snapshot.stack_of(stack)) for stack in range(len(snapshot.stacks))]
    lasting = [  # asked for by vLLM's trial run at the start: what is still live of it once the server is up is no activation
        category is Category.ACTIVATIONS
        and any(frame.name == "profile_run" and below_vllm(frame.filename) is not None for frame in snapshot.stack_of(stack))
        for stack, category in enumerate(stacks)
    ]
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
    return BlockCategories(tuple(named), frozenset(by_size - {Category.UNKNOWN}))


class _Sizes:
    """Names one device's blocks without a stack by their sizes."""

    def __init__(self, snapshot: Snapshot, device: int, stacks: list[Category], hints: LogHints) -> None:
        live = [
            (segment, block)
            for segment in snapshot.segments if segment.device == device
            for block in segment.blocks if block.state != FREE
        ]  # fmt: skip
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
                self.counts[block.asked] += 1
                self.held[block.asked] += block.size
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
        return Category.GRAPHS if segment.pool in self.graph_pools else self.named.get(block.asked, Category.UNKNOWN)


def _may_be_kv(held: int, stated: int | None) -> bool:
    return stated is None or stated * (1 - _KV_UNUSED) - PRINTED_TOLERANCE <= held <= stated + PRINTED_TOLERANCE


SMALL_PAGE, LARGE_PAGE = 2 * _MIB, 20 * _MIB
SMALL_REQUEST = _MIB  # up to here torch serves from the pool for small requests
_PIN_SHARE = 0.05  # of its segment, at most: what a small live block is
_PIN_BYTES = 16 * _MIB  # gaps that are worth naming who holds them
_PINS_KEPT = 20
_STACKS_KEPT = 20
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
    holes: tuple[Gap, ...]
    parts: tuple[CategoryUse, ...]
    pins: tuple[Pin, ...]
    stacks: tuple[StackUse, ...]


def device_facts(snapshot: Snapshot, named: BlockCategories) -> tuple[DeviceFacts, ...]:
    """The facts of each device that holds anything."""
    devices: dict[int, list[int]] = defaultdict(list)
    for place, segment in enumerate(snapshot.segments):
        devices[segment.device].append(place)
    return tuple(_of_device(snapshot, named, device, places) for device, places in sorted(devices.items()))


def _of_device(snapshot: Snapshot, named: BlockCategories, device: int, places: Sequence[int]) -> DeviceFacts:
    segments = [snapshot.segments[place] for place in places]
    common = [segment for segment in segments if segment.pool == DEFAULT_POOL]
    private = [segment for segment in segments if segment.pool != DEFAULT_POOL]
    live = [block for segment in segments for block in segment.blocks if block.state == LIVE]
    asked = [block.requested for block in live]
    whole, holes, pins = 0, [], []
    by_category: dict[Category, list[int]] = defaultdict(list)
    by_stack: dict[tuple[int, Category], list[int]] = defaultdict(list)
    for place, segment in zip(places, segments, strict=True):
        held = [(b, category) for b, category in zip(segment.blocks, named.blocks[place], strict=True) if category is not None]
        for block, category in held:
            by_category[category].append(block.size)
            if block.stack:
                by_stack[block.stack, category].append(block.size)
        if segment.pool != DEFAULT_POOL:
            continue
        if all(block.state == FREE for block in segment.blocks):
            whole += segment.size
            continue
        gaps = [Gap(place, b.address, b.size, b.size - _whole_pages(segment, b)) for b in segment.blocks if b.state == FREE]
        holes += gaps
        pinned, in_use = sum(gap.pinned for gap in gaps), sum(block.size for block, _ in held)
        if pinned >= _PIN_BYTES and in_use <= _PIN_SHARE * segment.size:  # little memory pins it
            largest, category = max(held, key=lambda pair: pair[0].size)
            pins.append(Pin(place, in_use, len(held), pinned, largest, category))
    parts = [
        CategoryUse(category, sum(sizes), len(sizes), category in named.by_size) for category, sizes in by_category.items()
    ]
    stacks = [StackUse(stack, category, sum(sizes), len(sizes)) for (stack, category), sizes in by_stack.items()]
    return DeviceFacts(
        device=device, reserved=sum(segment.size for segment in segments), allocated=sum(block.size for block in live),
        active=sum(block.size for segment in segments for block in segment.blocks if block.state != FREE),
        releasable=whole + sum(hole.size - hole.pinned for hole in holes), pinned=sum(hole.pinned for hole in holes),
        private_reserved=sum(segment.size for segment in private),
        private_free=sum(block.size for segment in private for block in segment.blocks if block.state == FREE),
        rounding=None if None in asked else sum(block.size for block in live) - sum(size or 0 for size in asked),
        segments=len(segments), expandable_segments=sum(segment.is_expandable for segment in segments),
        largest_free=max((b.size for segment in common for b in segment.blocks if b.state == FREE), default=0),
        holes=tuple(holes), parts=tuple(sorted(parts, key=lambda part: -part.bytes)),
        pins=tuple(sorted(pins, key=lambda pin: -pin.gap_bytes)[:_PINS_KEPT]),
        stacks=tuple(sorted(stacks, key=lambda use: -use.bytes)[:_STACKS_KEPT]),
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
