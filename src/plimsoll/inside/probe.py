"""The worker extension: `vllm serve ... --worker-extension-cls plimsoll.inside.Probe`.

vLLM adds this class to the bases of its worker class, after its own, and refuses it if one of our names is taken; so all of
them start with `plimsoll_`. vLLM's workers have no `__new__`, so Python calls ours, which starts the thread without a call
from outside. Where a worker class has a `__new__` that does not call super's, the first call of a method below starts it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from plimsoll.inside import memory
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.sampler import Sampler, attach


class Probe:
    """The methods that every worker gains, called through collective_rpc: without a timeout, one call at a time."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        worker = super().__new__(cls)
        watch(worker)
        return worker

    def plimsoll_figures(self) -> dict[str, Any]:
        """Returns the last figures of this worker."""
        sampler = _called(self)
        return {} if sampler is None else dict(sampler.figures)

    def plimsoll_compact(self) -> dict[str, Any]:
        """Gives unused memory back to the device; returns how much and how long it took, or why it did not."""
        return _acted(self, "last_compact", "compacting", lambda _: memory.compact(self, _torch()))

    def plimsoll_snapshot(self, history: int | str | None = None) -> dict[str, Any]:
        """Writes a memory snapshot; returns its path and counts, or why it did not."""

        def write(sampler: Sampler | None) -> dict[str, Any]:
            folder = "" if sampler is None else sampler.settings.snapshot_folder
            return memory.snapshot(self, _torch(), folder, history)

        return _acted(self, "last_snapshot", "writing a snapshot", write)


def watch(worker: Any) -> None:
    """Starts the thread for a worker that is being made. Never raises; a second call does nothing."""
    with FAULTS.noting("watching a worker"):
        sampler = None if "plimsoll_sampler" in worker.__dict__ else attach(worker)
        if sampler is not None:
            _follow_start(worker, sampler)


def equip(worker: Any) -> None:
    """Watches a worker that is no Probe, and gives it the Probe's methods."""
    watch(worker)
    for name in ("plimsoll_figures", "plimsoll_compact", "plimsoll_snapshot"):
        if not hasattr(type(worker), name):
            setattr(worker, name, functools.partial(getattr(Probe, name), worker))


def _acted(worker: Any, kept_as: str, where: str, act: Callable[[Sampler | None], dict[str, Any]]) -> dict[str, Any]:
    """Runs `act` in the worker's own thread and returns its result, or a refusal after a fault; the sampler keeps either."""
    sampler = _called(worker)
    done: dict[str, Any] = {"pid": os.getpid(), "rank": getattr(worker, "rank", None), "at": time.time()}
    try:
        done |= act(sampler)
    except Exception as error:
        FAULTS.note(where, error)
        done["refused"] = f"{where} failed: {type(error).__name__}"  # without the message, which may hold a user's text
    if sampler is not None:
        setattr(sampler, kept_as, done)
        sampler.wake()
    return done


def _called(worker: Any) -> Sampler | None:
    """Returns the sampler of a worker that was called from outside; such a call proves that the worker's start is over."""
    sampler = attach(worker, is_warm=True)
    if sampler is not None:
        sampler.is_warm = True
    return sampler


def _follow_start(worker: Any, sampler: Sampler) -> None:
    """Wraps two methods of this worker alone: the class stays as vLLM made it.

    The warm-up records the CUDA graphs, and may run again later: the wrapper notes when it is over. A wanted history begins in
    the worker's own thread once the device is there, before the weights are loaded.
    """
    own_warm_up, own_load = getattr(worker, "compile_or_warm_up_model", None), getattr(worker, "load_model", None)
    entries = sampler.settings.history_entries

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        assert own_warm_up is not None
        sampler.is_warm = False
        done = own_warm_up(*args, **kwargs)
        sampler.is_warm = True
        return done

    def load_model(*args: Any, **kwargs: Any) -> Any:
        assert own_load is not None
        with FAULTS.noting("recording the allocator's history"):
            if getattr(getattr(worker, "device", None), "type", None) == "cuda":
                memory.record_history(_torch(), entries)
        return own_load(*args, **kwargs)

    if own_warm_up is not None:
        worker.compile_or_warm_up_model = compile_or_warm_up_model
        sampler.is_watched = True
    if own_load is not None and entries > 0:
        worker.load_model = load_model


def _torch() -> Any:
    """Returns the torch that the worker has loaded; never loads it."""
    return sys.modules.get("torch")
