"""The thread that writes a worker's figures: what it takes, when, and how it stands aside."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.figures import GROUPS, empty_figures, read_figures
from plimsoll.inside.sampler import UNWATCHED_WARM_UP_S, Nvml, Sampler, budget, kv_cache_bytes
from plimsoll.inside.settings import InsideSettings
from tests.fakes import eventually
from tests.inside.test_figures import ended_process
from tests.inside.test_memory import SNAPSHOTS, raw_segments, stats_of

GIB = 1 << 30
QUICK = InsideSettings({"PLIMSOLL_SAMPLE_S": "0.05"})


class Worker:
    """A worker as far as the sampler looks."""

    def __init__(self, device: Any = None) -> None:
        parallel = SimpleNamespace(data_parallel_index=1, data_parallel_rank=0)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.device = device
        self.rank = 3
        self.local_rank = 1
        self.model_runner: Any = None


class Cuda:
    """torch.cuda of a process with one device: counts the calls that would reach the device."""

    def __init__(self) -> None:
        self.listed = raw_segments(SNAPSHOTS[0].with_name("snapshot-ready.pickle.gz"))
        self.device_calls: list[str] = []
        self.walks = 0

    def is_initialized(self) -> bool:
        return True

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert device == 0
        return stats_of(self.listed)

    def memory_snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces
        self.walks += 1
        return self.listed

    def get_device_properties(self, device: int) -> SimpleNamespace:
        self.device_calls.append("properties")
        return SimpleNamespace(uuid=["aa", "bb", "cc"][device])

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.device_calls.append(f"memory {device}")
        return 40 * GIB, 139 * GIB


def on_gpu(folder: Path, nvml: Any) -> tuple[Sampler, Worker, Cuda]:
    cuda, worker = Cuda(), Worker(SimpleNamespace(type="cuda", index=0))
    return Sampler(worker, QUICK, str(folder), SimpleNamespace(cuda=cuda), nvml), worker, cuda


def test_the_thread_writes_and_keeps_writing(tmp_path: Path) -> None:
    """An API server finds the figures of a worker on a CPU, ever newer, with what a CPU has; those of the dead are gone."""
    left = tmp_path / f"worker-{ended_process()}-1.json"
    left.write_text("")
    worker = Worker(SimpleNamespace(type="cpu"))
    sampler = Sampler(worker, QUICK, str(tmp_path))
    sampler.start()
    eventually(lambda: sampler.figures["samples"] is not None and sampler.figures["samples"] >= 2)
    (found,) = read_figures(str(tmp_path), os.getppid(), time.monotonic())
    sampler.stop()
    assert not left.exists()
    assert (found["engine"], found["rank"], found["local_rank"], found["phase"]) == (1, 3, 1, "starting")
    assert found["host_memory"]["resident"] > 1 << 20
    assert found["allocator"] is found["device_memory"] is None
    assert {"allocator", "device_memory", "device_name"} <= set(found["reasons"])
    assert found["alive"]
    assert found["age_s"] < 5
    assert found["sample_us"] > 0


def test_the_thread_ends_with_its_worker(tmp_path: Path) -> None:
    """A worker that vLLM lets go is not kept alive, and its thread goes."""
    sampler = Sampler(Worker(), QUICK, str(tmp_path))
    sampler.start()
    gc.collect()
    eventually(lambda: not any(thread.name == "plimsoll-probe" for thread in threading.enumerate()))


def test_while_a_worker_starts_no_call_reaches_the_device(tmp_path: Path) -> None:
    """Statistics are read, segments are not walked and CUDA is not called: a graph may be recorded right now."""
    sampler, worker, cuda = on_gpu(tmp_path, Bindings())
    sampler.is_watched = True
    found = sampler.gather(worker, 0.0)
    assert found["phase"] == "starting"
    assert found["allocator"]["reserved"] > GIB
    assert (found["device_memory"], cuda.walks, cuda.device_calls) == (None, 0, [])


def test_a_serving_worker_is_walked_seldom(tmp_path: Path) -> None:
    """The first sample after the start walks; the next walk is half a minute later."""
    sampler, worker, cuda = on_gpu(tmp_path, Bindings())
    sampler.is_watched = sampler.is_warm = True
    for now, walks in ((0.0, 1), (1.0, 1), (29.0, 1), (31.0, 2)):
        found = sampler.gather(worker, now)
        assert cuda.walks == walks
    assert found["phase"] == "serving"
    assert found["allocator"]["walked_age_s"] == 0
    sampler._walk_s = 0.1  # a walk takes a thousandth of the time at most: the next one after a hundred seconds
    for now, walks in ((130.9, 2), (131.1, 3)):
        sampler.gather(worker, now)
        assert cuda.walks == walks
    assert found["allocator"]["private_pool_bytes"] > 0
    assert found["device_name"] == "H200"
    assert cuda.device_calls == ["properties"], "the device is asked once for its name"
    assert found["walk_us"] >= 0


def test_without_nvml_cuda_is_asked_once_the_worker_serves(tmp_path: Path) -> None:
    """Before that the device's memory is unknown."""
    broken = SimpleNamespace()
    sampler, worker, cuda = on_gpu(tmp_path, broken)
    sampler.is_watched = True
    found = sampler.gather(worker, 0.0)
    assert found["device_memory"] is None
    assert "device_memory" in found["reasons"]
    sampler.is_warm = True
    found = sampler.gather(worker, 1.0)
    assert found["device_memory"]["source"] == "cuda"
    assert found["device_memory"]["used"] == 99 * GIB
    assert "device_memory.by_others" in found["reasons"]
    assert "memory 0" in cuda.device_calls


def test_a_warm_up_that_could_not_be_watched_is_over_a_minute_after_the_cache() -> None:
    """The KV cache comes before the graphs, so the minute begins with it."""
    worker = Worker()
    sampler = Sampler(worker, QUICK, None)
    assert not sampler.is_serving(worker, 1000.0)
    worker.model_runner = SimpleNamespace(kv_caches=[Tensor(1, GIB)])
    assert not sampler.is_serving(worker, 1010.0)
    assert not sampler.is_serving(worker, 1009.0 + UNWATCHED_WARM_UP_S)
    assert sampler.is_serving(worker, 1010.0 + UNWATCHED_WARM_UP_S)


def test_every_unknown_has_its_reason() -> None:
    """A worker that has just been made has no attribute at all: every key is there, and each None says why."""

    class Bare:
        """Before its own __init__."""

    bare = Bare()
    found = Sampler(bare, QUICK, None).gather(bare, 0.0)
    assert set(found) == set(empty_figures())
    unknown = {name for name, value in found.items() if value is None} - {"last_compact", "last_snapshot"}
    assert unknown == set(found["reasons"]) & set(found), found["reasons"]


def test_a_fault_leaves_the_last_figures_to_grow_old(tmp_path: Path) -> None:
    """Where a worker's attribute raises, nothing reaches the worker, and the file stays as it was."""

    class Odd(Worker):
        """Its rank cannot be asked."""

        is_odd = False

        def __getattribute__(self, name: str) -> Any:
            if name == "rank" and type(self).is_odd:
                raise RuntimeError("not now")
            return super().__getattribute__(name)

    worker = Odd()
    sampler = Sampler(worker, QUICK, str(tmp_path))
    sampler.sample(worker)
    before = dict(sampler.figures)
    Odd.is_odd = True
    sampler.sample(worker)
    assert sampler.figures == before
    assert len(read_figures(str(tmp_path), os.getpid(), time.monotonic())) == 1


def test_a_folder_that_was_tidied_away_is_made_again(tmp_path: Path) -> None:
    """The figures are back with the second sample after it."""
    folder = tmp_path / "run"
    folder.mkdir()
    worker = Worker()
    sampler = Sampler(worker, InsideSettings({"PLIMSOLL_DIR": str(folder)}), str(folder))
    sampler.sample(worker)
    shutil.rmtree(folder)
    sampler.sample(worker)
    sampler.sample(worker)
    assert len(read_figures(str(folder), os.getpid(), time.monotonic())) == 1


@pytest.mark.parametrize("parallel", [SimpleNamespace(data_parallel_rank=2), SimpleNamespace(data_parallel_index=2)])
def test_the_engine_is_the_data_parallel_index_or_rank(parallel: Any) -> None:
    """Before 0.15 there is no index."""
    worker = Worker()
    worker.vllm_config.parallel_config = parallel
    assert Sampler(worker, QUICK, None).gather(worker, 0.0)["engine"] == 2


# NVML's view of the worker's device, through a stand-in of NVML's Python bindings.

PID = 77
UUIDS = ("GPU-aa", "GPU-bb", "GPU-cc")


class Bindings:
    """A machine of three devices, on each a process of ours and one of others; errors as NVML's bindings raise them."""

    nvmlMemory_v2 = 2  # noqa: N815 - the name that NVML has

    def __init__(self, *, is_old: bool = False, sliced: bool = False) -> None:
        self.is_old, self.sliced = is_old, sliced
        self.processes = [SimpleNamespace(pid=PID, usedGpuMemory=60 * GIB), SimpleNamespace(pid=9, usedGpuMemory=20 * GIB)]
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return UUIDS.index(uuid)

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        assert handle in range(3)
        return b"H200"

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        if not self.sliced:
            raise RuntimeError(f"device {handle}: not supported")
        return 1, 1

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        if version is not None and self.is_old:
            raise RuntimeError("function not found")
        own = 1 if version == 2 else 0
        return SimpleNamespace(total=140 * GIB + handle, free=50 * GIB, used=(90 - own) * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        assert handle in range(3)
        return self.processes


def test_the_device_is_found_by_its_uuid() -> None:
    """Used, free, ours and others', the driver's own part left out as nvidia-smi does; NVML is opened once."""
    bindings = Bindings()
    nvml = Nvml(bindings)
    for _ in range(2):
        found = nvml.memory("GPU-bb", 50 * GIB, PID)
    assert found.figures == {
        "total": 140 * GIB + 1, "free": 50 * GIB, "used": 89 * GIB, "by_this_process": 60 * GIB, "by_others": 29 * GIB,
        "source": "nvml",
    }  # fmt: skip
    assert (found.name, found.reasons, bindings.opened) == ("H200", {}, 1)
    found = Nvml(Bindings(is_old=True)).memory("GPU-aa", None, PID)
    assert found.figures is not None
    assert found.figures["used"] == 90 * GIB, "an older driver counts its own part in"


def test_a_slice_is_unknown_as_is_a_device_that_nvml_does_not_know_or_that_has_no_nvml() -> None:
    """NVML's figures of a sliced device would be those of the whole one; without a driver a reason and no exception."""
    nvml = Nvml(Bindings(sliced=True))
    for _ in range(2):
        assert "MIG" in nvml.memory("GPU-aa", None, PID).reasons["device_memory"]
    assert "ValueError" in Nvml(Bindings()).memory("GPU-xx", None, PID).reasons["device_memory"]
    found = Nvml().memory("GPU-aa", None, PID)
    assert found.figures is None
    assert "NVML" in found.reasons["device_memory"]


def test_a_process_that_nvml_does_not_know_has_no_part() -> None:
    """Not listed, listed with less than torch holds or without an amount: None with the reason, the rest stays."""
    for pid, reserved in ((1, 50 * GIB), (9, 50 * GIB)):
        found = Nvml(Bindings()).memory("GPU-aa", reserved, pid)
        assert found.figures is not None
        assert found.figures["by_this_process"] is found.figures["by_others"] is None
        assert set(found.reasons) == {"device_memory.by_this_process", "device_memory.by_others"}
        assert found.figures["used"] == 89 * GIB
    bindings = Bindings()
    bindings.processes = [SimpleNamespace(pid=PID, usedGpuMemory=None)]
    found = Nvml(bindings).memory("GPU-aa", None, PID)
    assert "driver" in found.reasons["device_memory.by_this_process"]


# What the worker reckoned with when it started, under the names of each era of vLLM.
class Tensor:
    """A tensor as far as it is asked: a view into a storage."""

    def __init__(self, pointer: int, size: int) -> None:
        self.storage = SimpleNamespace(data_ptr=lambda: pointer, nbytes=lambda: size)

    def untyped_storage(self) -> Any:
        return self.storage


def worker_of(**own: Any) -> Any:
    at_start = SimpleNamespace(free_memory=138 * GIB, total_memory=140 * GIB)
    runner = SimpleNamespace(model_memory_usage=15.0 * GIB, kv_caches=[])
    common = {"model_runner": runner, "init_snapshot": at_start, "requested_memory": 129 * GIB}
    return SimpleNamespace(**common, cudagraph_memory_estimate=1 * GIB, available_kv_cache_memory_bytes=105 * GIB, **own)


def test_the_budget_under_the_names_of_each_release() -> None:
    """Up to 0.26 each part as it is kept; from 0.27 what lies outside torch is the consumed memory less the weights, and the
    graphs' estimate is taken out of the activations."""
    found, reasons = budget(worker_of(peak_activation_memory=5 * GIB, non_torch_memory=3 * GIB), {})
    assert found is not None
    assert set(found) == set(GROUPS["budget"])
    assert {name: value // GIB for name, value in found.items() if value is not None} == {
        "requested": 129, "weights": 15, "kv_cache": 105, "activation_peak": 5, "non_torch": 3, "graphs": 1,
        "free_at_start": 138, "total_at_start": 140,
    }  # fmt: skip
    assert reasons == {}
    worker = worker_of(peak_activation_memory=6 * GIB, total_consumed=18 * GIB)
    found, _ = budget(worker, {})
    assert found is not None
    assert (found["activation_peak"], found["non_torch"]) == (5 * GIB, 3 * GIB)
    found, _ = budget(worker, {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"})
    assert found is not None
    assert found["activation_peak"] == 6 * GIB


def test_the_cache_is_counted_once_however_it_is_shared() -> None:
    """Layers are views into one piece of memory; lists and tables of tensors are looked into."""
    runner = SimpleNamespace(kv_caches=[Tensor(1, 8 * GIB), [Tensor(1, 8 * GIB), Tensor(2, GIB)], {"a": Tensor(3, GIB)}])
    assert kv_cache_bytes(runner) == 10 * GIB
    worker = worker_of()
    worker.model_runner.kv_caches = runner.kv_caches
    found, _ = budget(worker, {})
    assert found is not None
    assert found["kv_cache"] == 10 * GIB


def test_what_the_worker_does_not_keep_is_unknown() -> None:
    """None with a reason for each, also where a later vLLM keeps other things under these names."""
    found, reasons = budget(SimpleNamespace(requested_cpu_memory=22 * GIB), {})
    assert found is not None
    assert found["requested"] == 22 * GIB
    assert set(reasons) == {f"budget.{name}" for name, value in found.items() if value is None}
    assert budget(SimpleNamespace(), {})[0] is None
    assert kv_cache_bytes(None) is None
    worker = SimpleNamespace(requested_memory="129", non_torch_memory=True, peak_activation_memory=float("nan"))
    worker.model_runner = SimpleNamespace(kv_caches=[3])
    assert budget(worker, {})[0] is None
