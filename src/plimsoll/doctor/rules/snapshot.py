"""Judges a snapshot of torch's memory: are the gaps the reason for a failure, or did live memory grow since another one?

The verdict is over what is neither weights, KV cache nor CUDA graphs: those are made at the start and never move.
A low ratio of allocated to reserved is no sign; gaps matter only against a request that did not fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
    Pin,
    Snapshot,
    categories,
    device_facts,
    format_stack,
    sized,
)
from plimsoll.doctor.words import finding
from plimsoll.findings import Evidence, Finding, Remedy

MEANINGFUL_BYTES = 128 << 20
_START_SHARE = 0.5  # more live memory than that again, and mostly what a start makes: the server was still starting

_PLACES_TOLD = 3


class SnapshotGrowth(NamedTuple):
    """Now less before, in bytes."""

    live: int  # without weights, KV cache and graphs
    fixed: int  # those three
    releasable: int
    was_starting: bool  # the first snapshot was taken before the server was complete: nothing follows from the rest


def _growth(
    before: Snapshot, earlier: BlockCategories, now: Snapshot, named: BlockCategories, now_facts: Sequence[DeviceFacts],
    source: str,
) -> tuple[SnapshotGrowth, Finding | None]:  # fmt: skip
    """Compare two snapshots of one process; a finding where live memory grew enough to matter, not what torch can return."""
    # Live bytes and blocks by place. Blocks without a stack go by size: what is fixed is in both and cancels out.
    sizes: Counter[tuple[str, Category]] = Counter()
    blocks: Counter[tuple[str, Category]] = Counter()
    for snapshot, categories_of, sign in ((before, earlier, -1), (now, named, 1)):
        stacks: dict[int, str] = {}
        for segment, row in zip(snapshot.segments, categories_of, strict=True):
            for block, category in zip(segment.blocks, row, strict=True):
                if category is None:
                    continue
                if block.stack == NO_STACK:
                    key = f"blocks of {sized(block.size)}", category
                else:
                    if block.stack not in stacks:
                        stacks[block.stack] = format_stack(snapshot.stack_of(block.stack))
                    key = stacks[block.stack], category
                sizes[key] += sign * block.size
                blocks[key] += sign
    by_category: Counter[Category] = Counter()
    for (_, category), size in sizes.items():
        by_category[category] += size
    more = sum(by_category.values())
    fixed = sum(size for category, size in by_category.items() if category in FIXED)
    before_facts = device_facts(before, earlier)
    is_large = more > sum(each.active for each in before_facts) * _START_SHARE  # far more, which traffic rarely makes
    releasable, pinned = (
        sum(getattr(each, name) for each in now_facts) - sum(getattr(each, name) for each in before_facts)
        for name in ("releasable", "pinned")
    )
    grown = SnapshotGrowth(more - fixed, fixed, releasable, is_large and fixed * 2 >= more)
    if grown.was_starting or grown.live < MEANINGFUL_BYTES:
        return grown, None
    live = [pair for pair in by_category.items() if pair[1] > 0 and pair[0] not in FIXED]
    because = (
        f"Between the two snapshots live memory that is neither weights, KV cache nor CUDA graphs grew by "
        f"{sized(grown.live)} ({_told(live)}). Two points are not a trend: a longer prompt than any before, a new adapter or "
        f"kernels used for the first time grow once and then stay."
    )
    if is_large:
        because += " It grew by more than half: if the server was still starting then, this says nothing."
    if pinned > 0:
        because += f" The gaps beside live blocks grew by {sized(pinned)}."
    places = [key for key, size in sizes.items() if size > 0 and key[1] not in FIXED]
    evidence = [
        Evidence(source, f"{key[0]}: {sized(sizes[key])} more in {blocks[key]:+,} blocks ({key[1]})")
        for key in sorted(places, key=lambda key: (-sizes[key], key[0]))[:_PLACES_TOLD]
    ]
    confidence = 0.3 if is_large else None
    return grown, finding("snapshot-growth", evidence, because, confidence=confidence, live=sized(grown.live))


def _told(held: Iterable[tuple[Category, int]]) -> str:
    """Sizes by purpose, most first."""
    most = sorted(held, key=lambda pair: -pair[1])
    return ", ".join(f"{sized(size)} of {'unknown purpose' if c is Category.UNKNOWN else c}" for c, size in most)


_AT_ONCE = 8  # recorded events after a failure that belong to it: what it returned, and the taking of the snapshot
_PINS_TOLD = 3
_BESIDE_TOLD = 3
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
    device_free: int | None = None,
) -> SnapshotVerdict:  # fmt: skip
    """Findings and facts; `before` is an earlier snapshot of the same process.

    The rest is what a log of the server tells: the size of a request that failed, and what the device had free then.
    """
    named = categories(snapshot)
    facts = device_facts(snapshot, named)
    last = {failure.device: failure for failure in snapshot.failures}
    findings: list[Finding] = []
    notes: list[str] = []
    for device in facts:
        # A request in the snapshot's own history is better evidence than one from elsewhere.
        recorded = last.get(device.device)
        if recorded is not None and recorded.size > 0:
            confidence, when = 0.9, "at this moment"
            if recorded.events_after > _AT_ONCE:
                confidence, when = 0.6, f"{recorded.events_after:,} recorded events before this snapshot"
            failed = _RequestFailure(recorded.size, recorded.device_free, recorded.stream, confidence, when)
        elif failed_bytes is not None and failed_bytes > 0:
            failed = _RequestFailure(failed_bytes, device_free, None, 0.7, "by the error that was given")
        else:
            continue
        verdict = _fragmentation(snapshot, named, device, failed, source)
        if isinstance(verdict, Finding):
            findings.append(verdict)
        else:
            notes.append(verdict)
    notes += _notes(snapshot, facts, is_failure_known=bool(last) or failed_bytes is not None)
    growth = None
    if before is not None:
        earlier = categories(before)
        growth, grown = _growth(before, earlier, snapshot, named, facts, source)
        findings += [grown] if grown is not None else []
        if growth.was_starting:
            notes.append("The first snapshot was taken before the server was complete, so growth since then says nothing.")
    return SnapshotVerdict(tuple(findings), facts, tuple(notes), growth)


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
    had, free = "", ""
    if failed.device_free is not None:
        had = f", and the device had {sized(failed.device_free)} free"
        free = f", device free {sized(failed.device_free)}"
    if failed.is_limited:
        had = (
            f". The device had {sized(failed.device_free or 0)} free, so this process runs under a memory limit of its own and "
            f"torch could not take more"
        )
    kept = "torch cannot return such gaps."
    if all(snapshot.segments[hole.segment].is_expandable for hole in usable):
        page = SMALL_PAGE if snapshot.segments[usable[0].segment].is_small else LARGE_PAGE
        kept = (
            f"The segments are expandable, but torch returns only whole pages of {page >> 20} MiB, and live blocks lie on the "
            f"pages of these gaps too."
        )
    because = (
        f"torch asked for {asked} in one piece ({failed.when}){had}. Gaps between live blocks hold "
        f"{sized(pinned)} in {len(usable):,} pieces, the largest {sized(largest)}: enough together, none alone. {kept}"
    )
    beside: Counter[Category] = Counter()
    for place in {hole.segment for hole in usable}:
        for block, category in zip(snapshot.segments[place].blocks, named[place], strict=True):
            if category is not None:
                beside[category] += block.size
    because += f" Live in the same segments: {_told(beside.most_common(_BESIDE_TOLD))}." if beside else ""
    pins = [pin for pin in facts.pins if any(hole.segment == pin.segment for hole in usable)]
    if pins:
        because += f" {_pinned_sentence(snapshot, pins)}"
    lines = [
        f"device {facts.device}: failed request {asked}{free}",
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
    return finding(
        "snapshot-gaps", [Evidence(source, line) for line in lines], because, first=_remedies(facts, failed, largest),
        confidence=round(failed.confidence * (_UNDER_A_LIMIT if failed.is_limited else 1), 2), asked=asked,
    )  # fmt: skip


def _pinned_sentence(snapshot: Snapshot, pins: Sequence[Pin]) -> str:
    first = pins[0]
    who = "one live block" if first.live_blocks == 1 else f"{first.live_blocks} live blocks"
    size = snapshot.segments[first.segment].size
    sentence = f"A segment of {sized(size)} is held by {who} of {sized(first.live_bytes)} ({first.category})"
    if frames := snapshot.stack_of(first.block.stack):
        sentence += f", asked for in {format_stack(frames, 1)}"
    more = len(pins) - 1
    return sentence + (f"; {more:,} more segments are held like this." if more > 1 else "; one more is." if more else ".")


def _remedies(facts: DeviceFacts, failed: _RequestFailure, largest: int) -> tuple[Remedy, ...]:
    limit = Remedy(
        "raise or drop the memory limit of this process",
        "torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF; vLLM itself "
        "sets none, so look in what runs beside it in the same process",
    )
    flags = {
        "--max-num-batched-tokens": "the largest pieces become smaller, so they fit into gaps; costs time to first token",
        "--gpu-memory-utilization": "more memory stays outside the KV cache, so gaps matter less; costs KV cache",
    }
    lower = [Remedy(f"lower {flag}", why, flag) for flag, why in flags.items()]
    common = (*((limit,) if failed.is_limited else ()), *lower)
    if facts.expandable_segments:
        return common
    where_not = (
        "Not beside a KV connector from 0.21.0 on (unless --enable-cumem-allocator is set, 0.22.0 and later), and not with "
        "sleep mode before 0.20.1"
    )
    set_it = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment and restart"
    if largest < LARGE_PAGE and failed.size > SMALL_REQUEST:
        why = "pages of 20 MiB go back only when all of one is free, and every gap here is smaller: it may help little"
        return *common, Remedy(set_it, f"{why}. {where_not}")
    why = "segments grow instead of being cut, and whole free pages go back to the device"
    return Remedy(set_it, f"{why}. {where_not}"), *common


def _notes(snapshot: Snapshot, facts: tuple[DeviceFacts, ...], *, is_failure_known: bool) -> list[str]:
    notes = []
    for device in facts:
        if device.releasable:
            notes.append(
                f"Device {device.device}: {sized(device.releasable)} is free as whole segments or pages. torch returns it to "
                f"the device by itself before it fails, so it is harmless."
            )
        if device.pins and not is_failure_known:
            notes.append(
                f"Device {device.device}: {_pinned_sentence(snapshot, device.pins)} No request is known to have failed."
            )
    if facts and not snapshot.has_stacks:
        notes.append(
            "No stacks were recorded, so what memory is for is not known; "
            "torch.cuda.memory._record_memory_history() before the start records them."
        )
    return notes
