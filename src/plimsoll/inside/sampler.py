"""The thread in each worker that writes its figures down, once a second.

While a worker starts, the thread makes no CUDA call: one from another thread can spoil the recording of a CUDA graph. Torch's
statistics are host memory, and NVML needs no context; walks over the segments and questions to the device wait until the
worker serves. No attribute of vLLM's worker says when that is, so the probe notes when the worker's warm-up returns
(`is_warm`); a call from outside proves it too, since the engine takes none before. Where the warm-up could not be
watched (`is_watched` is false), a worker serves a minute after its KV cache was seen.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any

from plimsoll.inside.actions import asleep_or_allocating
from plimsoll.inside.allocator import Torch, allocator_figures, wants_expandable
from plimsoll.inside.budget import budget, kv_cache_bytes
from plimsoll.inside.device import SHARES, Nvml, by_cuda
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.figures import PLAIN_KEYS, empty_figures, remove_dead, write_figures
from plimsoll.inside.host import group_files, host_memory
from plimsoll.inside.places import ancestors, run_folder, start_ticks
from plimsoll.inside.segments import Walk, WalkClock, walk
from plimsoll.inside.settings import Settings

UNWATCHED_WARM_UP_S = 60.0


class Sampler:
    """One worker's figures: taken, kept as `figures`, and written to the shared folder."""

    def __init__(self, worker: Any, settings: Settings, folder: str | None, torch: Any = None, nvml: Any = None) -> None:
        """`torch` and `nvml` stand in for the modules of that name."""
        self.settings = settings
        self.folder = folder
        self.is_warm = False
        self.is_watched = False
        self.figures = empty_figures()
        self.last_compact: dict[str, Any] | None = None
        self.last_snapshot: dict[str, Any] | None = None
        self._worker = weakref.ref(worker)  # a worker that vLLM lets go must not live on for our sake
        self._pid = os.getpid()
        self._started = start_ticks(self._pid)
        self._ancestors = ancestors(self._pid)  # kept: they still name the server once its processes have died
        self._groups = group_files()
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._samples = 0
        self._spent_s = 0.0
        self._modules = torch, nvml
        self._torch: Torch | None = None
        self._nvml: Nvml | None = None
        self._uuid: str | None = None
        self._clock = WalkClock()
        self._walk: Walk | None = None
        self._kv_seen_at: float | None = None
        self._budget: tuple[dict[str, int | None] | None, dict[str, str]] | None = None
        self._is_expandable = wants_expandable()

    # The thread

    def start(self) -> None:
        """Begin to sample; the thread ends with the process or with the worker."""
        self._thread = threading.Thread(target=self._run, name="plimsoll-probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what it is doing now."""
        self._stop = True
        self.wake()

    def wake(self) -> None:
        """Take a sample now."""
        self._wake.set()

    def _run(self) -> None:
        try:
            if self.folder is not None:
                remove_dead(self.folder)
        except Exception as error:
            FAULTS.note("removing figures of dead workers", error)
        while not self._stop:
            worker = self._worker()
            if worker is None:
                return
            self.sample(worker)
            del worker
            self._wake.wait(self.settings.sample_s)
            self._wake.clear()

    def sample(self, worker: Any) -> None:
        """Take one sample and write it; a fault leaves the last one as it is, to grow old."""
        began = time.thread_time()  # what it costs, not how long the machine kept it waiting
        try:
            self.figures = self.gather(worker, time.monotonic())
            self._write()
        except Exception as error:
            FAULTS.note("sampling a worker", error)
        self._samples += 1
        self._spent_s += time.thread_time() - began

    def _write(self) -> None:
        if self.folder is None:
            return
        try:
            write_figures(self.folder, self.figures)
        except FileNotFoundError:  # somebody tidied it away
            self.folder = run_folder(self.settings.folder)

    # What is taken

    def gather(self, worker: Any, now: float) -> dict[str, Any]:
        """Everything that is known of the worker now."""
        is_serving = self.is_serving(worker, now)
        found = empty_figures()
        reasons: dict[str, str] = {}
        found |= self._identity(worker, reasons)
        found["phase"] = "serving" if is_serving else "starting"
        memory, whys = host_memory(groups=self._groups)
        found["host_memory"] = memory
        reasons |= whys
        try:
            found |= self._of_device(worker, now, reasons, is_serving=is_serving)
        except Exception as error:  # the rest is worth having without it
            FAULTS.note("asking about the device", error)
            reasons |= dict.fromkeys(("allocator", "device_memory", "device_name"), f"asking failed: {type(error).__name__}")
        if self._budget is None or not is_serving or found["phase"] != self.figures["phase"]:
            self._budget = budget(worker)
        found["budget"], whys = self._budget
        reasons |= whys
        found |= {"last_compact": self.last_compact, "last_snapshot": self.last_snapshot}
        found |= {"faults": dict(FAULTS.counts), "beat": time.monotonic(), "at": time.time()}
        found["reasons"] = {name: "not known yet" for name in PLAIN_KEYS if found[name] is None} | reasons
        return found

    def is_serving(self, worker: Any, now: float) -> bool:
        """Whether the worker's start is over, as the head of this file explains."""
        if self.is_warm or self.is_watched:
            return self.is_warm
        if self._kv_seen_at is None and kv_cache_bytes(getattr(worker, "model_runner", None)) is not None:
            self._kv_seen_at = now
        return self._kv_seen_at is not None and now - self._kv_seen_at >= UNWATCHED_WARM_UP_S

    def _identity(self, worker: Any, reasons: dict[str, str]) -> dict[str, Any]:
        parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
        # Ranks of dense models are all told that their rank is 0; the index is each one's own where vLLM has it.
        engine = getattr(parallel, "data_parallel_index", None)
        if engine is None:
            engine = getattr(parallel, "data_parallel_rank", None)
        device = getattr(worker, "device", None)
        found = {
            "pid": self._pid,
            "started": self._started,
            "ancestors": self._ancestors,
            "every_s": self.settings.sample_s,
            "engine": engine,
            "rank": getattr(worker, "rank", None),
            "local_rank": getattr(worker, "local_rank", None),
            "device": None if device is None else str(device),
            "vllm": _version("vllm"),
            "torch": _version("torch"),
            "samples": self._samples,
            "sample_us": round(self._spent_s / self._samples * 1e6, 1) if self._samples else None,
            "walk_us": None if self._clock.walked_at is None else round(self._clock.took_s * 1e6, 1),
        }
        reasons |= {name: "the worker has not got so far" for name in ("engine", "rank", "device") if found[name] is None}
        return found

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
            self._torch, self._nvml = Torch(torch or sys.modules["torch"], index), Nvml(index, module=nvml)
        held = self._of_allocator(self._torch, now, reasons, is_serving=is_serving)
        if self._uuid is None and is_serving:
            self._uuid = self._torch.uuid()
        found = self._nvml.memory(self._uuid, None if held is None else held["reserved"], self._pid)
        memory, name, whys = found
        if memory is None and is_serving:
            memory = by_cuda(*self._torch.free_and_total())
            whys = dict.fromkeys(SHARES, found.reasons["device_memory"])
        reasons |= whys
        if name is None:
            reasons["device_name"] = "NVML does not say"
        return {"allocator": held, "device_memory": memory, "device_name": name}

    def _of_allocator(self, torch: Torch, now: float, reasons: dict[str, str], *, is_serving: bool) -> dict[str, Any] | None:
        if is_serving and self._clock.is_due(now):
            began = time.thread_time()
            try:
                self._walk = walk(torch.segments(), torch.device)
            except Exception as error:
                FAULTS.note("walking torch's segments", error)
            self._clock.note(now, time.thread_time() - began)
        age_s = None if self._walk is None or self._clock.walked_at is None else round(now - self._clock.walked_at, 3)
        held, whys = allocator_figures(torch.stats(), self._walk, age_s, wants_expandable=self._is_expandable)
        reasons |= whys
        if held is not None and (why := asleep_or_allocating()) is not None:
            reasons["allocator"] = f"{why}; torch may still count memory that vLLM has taken from it"
        return held


def attach(worker: Any, *, is_warm: bool = False) -> Sampler | None:
    """The worker's sampler, started if it has none; None where that failed, which is counted and logged."""
    found: Sampler | None = worker.__dict__.get("plimsoll_sampler")
    if found is not None:
        return found
    try:
        settings = Settings()
        sampler = Sampler(worker, settings, run_folder(settings.folder))
        sampler.is_warm = is_warm
        worker.plimsoll_sampler = sampler
        sampler.start()
    except Exception as error:
        FAULTS.note("starting the probe", error)
        return None
    LOG.info("plimsoll: figures of this worker every %g s in %s", settings.sample_s, sampler.folder)
    return sampler


def _version(name: str) -> str | None:
    """The version of a package that this process has loaded already."""
    found = getattr(sys.modules.get(name), "__version__", None)
    return None if found is None else str(found)
