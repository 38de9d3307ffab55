"""What is seen of the engine without asking it; what a release has not is None."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.engine_view import CANARY, EngineClientView
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


def test_requests_and_death_are_what_vllm_says() -> None:
    """Counted without our own test request; dead by vLLM's own word, no guess."""
    client = EngineClient()
    client.add("a", 10)
    client.add(f"{CANARY}1", 1)
    assert EngineClientView(State(engine_client=client)).request_count() == 1
    client = EngineClient()
    view = EngineClientView(State(engine_client=client))
    assert not view.is_dead()
    client.errored = True
    assert view.is_dead()


def test_the_newest_that_answered_nothing_are_those_that_wait() -> None:
    """Their prompts, and the output expected of each."""
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
