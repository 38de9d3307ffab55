"""What torch's CUDA allocator holds, from its own statistics: host memory only, no call to the device.

    releasable = reserved - active - inactive_split - free segments of private pools
    unreleasable = reserved - active - releasable

`active` is what tensors use and what waits for another stream; `inactive_split` are gaps beside blocks in use. torch keeps
no such statistic for expandable segments: there the last walk tells which gaps are pinned, and until the next walk these
are taken as unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# torch gives back a segment that is free as a whole. Of an expandable segment it gives back every whole page that is free:
# 2 MiB in the pool for small requests, else 20 MiB. A private pool (CUDA graphs, sleep mode) keeps what it has.
# A walk makes Python objects of every block while the worker waits, so walks are rare.

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
        self.walked_at, self.took_s = now, took_s


_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the first that is set holds


def allocator_figures(
    stats: Mapping[str, Any], last: Walk | None, walked_age_s: float | None, *, wants_expandable: bool = False
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The figures from torch's nested statistics and the last walk, and the reason for each that is unknown."""
    reserved, active = _amount(stats, "reserved_bytes"), _amount(stats, "active_bytes")
    if reserved is None or active is None:
        return None, {"allocator": "torch has no statistics of this device yet"}
    split = _amount(stats, "inactive_split_bytes")
    pools = stats.get("reserved_bytes_by_private_pools")  # a newer torch counts each
    private_pools = sum(_amount(pools, pool) or 0 for pool in pools) if isinstance(pools, Mapping) else None
    is_expandable = wants_expandable or (last is not None and last.expandable_segments > 0)
    releasable = _releasable(reserved, active, split, last, is_expandable=is_expandable)
    figures = {
        "allocated": _amount(stats, "allocated_bytes"),
        "reserved": reserved,
        "active": active,
        "inactive_split": split,
        "releasable": releasable,
        "unreleasable": None if releasable is None else reserved - active - releasable,
        "segments": _amount(stats, "segment"),
        "allocated_peak": _amount(stats, "allocated_bytes", "peak"),
        "reserved_peak": _amount(stats, "reserved_bytes", "peak"),
        "alloc_retries": _whole(stats.get("num_alloc_retries")),
        "ooms": _whole(stats.get("num_ooms")),
        "expandable": is_expandable,
        "private_pool_bytes": private_pools if last is None else last.private_reserved,
        "largest_free_block": None if last is None else last.largest_free_block,
        "walked_age_s": walked_age_s,
    }
    reasons = {f"allocator.{name}": "torch does not count it" for name, value in figures.items() if value is None}
    if last is None:
        walked = ("releasable", "unreleasable", "private_pool_bytes", "largest_free_block", "walked_age_s")
        unknown = [f"allocator.{name}" for name in walked if figures[name] is None]
        reasons |= dict.fromkeys(unknown, "known after the first walk over the segments")
    return figures, reasons


def _releasable(reserved: int, active: int, split: int | None, last: Walk | None, *, is_expandable: bool) -> int | None:
    free = max(0, reserved - active)
    if is_expandable:
        if last is None:
            return None
        pinned = last.reserved - last.active - last.releasable
    elif split is None:
        return None
    else:
        pinned = split + (0 if last is None else last.private_whole_free)
    return max(0, free - pinned)


def _amount(stats: Mapping[Any, Any], name: Any, kind: str = "current") -> int | None:
    try:
        return _whole(stats[name]["all"][kind])
    except (KeyError, TypeError):
        return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def wants_expandable(environ: Mapping[str, str] | None = None) -> bool:
    environ = os.environ if environ is None else environ
    setting = next((environ[name] for name in _SETTINGS if environ.get(name)), "")
    pairs = (pair.partition(":") for pair in setting.replace(" ", "").split(","))
    return any(name == "expandable_segments" and value == "True" for name, _, value in pairs)


class Torch:
    """The few things that are asked of torch about one CUDA device, whatever its version."""

    def __init__(self, torch: Any, device: int) -> None:
        self.torch, self.device = torch, device
        self._takes_traces = True

    def stats(self) -> Mapping[str, Any]:
        """The nested statistics; empty before torch uses the device. No call to the device."""
        if not self.torch.cuda.is_initialized():
            return {}
        nested: Mapping[str, Any] = self.torch.cuda.memory_stats_as_nested_dict(self.device)
        return nested

    def segments(self) -> list[Mapping[str, Any]]:
        """All segments with their blocks, without the history of past allocations where torch can leave it out."""
        listing = self.torch.cuda.memory_snapshot
        if self._takes_traces:
            try:
                return list(listing(include_traces=False))
            except TypeError:  # an older torch
                self._takes_traces = False
        return list(listing())

    def free_and_total(self) -> tuple[int, int]:
        """What the device has, by a call to the device: never while the worker starts."""
        free, total = self.torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def uuid(self) -> str | None:
        """The device's own name for good, in NVML's spelling; never while the worker starts."""
        uuid = getattr(self.torch.cuda.get_device_properties(self.device), "uuid", None)
        return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()
