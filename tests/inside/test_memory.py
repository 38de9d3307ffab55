"""The memory of one worker: torch's segments and statistics, the host's, giving it back, snapshots."""

from __future__ import annotations

import gzip
import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read.snapshots import read_snapshot
from plimsoll.doctor.rules.snapshot_facts import FREE, Category, device_facts
from plimsoll.inside.figures import GROUPS
from plimsoll.inside.memory import (
    HISTORY_MAX_ENTRIES,
    LARGE_PAGE_BYTES,
    SMALL_PAGE_BYTES,
    SNAPSHOTS_KEPT,
    Torch,
    allocator_figures,
    asleep_or_allocating,
    compact,
    host_memory,
    record_history,
    resident_bytes,
    snapshot,
    walk,
    wants_expandable,
)
from tests.each import cases, each

# The walk over torch's segments, on snapshots that a real H200 wrote.

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-failures" / "snapshots"
SNAPSHOTS = sorted(CAPTURES.glob("*.pickle.gz"))
MIB = 1 << 20


def raw_segments(path: Path) -> list[dict[str, Any]]:
    found = pickle.loads(gzip.decompress(path.read_bytes()))
    segments: list[dict[str, Any]] = found["segments"] if isinstance(found, dict) else found
    return segments


def segment(blocks: list[tuple[str, int]], **more: Any) -> dict[str, Any]:
    listed = [{"state": state, "size": size} for state, size in blocks]
    return {"device": 0, "total_size": sum(size for _, size in blocks), "segment_type": "large", "blocks": listed, **more}


@each("path", SNAPSHOTS, ids=lambda path: path.name)
def test_walk_statistics_and_doctor_agree(path: Path) -> None:
    """What the worker reckons from torch's list and statistics is what `doctor` reads from the file of that moment."""
    snapshot = read_snapshot(path)
    some = next(iter(Category))
    named = tuple(tuple(None if block.state == FREE else some for block in each.blocks) for each in snapshot.segments)
    (facts,) = device_facts(snapshot, named)
    found = walk(raw_segments(path), 0)
    told = (found.reserved, found.active, found.releasable, found.private_reserved, found.largest_free_block)
    assert told == (facts.reserved, facts.active, facts.releasable, facts.private_reserved, facts.largest_free)
    assert found.expandable_segments == facts.expandable_segments
    # Right after a walk, the statistics of the same moment say the same, for ordinary segments and expandable ones.
    figures, reasons = allocator_figures(stats_of(raw_segments(path)), found, 0.0)
    assert figures is not None
    assert set(figures) == set(GROUPS["allocator"])
    assert figures["releasable"] == found.releasable
    assert figures["unreleasable"] == found.reserved - found.active - found.releasable
    assert figures["expandable"] == (found.expandable_segments > 0)
    assert reasons == {}


def test_releasable_is_what_torch_would_give_back() -> None:
    """Whole free segments and whole expandable pages; no gap beside a live block, no private pool, no other device."""
    found = walk([segment([("inactive", 20 * MIB)]), segment([("active_allocated", MIB), ("inactive", 9 * MIB)])], 0)
    assert (found.releasable, found.reserved - found.active) == (20 * MIB, 29 * MIB)
    assert found.largest_free_block == 20 * MIB
    found = walk([segment([("inactive", 20 * MIB)], segment_pool_id=(0, 1))], 0)
    assert (found.releasable, found.private_reserved, found.private_whole_free) == (0, 20 * MIB, 20 * MIB)
    assert found.largest_free_block == 0
    blocks = [("active_allocated", 10 * MIB), ("inactive", 50 * MIB), ("active_pending_free", 20 * MIB)]
    large = walk([segment(blocks, is_expandable=True)], 0)
    assert large.releasable == 2 * LARGE_PAGE_BYTES
    assert large.active == 30 * MIB
    small = [("active_allocated", MIB), ("inactive", 4 * MIB), ("active_allocated", MIB)]
    assert walk([segment(small, is_expandable=True, segment_type="small")], 0).releasable == SMALL_PAGE_BYTES
    assert walk([segment([("inactive", MIB)], device=1)], 0).reserved == 0


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(["inactive", "active_allocated"]), st.integers(1, 1 << 32)), min_size=1),
            st.booleans(),
            st.sampled_from([(0, 0), (0, 1)]),
        )
    )
)
def test_releasable_never_exceeds_what_is_free(drawn: list[tuple[list[tuple[str, int]], bool, tuple[int, int]]]) -> None:
    """For any list of segments the parts are not negative and add up."""
    found = walk([segment(blocks, is_expandable=grows, segment_pool_id=pool) for blocks, grows, pool in drawn], 0)
    assert 0 <= found.releasable <= found.reserved - found.active
    assert 0 <= found.private_whole_free <= found.private_reserved <= found.reserved


# What is reckoned from torch's own statistics.
def stats_of(segments: list[dict[str, Any]]) -> dict[str, Any]:
    """The statistics that torch would keep for these segments: gaps of expandable ones are in none of them."""
    reserved = active = split = 0
    for segment in segments:
        gaps = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        reserved += segment["total_size"]
        active += segment["total_size"] - sum(gaps)
        if len(segment["blocks"]) > 1 and not segment.get("is_expandable"):
            split += sum(gaps)
    amounts = {"reserved_bytes": reserved, "active_bytes": active, "inactive_split_bytes": split, "allocated_bytes": active}
    nested = {name: {"all": {"current": amount, "peak": amount + 1}} for name, amount in amounts.items()}
    return {**nested, "segment": {"all": {"current": len(segments)}}, "num_alloc_retries": 3, "num_ooms": 1}


def test_before_the_first_walk_what_needs_one_is_unknown_and_without_statistics_everything() -> None:
    """The statistics alone give an upper bound, but for expandable segments, which would promise too much: None, not zeros."""
    segments = raw_segments(SNAPSHOTS[0].with_name("snapshot-ready.pickle.gz"))
    figures, reasons = allocator_figures(stats_of(segments), None, None)
    assert figures is not None
    assert figures["releasable"] >= walk(segments, 0).releasable
    assert (figures["largest_free_block"], figures["alloc_retries"], figures["ooms"]) == (None, 3, 1)
    assert "walk" in reasons["allocator.largest_free_block"]
    free = [{"total_size": 40 * MIB, "blocks": [{"state": "inactive", "size": 40 * MIB}]}]
    figures, reasons = allocator_figures(stats_of(free), None, None, wants_expandable=True)
    assert figures is not None
    assert figures["releasable"] is figures["unreleasable"] is None
    assert {"allocator.releasable", "allocator.unreleasable"} <= set(reasons)
    none: list[dict[str, Any]] = [{}, {"reserved_bytes": {}}, {"reserved_bytes": None, "active_bytes": {"all": 3}}]
    for stats in none:
        figures, reasons = allocator_figures(stats, None, None)
        assert (figures, set(reasons)) == (None, {"allocator"})


def test_between_walks_pinned_gaps_are_taken_as_unchanged() -> None:
    """60 MiB more came free since the walk found 30 MiB pinned of 50: they count as releasable, and never below zero."""
    blocks = [{"state": "active_allocated", "size": 10 * MIB}, {"state": "inactive", "size": 50 * MIB}]
    segment = {"total_size": 60 * MIB, "blocks": blocks, "is_expandable": True}
    found = walk([segment], 0)
    assert found.releasable == 40 * MIB
    stats = stats_of([segment])
    stats["reserved_bytes"]["all"]["current"] += 60 * MIB
    figures, _ = allocator_figures(stats, found, 12.0)
    assert figures is not None
    assert figures["releasable"] == 100 * MIB
    stats["active_bytes"]["all"]["current"] = stats["reserved_bytes"]["all"]["current"]
    figures, _ = allocator_figures(stats, found, 12.0)
    assert figures is not None
    assert figures["releasable"] == 0


@pytest.mark.parametrize(("environ", "wanted"), cases("inside", "the_setting_is_read_as_torch_reads_it"))
def test_the_setting_is_read_as_torch_reads_it(environ: dict[str, str], wanted: bool) -> None:
    """The first variable that is set holds as a whole."""
    assert wants_expandable(environ) is wanted


class OlderCuda:
    """What of torch.cuda is asked, as an older torch has it: its listing takes no word on traces."""

    def __init__(self, *, is_initialized: bool) -> None:
        self._is_initialized = is_initialized

    def is_initialized(self) -> bool:
        return self._is_initialized

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert self._is_initialized
        return {"of": device}

    def memory_snapshot(self, mempool_id: object = None) -> list[dict[str, Any]]:
        return [{"total_size": 1, "pool": mempool_id}]

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0000-{device}")


def test_an_older_torch_is_asked_in_its_own_way() -> None:
    """Segments are listed although it cannot leave traces out; the UUID is spelled as NVML spells it."""
    torch = Torch(SimpleNamespace(cuda=OlderCuda(is_initialized=True)), 2)
    assert torch.stats() == {"of": 2}
    assert len(torch.segments()) == len(torch.segments()) == 1
    assert torch.uuid() == "GPU-0000-2"
    assert Torch(SimpleNamespace(cuda=OlderCuda(is_initialized=False)), 0).stats() == {}, "asking would initialize it"


# Giving memory back and writing snapshots, with a stand-in for torch.

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
        self.free_segment = 0

    def _snapshot(self) -> dict[str, Any]:
        block = {"size": MIB, "requested_size": MIB, "address": 0, "state": "active_allocated", "frames": []}
        segment = {"address": 0, "total_size": MIB, "device": 1, "stream": 0, "segment_type": "small", "blocks": [block]}
        return {"segments": [segment], "device_traces": [[], [None, None]]}

    def _record_memory_history(self, enabled: str | None, stacks: str = "all", max_entries: int = 0) -> None:
        self.history.append((enabled, stacks, max_entries))


def torch_of(memory: Memory) -> Any:
    return SimpleNamespace(cuda=memory)


def test_compaction_says_what_it_returned_and_other_devices_are_refused() -> None:
    """Reserved and free before and after, and how long it took; on a CPU what was resident, of this very process."""
    done = compact(ON_GPU, torch_of(Memory()))
    assert (done["reserved_before"], done["reserved_after"], done["returned"]) == (30 * MIB, 10 * MIB, 20 * MIB)
    assert (done["free_before"], done["free_after"]) == (80 * MIB, 100 * MIB)
    assert done["duration_s"] >= 0
    done = compact(ON_CPU, None)
    assert done["resident_before"] > MIB
    assert done["returned"] == done["resident_before"] - done["resident_after"]
    for worker in (SimpleNamespace(device=None), SimpleNamespace(device=SimpleNamespace(type="xpu"))):
        assert "refused" in compact(worker, None)
        assert "refused" in snapshot(worker, None, "")


def cumem(*asleep: bool, tag: str = "default") -> dict[str, Any]:
    held = {place: SimpleNamespace(is_asleep=each) for place, each in enumerate(asleep)}
    allocator = SimpleNamespace(current_tag=tag, default_tag="default", pointer_to_data=held)
    return {"vllm.device_allocator.cumem": SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=allocator))}


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


def test_only_the_newest_snapshots_of_a_rank_are_kept_in_a_folder_of_ours(tmp_path: Path) -> None:
    """Those of other ranks and other people's files stay; a link in the place of the folder is not followed."""
    (tmp_path / "plimsoll-rank20-x.pickle").write_bytes(b"")
    (tmp_path / "mine.pickle").write_bytes(b"")
    paths = [snapshot(ON_GPU, torch_of(Memory()), str(tmp_path))["path"] for _ in range(SNAPSHOTS_KEPT + 3)]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {Path(path).name for path in paths[-SNAPSHOTS_KEPT:]} | {"plimsoll-rank20-x.pickle", "mine.pickle"}
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "refused" in snapshot(ON_GPU, torch_of(Memory()), str(tmp_path / "link"))
    assert list((tmp_path / "real").iterdir()) == []


def test_history_is_turned_on_and_off_within_bounds(tmp_path: Path) -> None:
    """Numbers as text too: vLLM's own endpoint hands on nothing else. Beyond the bounds nothing is recorded or written."""
    memory = Memory()
    wild: list[Any] = [-1, HISTORY_MAX_ENTRIES + 1, "many", [], float("inf"), float("nan")]
    for history in wild:
        assert "history" in snapshot(ON_GPU, torch_of(memory), str(tmp_path), history)["refused"]
    assert (memory.history, list(tmp_path.iterdir())) == ([], [])
    for wanted in (1000, "5", 0):
        assert "path" in snapshot(ON_GPU, torch_of(memory), str(tmp_path), wanted)
    record_history(torch_of(memory), 10 * HISTORY_MAX_ENTRIES)  # an operator's larger number, from the start
    asked = [("all", "python", 1000), ("all", "python", 5), (None, "all", 0), ("all", "python", HISTORY_MAX_ENTRIES)]
    assert memory.history == asked


def test_a_snapshot_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """What cannot be pickled is raised to the caller, who tells it as a refusal; no scrap stays."""
    memory = Memory()
    held = {"segments": [], "device_traces": [], "odd": lambda: None}
    memory._snapshot = lambda: held  # type: ignore[method-assign]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        snapshot(ON_GPU, torch_of(memory), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# What the kernel says of this process's memory and its group's.

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def limits(root: str) -> tuple[int | None, int | None]:
    figures, _ = host_memory(root)
    return figures["limit"], figures["used_by_group"]


def test_this_very_process_is_read() -> None:
    """On a real Linux every figure but the limit is there, and they are in proportion."""
    figures, reasons = host_memory()
    resident, peak, total = figures["resident"], figures["resident_peak"], figures["total"]
    assert resident is not None
    assert peak is not None
    assert total is not None
    assert 5 << 20 < resident <= peak + (1 << 20) < total
    assert set(reasons) <= {"host_memory.limit", "host_memory.used_by_group"}
    assert resident_bytes() == pytest.approx(resident, rel=0.2)


def test_what_the_machine_does_not_say_is_unknown(tmp_path: Path) -> None:
    """All are None, each with its sentence; no limit is None, and then the own group is told."""
    figures, reasons = host_memory(str(tmp_path))
    assert set(figures.values()) == {None}
    assert set(reasons) == {f"host_memory.{name}" for name in figures}
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": "77"}
    assert limits(machine(tmp_path, files)) == (None, 77)


def test_the_tightest_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    """A pod's limit binds its containers, and the use that counts is that of the group that is limited."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": f"{2 * GIB}\n", "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n", "sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{9 * GIB}\n",
        },
    )  # fmt: skip
    assert limits(root) == (8 * GIB, 5 * GIB)


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    """Its memory has a tree of its own; in a container only the top of it is there, and 'no limit' is a huge number."""
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    root = machine(tmp_path, files)
    assert limits(root) == (3 * GIB, GIB)
    machine(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert limits(root) == (None, GIB)


@given(text=st.text(max_size=200))
def test_strange_files_are_unknown(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever stands in them, nothing is raised and no figure is negative."""
    text = text.encode("utf-8", "replace").decode()
    names = ("proc/self/status", "proc/meminfo", "proc/self/cgroup", "sys/fs/cgroup/memory.max")
    root = machine(tmp_path_factory.mktemp("odd"), dict.fromkeys(names, f"0::/\nVmRSS: {text}\n{text}"))
    figures, _ = host_memory(root)
    assert all(value is None or value >= 0 for value in figures.values())
