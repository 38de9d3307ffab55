"""What a worker does when it is told to, in its own thread between two steps: give memory back, write a snapshot.

Both are called through the engine (collective_rpc), so a step waits for them. Neither ever raises: what was not done is
told with its reason under `refused`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from plimsoll.inside.allocator import Torch
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import run_folder

_NO_LIMIT = 1 << 60  # cgroup v1 says "no limit" with a number of about 2**63

GroupFiles = Sequence[tuple[str, str]]  # where a group's limit and its use are


def host_memory(root: str = "", groups: GroupFiles | None = None) -> tuple[dict[str, int | None], dict[str, str]]:
    """The figures in bytes, and the reason for each that is unknown.

    `root` is put before every path; `groups` is what `group_files` has found before, which spares the search.
    """
    own = _table(_text(f"{root}/proc/self/status"), "VmRSS", "VmHWM")
    machine = _table(_text(f"{root}/proc/meminfo"), "MemTotal", "MemAvailable")
    limit, used = group_memory(group_files(root) if groups is None else groups)
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


def group_memory(groups: GroupFiles) -> tuple[int | None, int | None]:
    """The tightest limit on this process's control group, and what that group uses, file cache included.

    A limit holds for everything below it, so all groups up to the top are asked. Without any limit the use is that of
    the process's own group.
    """
    tightest: tuple[int, int | None] | None = None
    own_use: int | None = None
    for limit_file, use_file in groups:
        limit, use = _number(_text(limit_file)), _number(_text(use_file))
        own_use = use if own_use is None else own_use
        if limit is not None and limit < _NO_LIMIT and (tightest is None or limit < tightest[0]):
            tightest = limit, use
    return (None, own_use) if tightest is None else tightest


def group_files(root: str = "") -> GroupFiles:
    """The files that hold limit and use of this process's groups and are there, the process's own group first."""
    files = []
    for line in _text(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":  # version 2
            top, limit, use = f"{root}/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, use = f"{root}/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the group may be named as the host sees it; then only the top is there, and it is ours.
        names = [part for part in group.split("/") if part not in ("", "..")][:64]
        files += [("/".join((top, *names[:n], limit)), "/".join((top, *names[:n], use))) for n in range(len(names), -1, -1)]
    return [pair for pair in files if any(os.access(path, os.R_OK) for path in pair)]


def _table(text: str, *names: str) -> Mapping[str, int]:
    """Of lines like `VmRSS:  123 kB` those with these names, in bytes."""
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
    """Give back to the device what torch keeps and nobody uses; on a CPU, what the C library keeps."""
    device = getattr(worker, "device", None)
    kind = getattr(device, "type", None)
    if kind == "cpu":
        return _told(worker, _compact_host())
    if kind != "cuda":
        return _told(worker, {"refused": f"there is nothing to give back on {kind or 'a worker without a device'}"})
    if (why := asleep_or_allocating()) is not None:
        return _told(worker, {"refused": why})
    return _told(worker, _compact_device(Torch(torch, getattr(device, "index", None) or 0)))


def _compact_device(torch: Torch) -> dict[str, Any]:
    before, (free_before, _) = _reserved(torch), torch.free_and_total()
    began = time.perf_counter()
    torch.empty_cache()
    took_s = time.perf_counter() - began
    after, (free_after, _) = _reserved(torch), torch.free_and_total()
    return {
        "reserved_before": before,
        "reserved_after": after,
        "returned": None if before is None or after is None else before - after,
        "free_before": free_before,
        "free_after": free_after,
        "duration_s": round(took_s, 6),
    }


def _compact_host() -> dict[str, Any]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return {"refused": "this C library cannot give memory back on request"}
    before = resident_bytes()
    began = time.perf_counter()
    trim(0)
    took_s = time.perf_counter() - began
    after = resident_bytes()
    returned = None if before is None or after is None else before - after
    return {"resident_before": before, "resident_after": after, "returned": returned, "duration_s": round(took_s, 6)}


def _reserved(torch: Torch) -> int | None:
    try:
        return int(torch.stats()["reserved_bytes"]["all"]["current"])
    except (KeyError, TypeError, ValueError):
        return None


def asleep_or_allocating(modules: Any = None) -> str | None:
    """Why torch's cache must not be emptied now, or None.

    Sleep mode keeps weights and KV cache in pools whose memory vLLM maps and unmaps behind torch's back. torch leaves pools
    alone that somebody still holds, and vLLM holds them all, so emptying the cache is what vLLM itself does before it wakes
    up. Two moments are not for it: asleep, when torch's own figures are wrong and nothing is left to give back; and while
    a pool is open for allocation, when torch would empty that pool and fail (pytorch issue 145168).
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
    """Write what torch's allocator holds, block by block, into one folder; `history` sets how many past events it keeps."""
    if getattr(getattr(worker, "device", None), "type", None) != "cuda":
        return _told(worker, {"refused": "torch has memory snapshots for CUDA devices alone"})
    entries = None if history is None else _entries(history)
    if history is not None and entries is None:
        return _told(worker, {"refused": f"history is not a whole number from 0 to {HISTORY_MAX_ENTRIES}"})
    if entries:
        record_history(torch, entries)
    safe = run_folder(folder or f"{tempfile.gettempdir()}/plimsoll-snapshots-{os.getuid()}")
    if safe is None:
        return _told(worker, {"refused": "there is no folder of this user's own to write to"})
    began = time.perf_counter()
    held = torch.cuda.memory._snapshot()  # noqa: SLF001 - torch has no public name for it
    if entries == 0:
        record_history(torch, 0)  # only now: torch forgets what it has recorded
    path, size = _write(worker, safe, held)
    return _told(
        worker,
        {
            "path": path,
            "bytes": size,
            "segments": len(held["segments"]),
            "blocks": sum(len(segment["blocks"]) for segment in held["segments"]),
            "entries": sum(len(trace) for trace in held.get("device_traces", ())),
            "duration_s": round(time.perf_counter() - began, 6),
        },
    )


def record_history(torch: Any, entries: int) -> None:
    """Let torch remember the last `entries` allocations and frees with their Python frames; 0 ends it."""
    record = torch.cuda.memory._record_memory_history  # noqa: SLF001 - torch has no public name for it
    if entries > 0:
        record("all", stacks="python", max_entries=min(entries, HISTORY_MAX_ENTRIES))
    else:
        record(None)


def _entries(history: Any) -> int | None:
    """A whole number within its bounds; vLLM's own endpoint hands every argument on as text."""
    try:
        entries = int(history)
    except (TypeError, ValueError, OverflowError):
        return None
    return entries if 0 <= entries <= HISTORY_MAX_ENTRIES else None


def _write(worker: Any, folder: str, held: Any) -> tuple[str, int]:
    prefix = f"plimsoll-rank{int(getattr(worker, 'rank', 0) or 0)}-"
    seconds, rest_ns = divmod(time.time_ns(), 1_000_000_000)  # one reading: names sort by age, also around a full second
    path = f"{folder}/{prefix}{time.strftime('%Y%m%dT%H%M%S', time.gmtime(seconds))}-{rest_ns:09d}-{os.getpid()}.pickle"
    temporary = f"{path}.part"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            pickle.dump(held, file)
            size = file.tell()
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    # Names begin with the time, so their order is that of age.
    names = sorted(name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(".pickle"))  # noqa: PTH208
    for name in names[:-SNAPSHOTS_KEPT]:
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{name}")  # noqa: PTH108
    return path, size


def _told(worker: Any, what: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "rank": getattr(worker, "rank", None), "at": time.time(), **what}


def refused(worker: Any, where: str, error: BaseException) -> dict[str, Any]:
    """A fault, counted and told as a refusal."""
    FAULTS.note(where, error)
    return _told(worker, {"refused": f"{where} failed: {type(error).__name__}"})
