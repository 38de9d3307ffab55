"""One worker's memory in torch's CUDA allocator and on the host; gives it back or writes a snapshot of it on request.

    releasable = reserved - active - inactive_split - free segments of private pools
    unreleasable = reserved - active - releasable

`active` bytes are used by tensors or wait for another stream; `inactive_split` are gaps beside blocks in use. torch keeps
no such statistic for expandable segments: there the last walk shows which gaps are pinned, and until the next walk these
are taken as unchanged. Statistics are host memory only, no call to the device.

`compact` and `snapshot` are called through the engine (collective_rpc), in the worker's own thread between two steps, so a step
waits for them. A call that does nothing returns the reason under `refused`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from plimsoll.inside.figures import replacing
from plimsoll.inside.places import run_folder

# torch gives back a segment that is free as a whole. In an expandable segment it gives back every whole page that is free:
# 2 MiB in the pool for small requests, else 20 MiB. A private pool (CUDA graphs, sleep mode) keeps its memory.
# A walk makes Python objects of every block while the worker waits, so walks are rare, and rarer where one takes long.

SMALL_PAGE_BYTES = 2 << 20
LARGE_PAGE_BYTES = 20 << 20
WALK_EVERY_S = 30.0
WALK_SHARE = 0.001  # of the time, at most


class Walk(NamedTuple):
    """The sums of one walk over one device's segments, in bytes."""

    reserved: int
    active: int
    releasable: int
    private_reserved: int
    private_whole_free: int  # segments of private pools that are free and yet cannot be given back
    largest_free_block: int  # of the common pool: the largest request that needs nothing new from the device
    expandable_segments: int


def walk(segments: Iterable[Mapping[str, Any]], device: int) -> Walk:
    """Adds up the segments that torch.cuda.memory_snapshot() lists for one device."""
    reserved = active = releasable = private = private_free = largest = expandable = 0
    for segment in segments:
        if segment.get("device", device) != device:
            continue
        size = segment["total_size"]
        sizes = [block["size"] for block in segment["blocks"]]  # they fill the segment in order
        starts = itertools.accumulate(sizes, initial=0)
        free_or_not = (block["state"] == "inactive" for block in segment["blocks"])
        gaps = [(start, held) for start, held, is_free in zip(starts, sizes, free_or_not, strict=False) if is_free]
        free = sum(held for _, held in gaps)
        is_expandable = segment.get("is_expandable") is True
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
    return Walk(reserved, active, releasable, private, private_free, largest, expandable)


def _whole_pages(start: int, size: int, page: int) -> int:
    """Returns the bytes of a gap that are whole pages. `start` counts from the segment, which begins where a page does."""
    return max(0, (start + size) // page - -(-start // page)) * page


_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the first that is set holds


def allocator_figures(
    stats: Mapping[str, Any], last: Walk | None, walked_age_s: float | None, *, wants_expandable: bool = False
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Returns the figures from torch's nested statistics and the last walk, and the reason for each unknown one."""
    reserved, active = _amount(stats, "reserved_bytes"), _amount(stats, "active_bytes")
    if reserved is None or active is None:
        return None, {"allocator": "torch has no statistics of this device yet"}
    split = _amount(stats, "inactive_split_bytes")
    pools = stats.get("reserved_bytes_by_private_pools")  # a newer torch counts each
    private_pools = sum(_amount(pools, pool) or 0 for pool in pools) if isinstance(pools, Mapping) else None
    is_expandable = wants_expandable or (last is not None and last.expandable_segments > 0)
    pinned = None if split is None else split + (0 if last is None else last.private_whole_free)
    if is_expandable:
        pinned = None if last is None else last.reserved - last.active - last.releasable
    releasable = None if pinned is None else max(0, max(0, reserved - active) - pinned)
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
    """The few calls to torch about one CUDA device, the same for every version of torch."""

    def __init__(self, torch: Any, device: int) -> None:
        self.torch, self.device = torch, device
        self._takes_traces = True

    def stats(self) -> Mapping[str, Any]:
        """Returns the nested statistics; empty before torch uses the device. No call to the device."""
        if not self.torch.cuda.is_initialized():
            return {}
        nested: Mapping[str, Any] = self.torch.cuda.memory_stats_as_nested_dict(self.device)
        return nested

    def segments(self) -> list[Mapping[str, Any]]:
        """Returns all segments with their blocks, without the history of past allocations where torch can leave it out."""
        listing = self.torch.cuda.memory_snapshot
        if self._takes_traces:
            try:
                return list(listing(include_traces=False))
            except TypeError:  # an older torch
                self._takes_traces = False
        return list(listing())

    def free_and_total(self) -> tuple[int, int]:
        """Returns the device's free and total bytes, by a call to the device: never while the worker starts."""
        free, total = self.torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def uuid(self) -> str | None:
        """Returns the device's permanent name in NVML's spelling; None where torch has none. Never while the worker starts."""
        uuid = getattr(self.torch.cuda.get_device_properties(self.device), "uuid", None)
        return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


_NO_LIMIT = 1 << 60  # cgroup v1 says "no limit" with a number of about 2**63

GroupFiles = Sequence[tuple[str, str]]  # where a group's limit and its use are


def host_memory(root: str = "", groups: GroupFiles | None = None) -> tuple[dict[str, int | None], dict[str, str]]:
    """Returns the figures in bytes, and the reason for each unknown one.

    `root` is put before every path; `groups` is an earlier result of `group_files`, which spares the search.
    """
    own = _table(_text(f"{root}/proc/self/status"), "VmRSS", "VmHWM")
    machine = _table(_text(f"{root}/proc/meminfo"), "MemTotal", "MemAvailable")
    # A limit holds for everything below it, so all groups up to the top are read: the tightest counts, with its group's use,
    # file cache included. Without any limit the use is that of the process's own group.
    bounds = [(_number(_text(limit)), _number(_text(use))) for limit, use in (group_files(root) if groups is None else groups)]
    limits = [(limit, use) for limit, use in bounds if limit is not None and limit < _NO_LIMIT]
    own_use = next((use for _, use in bounds if use is not None), None)
    limit, used = min(limits, key=lambda bound: bound[0], default=(None, own_use))
    figures = {
        "resident": own.get("VmRSS"),
        "resident_peak": own.get("VmHWM"),
        "total": machine.get("MemTotal"),
        "available": machine.get("MemAvailable"),
        "limit": limit,
        "used_by_group": used,
    }
    reasons = {f"host_memory.{name}": "the kernel does not say" for name, value in figures.items() if value is None}
    if limit is None:
        reasons["host_memory.limit"] = "no control group limits this process's memory, as far as it can see"
    return figures, reasons


def resident_bytes(root: str = "") -> int | None:
    return _table(_text(f"{root}/proc/self/status"), "VmRSS").get("VmRSS")


def group_files(root: str = "", pid: int | str = "self") -> GroupFiles:
    """Returns the readable files with the limit and use of a process's groups, the process's own group first."""
    files = []
    for line in _text(f"{root}/proc/{pid}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":  # version 2
            top, limit, use = f"{root}/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, use = f"{root}/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the group may have the host's name for it; then only the top is there, and it is ours.
        names = [part for part in group.split("/") if part not in ("", "..")][:64]
        files += [("/".join((top, *names[:n], limit)), "/".join((top, *names[:n], use))) for n in range(len(names), -1, -1)]
    return [pair for pair in files if any(os.access(path, os.R_OK) for path in pair)]


def _table(text: str, *names: str) -> Mapping[str, int]:
    """Returns the bytes of these names from lines like `VmRSS:  123 kB`."""
    sizes = {}
    for name in names:
        words = f"\n{text}".partition(f"\n{name}:")[2].partition("\n")[0].split()
        if len(words) == 2 and words[1] == "kB" and words[0].isascii() and words[0].isdigit():
            sizes[name] = int(words[0][:18]) * 1024
    return sizes


def _number(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isascii() and word.isdigit() and len(word) < 25 else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(256 * 1024)
    except OSError:
        return ""


HISTORY_MAX_ENTRIES = 1_000_000
SNAPSHOTS_KEPT = 8  # of each rank


def compact(worker: Any, torch: Any) -> dict[str, Any]:
    """Gives unused memory back: torch's cache to the device, or on a CPU the C library's to the system."""
    device = getattr(worker, "device", None)
    kind = getattr(device, "type", None)
    if kind == "cpu":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is None:
            return {"refused": "this C library cannot give memory back on request"}
        before = resident_bytes()
        took_s = _timed(lambda: trim(0))
        after = resident_bytes()
        returned = None if before is None or after is None else before - after
        return {"resident_before": before, "resident_after": after, "returned": returned, "duration_s": took_s}
    if kind != "cuda":
        return {"refused": f"there is nothing to give back on {kind or 'a worker without a device'}"}
    if (why := asleep_or_allocating()) is not None:
        return {"refused": why}
    cuda = Torch(torch, getattr(device, "index", None) or 0)
    before, (free_before, _) = _amount(cuda.stats(), "reserved_bytes"), cuda.free_and_total()
    took_s = _timed(torch.cuda.empty_cache)
    after, (free_after, _) = _amount(cuda.stats(), "reserved_bytes"), cuda.free_and_total()
    return {
        "reserved_before": before,
        "reserved_after": after,
        "returned": None if before is None or after is None else before - after,
        "free_before": free_before,
        "free_after": free_after,
        "duration_s": took_s,
    }


def _timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return round(time.perf_counter() - began, 6)


def asleep_or_allocating(modules: Any = None) -> str | None:
    """Returns why torch's cache must not be emptied now, or None.

    Sleep mode keeps weights and KV cache in pools whose memory vLLM maps and unmaps behind torch's back. torch leaves pools
    alone that somebody still holds, and vLLM holds them all; vLLM itself empties the cache before it wakes up. There are two
    wrong moments: asleep, when torch's own figures are wrong and nothing is left to give back; and while a pool is open for
    allocation, when torch would empty that pool and fail (pytorch issue 145168).
    """
    home = (sys.modules if modules is None else modules).get("vllm.device_allocator.cumem")
    allocator = getattr(getattr(home, "CuMemAllocator", None), "instance", None)
    if allocator is None:
        return None
    if getattr(allocator, "current_tag", None) != getattr(allocator, "default_tag", None):
        return "vLLM is allocating in a memory pool of its own"
    held = list(getattr(allocator, "pointer_to_data", {}).values())
    if any(not hasattr(data, "is_asleep") for data in held):
        return "this vLLM does not say whether its memory is asleep"
    return "the worker is asleep" if any(data.is_asleep for data in held) else None


def snapshot(worker: Any, torch: Any, folder: str, history: Any = None) -> dict[str, Any]:
    """Writes all blocks of torch's allocator into a file in the folder; `history` sets how many past events torch keeps."""
    if getattr(getattr(worker, "device", None), "type", None) != "cuda":
        return {"refused": "torch has memory snapshots for CUDA devices alone"}
    try:  # vLLM's own endpoint hands every argument on as text
        entries = None if history is None else int(history)
    except (TypeError, ValueError, OverflowError):
        entries = -1
    if entries is not None and not 0 <= entries <= HISTORY_MAX_ENTRIES:
        return {"refused": f"history is not a whole number from 0 to {HISTORY_MAX_ENTRIES}"}
    if entries:
        record_history(torch, entries)
    safe = run_folder(folder or f"{tempfile.gettempdir()}/plimsoll-snapshots-{os.getuid()}")
    if safe is None:
        return {"refused": "there is no folder of this user's own to write to"}
    began = time.perf_counter()
    held = torch.cuda.memory._snapshot()  # noqa: SLF001 - torch has no public name for it
    if entries == 0:
        record_history(torch, 0)  # only now: torch forgets what it has recorded
    path, size = _write(worker, safe, held)
    return {
        "path": path,
        "bytes": size,
        "segments": len(held["segments"]),
        "blocks": sum(len(segment["blocks"]) for segment in held["segments"]),
        "entries": sum(len(trace) for trace in held.get("device_traces", ())),
        "duration_s": round(time.perf_counter() - began, 6),
    }


def record_history(torch: Any, entries: int) -> None:
    """Makes torch record the last `entries` allocations and frees with their Python frames; 0 ends it."""
    record = torch.cuda.memory._record_memory_history  # noqa: SLF001 - torch has no public name for it
    if entries > 0:
        record("all", stacks="python", max_entries=min(entries, HISTORY_MAX_ENTRIES))
    else:
        record(None)


def _write(worker: Any, folder: str, held: Any) -> tuple[str, int]:
    prefix = f"plimsoll-rank{int(getattr(worker, 'rank', 0) or 0)}-"
    seconds, rest_ns = divmod(time.time_ns(), 1_000_000_000)  # one reading: names sort by age, also around a full second
    name = f"{prefix}{time.strftime('%Y%m%dT%H%M%S', time.gmtime(seconds))}-{rest_ns:09d}-{os.getpid()}.pickle"
    with replacing(folder, name) as file:
        pickle.dump(held, file)
        size = file.tell()
    # Names begin with the time, so their order is that of age.
    names = sorted(each for each in os.listdir(folder) if each.startswith(prefix) and each.endswith(".pickle"))  # noqa: PTH208
    for old in names[:-SNAPSHOTS_KEPT]:
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{old}")  # noqa: PTH108
    return f"{folder}/{name}", size
