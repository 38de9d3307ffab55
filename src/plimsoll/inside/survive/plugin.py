"""Arms containment: a general plugin of vLLM, off unless PLIMSOLL_SURVIVE is set.

vLLM calls `install` in each of its processes, but not again in a forked one. Each kind of process does its own part: the engine
core contains, a worker notes where it failed, the API server names the reason of an aborted request.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import INSPECTION, main_module, run_folder, server_key
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.survive import contain, failures, report

CORE = "vllm.v1.engine.core"
ENGINE = "vllm.v1.engine.async_llm"
SERVING = "vllm.entrypoints.generate.base.serving"  # 0.25 to 0.32; imports the error that every endpoint answers with its text
API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry")  # 0.25; 0.32
WORKER_LOG = "vllm.v1.executor.multiproc_executor"
_ASKED: list[Any] = []  # the engine cores of this process that were armed or refused
ARMING = "arming containment"


def install() -> None:
    """Prepares this process if PLIMSOLL_SURVIVE is set. Never raises; a second call does nothing."""
    with FAULTS.noting(ARMING):
        settings = InsideSettings()
        if not settings.survive or main_module() == INSPECTION:
            return
        worker_log = logging.getLogger(WORKER_LOG)
        if failures.NOTE not in worker_log.filters:
            worker_log.addFilter(failures.NOTE)
        _follow_cores(importlib.import_module(CORE), settings)
        if main_module() in API_SERVERS or any(name in sys.modules for name in API_SERVERS):
            install_frontend()


def _follow_cores(module: Any, settings: InsideSettings) -> None:
    """Arms every engine core of this process before its first step, and keeps prompts of contained steps out of the log.

    A core loads its plugins in its own constructor, too late to wrap that: it is armed when its loop begins or, where there
    is no loop, at its first step, which then runs contained.
    """
    if getattr(module.EngineCore.step, "is_plimsoll", False):
        return

    def arming(own: Any) -> Any:
        @functools.wraps(own)
        def step(self: Any) -> Any:
            if self in _ASKED:
                return own(self)  # called by a wrapper around it
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
            own_dump(*args, **kwargs)  # it prints prompts, and a contained failure needs no dump

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


# In the API server: vLLM itself answers an aborted request with "Internal server error". Its streams before 0.32 say nothing:
# an error before the first token is skipped like an empty piece of a prefill, and the client reads an answer without tokens.


def install_frontend() -> None:
    """Makes the engine's client raise our reason in every endpoint. Never raises itself; a second call does nothing."""
    with FAULTS.noting("naming the reason of aborted requests"):
        client, failure = importlib.import_module(ENGINE).AsyncLLM, importlib.import_module(SERVING).GenerationError
        if not getattr(client.generate, "is_plimsoll", False):
            client.generate = _with_reason(client.generate, failure)


def _with_reason(own: Any, failure: type[Exception]) -> Any:
    folder = run_folder(InsideSettings().folder)

    @functools.wraps(own)
    async def generate(self: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(own(self, *arguments, **named)) as outputs:
            async for output in outputs:
                if any(answer.finish_reason == "error" for answer in output.outputs):
                    why = None
                    with FAULTS.noting("naming the reason of an aborted request"):
                        why = report.why_aborted(folder, server_key(), output.request_id)
                    if why is not None:
                        raise failure(f"this request was aborted: {why}. Other requests go on; send it smaller")
                yield output

    generate.is_plimsoll = True  # type: ignore[attr-defined]
    return generate
