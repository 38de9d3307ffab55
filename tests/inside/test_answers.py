"""Answers of our own: OpenAI's error shape, headers in place, websockets refused before they open."""

from __future__ import annotations

import asyncio
import json

from plimsoll.inside.answers import GateAnswer, Message, busy, error, refuse_websocket, send_answer, with_headers


def _sent(answer: GateAnswer, *, is_head: bool = False) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(send_answer(send, answer, is_head=is_head))
    return sent


def test_an_error_has_openai_s_shape() -> None:
    """As their clients read it."""
    start, body = _sent(error(400, "no", "BadRequestError"))
    assert json.loads(body["body"]) == {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(body["body"])).encode()


def test_busy_says_when_to_come_again_and_over_another_connection() -> None:
    """503, Retry-After, Connection: close."""
    start, _ = _sent(busy("full", 7))
    assert start["status"] == 503
    assert {(b"retry-after", b"7"), (b"connection", b"close")} <= set(start["headers"])


def test_head_has_the_headers_and_no_body() -> None:
    """The length is that of the body it would have had."""
    whole, head = _sent(error(404, "no", "x")), _sent(error(404, "no", "x"), is_head=True)
    assert head[0] == whole[0]
    assert head[1]["body"] == b""


def test_headers_replace_those_of_the_same_name() -> None:
    """However it is spelt; the message that was handed in stays as it was."""
    before: Message = {"type": "http.response.start", "status": 200, "headers": [(b"Connection", b"keep-alive"), (b"x", b"1")]}
    after = with_headers(before, ((b"connection", b"close"),))
    assert after["headers"] == [(b"x", b"1"), (b"connection", b"close")]
    assert before["headers"][0] == (b"Connection", b"keep-alive")
    assert with_headers({"type": "http.response.start"}, ((b"a", b"b"),))["headers"] == [(b"a", b"b")]


def _refused(extensions: object) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(refuse_websocket({"type": "websocket", "extensions": extensions}, receive, send, busy("full", 7)))
    return sent


def test_a_websocket_is_refused_with_the_answer_or_with_try_again_later() -> None:
    """As far as the server knows how."""
    start, body = _refused({"websocket.http.response": {}})
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 503)
    assert (b"retry-after", b"7") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == 503
    nothing: tuple[dict[str, object] | None, ...] = (None, {})
    for extensions in nothing:
        assert _refused(extensions) == [{"type": "websocket.close", "code": 1013, "reason": "try again later"}]
