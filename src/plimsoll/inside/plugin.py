"""A general plugin of vLLM, called once in each of its processes: the engine core's schedule ring and knobs, and the probe.

PLIMSOLL_PROBE=plugin loads the probe this way, for servers that have another worker extension already. Its methods go onto
each worker, not onto its class: vLLM refuses an extension whose names the class already has, and the Probe may be one too.
"""

from __future__ import annotations

import importlib
from typing import Any

from plimsoll.inside import knobs, schedule_ring
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.settings import InsideSettings

WORKER_BASE = "vllm.v1.worker.worker_base"


def install() -> None:
    """Follows the scheduler, adds its knobs, and watches each worker of this process if PLIMSOLL_PROBE is `plugin`."""
    schedule_ring.install()
    knobs.install()
    with FAULTS.noting("installing the probe as a plugin"):
        if InsideSettings().probe_as_plugin:
            install_into(importlib.import_module(WORKER_BASE).WorkerBase)


def install_into(base: Any) -> None:
    """Gives a class of workers a `__new__` that watches each worker it makes; a second call does nothing."""
    if getattr(base.__dict__.get("__new__"), "is_plimsoll", False):
        return
    # A staticmethod, as Python keeps every __new__; the class's own, if it has one, makes the worker.
    own = base.__dict__.get("__new__")

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        if own is not None:
            worker = own.__get__(None, cls)(cls, *args, **kwargs)
        else:
            following = super(base, cls).__new__
            worker = following(cls) if following is object.__new__ else following(cls, *args, **kwargs)
        with FAULTS.noting("equipping a worker"):
            importlib.import_module("plimsoll.inside.probe").equip(worker)
        return worker

    make.is_plimsoll = True  # type: ignore[attr-defined]
    base.__new__ = make
