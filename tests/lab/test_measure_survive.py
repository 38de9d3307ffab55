"""The way of measure_survive.py through a GPU's host, played with a stand-in for vLLM, torch and nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.gpu.survive_host import told_in
from lab.gpu.survive_load import Answer, compare_ids, dechunked, first_difference, longest_standstill, read_answer, requests_of
from tests.each import each

ROOT = Path(__file__).parents[2]
CONTENT: dict[str, Any] = json.loads((ROOT / "lab" / "gpu" / "survive_runs.json").read_text(encoding="utf-8"))
LINE = (
    "(EngineCore pid=7) WARNING 11-17 20:01:02 [contain.py:88] plimsoll: survive: contained failure 3: a step of 8192 tokens "
    "in 48 requests ran out of device memory at forward (asked for 1.95 GiB, 1.10 GiB free); 48 requests preempted, 190000 "
    "tokens to recompute; steps of at most 4096 tokens and 48 sequences from here\n"
)
# The list of runs


# Reading answers and logs


def answer_of(raw: bytes, asked: int = 3) -> Answer:
    """An answer read from these bytes."""
    answer = Answer(0, is_killer=False, asked=asked)
    read_answer(raw, answer)
    return answer


def stream_of(*events: str) -> bytes:
    """A stream as vLLM's server sends it."""
    parts = [f"data: {event}\n\n".encode() for event in events]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks


PIECES = ('{"choices": [{"token_ids": [5, 6]}]}', '{"choices": [{"token_ids": [7]}]}')
USAGE = '{"choices": [], "usage": {"completion_tokens": 3}}'


def test_a_whole_stream_is_served_with_its_tokens() -> None:
    """Every id once, as many as were asked for; chunks that break off give what came."""
    answer = answer_of(stream_of(*PIECES, USAGE, "[DONE]") + b"0\r\n\r\n")
    assert (answer.end, answer.ids, answer.wrong) == ("served", [5, 6, 7], "")
    assert dechunked(b"3\r\nabc\r\n5\r\nde") == b"abcde"
    assert dechunked(b"zz\r\nabc") == b""


@each(
    ("raw", "end"),
    [
        (stream_of(*PIECES), "lost"),
        (stream_of(*PIECES)[:-30], "lost"),
        (stream_of(PIECES[0], USAGE, "[DONE]"), "lost"),
        (stream_of(*PIECES, PIECES[1], USAGE, "[DONE]"), "lost"),
        (stream_of(PIECES[0], '{"error": {"message": "EngineCore encountered an issue."}}', "[DONE]"), "lost"),
        (stream_of(PIECES[0], '{"error": {"message": "it ran out of device memory alone"}}', "[DONE]"), "aborted"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n{}", "refused"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "refused"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}", "lost"),
        (b'HTTP/1.1 500 Internal Server Error\r\n\r\n{"error": "plimsoll: aborted"}', "aborted"),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": [{"token_ids": [5, 6, 7]}]}', "served"),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": [{"token_', "lost"),
        (b"", "lost"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_not_served(raw: bytes, end: str) -> None:
    """A missing or repeated token, an error in the stream and a connection that breaks are all told apart from success."""
    assert answer_of(raw).end == end


def test_requests_standstills_and_tokens_are_compared() -> None:
    """The same load is the same requests but for the salt; a standstill has no piece of any stream."""
    load = CONTENT["loads"]["prompts"]
    one, other = requests_of(load, "m", "a"), requests_of(load, "m", "b")
    assert [request.body | {"cache_salt": ""} for request in one] == [request.body | {"cache_salt": ""} for request in other]
    assert one[0].body["cache_salt"] != other[0].body["cache_salt"]
    assert sum(request.is_killer for request in one) == 16
    load = {"killers": {"n": 2, "side": 60, "out": [1, 1]}}
    made = [json.dumps(request.body["messages"]) for salt in ("a", "b") for request in requests_of(load, "m", salt)]
    assert len(set(made)) == 4

    first, second = Answer(0, is_killer=False, asked=1), Answer(1, is_killer=False, asked=1)
    first.pieces, second.pieces = [0.0, 5.0, 9.0], [1.0, 2.0, 3.0, 4.0]
    assert longest_standstill([first, second]) == 4.0
    assert longest_standstill([]) is None

    found = {"0": [1, 2, 3], "1": [1, 9, 3], "2": [1, 2], "3": [1]}
    wanted = {"0": [1, 2, 3], "1": [1, 2, 3], "2": [1, 2, 3], "4": [1]}
    assert compare_ids(found, wanted) == {"compared": 3, "equal": 1, "first_differences": [1, 2]}
    assert first_difference([1], [1]) is None


def test_the_log_tells_what_was_contained() -> None:
    """Site, size and the steps that follow, from the line that containment writes."""
    told = told_in("x plimsoll: survive: armed (vLLM 0.25.1, second runner)\n" + LINE)
    assert told["armed"] == "armed (vLLM 0.25.1, second runner)"
    assert told["failures"] == [{"tokens": 8192, "requests": 48, "site": "forward", "recompute": 190000, "steps": 4096}]
    assert told["steps"] == 4096
    grown = LINE + "y plimsoll: survive: growing back: steps of at most 6144 tokens and 256 sequences\n"
    assert told_in(grown)["steps"] == 6144
    assert told_in("plimsoll: survive: not armed: two ranks\n")["armed"] == "not armed: two ranks"
