"""What the worker reckoned with when it started: the parts of its memory, as vLLM keeps them on the worker, in bytes.

The names have changed with vLLM. Up to 0.26 the worker keeps `non_torch_memory`, and `peak_activation_memory` is the
activations alone. From 0.27 it keeps `total_consumed` (weights and all outside torch) instead, and
`peak_activation_memory` includes the estimate for CUDA graphs where that was taken off the budget.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

_KEYS = ("requested", "weights", "kv_cache", "activation_peak", "non_torch", "graphs", "free_at_start", "total_at_start")
_ESTIMATE_SETTING = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"


def budget(worker: Any, environ: Mapping[str, str] | None = None) -> tuple[dict[str, int | None] | None, dict[str, str]]:
    """The parts, and the reason for each that the worker does not keep."""
    environ = os.environ if environ is None else environ
    runner = getattr(worker, "model_runner", None)
    at_start = getattr(worker, "init_snapshot", None)
    weights = _bytes(runner, "model_memory_usage")
    graphs = _bytes(worker, "cudagraph_memory_estimate")
    activation, non_torch = _bytes(worker, "peak_activation_memory"), _bytes(worker, "non_torch_memory")
    consumed = _bytes(worker, "total_consumed")
    if consumed is not None:
        non_torch = None if weights is None else consumed - weights
        if activation is not None and environ.get(_ESTIMATE_SETTING, "1") != "0":
            activation -= graphs or 0
    found = {
        "requested": _first(_bytes(worker, "requested_memory"), _bytes(worker, "requested_cpu_memory")),
        "weights": weights,
        "kv_cache": _first(kv_cache_bytes(runner), _bytes(worker, "available_kv_cache_memory_bytes")),
        "activation_peak": activation,
        "non_torch": non_torch,
        "graphs": graphs,
        "free_at_start": _bytes(at_start, "free_memory"),
        "total_at_start": _bytes(at_start, "total_memory"),
    }
    if all(value is None for value in found.values()):
        return None, {"budget": "the worker has not reckoned yet, or keeps nothing of it"}
    return found, {f"budget.{name}": "this worker keeps no such figure" for name in _KEYS if found[name] is None}


def kv_cache_bytes(runner: Any) -> int | None:
    """The memory behind the model runner's KV caches, each piece once; None before they are allocated."""
    try:
        pieces = {}
        for tensor in _tensors(getattr(runner, "kv_caches", None) or ()):
            storage = tensor.untyped_storage()
            pieces[storage.data_ptr()] = int(storage.nbytes())
        return sum(pieces.values()) or None
    except Exception:  # a layout of its own: then what was available for it must do
        return None


def _tensors(found: Any) -> Iterable[Any]:
    """Tensors in lists, tuples and tables, as different runners keep them."""
    for each in found.values() if isinstance(found, dict) else found:
        if isinstance(each, list | tuple | dict):
            yield from _tensors(each)
        else:
            yield each


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _bytes(holder: Any, name: str) -> int | None:
    value = getattr(holder, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None
