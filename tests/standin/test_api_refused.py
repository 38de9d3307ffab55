"""Bad requests get vLLM's own answers: the status, the shape and the words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.standin.config import ServerFlags
from tests.each import each, rows
from tests.fakes import eventually
from tests.standin.engines import engine
from tests.standin.servers import SLOW, Server, standin
from tests.standin.test_api import PATHS, asked
from tests.standin.test_api_admin import Asking
from tests.standin.test_faults import CASES


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with standin(ServerFlags()) as found:
        yield found


def error_of(server: Server, path: str, body: object, **headers: str) -> dict[str, Any]:
    """The error in an answer, with its status; its shape is always the same."""
    got = server.ask("POST", path, body, **headers)
    error = got.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == got.status
    found: dict[str, Any] = error
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_text_that_is_too_long_is_refused_with_the_limit(server: Server, path: str) -> None:
    """400; vLLM counts no further than one token behind the limit, and not at all what must be too long."""
    for text, says, param in (
        ("word " * 2500, "your prompt contains at least 2049 input tokens, which exceeds this limit", "input_tokens"),
        ("x" * 20_000, "which is the upper bound for 2048 input tokens", "input_text"),
    ):
        body = asked(path, prompt=text) if path == PATHS[0] else asked(path, messages=[{"role": "user", "content": text}])
        error = error_of(server, path, body)
        assert says in error["message"]
        assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)


def test_deep_and_odd_json_is_refused_and_never_an_error_of_ours(server: Server) -> None:
    """Nothing that a client sends is answered with 500."""
    odd = [b"[" * 100_000, b'{"prompt": "\xff"}', b"\x00", *(text.encode() for (text,) in rows(CASES, "odd bodies"))]
    for body in odd:
        for path in PATHS:
            got = server.ask("POST", path, body)
            assert got.status in (200, 400, 404), (path, body[:80], got.body[:200])
            json.loads(got.body)


def test_a_full_queue_is_said_with_503() -> None:
    """By requests and by prompt tokens, as vLLM's own valves; each refusal is counted."""
    with standin(ServerFlags(max_num_queued_reqs=2), one=engine(step_time=SLOW)) as server:
        error = error_of(server, PATHS[0], asked(PATHS[0], n=3))
        assert error["message"].startswith("The engine is currently busy and cannot accept new requests.")
        assert (error["type"], error["code"]) == ("Service Unavailable", 503)
        assert server.service.engine.figures.rejected["max_num_queued_reqs"] == 1
        assert server.ask("POST", PATHS[0], asked(PATHS[0], n=2)).status == 200
    with standin(ServerFlags(max_num_queued_tokens=0)) as server:
        error = error_of(server, PATHS[1], asked(PATHS[1]))
        assert error["message"].startswith("The engine has reached its prefill token backlog limit.")
        assert server.service.engine.figures.rejected["max_num_queued_tokens"] == 1


def test_a_dead_engine_is_said_to_those_who_wait_and_those_who_come() -> None:
    """500 for a whole answer, an event in a stream that has begun, 503 from /health."""
    with standin(ServerFlags(is_dev_mode=True), one=engine(step_time=SLOW)) as server:
        service = server.service
        streamed, whole = Asking(server, stream=True), Asking(server)
        eventually(lambda: len(service.engine.requests) == 2 and service.engine.figures.generation_tokens > 4)
        server.do(lambda: service.engine.die("CUDA out of memory."))
        server.do(service.driver.turn)
        says = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        expected = {"error": {"message": says, "type": "InternalServerError", "param": None, "code": 500}}
        assert (whole.end().status, whole.end().json()) == (500, expected)
        assert (streamed.end().status, streamed.end().events()[-2:]) == (200, [json.dumps(expected), "[DONE]"])
        assert server.ask("GET", "/health").status == 503
        assert server.ask("POST", PATHS[1], asked(PATHS[1])).json() == expected
        assert not service.states


def test_a_slash_too_many_leads_to_the_same_place() -> None:
    """307 keeps the query and a proxy's prefix."""
    with standin(ServerFlags(root_path="/pre")) as server:
        got = server.ask("GET", "/v1/models/?a=b&c=%20")
        assert got.status == 307
        assert got.headers["location"] == f"http://127.0.0.1:{server.port}/pre/v1/models?a=b&c=%20"


def test_two_requests_of_one_name_do_not_disturb_each_other() -> None:
    """A client may send the same request id twice at once."""
    with standin(ServerFlags(), one=engine(step_time=SLOW)) as server:
        asking = [Asking(server, max_tokens=8, request_id="same") for _ in range(3)]
        assert [one.end().json()["id"] for one in asking] == ["cmpl-same"] * 3
        assert not server.service.states


@each(("more", "says"), rows(CASES, "numbers"))
def test_numbers_of_any_size_get_an_answer(server: Server, more: str, says: str) -> None:
    """400 in vLLM's words, never 500."""
    for path in PATHS:
        error = error_of(server, path, asked(path, **json.loads(more.replace("HUGE", "1" + "0" * 400))))
        assert error["code"] == 400
        assert says in error["message"]


def test_what_only_a_model_could_answer_is_refused_and_the_rest_ignored(server: Server) -> None:
    """400 for log probabilities and an echo; stop strings, tools and formats change nothing."""
    for name in ("logprobs", "prompt_logprobs", "echo"):
        assert error_of(server, PATHS[0], asked(PATHS[0], **{name: 1}))["param"] == name
    ignored = {"stop": ["a"], "tools": [{}], "response_format": {"type": "json_object"}, "logprobs": None, "echo": False}
    for path in PATHS:
        assert server.ask("POST", path, asked(path, **ignored)).json()["usage"]["completion_tokens"] == 5


def test_whatever_a_client_sends_is_answered_within_bounds(server: Server) -> None:
    """Half a letter becomes a question mark; more answers to one prompt than vLLM makes are refused with 400."""
    for body in ({"request_id": "a\ud800b"}, {"request_id": "a\ud800b", "stream": True}, {"model": "\udfff"}):
        for path in PATHS:
            got = server.ask("POST", path, asked(path, **body))
            assert "?" in got.body.decode("utf-8")
            assert got.status == (404 if "model" in body else 200)
    error = error_of(server, PATHS[0], asked(PATHS[0], prompt=["a"] * 1000, n=1000))
    assert error["message"] == "1000 prompts with n=1000 are 1000000 answers; at most 16384 are made."
