"""Judges a snapshot of torch's memory: are the gaps the reason for a failure, or did live memory grow since another one?

The verdict is over what is neither weights, KV cache nor CUDA graphs: those are made at the start and never move.
A low ratio of allocated to reserved is no sign; gaps matter only against a request that did not fit.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from plimsoll.doctor.rules.snapshot_facts import (
    FIXED,
    LARGE_PAGE,
    NO_STACK,
    SMALL_PAGE,
    SMALL_REQUEST,
    BlockCategories,
    Category,
    DeviceFacts,
    FailedRequest,
    Gap,
    LogHints,
    Pin,
    Snapshot,
    categories,
    device_facts,
    format_stack,
    sized,
)
from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity

MEANINGFUL_BYTES = 128 << 20
_START_SHARE = 0.5  # more live memory than that again, and mostly what a start makes: the server was still starting
_PLACES_KEPT = 10
_PLACES_TOLD = 3
_BY_SIZE = "blocks of "


class PlaceGrowth(NamedTuple):
    """Live memory of one place in the code, or of one size where no stack was recorded, now less before."""

    what: str
    category: Category
    bytes: int
    blocks: int


class SnapshotGrowth(NamedTuple):
    """Now less before, in bytes."""

    live: int  # without weights, KV cache and graphs
    fixed: int  # those three
    pinned: int
    releasable: int
    was_starting: bool  # the first snapshot was taken before the server was complete: nothing follows from the rest
    is_large: bool  # far more than before, which traffic rarely makes
    by_category: tuple[tuple[Category, int], ...]
    places: tuple[PlaceGrowth, ...]


class _LiveMemory(NamedTuple):
    bytes: Counter[tuple[str, Category]]
    blocks: Counter[tuple[str, Category]]


def growth_between(
    before: Snapshot, before_named: BlockCategories, now: Snapshot, now_named: BlockCategories,
    before_facts: tuple[DeviceFacts, ...], now_facts: tuple[DeviceFacts, ...],
) -> SnapshotGrowth:  # fmt: skip
    """Compare two snapshots of the same process."""
    old, new = _held(before, before_named), _held(now, now_named)
    places = [
        PlaceGrowth(what, category, new.bytes[what, category] - old.bytes[what, category],
              new.blocks[what, category] - old.blocks[what, category])
        for what, category in new.bytes.keys() | old.bytes.keys()
    ]  # fmt: skip
    by_category: Counter[Category] = Counter()
    for place in places:
        by_category[place.category] += place.bytes
    more = sum(by_category.values())
    is_large = more > sum(old.bytes.values()) * _START_SHARE
    made_at_start = sum(
        place.bytes
        for place in places
        if place.category in FIXED or (place.what.startswith(_BY_SIZE) and not old.blocks[place.what, place.category])
    )
    fixed = sum(size for category, size in by_category.items() if category in FIXED)
    grown = sorted((place for place in places if place.bytes > 0), key=lambda place: (-place.bytes, place.what))
    return SnapshotGrowth(
        live=sum(by_category.values()) - fixed, fixed=fixed,
        pinned=sum(each.pinned for each in now_facts) - sum(each.pinned for each in before_facts),
        releasable=sum(each.releasable for each in now_facts) - sum(each.releasable for each in before_facts),
        was_starting=is_large and made_at_start * 2 >= more, is_large=is_large,
        by_category=tuple(sorted(((c, size) for c, size in by_category.items() if size), key=lambda pair: -pair[1])),
        places=tuple([place for place in grown if place.category not in FIXED][:_PLACES_KEPT]),
    )  # fmt: skip


def _held(snapshot: Snapshot, named: BlockCategories) -> _LiveMemory:
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
                what = told_stacks.get(block.stack) or format_stack(snapshot.stack_of(block.stack))
                told_stacks[block.stack] = what
            sizes[what, category] += block.size
            blocks[what, category] += 1
    return _LiveMemory(sizes, blocks)


def growth_finding(growth: SnapshotGrowth, source: str) -> Finding | None:
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
        Code.GPU_GROWTH, Severity.WARNING, 0.3 if growth.is_large else 0.4,
        f"{sized(growth.live)} more live GPU memory than in the first snapshot", because, tuple(told_places),
        (
            Remedy(
                "take a third snapshot after the same traffic again",
                "growth that goes on is trouble, a step that stays is not",
            ),
            Remedy(
                "lower --gpu-memory-utilization by the growth you saw, divided by the card's memory",
                "it leaves room for a plateau; costs KV cache", "--gpu-memory-utilization",
            ),
            Remedy(
                "lower --max-num-batched-tokens", "it bounds the largest step; costs time to first token",
                "--max-num-batched-tokens",
            ),
        ),
        (
            "resetting or switching off the prefix cache: it lives inside the fixed KV cache and frees nothing",
            "emptying torch's cache: it returns free segments, and what grew is live",
            "restarting at a fixed used percentage: a healthy vLLM sits above 90 % from its first minute",
        ),
    )  # fmt: skip


_AT_ONCE = 8  # recorded events after a failure that belong to it: what it returned, and the taking of the snapshot
_PINS_TOLD = 3
_BESIDE_TOLD = 3
_PURPOSE_UNKNOWN = "unknown purpose"
_UNDER_A_LIMIT = 2 / 3  # of the confidence: the gaps failed the request, but the limit might be the thing to change


class SnapshotVerdict(NamedTuple):
    """The verdict on a snapshot; a healthy one has no finding."""

    findings: tuple[Finding, ...]
    facts: tuple[DeviceFacts, ...]
    notes: tuple[str, ...]
    growth: SnapshotGrowth | None = None


class _RequestFailure(NamedTuple):
    size: int
    device_free: int | None
    stream: int | None
    confidence: float
    when: str

    @property
    def is_limited(self) -> bool:
        """The device had enough: a limit of the process's own kept torch from taking it."""
        return self.device_free is not None and self.device_free >= self.size


def judge_snapshot(
    snapshot: Snapshot, source: str, before: Snapshot | None = None, failed_bytes: int | None = None,
    hints: LogHints | None = None, device_free: int | None = None,
) -> SnapshotVerdict:  # fmt: skip
    """Findings and facts; `before` is an earlier snapshot of the same process.

    The rest is what a log of the server tells: the size of a request that failed and what the device had free then, and how
    large weights and KV cache are.
    """
    named = categories(snapshot, hints)
    facts = device_facts(snapshot, named)
    last = {failure.device: failure for failure in snapshot.failures}
    findings: list[Finding] = []
    notes: list[str] = []
    for device in facts:
        failed = _failed(last.get(device.device), failed_bytes, device_free)
        if failed is None:
            continue
        verdict = _fragmentation(snapshot, named, device, failed, source)
        if isinstance(verdict, Finding):
            findings.append(verdict)
        else:
            notes.append(verdict)
    notes += _notes(snapshot, facts, is_failure_known=bool(last) or failed_bytes is not None)
    growth = None
    if before is not None:
        earlier = categories(before, hints)
        growth = growth_between(before, earlier, snapshot, named, device_facts(before, earlier), facts)
        grown = growth_finding(growth, source)
        findings += [grown] if grown is not None else []
        if growth.was_starting:
            notes.append("The first snapshot was taken before the server was complete, so growth since then says nothing.")
    return SnapshotVerdict(tuple(findings), facts, tuple(notes), growth)


def _failed(recorded: FailedRequest | None, given: int | None, free: int | None) -> _RequestFailure | None:
    """The request to judge by; one in the snapshot's own history is better evidence than one from elsewhere."""
    if recorded is not None and recorded.size > 0:
        if recorded.events_after <= _AT_ONCE:
            return _RequestFailure(recorded.size, recorded.device_free, recorded.stream, 0.9, "at this moment")
        when = f"{recorded.events_after:,} recorded events before this snapshot"
        return _RequestFailure(recorded.size, recorded.device_free, recorded.stream, 0.6, when)
    if given is not None and given > 0:
        return _RequestFailure(given, free, None, 0.7, "by the error that was given")
    return None


def _fragmentation(
    snapshot: Snapshot, named: BlockCategories, facts: DeviceFacts, failed: _RequestFailure, source: str
) -> Finding | str:
    """A finding where gaps would have been enough together and none alone; else a sentence that says why they are not it."""
    # torch keeps pools for small and large requests apart, and each stream's memory to itself.
    served = [
        segment.is_small == (failed.size <= SMALL_REQUEST) and failed.stream in (None, segment.stream)
        for segment in snapshot.segments
    ]
    usable = [hole for hole in facts.holes if served[hole.segment]]
    pinned, largest = sum(hole.pinned for hole in usable), max((hole.size for hole in usable), default=0)
    asked = sized(failed.size)
    if pinned < failed.size and failed.is_limited:
        return (
            f"The device had {sized(failed.device_free or 0)} free when {asked} failed, and all gaps together have "
            f"{sized(pinned)}: a memory limit set for this process, not gaps."
        )
    if pinned < failed.size:
        return (
            f"{asked} failed, and all gaps together have {sized(pinned)}: memory was short, not fragmented "
            f"(live {sized(facts.active)} of {sized(facts.reserved)} reserved)."
        )
    if largest >= failed.size:
        return (
            f"{asked} failed, but a gap of {sized(largest)} is there now: the snapshot does not show the moment of the failure."
        )
    if facts.releasable >= failed.size:
        return (
            f"{asked} failed, but {sized(facts.releasable)} could be returned to the device now, which torch does before "
            f"it fails: the snapshot does not show the moment of the failure."
        )
    because = (
        f"torch asked for {asked} in one piece ({failed.when}){_had_free(failed)}. Gaps between live blocks hold "
        f"{sized(pinned)} in {len(usable):,} pieces, the largest {sized(largest)}: enough together, none alone. "
        f"{_why_kept(snapshot, usable)}"
    )
    beside = _beside(snapshot, named, usable)
    because += f" Live in the same segments: {beside}." if beside else ""
    pins = [pin for pin in facts.pins if any(hole.segment == pin.segment for hole in usable)]
    if pins:
        because += f" {_pinned_sentence(snapshot, pins)}"
    return Finding(
        Code.ALLOCATOR_FRAGMENTATION, Severity.CRITICAL,
        round(failed.confidence * (_UNDER_A_LIMIT if failed.is_limited else 1), 2),
        f"GPU memory is in pieces too small for {asked}", because, _evidence(snapshot, facts, failed, pins, source),
        _remedies(facts, failed, largest), _NOT_A_REMEDY,
    )  # fmt: skip


def _had_free(failed: _RequestFailure) -> str:
    if failed.device_free is None:
        return ""
    if failed.is_limited:
        return (
            f". The device had {sized(failed.device_free)} free, so this process runs under a memory limit of its own and "
            f"torch could not take more"
        )
    return f", and the device had {sized(failed.device_free)} free"


def _why_kept(snapshot: Snapshot, holes: list[Gap]) -> str:
    """Why torch holds on to these gaps."""
    if not all(snapshot.segments[hole.segment].is_expandable for hole in holes):
        return "torch cannot return such gaps."
    page = SMALL_PAGE if snapshot.segments[holes[0].segment].is_small else LARGE_PAGE
    return (
        f"The segments are expandable, but torch returns only whole pages of {page >> 20} MiB, and live blocks lie on the "
        f"pages of these gaps too."
    )


def _beside(snapshot: Snapshot, named: BlockCategories, holes: list[Gap]) -> str:
    """Live memory in the segments that have these gaps, most first."""
    held: dict[Category, int] = {}
    for place in {hole.segment for hole in holes}:
        for block, category in zip(snapshot.segments[place].blocks, named.blocks[place], strict=True):
            if category is not None:
                held[category] = held.get(category, 0) + block.size
    most = sorted(held.items(), key=lambda pair: -pair[1])[:_BESIDE_TOLD]
    return ", ".join(f"{sized(size)} of {_PURPOSE_UNKNOWN if c is Category.UNKNOWN else c}" for c, size in most)


def _pinned_sentence(snapshot: Snapshot, pins: list[Pin]) -> str:
    first = pins[0]
    who = "one live block" if first.live_blocks == 1 else f"{first.live_blocks} live blocks"
    size = snapshot.segments[first.segment].size
    sentence = f"A segment of {sized(size)} is held by {who} of {sized(first.live_bytes)} ({first.category})"
    if frames := snapshot.stack_of(first.block.stack):
        sentence += f", asked for in {format_stack(frames, 1)}"
    more = len(pins) - 1
    return sentence + (f"; {more:,} more segments are held like this." if more > 1 else "; one more is." if more else ".")


def _evidence(
    snapshot: Snapshot, facts: DeviceFacts, failed: _RequestFailure, pins: list[Pin], source: str
) -> tuple[Evidence, ...]:
    free = "" if failed.device_free is None else f", device free {sized(failed.device_free)}"
    lines = [
        f"device {facts.device}: failed request {sized(failed.size)}{free}",
        f"device {facts.device}: reserved {sized(facts.reserved)}, allocated {sized(facts.allocated)}",
        f"device {facts.device}: pinned gaps {sized(facts.pinned)} in {len(facts.holes):,} pieces",
        f"device {facts.device}: returnable {sized(facts.releasable)}",
    ]
    for pin in pins[:_PINS_TOLD]:
        segment = snapshot.segments[pin.segment]
        lines.append(
            f"segment 0x{segment.address:x} of {sized(segment.size)}: {sized(pin.gap_bytes)} free, pinned by "
            f"{sized(pin.block.size)} from {format_stack(snapshot.stack_of(pin.block.stack))}"
        )
    return tuple(Evidence(source, line) for line in lines)


def _remedies(facts: DeviceFacts, failed: _RequestFailure, largest: int) -> tuple[Remedy, ...]:
    limit = Remedy(
        "raise or drop the memory limit of this process",
        "torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF; vLLM itself "
        "sets none, so look in what runs beside it in the same process",
    )
    common = (
        *((limit,) if failed.is_limited else ()),
        Remedy(
            "lower --max-num-batched-tokens",
            "the largest pieces become smaller, so they fit into gaps; costs time to first token", "--max-num-batched-tokens",
        ),
        Remedy(
            "lower --gpu-memory-utilization", "more memory stays outside the KV cache, so gaps matter less; costs KV cache",
            "--gpu-memory-utilization",
        ),
    )  # fmt: skip
    if facts.expandable_segments:
        return common
    set_it = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment and restart"
    if largest < LARGE_PAGE and failed.size > SMALL_REQUEST:
        why = "pages of 20 MiB go back only when all of one is free, and every gap here is smaller: it may help little"
        return *common, Remedy(set_it, f"{why}. {_WHERE_NOT}")
    why = "segments grow instead of being cut, and whole free pages go back to the device"
    return Remedy(set_it, f"{why}. {_WHERE_NOT}"), *common


_WHERE_NOT = (
    "Not beside a KV connector from 0.21.0 on (unless --enable-cumem-allocator is set, 0.22.0 and later), and not with sleep "
    "mode before 0.20.1"
)
_NOT_A_REMEDY = (
    "emptying torch's cache: torch did so before it failed, and gaps beside live blocks cannot be returned",
    "resetting or switching off the prefix cache: the KV cache is live memory of fixed size and none of the gaps lie in it",
    "--block-size or --swap-space: they change nothing of torch's segments",
    "a restart by the clock: the same traffic cuts the same gaps",
)


def _notes(snapshot: Snapshot, facts: tuple[DeviceFacts, ...], *, is_failure_known: bool) -> list[str]:
    notes = []
    for device in facts:
        if device.releasable:
            notes.append(
                f"Device {device.device}: {sized(device.releasable)} is free as whole segments or pages. torch returns it to "
                f"the device by itself before it fails, so it is harmless."
            )
        if device.expandable_segments:
            notes.append(
                f"Device {device.device}: expandable segments grow in pages of 20 MiB (2 MiB for small requests), as long "
                f"as the device has memory, and give whole free pages back; only the ends of gaps stay."
            )
        if device.pins and not is_failure_known:
            notes.append(
                f"Device {device.device}: {_pinned_sentence(snapshot, list(device.pins))} No request is known to have failed."
            )
    if facts and not snapshot.has_stacks:
        notes.append(
            "No stacks were recorded, so memory is named by its size where that tells; "
            "torch.cuda.memory._record_memory_history() before the start records them."
        )
    return notes
