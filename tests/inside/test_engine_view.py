"""What is seen of the engine without asking it; what a release has not is None."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.engine_view import CANARY, EngineClientView, canary_fails
from plimsoll.inside.faults import FAULTS
from tests.fakes import EngineClient, State


@pytest.mark.parametrize("state", [None, State(), SimpleNamespace(), State(engine_client=None), State(engine_client=object())])
def test_an_engine_that_is_not_there_or_foreign_is_unknown(state: Any) -> None:
    """No attribute is taken for granted."""
    view = EngineClientView(state)
    assert not view.is_dead()
    assert view.requests() is None
    assert (view.request_count(), view.background_count(), view.queued(5, 10.0)) == (0, 0, (0, 0.0))
    assert view.places() is None
    assert view.own_valve() == ""


def test_requests_those_that_wait_and_death_are_what_vllm_says() -> None:
    """Counted without our own test request; dead by vLLM's own word; the newest that answered nothing are those that wait."""
    client = EngineClient()
    client.add("a", 10)
    client.add(f"{CANARY}1", 1)
    assert EngineClientView(State(engine_client=client)).request_count() == 1
    client = EngineClient()
    view = EngineClientView(State(engine_client=client))
    assert not view.is_dead()
    client.errored = True
    assert view.is_dead()
    client = EngineClient()
    client.add("old", 1000)
    client.add("answering", 500, is_prefilling=False)
    client.add("newer", 20)
    client.add("newest", 10)
    view = EngineClientView(State(engine_client=client))
    assert view.queued(2, 5.0) == (2, 40.0)
    assert view.queued(9, 5.0) == (3, 1045.0)
    assert view.queued(0, 5.0) == view.queued(None, 5.0) == (0, 0.0)


def test_places_are_those_of_all_engines() -> None:
    """0.31's smaller number wins; data-parallel engines multiply."""
    client = EngineClient(places=8)
    view = EngineClientView(State(engine_client=client))
    assert view.places() == 8
    client.vllm_config.parallel_config.data_parallel_size = 3
    assert view.places() == 24
    client.vllm_config.scheduler_config.max_num_active_seqs = 2
    assert view.places() == 6
    client.vllm_config.scheduler_config = SimpleNamespace(max_num_seqs="8")
    assert view.places() is None


def test_background_responses_that_still_run_are_counted() -> None:
    """Wherever vLLM's state holds its responses; what is done is not."""

    async def look() -> int:
        async def forever() -> None:
            await asyncio.sleep(60)

        running, done = asyncio.create_task(forever()), asyncio.create_task(asyncio.sleep(0))
        await asyncio.sleep(0.01)
        responses = SimpleNamespace(background_tasks={"a": running, "b": done})
        found = EngineClientView(
            State(openai_serving_responses=responses, other=SimpleNamespace(background_tasks={"c": running}))
        )
        count = found.background_count()
        running.cancel()
        return count

    assert asyncio.run(look()) == 1


def test_vllm_s_own_valve_is_seen_set_or_unset() -> None:
    """Where a release has it, in its arguments or its configuration."""
    assert EngineClientView(State(args=SimpleNamespace(max_num_queued_reqs=None))).own_valve() == "unset"
    assert EngineClientView(State(args=SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=5))).own_valve() == "set"
    client = EngineClient()
    client.vllm_config.scheduler_config.max_num_queued_reqs = 7
    assert EngineClientView(State(engine_client=client)).own_valve() == "set"


# The test request: only silence is a proof.
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


def test_only_an_engine_that_says_nothing_fails() -> None:
    """An error is an answer; one that is deaf holds nothing up; a test that cannot be made proves nothing."""
    for does, fails in (("answer", False), ("hang", True), ("raise", False), ("deaf", True)):
        found, took_s = asyncio.run(_try(does))
        assert (found, took_s < 10) == (fails, True), does
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
