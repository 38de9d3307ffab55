"""A traceback of one request that vLLM or plimsoll's door turned away is never taken for the end of a server."""

from __future__ import annotations

import pytest

from plimsoll.findings import Code
from plimsoll.inside.door import CertificateTable, Door, KindDemand, RequestKind
from tests.doctor.log_maker import ARGS, ENGINE_DEAD, STARTED, VERSION, traceback
from tests.doctor.rules.test_symptoms import symptoms

API = "(APIServer pid=1) "
INVALID = "vllm.exceptions.VLLMValidationError: max_tokens must be at least 1 (parameter=max_tokens)"
TAKEN_IN = ("v1/engine/async_llm.py:generate", "v1/engine/async_llm.py:add_request", "v1/engine/async_llm.py:_add_request")
STREAMS = {
    "completion": "entrypoints/openai/completion/serving.py:completion_stream_generator",
    "chat": "entrypoints/openai/chat_completion/serving.py:chat_completion_stream_generator",
}


@pytest.mark.parametrize("frames", [(STREAMS["completion"], *TAKEN_IN), (STREAMS["chat"], *TAKEN_IN), TAKEN_IN], ids=str)
def test_an_invalid_request_is_no_complaint_even_as_the_last_word(frames: tuple[str, ...]) -> None:
    """vLLM prints a traceback for a request that it finds invalid, and serves on: nothing need follow it in the log."""
    assert symptoms(STARTED, traceback(*frames, error=INVALID, who=API))[0] == []


def test_an_invalid_request_that_the_engine_turned_away_is_no_complaint() -> None:
    """The engine core's input thread answers for a request it cannot prepare; its loop never sees it."""
    frames = ("v1/engine/core.py:process_input_sockets", "v1/engine/core.py:preprocess_add_request")
    assert symptoms(STARTED, traceback(*frames, error=INVALID))[0] == []


def refusals() -> list[str]:
    """What the door says of a request that never fits, and of one that does not fit beside another."""
    kind = RequestKind("pictures", "encoder tokens", 0, 1, 100, "step", is_open=True)
    door = Door()
    door.use("certified", CertificateTable("0.25.1", "m", 50, {}, (kind,)), {kind.kind: kind})
    found = [
        door.admit(name, name, {kind.kind: KindDemand(units, adds_up=True)})
        for name, units in (("a", 51), ("b", 30), ("c", 30))
    ]
    return [refusal.message for refusal in found if refusal is not None]


@pytest.mark.parametrize("kind", ["vllm.exceptions.VLLMValidationError", "plimsoll.inside.door.NotNow"])
@pytest.mark.parametrize("message", refusals(), ids=["never", "not now"])
@pytest.mark.parametrize("before", [STARTED, []], ids=["whole log", "its end alone"])
def test_a_refusal_by_the_door_is_no_complaint(before: list[str], message: str, kind: str) -> None:
    """Whatever is left of the log and of the traceback, the door's sentence tells of one request."""
    assert symptoms(before, traceback(TAKEN_IN[-1], error=f"{kind}: {message}", who=API))[0] == []


def test_the_door_has_two_sentences() -> None:
    """One for a request that never fits, one for a request that does not fit now."""
    assert len(set(refusals())) == 2


def test_an_engine_that_dies_of_an_invalid_value_is_a_complaint() -> None:
    """Raised in the engine's own loop after it served, it ended more than a request."""
    lines = traceback("v1/engine/core.py:run_engine_core", "v1/engine/core.py:run_busy_loop", error=INVALID)
    assert [one.code for one in symptoms(STARTED, lines, ENGINE_DEAD)[0]] == [Code.OTHER_BAD_CONFIG]


@pytest.mark.parametrize("before", [[VERSION, ARGS], [*STARTED, VERSION, ARGS]], ids=["a first start", "after another served"])
def test_a_start_refused_as_invalid_stays_a_complaint(before: list[str]) -> None:
    """A validation error below the functions that start an engine is what refused the start."""
    start = ("entrypoints/openai/api_server.py:run_server", "engine/arg_utils.py:create_engine_config")
    found, _ = symptoms(before, traceback(*start, error=INVALID, who=API))
    assert [(one.code, one.confidence) for one in found] == [(Code.OTHER_BAD_CONFIG, 0.6)]


def test_a_validation_error_before_the_server_serves_is_a_complaint() -> None:
    """Without a function that says so, how far the server had come tells a start from a request."""
    found, _ = symptoms(VERSION, ARGS, traceback("config/model.py:__post_init__", error=INVALID, who=API))
    assert [one.code for one in found] == [Code.OTHER_BAD_CONFIG]
