"""A general plugin of vLLM, called once in each of its processes: the engine core's schedule ring and knobs, and the probe.

The probe comes this way for servers that have another worker extension already: PLIMSOLL_PROBE=plugin. Its methods go onto
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
    """Follow the scheduler, add its knobs, and watch each worker of this process if PLIMSOLL_PROBE=plugin says so."""
    schedule_ring.install()
    knobs.install()
    with FAULTS.noting("installing the probe as a plugin"):
        if InsideSettings().probe_as_plugin:
            install_into(importlib.import_module(WORKER_BASE).WorkerBase)


def install_into(base: Any) -> None:
    """Give a class of workers a `__new__` that watches what it makes; the second time does nothing."""
    if getattr(base.__dict__.get("__new__"), "is_plimsoll", False):
        return
    # A staticmethod, as Python keeps every __new__; what the class had, if it had one of its own, is asked first.
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
