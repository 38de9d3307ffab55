"""Arms containment: a general plugin of vLLM, off unless PLIMSOLL_SURVIVE is set.

vLLM calls `install` in each of its processes, unless one was forked from another that it was called in. Each needs something
else: the engine core contains, a worker notes where it failed, the API server names the reason of an aborted request.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import INSPECTION, main_module
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.survive import contain, failures, frontend

CORE = "vllm.v1.engine.core"
API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry")  # 0.25; 0.32
WORKER_LOG = "vllm.v1.executor.multiproc_executor"
_ASKED: list[Any] = []  # the engine cores of this process that were armed or refused
ARMING = "arming containment"


def install() -> None:
    """Prepare this process, if PLIMSOLL_SURVIVE says so. Never raises, and does nothing the second time."""
    with FAULTS.noting(ARMING):
        settings = InsideSettings()
        if not settings.survive or main_module() == INSPECTION:
            return
        worker_log = logging.getLogger(WORKER_LOG)
        if failures.NOTE not in worker_log.filters:
            worker_log.addFilter(failures.NOTE)
        _follow_cores(importlib.import_module(CORE), settings)
        if main_module() in API_SERVERS or any(name in sys.modules for name in API_SERVERS):
            frontend.install()


def _follow_cores(module: Any, settings: InsideSettings) -> None:
    """Arm every engine core of this process before its first step, and keep prompts of contained steps out of the log.

    A core loads its plugins while it is made, too late to follow its making: it is armed when its loop begins or, where
    there is no loop, at its first step, which then runs as the armed one.
    """
    if getattr(module.EngineCore.step, "is_plimsoll", False):
        return

    def arming(own: Any) -> Any:
        @functools.wraps(own)
        def step(self: Any) -> Any:
            if self in _ASKED:
                return own(self)  # called by what stands around it
            _arm(self, settings)
            return self.step_fn()

        step.is_plimsoll = True  # type: ignore[attr-defined]
        return step

    for name in contain.STEPS:
        setattr(module.EngineCore, name, arming(getattr(module.EngineCore, name)))
    own_loop, own_dump = module.EngineCoreProc.run_busy_loop, module.dump_engine_exception

    @functools.wraps(own_loop)
    def run_busy_loop(self: Any) -> Any:
        _arm(self, settings)
        return own_loop(self)

    @functools.wraps(own_dump)
    def dump_engine_exception(*args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1]
        if not contain.ARMED or error is None or failures.identify(error) is None:
            own_dump(*args, **kwargs)  # it holds prompts, and is not wanted of a failure that is contained

    module.EngineCoreProc.run_busy_loop, module.dump_engine_exception = run_busy_loop, dump_engine_exception


def _arm(core: Any, settings: InsideSettings) -> None:
    if core in _ASKED:
        return
    _ASKED.append(core)
    is_done = False
    with FAULTS.noting(ARMING):
        contain.arm(core, settings, importlib.import_module("vllm").__version__)
        is_done = True
    if not is_done:
        with FAULTS.noting("leaving a step as it was"):
            core.step_fn = contain.own_step(core)
