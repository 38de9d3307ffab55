"""What the worker reckoned with when it started, under the names of each era of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from plimsoll.inside.figures import GROUPS
from plimsoll.inside.sampler import budget, kv_cache_bytes

GIB = 1 << 30


class Tensor:
    """A tensor as far as it is asked: a view into a storage."""

    def __init__(self, pointer: int, size: int) -> None:
        self.storage = SimpleNamespace(data_ptr=lambda: pointer, nbytes=lambda: size)

    def untyped_storage(self) -> Any:
        return self.storage


def worker_of(**own: Any) -> Any:
    """A worker that has finished its start, with these attributes besides those of every era."""
    at_start = SimpleNamespace(free_memory=138 * GIB, total_memory=140 * GIB)
    runner = SimpleNamespace(model_memory_usage=15.0 * GIB, kv_caches=[])
    common = {"model_runner": runner, "init_snapshot": at_start, "requested_memory": 129 * GIB}
    return SimpleNamespace(**common, cudagraph_memory_estimate=1 * GIB, available_kv_cache_memory_bytes=105 * GIB, **own)


def test_the_names_up_to_0_26() -> None:
    """Each part as the worker keeps it, as whole bytes."""
    found, reasons = budget(worker_of(peak_activation_memory=5 * GIB, non_torch_memory=3 * GIB), {})
    assert found is not None
    assert set(found) == set(GROUPS["budget"])
    assert {name: value // GIB for name, value in found.items() if value is not None} == {
        "requested": 129, "weights": 15, "kv_cache": 105, "activation_peak": 5, "non_torch": 3, "graphs": 1,
        "free_at_start": 138, "total_at_start": 140,
    }  # fmt: skip
    assert reasons == {}


def test_the_names_from_0_27() -> None:
    """Consumed memory less the weights is what lies outside torch; the graphs' estimate is taken out of the activations."""
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
