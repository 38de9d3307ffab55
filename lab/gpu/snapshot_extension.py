"""A vLLM worker extension that writes torch's memory snapshot from inside the worker, asked for over `collective_rpc`.

    --worker-extension-cls snapshot_extension.SnapshotProbe      # with this folder on PYTHONPATH
    PLIMSOLL_LAB_RECORD=1                                        # record where each block came from, from before the weights on

vLLM imports the class in the worker before it touches the device: recording begins with this import.
"""

from __future__ import annotations

import gzip
import importlib
import os
import pickle
import re
from pathlib import Path
from typing import Any

HISTORY_ENTRIES = 3000
MACHINE_PATH = re.compile(r"^.*/(?=(?:lab/gpu|vllm|torch|triton|multiprocessing|asyncio|concurrent)/)")


def record(entries: int = HISTORY_ENTRIES) -> None:
    """Begin to record allocations with their Python frames."""
    torch = importlib.import_module("torch")
    torch.cuda.init()  # the allocator of a device that is not there yet would not hear of it
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=entries)  # noqa: SLF001 - torch's only door to it


def dump(target: Path) -> dict[str, int]:
    """Write the snapshot and the allocator's own summary beside it; how many segments and blocks it holds.

    `target` ends in .pickle.gz. Frames lose the folders of this machine.
    """
    torch = importlib.import_module("torch")
    raw = target.with_suffix(".raw")
    torch.cuda.memory._dump_snapshot(str(raw))  # noqa: SLF001 - torch's only door to it
    with raw.open("rb") as stream:
        snapshot = pickle.load(stream)
    raw.unlink()
    without_machine_paths(snapshot)
    with gzip.open(target, "wb") as packed:
        pickle.dump(snapshot, packed)
    target.with_name(target.name.replace(".pickle.gz", ".summary.txt")).write_text(
        torch.cuda.memory_summary(), encoding="utf-8"
    )
    segments = snapshot["segments"]
    return {
        "segments": len(segments),
        "blocks": sum(len(segment["blocks"]) for segment in segments),
        "events": sum(len(trace) for trace in snapshot["device_traces"]),
        "bytes": target.stat().st_size,
    }


def without_machine_paths(found: Any, names: dict[str, str] | None = None, seen: set[int] | None = None) -> None:
    """Shorten every frame's file name in place, so that it starts with the package it belongs to."""
    names = {} if names is None else names
    seen = set() if seen is None else seen
    if not isinstance(found, dict | list | tuple) or id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, dict) and isinstance(found.get("filename"), str):
        name = found["filename"]
        found["filename"] = names.setdefault(name, MACHINE_PATH.sub("", name))
    for value in found.values() if isinstance(found, dict) else found:
        without_machine_paths(value, names, seen)


class SnapshotProbe:
    """Methods that vLLM adds to its worker; the names clash with none of its own."""

    def write_memory_snapshot(self, target: str) -> dict[str, int]:
        """Write this worker's snapshot to a file on its machine."""
        return dump(Path(target))


if os.environ.get("PLIMSOLL_LAB_RECORD") == "1":
    record()
