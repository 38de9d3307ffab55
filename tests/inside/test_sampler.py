"""The thread that writes a worker's figures: what it takes, when, and how it stands aside."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.figures import empty_figures, read_figures
from plimsoll.inside.sampler import UNWATCHED_WARM_UP_S, Sampler
from plimsoll.inside.settings import InsideSettings
from tests.inside.test_allocator import stats_of
from tests.inside.test_budget import GIB, Tensor
from tests.inside.test_device import Bindings
from tests.inside.test_figures import ended_process
from tests.inside.test_segments import SNAPSHOTS, raw_segments

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
    """A sampler of a worker on a stand-in for a GPU."""
    cuda, worker = Cuda(), Worker(SimpleNamespace(type="cuda", index=0))
    return Sampler(worker, QUICK, str(folder), SimpleNamespace(cuda=cuda), nvml), worker, cuda


def wait_for(what: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Return once it is so."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_the_thread_writes_and_keeps_writing(tmp_path: Path) -> None:
    """An API server finds the figures of a worker on a CPU, ever newer, with what a CPU has; those of the dead are gone."""
    left = tmp_path / f"worker-{ended_process()}.json"
    left.write_text("")
    worker = Worker(SimpleNamespace(type="cpu"))
    sampler = Sampler(worker, QUICK, str(tmp_path))
    sampler.start()
    wait_for(lambda: sampler.figures["samples"] is not None and sampler.figures["samples"] >= 2)
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
    wait_for(lambda: not any(thread.name == "plimsoll-probe" for thread in threading.enumerate()))


def test_while_a_worker_starts_no_call_reaches_the_device(tmp_path: Path) -> None:
    """Statistics and NVML are asked, segments are not walked and CUDA is not called: a graph may be recorded right now."""
    sampler, worker, cuda = on_gpu(tmp_path, Bindings())
    sampler.is_watched = True
    found = sampler.gather(worker, 0.0)
    assert found["phase"] == "starting"
    assert found["allocator"]["reserved"] > GIB
    assert found["device_memory"]["source"] == "nvml"
    assert (cuda.walks, cuda.device_calls) == (0, [])


def test_a_serving_worker_is_walked_seldom(tmp_path: Path) -> None:
    """The first sample after the start walks; the next walk is half a minute later."""
    sampler, worker, cuda = on_gpu(tmp_path, Bindings())
    sampler.is_watched = sampler.is_warm = True
    for now, walks in ((0.0, 1), (1.0, 1), (29.0, 1), (31.0, 2)):
        found = sampler.gather(worker, now)
        assert cuda.walks == walks
    assert found["phase"] == "serving"
    assert found["allocator"]["walked_age_s"] == 0
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
