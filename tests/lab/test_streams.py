"""The streaming clients, against a small server that speaks as vLLM does."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lab import streams
from lab.streams import Answer, Gap, Shape, Streams

SHAPE = Shape(clients=3, prompt=(4, 8), output=(5, 9), long_prompt=(50, 60), long_every=4)


class Streaming(http.server.BaseHTTPRequestHandler):
    """Streams as many tokens as it was asked for, in one piece fewer; where it is told to, it refuses every fifth request."""

    protocol_version = "HTTP/1.1"
    is_refusing = False
    prompts: list[list[int]] = []  # noqa: RUF012 - one server a test, and the test empties it

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.prompts.append(asked["prompt"])
        if len(self.prompts) % 5 == 0 and self.is_refusing:
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        usage = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
        for piece in [{"choices": [{"text": "x"}]}] * (asked["max_tokens"] - 1) + [usage]:
            event = f"data: {json.dumps(piece)}\n\n".encode()
            self.wfile.write(event[:4])  # an event may arrive in parts
            self.wfile.flush()
            time.sleep(0.002)
            self.wfile.write(event[4:])
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    """A server of the above on a port of its own."""
    Streaming.prompts = []
    Streaming.is_refusing = False
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()


def test_every_token_is_counted_and_every_piece_timed(server: http.server.ThreadingHTTPServer) -> None:
    """Tokens are those of the usage, pieces those that hold text; no two prompts begin alike."""
    with Streams(server.server_port, "m", SHAPE, 0.5) as load:
        answers = load.finish()
    assert len(answers) > 3
    assert streams.failures(answers) == []
    assert all(len(answer.pieces) == answer.tokens - 1 for answer in answers)
    assert all(5 <= answer.tokens <= 9 for answer in answers)
    assert len({tuple(prompt[:2]) for prompt in Streaming.prompts}) == len(Streaming.prompts)
    assert {4 <= len(prompt) <= 8 or 50 <= len(prompt) <= 60 for prompt in Streaming.prompts} == {True}
    assert all(answer.sent < answer.pieces[0] for answer in answers)


def test_a_refused_request_is_a_failure_with_its_reason(server: http.server.ThreadingHTTPServer) -> None:
    """An answer other than 200 is told, and the clients go on."""
    Streaming.is_refusing = True
    with Streams(server.server_port, "m", SHAPE, 0.6) as load:
        answers = load.finish()
    wrong = streams.failures(answers)
    assert wrong
    assert all("503" in reason for reason in wrong)
    assert len(answers) > len(wrong)


def test_a_server_that_is_not_there_is_a_failure_too() -> None:
    """Nobody listens: every request fails, and not a million of them."""
    with Streams(1, "m", SHAPE, 0.3) as load:
        answers = load.finish()
    assert 3 <= len(answers) <= 9
    assert len(streams.failures(answers)) == len(answers)


def test_a_stream_is_whole_only_with_all_its_tokens_and_its_end() -> None:
    """Too few tokens, an error in the stream and a stream without its last line are wrong."""
    head, usage = b"HTTP/1.1 200 OK", b'data: {"usage":{"completion_tokens":7}}\n\n'
    done = b"data: [DONE]\n\n"
    assert streams.judge(head, usage + done, 7) == (7, None)
    assert streams.judge(head, usage + done, 8) == (7, "7 tokens of 8")
    assert streams.judge(head, usage, 7)[1] == "the stream broke off"
    assert '"error"' in (streams.judge(head, b'data: {"error": {}}\n\n' + done, 7)[1] or "")
    assert streams.judge(b"", b"", 7)[1] == "no answer"


def test_a_window_has_its_share_of_tokens_and_its_longest_gap() -> None:
    """Also of gaps that lie in it partly; percentiles of nothing are unknown, never 0."""
    answer = Answer(0.0, (1.0, 2.0, 3.0, 4.0, 5.0), 10, None)
    assert streams.tokens_between([answer], 2.0, 4.0) == 4.0
    assert streams.tokens_between([answer, Answer(0.0, (), 0, "no")], 0.0, 9.0) == 10.0
    found = [Gap(at=10.0, seconds=4.0), Gap(at=12.0, seconds=0.5), Gap(at=20.0, seconds=9.0)]
    assert streams.longest_gap_s(found, 9.0, 12.0) == 9.0
    assert streams.longest_gap_s(found, 9.0, 10.5) == 4.0
    assert streams.longest_gap_s(found, 30.0, 31.0) is None
    assert streams.percentile([], 0.5) is None
    assert streams.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert streams.percentile([3.0, 1.0, 2.0], 0.99) == 3.0


@given(st.lists(st.lists(st.floats(0, 100), max_size=20), max_size=5))
@example([[49.0, 50.0, 51.0]])
def test_windows_that_meet_hold_every_token_and_gap_once(streams_of_pieces: list[list[float]]) -> None:
    """Whatever the times are, two halves have together what the whole has."""
    answers = [Answer(0.0, tuple(sorted(pieces)), 2 * len(pieces), None) for pieces in streams_of_pieces]
    halves = [(-1.0, 50.0), (50.0, 101.0)]
    total = sum(streams.tokens_between(answers, *half) for half in halves)
    assert total == pytest.approx(sum(answer.tokens for answer in answers))
    assert sum(len(streams.gaps(answers, *half)) for half in halves) == sum(max(0, len(a.pieces) - 1) for a in answers)
