"""The thread in each worker that writes its figures to a file, once a second.

While a worker starts, the thread makes no CUDA call: one from another thread can spoil the recording of a CUDA graph. Torch's
statistics are host memory; walks over the segments and questions about the device wait until the worker serves. No attribute of
vLLM's worker says when it serves, so the probe notes when the worker's warm-up returns (`is_warm`); a call from outside proves
it too, since the engine takes none before. Where the warm-up could not be watched (`is_watched` is false), a worker counts as
serving a minute after its KV cache was seen.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from plimsoll.inside import memory
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.figures import PLAIN_KEYS, empty_figures, write_whole
from plimsoll.inside.memory import Torch, Walk
from plimsoll.inside.places import ancestors, run_folder, start_ticks, sweep
from plimsoll.inside.settings import InsideSettings

# The budget's names have changed with vLLM. Up to 0.26 the worker keeps `non_torch_memory`, and `peak_activation_memory` is the
# activations only. From 0.27 it keeps `total_consumed` (weights and all outside torch) instead, and
# `peak_activation_memory` includes the estimate for CUDA graphs where vLLM took that off the budget.

_ESTIMATE_SETTING = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"


def budget(worker: Any, environ: Mapping[str, str] | None = None) -> tuple[dict[str, int | None] | None, dict[str, str]]:
    """Returns the budget's parts in bytes, and the reason for each that the worker does not keep."""
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
    terms = {
        "requested": _first(_bytes(worker, "requested_memory"), _bytes(worker, "requested_cpu_memory")),
        "weights": weights,
        "kv_cache": _first(kv_cache_bytes(runner), _bytes(worker, "available_kv_cache_memory_bytes")),
        "activation_peak": activation,
        "non_torch": non_torch,
        "graphs": graphs,
        "free_at_start": _bytes(at_start, "free_memory"),
        "total_at_start": _bytes(at_start, "total_memory"),
    }
    if all(value is None for value in terms.values()):
        return None, {"budget": "the worker has not reckoned yet, or keeps nothing of it"}
    return terms, {f"budget.{name}": "this worker keeps no such figure" for name, value in terms.items() if value is None}


def kv_cache_bytes(runner: Any) -> int | None:
    """Returns the bytes behind the model runner's KV caches, each piece once; None before they are allocated."""
    try:
        pieces = {}
        for tensor in _tensors(getattr(runner, "kv_caches", None) or ()):
            storage = tensor.untyped_storage()
            pieces[storage.data_ptr()] = int(storage.nbytes())
        return sum(pieces.values()) or None
    except Exception:  # an unknown layout: then the caller takes the memory that was available for the cache
        return None


def _tensors(holder: Any) -> Iterable[Any]:
    """Yields the tensors in lists, tuples and dicts, as different runners keep them."""
    for each in holder.values() if isinstance(holder, dict) else holder:
        if isinstance(each, list | tuple | dict):
            yield from _tensors(each)
        else:
            yield each


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _bytes(holder: Any, name: str) -> int | None:
    value = getattr(holder, name, None)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return int(value)
    return None


# The worker's device is found by its UUID, for which torch may be asked once the worker serves. A slice of a device (MIG) is
# not looked up: NVML's figures would be those of the whole device.

_HOMES = ("vllm.third_party.pynvml", "pynvml")  # vLLM brings its own copy
SHARES = ("device_memory.by_this_process", "device_memory.by_others")  # unknown together


class DeviceReading(NamedTuple):
    """A device's figures in bytes, its name, and the reason for each unknown figure."""

    figures: dict[str, Any] | None
    name: str | None
    reasons: dict[str, str]


class Nvml:
    """NVML's view of one CUDA device; opened at the first reading, and not read again once it has failed for good."""

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._handle: Any = None
        self._refused: str | None = None

    def memory(self, uuid: str, reserved: int | None, pid: int) -> DeviceReading:
        """Returns the device's memory and this process's part of it, which is at least `reserved`, torch's own bytes."""
        try:
            handle = self._found(uuid)
            if handle is None:
                return DeviceReading(None, None, {"device_memory": str(self._refused)})
            nvml = self._module
            try:  # with v2 the driver's own memory is in neither free nor used, as in nvidia-smi
                memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            except Exception:  # an older driver, or an older copy of the bindings
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            total, free, used = int(memory.total), int(memory.free), int(memory.used)
            own, reason = self._own(handle, reserved, pid)
            name = nvml.nvmlDeviceGetName(handle)
            name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        except Exception as error:  # NVML's errors share no base with anybody's; a driver may be replaced under us
            return DeviceReading(None, None, {"device_memory": f"NVML failed: {type(error).__name__}"})
        others = None if own is None else max(0, used - own)
        figures = {"total": total, "free": free, "used": used, "by_this_process": own, "by_others": others, "source": "nvml"}
        reasons = {} if own is not None else dict.fromkeys(SHARES, reason)
        return DeviceReading(figures, name, reasons)

    def _found(self, uuid: str) -> Any:
        if self._refused is not None or self._handle is not None:
            return self._handle
        for home in _HOMES if self._module is None else ():
            with contextlib.suppress(Exception):  # missing or broken: try the next one
                self._module = importlib.import_module(home)
                break
        if self._module is None:
            self._refused = "NVML is not here"
            return None
        self._module.nvmlInit()
        handle, is_sliced = self._module.nvmlDeviceGetHandleByUUID(uuid), False
        with contextlib.suppress(Exception):  # most devices cannot be sliced, and say so with an error
            is_sliced = bool(self._module.nvmlDeviceGetMigMode(handle)[0])
        if is_sliced:
            self._refused = "the device is cut into slices (MIG); NVML's figures are those of the whole"
        else:
            self._handle = handle
        return self._handle

    def _own(self, handle: Any, reserved: int | None, pid: int) -> tuple[int | None, str]:
        """Returns this process's bytes, or None and the reason."""
        for process in self._module.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid != pid:
                continue
            if process.usedGpuMemory is None:
                return None, "the driver does not say what each process holds"
            if reserved is not None and process.usedGpuMemory < reserved:
                # In a container NVML may list the host's process numbers, where ours belongs to another process.
                return None, "NVML's process of this number holds less than torch does, so it is another one"
            return int(process.usedGpuMemory), ""
        return None, "NVML lists no process of this number, as in a container with process numbers of its own"


UNWATCHED_WARM_UP_S = 60.0


class Sampler:
    """One worker's figures: taken, kept as `figures`, and written to the shared folder."""

    def __init__(self, worker: Any, settings: InsideSettings, folder: str | None, torch: Any = None, nvml: Any = None) -> None:
        """`torch` and `nvml` replace the modules of that name."""
        self.settings = settings
        self.folder = folder
        self.is_warm = False
        self.is_watched = False
        self.figures = empty_figures()
        self.last_compact: dict[str, Any] | None = None
        self.last_snapshot: dict[str, Any] | None = None
        self._worker = weakref.ref(worker)  # we must not keep a worker alive that vLLM drops
        self._pid = os.getpid()
        self._started = start_ticks(self._pid)
        self._ancestors = ancestors(self._pid)  # read once: they name the server even after its processes have died
        self._groups = memory.group_files()
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._samples = 0
        self._spent_s = 0.0
        self._modules = torch, nvml
        self._torch: Torch | None = None
        self._nvml: Nvml | None = None
        self._uuid: str | None = None
        self._walked_at: float | None = None
        self._walk_s = 0.0  # processor time of the last walk
        self._walk: Walk | None = None
        self._kv_seen_at: float | None = None
        self._budget: tuple[dict[str, int | None] | None, dict[str, str]] | None = None
        self._is_expandable = memory.wants_expandable()

    # The thread

    def start(self) -> None:
        """Begins to sample; the thread ends with the process or with the worker."""
        self._thread = threading.Thread(target=self._run, name="plimsoll-probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def _run(self) -> None:
        if self.folder is not None:
            sweep(self.folder)
        while not self._stop:
            worker = self._worker()
            if worker is None:
                return
            self.sample(worker)
            del worker
            self._wake.wait(self.settings.sample_s)
            self._wake.clear()

    def sample(self, worker: Any) -> None:
        """Takes one sample and writes it; after a fault the last sample stays, and its age grows."""
        began = time.thread_time()  # its cost in processor time, not the time that it waits for a processor
        with FAULTS.noting("sampling a worker"):
            self.figures = self.gather(worker, time.monotonic())
            try:
                if self.folder is not None:
                    write_whole(self.folder, f"worker-{self._pid}-{self._started}", self.figures)
            except FileNotFoundError:  # somebody removed the folder
                self.folder = run_folder(self.settings.folder)
        self._samples += 1
        self._spent_s += time.thread_time() - began

    # Figures

    def gather(self, worker: Any, now: float) -> dict[str, Any]:
        is_serving = self.is_serving(worker, now)
        figures = empty_figures()
        reasons: dict[str, str] = {}
        figures |= self._identity(worker, reasons)
        figures["phase"] = "serving" if is_serving else "starting"
        figures["host_memory"], whys = memory.host_memory(groups=self._groups)
        reasons |= whys
        try:
            figures |= self._of_device(worker, now, reasons, is_serving=is_serving)
        except Exception as error:  # the other figures are useful without the device's
            FAULTS.note("asking about the device", error)
            reasons |= dict.fromkeys(("allocator", "device_memory", "device_name"), f"asking failed: {type(error).__name__}")
        if self._budget is None or not is_serving or figures["phase"] != self.figures["phase"]:
            self._budget = budget(worker)
        figures["budget"], whys = self._budget
        reasons |= whys
        figures |= {"last_compact": self.last_compact, "last_snapshot": self.last_snapshot}
        figures |= {"faults": dict(FAULTS.counts), "beat": time.monotonic(), "at": time.time()}
        figures["reasons"] = {name: "not known yet" for name in PLAIN_KEYS if figures[name] is None} | reasons
        return figures

    def is_serving(self, worker: Any, now: float) -> bool:
        """True if the worker's start is over, as the head of this file explains."""
        if self.is_warm or self.is_watched:
            return self.is_warm
        if self._kv_seen_at is None and kv_cache_bytes(getattr(worker, "model_runner", None)) is not None:
            self._kv_seen_at = now
        return self._kv_seen_at is not None and now - self._kv_seen_at >= UNWATCHED_WARM_UP_S

    def _identity(self, worker: Any, reasons: dict[str, str]) -> dict[str, Any]:
        parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
        # vLLM gives all ranks of dense models rank 0; each has its own index, where vLLM has one.
        engine = getattr(parallel, "data_parallel_index", None)
        if engine is None:
            engine = getattr(parallel, "data_parallel_rank", None)
        device = getattr(worker, "device", None)
        versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("vllm", "torch")}
        identity = {
            "pid": self._pid,
            "started": self._started,
            "ancestors": self._ancestors,
            "every_s": self.settings.sample_s,
            "engine": engine,
            "rank": getattr(worker, "rank", None),
            "local_rank": getattr(worker, "local_rank", None),
            "device": None if device is None else str(device),
            **{name: version and str(version) for name, version in versions.items()},
            "samples": self._samples,
            "sample_us": round(self._spent_s / self._samples * 1e6, 1) if self._samples else None,
            "walk_us": None if self._walked_at is None else round(self._walk_s * 1e6, 1),
        }
        reasons |= {name: "the worker has not got so far" for name in ("engine", "rank", "device") if identity[name] is None}
        return identity

    def _of_device(self, worker: Any, now: float, reasons: dict[str, str], *, is_serving: bool) -> dict[str, Any]:
        device = getattr(worker, "device", None)
        kind = getattr(device, "type", None)
        if kind != "cuda":
            why = "the worker has no device yet" if device is None else f"torch keeps no such figures for {kind}"
            reasons |= dict.fromkeys(("allocator", "device_memory", "device_name"), why)
            return {}
        if self._torch is None or self._nvml is None:
            index = getattr(device, "index", None) or 0
            torch, nvml = self._modules
            self._torch, self._nvml = Torch(torch or sys.modules["torch"], index), Nvml(nvml)
        held = self._of_allocator(self._torch, now, reasons, is_serving=is_serving)
        if self._uuid is None and is_serving:
            self._uuid = self._torch.uuid()
        reading = DeviceReading(None, None, {"device_memory": "torch does not name the device" if is_serving else "it starts"})
        if self._uuid is not None:
            reading = self._nvml.memory(self._uuid, None if held is None else held["reserved"], self._pid)
        memory, name, whys = reading
        if memory is None and is_serving:
            free, total = self._torch.free_and_total()
            memory = {"total": total, "free": free, "used": total - free, "by_this_process": None, "by_others": None}
            memory["source"] = "cuda"
            whys = dict.fromkeys(SHARES, reading.reasons["device_memory"])
        reasons |= whys
        if name is None:
            reasons["device_name"] = "NVML does not say"
        return {"allocator": held, "device_memory": memory, "device_name": name}

    def _of_allocator(self, torch: Torch, now: float, reasons: dict[str, str], *, is_serving: bool) -> dict[str, Any] | None:
        pause_s = max(memory.WALK_EVERY_S, self._walk_s / memory.WALK_SHARE)
        if is_serving and (self._walked_at is None or now - self._walked_at >= pause_s):
            began = time.thread_time()
            with FAULTS.noting("walking torch's segments"):
                self._walk = memory.walk(torch.segments(), torch.device)
            self._walked_at, self._walk_s = now, time.thread_time() - began
        age_s = None if self._walk is None or self._walked_at is None else round(now - self._walked_at, 3)
        held, whys = memory.allocator_figures(torch.stats(), self._walk, age_s, wants_expandable=self._is_expandable)
        reasons |= whys
        if held is not None and (why := memory.asleep_or_allocating()) is not None:
            reasons["allocator"] = f"{why}; torch may still count memory that vLLM has taken from it"
        return held


def attach(worker: Any, *, is_warm: bool = False) -> Sampler | None:
    """Returns the worker's sampler, started if it has none; None where that failed, which is counted and logged."""
    existing: Sampler | None = worker.__dict__.get("plimsoll_sampler")
    if existing is not None:
        return existing
    try:
        settings = InsideSettings()
        sampler = Sampler(worker, settings, run_folder(settings.folder))
        sampler.is_warm = is_warm
        worker.plimsoll_sampler = sampler
        sampler.start()
    except Exception as error:
        FAULTS.note("starting the probe", error)
        return None
    LOG.info("plimsoll: figures of this worker every %g s in %s", settings.sample_s, sampler.folder)
    return sampler
