"""What the rounds of containment on a GPU count as served: a whole answer, read from its bytes."""

from __future__ import annotations

from lab.gpu.survive_load import Answer, dechunked, read_answer
from tests.each import each


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
