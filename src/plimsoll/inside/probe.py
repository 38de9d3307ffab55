"""The worker extension: `vllm serve ... --worker-extension-cls plimsoll.inside.Probe`.

vLLM adds this class to the bases of its worker class, after its own, and refuses if a name of ours is taken; so all of
them start with `plimsoll_`. Python asks for `__new__` where an object is made, and vLLM's workers have none: ours is
found, and starts the thread with no call from outside. Where a worker class does have one that does not ask on,
the thread starts with the first call of a method below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

from plimsoll.inside import memory
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.sampler import Sampler, attach


class Probe:
    """What every worker can do in addition, through collective_rpc; call it without a timeout, one call at a time."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        worker = super().__new__(cls)
        watch(worker)
        return worker

    def plimsoll_figures(self) -> dict[str, Any]:
        """The last figures of this worker."""
        return figures(self)

    def plimsoll_compact(self) -> dict[str, Any]:
        """Give unused memory back to the device: how much, and how long it took, or why not."""
        return compact(self)

    def plimsoll_snapshot(self, history: int | str | None = None) -> dict[str, Any]:
        """Write a memory snapshot: where it is and what it holds, or why not."""
        return snapshot(self, history)


def watch(worker: Any) -> None:
    """Start the thread for a worker that is being made. Never raises, and does nothing the second time."""
    try:
        if "plimsoll_sampler" in worker.__dict__:
            return
        sampler = attach(worker)
        if sampler is not None:
            _follow_warm_up(worker, sampler)
            _follow_loading(worker, sampler)
    except Exception as error:
        FAULTS.note("watching a worker", error)


def figures(worker: Any) -> dict[str, Any]:
    sampler = _called(worker)
    return {} if sampler is None else dict(sampler.figures)


def compact(worker: Any) -> dict[str, Any]:
    """Give memory back, as `memory.compact` does; the figures tell of it."""
    return _acted(worker, "last_compact", "compacting", lambda _: memory.compact(worker, _torch()))


def snapshot(worker: Any, history: int | str | None = None) -> dict[str, Any]:
    """Write a snapshot, as `memory.snapshot` does; the figures tell of it."""
    return _acted(
        worker,
        "last_snapshot",
        "writing a snapshot",
        lambda sampler: memory.snapshot(worker, _torch(), "" if sampler is None else sampler.settings.snapshot_folder, history),
    )


def _acted(worker: Any, kept_as: str, where: str, act: Callable[[Sampler | None], dict[str, Any]]) -> dict[str, Any]:
    """Do it in the worker's own thread; a fault is a refusal, and the sampler tells of either."""
    sampler = _called(worker)
    try:
        done = act(sampler)
    except Exception as error:
        done = memory.refused(worker, where, error)
    if sampler is not None:
        setattr(sampler, kept_as, done)
        sampler.wake()
    return done


def _called(worker: Any) -> Sampler | None:
    """The sampler of a worker that was called from outside, which proves that its start is over."""
    sampler = attach(worker, is_warm=True)
    if sampler is not None:
        sampler.is_warm = True
    return sampler


def _follow_warm_up(worker: Any, sampler: Sampler) -> None:
    """Note when the worker's warm-up, which records the CUDA graphs, is over; it may come again later."""
    own = getattr(worker, "compile_or_warm_up_model", None)
    if own is None:
        return

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        sampler.is_warm = False
        done = own(*args, **kwargs)
        sampler.is_warm = True
        return done

    worker.compile_or_warm_up_model = compile_or_warm_up_model  # of this worker alone: the class stays as vLLM made it
    sampler.is_watched = True


def _follow_loading(worker: Any, sampler: Sampler) -> None:
    """Where a history is wanted, begin it in the worker's own thread once the device is there: before the weights."""
    own = getattr(worker, "load_model", None)
    entries = sampler.settings.history_entries
    if own is None or entries <= 0:
        return

    def load_model(*args: Any, **kwargs: Any) -> Any:
        try:
            if getattr(getattr(worker, "device", None), "type", None) == "cuda":
                memory.record_history(_torch(), entries)
        except Exception as error:
            FAULTS.note("recording the allocator's history", error)
        return own(*args, **kwargs)

    worker.load_model = load_model


def _torch() -> Any:
    """The torch that the worker uses; what is not loaded is not loaded for our sake."""
    return sys.modules.get("torch")
