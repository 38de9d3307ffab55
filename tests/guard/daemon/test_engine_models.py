"""Which model an engine serves, and its first request, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.daemon.engine_look import ServedModel, served_model, warm_up
from tests.net.raw_server import by_path, raw_server

MODELS = b'{"data": [{"id": "one", "max_model_len": 4096}, {"id": "two"}]}'
HALF = b'{"choices": [{"text": "\xef\xbf\xbd", "finish_reason": "length"}]}'
TEXT = b'{"choices": [{"text": " world", "finish_reason": "length"}]}'


def warmed(answer: bytes | str, models: bytes | str = MODELS) -> Outcome:
    """What becomes of the first request at a server that answers it so."""

    async def scene() -> Outcome:
        async with raw_server(by_path({"/v1/models": models, "/v1/completions": answer})) as server:
            return await warm_up(f"http://127.0.0.1:{server.port}", deadline_s=5)

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("answer", "is_done"),
    [(TEXT, True), ("500 Internal Server Error", False), ("503 Service Unavailable", None), ("404 Not Found", None),
     ("429 Too Many Requests", None), (HALF, False), (b"{}", None)],
)  # fmt: skip
def test_a_first_request_that_the_engine_breaks_over_is_a_failure(answer: bytes | str, is_done: bool | None) -> None:
    """500 and half a letter are; a refusal, or an answer that is no completion, says nothing of the engine."""
    assert warmed(answer).is_done is is_done


def test_without_a_model_nothing_is_asked() -> None:
    """A server that lists none: not known, and it says why."""
    outcome = warmed(TEXT, "404 Not Found")
    assert (outcome.is_done, "unknown which model it serves" in outcome.message) == (None, True)


@pytest.mark.parametrize(
    ("models", "found"),
    [(MODELS, ServedModel("one", 4096.0)), (b'{"data": [{"id": "x", "max_model_len": true}]}', ServedModel("x", None)),
     (b'{"data": []}', None), (b"[" * 100_000, None), (b'{"data": [{"id": 7}]}', None), ("500 Oops", None)],
)  # fmt: skip
def test_the_first_model_of_the_list_is_told(models: bytes | str, found: ServedModel | None) -> None:
    """With its context where it is a number; whatever else a server says is not known."""

    async def scene() -> ServedModel | None:
        async with raw_server(by_path({"/v1/models": models})) as server:
            return await served_model(f"http://127.0.0.1:{server.port}")

    assert asyncio.run(scene()) == found
