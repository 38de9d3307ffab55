"""Faults of our own under the gate: whatever part of it is broken, requests pass as if it were not there."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.answers import Receive, Scope, Send
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate import Gate
from plimsoll.inside.gate_control import GateControl
from tests.fakes import ask, hello
from tests.inside.test_gate import gated, one, with_engine
from tests.inside.test_gate_control import feed


class Broken:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def _close_own(gate: Gate, core: GateControl) -> None:
    del gate
    core.shared.own.close()


def _close_common(gate: Gate, core: GateControl) -> None:
    del gate
    core.shared.common.close()


def _break_pulse(gate: Gate, core: GateControl) -> None:
    del gate
    feed(core, 4, 40)
    core.pulse = Broken()  # type: ignore[assignment]


def _break_engine(gate: Gate, core: GateControl) -> None:
    del gate
    core.engine = Broken()  # type: ignore[assignment]


def _break_tick(gate: Gate, core: GateControl) -> None:
    del core
    gate._tick = Broken()  # type: ignore[assignment]


def _break_shared(gate: Gate, core: GateControl) -> None:
    del gate
    core.shared = Broken()  # type: ignore[assignment]


def _break_settings(gate: Gate, core: GateControl) -> None:
    del gate
    core.settings = SimpleNamespace(listen="")  # type: ignore[assignment]


@pytest.mark.parametrize(
    "spoil", [_close_own, _close_common, _break_pulse, _break_engine, _break_tick, _break_shared, _break_settings]
)
def test_a_fault_of_ours_never_fails_a_request(tmp_path: Path, spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever part is broken, work, looks, websockets and /sleep pass; counted each time, logged once a place."""

    async def go() -> None:
        gate, core = gated(hello, tmp_path, PLIMSOLL_SHED_WAIT_S="5")
        with_engine(core)
        spoil(gate, core)
        FAULTS.counts.clear()
        for _ in range(3):
            for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("POST", "/sleep"), ("POST", "/resume")):
                assert (await ask(gate, method, path)).body == b"hello"
            await one(gate, "websocket", 1, lambda: None)
            assert (await ask(gate, "GET", "/plimsoll/ready")).status in (200, 500, 503)
        if gate._tick is not None and not isinstance(gate._tick, Broken):
            assert gate._tick._task is not None
            gate._tick._task.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(go())
    failed = [record.getMessage() for record in caplog.records if " failed " in record.getMessage()]
    assert len(failed) == len(set(failed))
    assert FAULTS.counts
    assert max(FAULTS.counts.values()) >= 3


async def test_a_server_that_ends_while_a_request_runs_does_not_spoil_it(tmp_path: Path) -> None:
    """Our page is gone by then; the client still has its whole answer."""
    may_end = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await may_end.wait()
        await hello(scope, receive, send)

    gate, core = gated(slow, tmp_path)
    task = asyncio.create_task(ask(gate, "POST", "/v1/completions"))
    await asyncio.sleep(0.01)
    core.close()
    may_end.set()
    assert (await task).body == b"hello"


def test_a_gate_that_cannot_be_set_up_is_not_there(tmp_path: Path) -> None:
    """Everything passes, also what would be ours."""
    before = FAULTS.counts.get("setting up the gate", 0)
    for broken in (Broken(), SimpleNamespace(token="x", folder=str(tmp_path), listen="", failover=False)):
        gate = Gate(hello, broken)  # type: ignore[arg-type]
        assert asyncio.run(ask(gate, "POST", "/v1/completions")).body == b"hello"
    assert FAULTS.counts["setting up the gate"] == before + 1
    assert asyncio.run(ask(Gate(hello, Broken()), "GET", "/plimsoll/ready")).body == b"hello"  # type: ignore[arg-type]
