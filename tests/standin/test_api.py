"""The stand-in's API over real sockets: vLLM's answers, whole and streamed."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.standin.config import ServerFlags
from tests.fakes import eventually
from tests.standin.engines import engine
from tests.standin.servers import SLOW, Server, standin

PATHS = ("/v1/completions", "/v1/chat/completions")
LONG = 500  # tokens


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with standin() as found:
        yield found


def asked(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"prompt": "a few words"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "a few words"}]}
    return {"model": "m", **prompt, "max_tokens": 5, **more}


def text_of(path: str, choice: dict[str, Any]) -> str:
    if path == PATHS[0]:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"])["content"])


def test_answers_and_events_have_their_keys_in_vllms_order(server: Server) -> None:
    """As 0.32.0 writes them, and without blanks in a stream; the recorded answers beside ours tell nothing of an order."""
    top, tail = "id object created model choices service_tier system_fingerprint usage", "kv_transfer_params ec_transfer_params"
    of_prompt, choice = "prompt_logprobs prompt_token_ids prompt_text", "logprobs finish_reason stop_reason token_ids"
    for path, keys, own, streamed in (
        (PATHS[0], f"{top} {tail} metrics", f"index text {choice} prompt_logprobs prompt_token_ids routed_experts",
         "index text logprobs finish_reason stop_reason prompt_token_ids token_ids"),
        (PATHS[1], f"{top} {of_prompt} {tail} metrics", f"index message {choice} routed_experts",
         "index delta logprobs finish_reason token_ids"),
    ):  # fmt: skip
        body = server.ask("POST", path, asked(path)).json()
        assert (list(body), list(body["choices"][0])) == (keys.split(), own.split())
        # Too long for a late machine to put all of it into one event.
        events = server.ask("POST", path, asked(path, stream=True, request_id="r", max_tokens=LONG)).events()
        second = json.loads(events[1])
        assert events[1] == json.dumps(second, separators=(",", ":"), ensure_ascii=False)
        assert list(second) == ["id", "object", "created", "model", "choices"]
        assert list(second["choices"][0]) == streamed.split()
        assert second["id"].endswith("cmpl-r")


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_what_the_whole_answer_says(server: Server, path: str) -> None:
    """The pieces of each choice put together are its answer; the last one says why it ended, and then it is done."""
    whole = server.ask("POST", path, asked(path, max_tokens=40, n=3)).json()
    expected = [text_of(path, choice) for choice in whole["choices"]]
    assert (len(set(expected)), whole["usage"]["completion_tokens"]) == (3, 120)
    got = server.ask("POST", path, asked(path, max_tokens=40, n=3, stream=True))
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert got.headers["transfer-encoding"] == "chunked"
    *events, done = got.events()
    pieces = [json.loads(event) for event in events]
    texts = ["", "", ""]
    ends: list[str | None] = [None] * 3
    for piece_of_one in pieces:
        choice = piece_of_one["choices"][0]
        assert ends[choice["index"]] is None, "nothing comes after its end"
        texts[choice["index"]] += text_of(path, choice)
        ends[choice["index"]] = choice["finish_reason"]
    assert (done, texts, ends) == ("[DONE]", expected, ["length"] * 3)
    assert pieces[-1]["system_fingerprint"] == whole["system_fingerprint"]
    assert len({piece_of_one["id"] for piece_of_one in pieces}) == 1


def test_an_answer_ends_by_itself_unless_it_may_not(server: Server) -> None:
    """Without a limit it stops somewhere, with ignore_eos it goes on to the limit, and min_tokens is kept."""
    got = server.ask("POST", PATHS[1], asked(PATHS[1], max_tokens=None)).json()
    assert got["choices"][0]["finish_reason"] == "stop"
    length = got["usage"]["completion_tokens"]
    got = server.ask("POST", PATHS[1], asked(PATHS[1], max_tokens=length + 100, ignore_eos=True)).json()
    assert got["usage"]["completion_tokens"] == length + 100
    got = server.ask("POST", PATHS[1], asked(PATHS[1], max_tokens=None, min_tokens=length + 20)).json()
    assert got["usage"]["completion_tokens"] == length + 20


def test_the_next_turn_finds_the_last_one_in_the_cache() -> None:
    """Text of a conversation becomes the same tokens again, so that its blocks are hit."""
    with standin(ServerFlags(has_prompt_tokens_details=True)) as server:
        messages = [{"role": "user", "content": "word " * 200}]
        first = server.ask("POST", PATHS[1], {"messages": messages, "max_tokens": 60}).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        second = server.ask("POST", PATHS[1], {"messages": messages, "max_tokens": 5}).json()
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens"] + 40 < cached < second["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_request_with_it(stream: bool) -> None:
    """Nobody generates for nobody; vLLM counts such a request nowhere."""
    with standin(one=engine(step_time=SLOW)) as server:
        body = json.dumps(asked(PATHS[0], max_tokens=1500, ignore_eos=True, stream=stream)).encode()
        head = f"POST {PATHS[0]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(head.encode() + body)
            eventually(lambda: len(server.service.engine.requests) == 1)
        eventually(lambda: not server.service.engine.requests and not server.service.states)
        time.sleep(0.1)
        assert sum(server.service.engine.figures.success.values()) == 0


def test_servers_of_one_process_know_nothing_of_each_other_and_any_of_several_keys_opens() -> None:
    """Each has an engine, a page and requests of its own; no client could show an empty key, so that is none."""
    with standin(ServerFlags(api_keys=("a", "b"))) as one, standin(ServerFlags(api_keys=("",))) as other:
        assert one.ask("POST", PATHS[0], asked(PATHS[0]), authorization="Bearer b").status == 200
        assert other.ask("GET", "/v1/models").status == 200
        for server, tokens in ((one, "5.0"), (other, "0.0")):
            page = server.ask("GET", "/metrics").body.decode()
            assert f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}' in page
