"""The test request: only silence is a proof."""

from __future__ import annotations

import asyncio
import time

import pytest

from plimsoll.inside.engine_view import canary_fails
from plimsoll.inside.faults import FAULTS
from tests.fakes import EngineClient


async def _try(does: str, limit_s: float = 0.2) -> tuple[bool, float]:
    client = EngineClient()
    client.generate_does = does
    began = time.monotonic()
    fails = await canary_fails(client, limit_s, params=object())
    took_s = time.monotonic() - began
    client.generate_does = "answer"
    await asyncio.sleep(0.12)  # a deaf one looks again
    assert not client.output_processor.request_states, "the request was not taken back"
    return fails, took_s


@pytest.mark.parametrize(("does", "fails"), [("answer", False), ("hang", True), ("raise", False), ("deaf", True)])
def test_only_an_engine_that_says_nothing_fails(does: str, fails: bool) -> None:
    """An error is an answer; one that does not listen when it is taken back does not hold up the proof."""
    found, took_s = asyncio.run(_try(does))
    assert found is fails
    assert took_s < 10


def test_a_test_that_cannot_be_made_proves_nothing() -> None:
    """Without vLLM's parameters, or with a client of another shape: counted, and not stuck."""
    before = FAULTS.counts.get("the test request", 0)
    assert asyncio.run(canary_fails(object(), 0.1, params=object())) is False
    assert FAULTS.counts["the test request"] == before + 1


async def test_when_the_server_ends_the_request_is_taken_back() -> None:
    """Cancelled from outside it does not go on."""
    client = EngineClient()
    client.generate_does = "hang"
    task = asyncio.create_task(canary_fails(client, 60, params=object()))
    await asyncio.sleep(0.05)
    assert client.output_processor.request_states
    task.cancel()
    await asyncio.sleep(0.05)
    assert task.cancelled()
    assert not client.output_processor.request_states
