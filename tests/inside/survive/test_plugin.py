"""Containment is armed by vLLM's plugin mechanism, and only when it is asked for."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.survive import contain, failures, plugin, report
from tests.inside.survive.fake_core import OUT_OF_MEMORY, EngineCore, OutOfMemoryError, Request, install_vllm


@pytest.fixture
def core_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """vLLM's module of the engine core, not yet followed."""
    install_vllm(monkeypatch)
    module: Any = ModuleType(plugin.CORE)
    # Classes of its own: what is patched must not reach another test.
    module.EngineCore = type("EngineCore", (EngineCore,), dict.fromkeys(contain.STEPS, EngineCore.__dict__["step"]))
    module.EngineCoreProc = type("EngineCoreProc", (module.EngineCore,), {"run_busy_loop": lambda self: self.step_fn()})
    module.Request, module.dumped = Request, []
    module.dump_engine_exception = lambda *words: module.dumped.append(words)
    monkeypatch.setitem(sys.modules, plugin.CORE, module)
    monkeypatch.setenv("PLIMSOLL_SURVIVE", "1")
    monkeypatch.setenv("PLIMSOLL_DIR", str(tmp_path))
    monkeypatch.setattr(FAULTS, "counts", {})
    yield module
    logging.getLogger(plugin.WORKER_LOG).removeFilter(failures.NOTE)


def test_nothing_is_touched_unless_it_is_asked_for(core_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by default."""
    before = dict(vars(core_module.EngineCore))
    monkeypatch.delenv("PLIMSOLL_SURVIVE")
    plugin.install()
    assert dict(vars(core_module.EngineCore)) == before
    assert failures.NOTE not in logging.getLogger(plugin.WORKER_LOG).filters


def test_a_core_is_armed_when_its_loop_begins(core_module: Any, tmp_path: Path) -> None:
    """Before the first request; one without a loop, as in an offline script, at its first step."""
    plugin.install()
    plugin.install()
    core = core_module.EngineCoreProc()
    core.run_busy_loop()
    assert core.step_fn.__func__ is contain.Containment.step
    assert report.read(str(tmp_path), os.getpid())[0]["armed"] is True
    plugin.install()
    core = core_module.EngineCore(lambda _plan: OutOfMemoryError(OUT_OF_MEMORY))
    core.add_request(Request("a"))
    assert core.step_fn() == ({}, False)


def test_a_core_that_is_refused_or_fails_while_arming_steps_as_before(
    core_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own step function with nothing around it; it says why, and the server starts."""
    plugin.install()
    core = core_module.EngineCoreProc()
    core.vllm_config.parallel_config.world_size = 2
    core.run_busy_loop()
    assert core.step_fn.__func__ is EngineCore.step
    told = report.read(str(tmp_path), os.getpid())[0]
    assert told["armed"] is False
    assert "2 ranks" in told["why"]
    plugin.install()
    monkeypatch.setattr(contain, "arm", lambda *_words: 1 / 0)
    core = core_module.EngineCoreProc()
    core.run_busy_loop()
    assert core.step_fn.__func__ is EngineCore.step
    assert FAULTS.counts == {"arming containment": 1}


def test_a_step_function_of_somebody_else_stays_in_place(core_module: Any) -> None:
    """Another plugin's, or a plain function: it is called inside ours, and never a reason to fail."""
    plugin.install()
    core = core_module.EngineCoreProc()
    own, calls = core.step_fn, []

    def traced() -> Any:
        calls.append(1)
        scheduler_output = own()
        return scheduler_output  # noqa: RET504 - the name is what is looked for

    core.step_fn = traced
    core.run_busy_loop()
    core.step_fn()
    assert len(calls) == 2
    assert FAULTS.counts == {}


def test_the_dump_of_a_contained_step_is_kept_out_of_the_log(core_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds prompts; of any other failure vLLM's own dump stays."""
    plugin.install()
    monkeypatch.setattr(contain, "ARMED", ["a core"])
    for error in (OutOfMemoryError(OUT_OF_MEMORY), ValueError("a bug")):
        try:
            raise error
        except RuntimeError:
            core_module.dump_engine_exception("contained")
        except ValueError:
            core_module.dump_engine_exception("other")
    assert core_module.dumped == [("other",)]


@pytest.mark.parametrize("is_main", [False, True])
def test_an_api_server_names_the_reason_of_an_aborted_request(
    core_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_main: bool
) -> None:
    """Also of a server started as a module, also before the first token; another failed request keeps vLLM's words."""

    class AsyncLLM:
        """vLLM's client of the engine: its outputs, and whether it was left in the middle."""

        is_closed = False

        async def generate(self, *outputs: SimpleNamespace) -> AsyncIterator[SimpleNamespace]:
            try:
                for output in outputs:
                    yield output
            finally:
                self.is_closed = True

    def output(request_id: str, reason: str | None) -> SimpleNamespace:
        return SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(finish_reason=reason)])

    async def read(client: AsyncLLM, *outputs: SimpleNamespace) -> list[str | None]:
        return [each.outputs[0].finish_reason async for each in client.generate(*outputs)]

    for name, contents in {plugin.SERVING: {"GenerationError": RuntimeError}, plugin.ENGINE: {"AsyncLLM": AsyncLLM}}.items():
        module: Any = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    server: Any = ModuleType("__main__" if is_main else plugin.API_SERVERS[0])
    server.__spec__ = SimpleNamespace(name=plugin.API_SERVERS[0])
    monkeypatch.setitem(sys.modules, server.__name__, server)
    told = {**report.unknown(""), "armed": True, "aborted_requests": [{"id": "cmpl-a-0-9", "why": "it ran out alone"}]}
    report.write(str(tmp_path), told)
    plugin.install()
    plugin.install()
    client = AsyncLLM()
    with pytest.raises(RuntimeError, match="this request was aborted: it ran out alone"):
        asyncio.run(read(client, output("cmpl-a-0", None), output("cmpl-a-0", "error"), output("cmpl-a-0", None)))
    assert client.is_closed
    assert asyncio.run(read(client, output("cmpl-a-0", None), output("cmpl-a-0", "stop"))) == [None, "stop"]
    assert asyncio.run(read(client, output("cmpl-b-0", "error"))) == ["error"]
    assert core_module
