"""A vLLM that was told to end: not ready, and new work is told where to go instead of failing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from plimsoll.inside.gate import Gate
from plimsoll.inside.tick import notice_shutdown
from tests.fakes import State, ask, hello, settings
from tests.inside.test_gate_control import made


class Client:
    """An engine client with a `shutdown`, as vLLM calls it on SIGTERM."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def shutdown(self, timeout: float | None = None) -> str:
        """Remembers what it was called with."""
        self.heard.append(timeout)
        return "done"


def test_the_call_is_noticed_once_and_stays_vllms_own(tmp_path: Path) -> None:
    """Its argument and its answer pass through; listening twice changes nothing."""
    core, _ = made(tmp_path)
    client = Client()
    notice_shutdown(client, core)
    listening = client.shutdown
    notice_shutdown(client, core)
    assert client.shutdown is listening
    before = core.is_stopping
    assert client.shutdown(timeout=7.0) == "done"
    assert client.heard == [7.0]
    assert (before, core.is_stopping) == (False, True)
    notice_shutdown(object(), core)  # a client without one is left alone


def test_while_it_ends_new_work_is_refused_and_nothing_else(tmp_path: Path) -> None:
    """503 with Retry-After where vLLM would answer 500; looking still works; the reason is `draining`."""
    gate = Gate(hello, settings(tmp_path))
    core = gate._control
    assert core is not None
    core.engine._state = State(engine_client=object())
    core.is_stopping = True

    async def scene() -> None:
        refused = await ask(gate, "POST", "/v1/completions")
        assert refused.status == 503
        assert refused.headers["retry-after"]
        looked = await ask(gate, "GET", "/v1/models")
        assert looked.status == 200
        assert looked.headers["connection"] == "close"

    asyncio.run(scene())
    assert core.readiness().reason == "draining"
    assert core.shared.own["in_flight"] == 0
