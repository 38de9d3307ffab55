"""Giving memory back and writing snapshots, with a stand-in for torch."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.doctor.read.snapshots import read_snapshot
from plimsoll.inside.memory import (
    HISTORY_MAX_ENTRIES,
    SNAPSHOTS_KEPT,
    asleep_or_allocating,
    compact,
    record_history,
    refused,
    snapshot,
)
from tests.inside.test_segments import MIB

ON_GPU = SimpleNamespace(device=SimpleNamespace(type="cuda", index=1), rank=2)
ON_CPU = SimpleNamespace(device=SimpleNamespace(type="cpu"), rank=0)


class Memory:
    """torch.cuda and torch.cuda.memory in one: 30 MiB held, of which 20 are free as a whole segment."""

    def __init__(self) -> None:
        self.memory = self
        self.free_segment = 20 * MIB
        self.history: list[tuple[Any, ...]] = []

    def is_initialized(self) -> bool:
        return True

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert device == 1
        return {"reserved_bytes": {"all": {"current": 10 * MIB + self.free_segment}}}

    def mem_get_info(self, device: int) -> tuple[int, int]:
        assert device == 1
        return 100 * MIB - self.free_segment, 200 * MIB

    def empty_cache(self) -> None:
        """Give the free segment back."""
        self.free_segment = 0

    def _snapshot(self) -> dict[str, Any]:
        """One segment of one block, and two events."""
        block = {"size": MIB, "requested_size": MIB, "address": 0, "state": "active_allocated", "frames": []}
        segment = {"address": 0, "total_size": MIB, "device": 1, "stream": 0, "segment_type": "small", "blocks": [block]}
        return {"segments": [segment], "device_traces": [[], [None, None]]}

    def _record_memory_history(self, enabled: str | None, stacks: str = "all", max_entries: int = 0) -> None:
        self.history.append((enabled, stacks, max_entries))


def torch_of(memory: Memory) -> Any:
    """A torch with this memory."""
    return SimpleNamespace(cuda=memory)


def test_compaction_says_what_it_returned() -> None:
    """Reserved and free before and after, the difference, and how long it took."""
    done = compact(ON_GPU, torch_of(Memory()))
    assert (done["reserved_before"], done["reserved_after"], done["returned"]) == (30 * MIB, 10 * MIB, 20 * MIB)
    assert (done["free_before"], done["free_after"]) == (80 * MIB, 100 * MIB)
    assert done["duration_s"] >= 0
    assert (done["rank"], done["pid"]) == (2, os.getpid())


def test_on_a_cpu_the_c_library_gives_back() -> None:
    """It tells what was resident before and after, of this very process."""
    done = compact(ON_CPU, None)
    assert done["resident_before"] > MIB
    assert done["returned"] == done["resident_before"] - done["resident_after"]


@pytest.mark.parametrize("device", [None, SimpleNamespace(type="xpu")])
def test_other_devices_are_refused(device: Any) -> None:
    """Compaction and snapshots are known for CUDA and a CPU alone."""
    worker = SimpleNamespace(device=device)
    assert "refused" in compact(worker, None)
    assert "refused" in snapshot(worker, None, "")


def cumem(*asleep: bool, tag: str = "default") -> dict[str, Any]:
    """The loaded modules of a worker with vLLM's own memory pools, some of them asleep."""
    held = {place: SimpleNamespace(is_asleep=each) for place, each in enumerate(asleep)}
    allocator = SimpleNamespace(current_tag=tag, default_tag="default", pointer_to_data=held)
    home = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=allocator))
    return {"vllm.device_allocator.cumem": home}


def test_only_a_worker_that_is_awake_is_asked_to_compact() -> None:
    """Not one that is half awake, allocates in a pool, or whose vLLM does not say; pools that were never used are no matter."""
    assert asleep_or_allocating(cumem(True, True)) == "the worker is asleep"
    assert asleep_or_allocating(cumem(False, True)) == "the worker is asleep"
    assert "pool" in str(asleep_or_allocating(cumem(False, tag="weights")))
    silent = cumem(False)
    silent["vllm.device_allocator.cumem"].CuMemAllocator.instance.pointer_to_data = {0: SimpleNamespace()}
    assert "does not say" in str(asleep_or_allocating(silent))
    assert asleep_or_allocating(cumem(False, False)) is None
    assert asleep_or_allocating({"vllm.device_allocator.cumem": SimpleNamespace(CuMemAllocator=None)}) is None
    assert asleep_or_allocating({}) is None


def test_a_snapshot_is_a_file_that_doctor_reads(tmp_path: Path) -> None:
    """Whole, for its user alone, with what it holds told."""
    done = snapshot(ON_GPU, torch_of(Memory()), str(tmp_path / "new"))
    path = Path(done["path"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert done["bytes"] == path.stat().st_size
    assert (done["segments"], done["blocks"], done["entries"]) == (1, 1, 2)
    assert len(read_snapshot(path).segments) == 1
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_only_the_newest_snapshots_of_a_rank_are_kept(tmp_path: Path) -> None:
    """Those of other ranks and other people's files stay."""
    (tmp_path / "plimsoll-rank20-x.pickle").write_bytes(b"")
    (tmp_path / "mine.pickle").write_bytes(b"")
    paths = [snapshot(ON_GPU, torch_of(Memory()), str(tmp_path))["path"] for _ in range(SNAPSHOTS_KEPT + 3)]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {Path(path).name for path in paths[-SNAPSHOTS_KEPT:]} | {"plimsoll-rank20-x.pickle", "mine.pickle"}


@pytest.mark.parametrize(
    ("history", "asked"), [(1000, ("all", "python", 1000)), ("5", ("all", "python", 5)), (0, (None, "all", 0))]
)
def test_history_is_turned_on_and_off(tmp_path: Path, history: Any, asked: tuple[Any, ...]) -> None:
    """Numbers as text too: vLLM's own endpoint hands on nothing else."""
    memory = Memory()
    assert "path" in snapshot(ON_GPU, torch_of(memory), str(tmp_path), history)
    assert memory.history == [asked]


@pytest.mark.parametrize("history", [-1, HISTORY_MAX_ENTRIES + 1, "many", [], float("inf"), float("nan")])
def test_a_history_without_bounds_is_refused(tmp_path: Path, history: Any) -> None:
    """Nothing is recorded and nothing written."""
    memory = Memory()
    assert "history" in snapshot(ON_GPU, torch_of(memory), str(tmp_path), history)["refused"]
    assert memory.history == []
    assert list(tmp_path.iterdir()) == []


def test_a_history_from_the_start_is_bounded_too() -> None:
    """An operator's larger number is cut."""
    memory = Memory()
    record_history(torch_of(memory), 10 * HISTORY_MAX_ENTRIES)
    assert memory.history == [("all", "python", HISTORY_MAX_ENTRIES)]


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A link in the place of the folder is not followed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "refused" in snapshot(ON_GPU, torch_of(Memory()), str(tmp_path / "link"))
    assert list((tmp_path / "real").iterdir()) == []


def test_a_snapshot_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """What cannot be pickled is raised to the caller, who tells it as a refusal; no scrap stays."""
    memory = Memory()
    held = {"segments": [], "device_traces": [], "odd": lambda: None}
    memory._snapshot = lambda: held  # type: ignore[method-assign]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        snapshot(ON_GPU, torch_of(memory), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_told_without_its_text() -> None:
    """The kind of the error, never its words: they may hold a user's."""
    told = refused(ON_GPU, "compacting", RuntimeError("secret"))
    assert told["refused"] == "compacting failed: RuntimeError"
