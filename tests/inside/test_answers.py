"""Requests to the gate and its own answers: which are work, who may use the endpoints, what is read, what is sent back."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.answers import (
    ALLOWED,
    ASIDE,
    DENIED,
    FOLLOW_UP,
    OFF,
    WORK,
    AskRefused,
    GateAnswer,
    Message,
    Tokens,
    busy,
    error,
    fields_of,
    number,
    path_of,
    refuse,
    route_of,
    send_answer,
    whole,
    with_headers,
)
from plimsoll.vllm import versions
from tests.each import cases, each, rows
from tests.fakes import Wire

RELEASE = "0.32.0"
CASES = Path(__file__).parent / "cases.txt"
WORKING, STEERED = ([path for (line,) in rows(CASES, kind) for path in line.split()] for kind in ("work", "steering"))
FOLLOWING = ["/v1/responses/{response_id}/cancel"]
TOKEN = b"correct-horse-battery"
RIGHT = (b"authorization", b"Bearer " + TOKEN)

Headers = list[tuple[bytes, bytes]]


def _rows(method: str) -> set[str]:
    stretches = versions.rows("endpoints")
    return {
        name.partition(" ")[2]
        for name, found in stretches.items()
        if name.startswith(f"{method} ") and any(versions.is_within(stretch, RELEASE) for stretch in found)
    }


def test_every_endpoint_of_the_release_was_thought_about() -> None:
    """A new one is work, steering, or the follow-up of what was begun before."""
    assert _rows("POST") == {*WORKING, *STEERED, *FOLLOWING}
    assert not _rows("PUT") | _rows("DELETE") | _rows("PATCH")
    assert _rows("WEBSOCKET") == {"/v1/realtime"}


LOOKED_AT = sorted(_rows("GET") - {"/v1/responses/{response_id}"} | {"/nothing"})


@each(
    ("kind", "method", "path", "route"),
    [
        *(("http", "POST", path, WORK) for path in WORKING),
        *(("http", "POST", path, ASIDE) for path in STEERED),  # an operator needs them most while the server drains
        *(("http", method, path, ASIDE) for path in LOOKED_AT for method in ("GET", "HEAD", "OPTIONS")),
        ("http", "GET", "/v1/responses/resp_1", FOLLOW_UP),
        ("http", "POST", "/v1/responses/resp_1/cancel", FOLLOW_UP),
        ("http", "DELETE", "/v1/responses/resp_1", FOLLOW_UP),
        ("websocket", "GET", "/v1/realtime", WORK),
    ],
)
def test_work_is_what_costs_the_engine_something(kind: str, method: str, path: str, route: object) -> None:
    """Work is counted and may be refused; looks and steering pass uncounted; what was begun before is counted."""
    assert route_of(kind, method, path) == route


@given(path=st.text(max_size=30).map(lambda text: f"/{text}"), method=st.sampled_from(["POST", "PUT", "PATCH", "BREW"]))
def test_what_is_not_known_is_work(path: str, method: str) -> None:
    """A drain lets nothing pass that nobody thought about."""
    if path.rstrip("/") not in STEERED and not path.startswith("/v1/responses/"):
        assert route_of("http", method, path) == WORK


@each(("path", "root", "expected"), cases("inside", "the_root_path_is_cut_off_whole"))
def test_the_root_path_is_cut_off_whole(path: str, root: str, expected: str) -> None:
    """A prefix ends where a name ends."""
    assert path_of(path, root) == expected


@each(
    ("headers", "verdict"),
    [
        ([], DENIED),
        *(([(b"authorization", shown)], DENIED) for shown in (
            b"Bearer wrong", b"Bearer ", b"Bearer", b"Bearer \xff\xfe", TOKEN, b"Basic " + TOKEN, b"Bearer " + TOKEN + b"x",
            b"Bearer " + TOKEN[:-1], b"Bearer " + TOKEN.upper(),
        )),
        ([RIGHT, RIGHT], DENIED),
        ([RIGHT, (b"Authorization", b"Bearer wrong")], DENIED),
        ([(b"x-forwarded-for", b"127.0.0.1"), (b"x-real-ip", b"127.0.0.1")], DENIED),
        ([(b"x-authorization", b"Bearer " + TOKEN)], DENIED),
        *(([(b"host", b"x"), (name, scheme + b" " + TOKEN)], ALLOWED)
          for name in (b"authorization", b"Authorization", b"AUTHORIZATION") for scheme in (b"Bearer", b"bearer")),
    ],
)  # fmt: skip
def test_one_header_the_word_bearer_and_the_whole_token_open(headers: Headers, verdict: object) -> None:
    """Missing, wrong, doubled or otherwise worded is denied; with no token set the endpoints are off for everybody."""
    assert Tokens(TOKEN.decode()).judge(headers) == verdict
    assert Tokens("").judge(headers) == OFF


@given(shown=st.binary(max_size=40))
def test_no_other_bytes_open(shown: bytes) -> None:
    """A token of any bytes works, also those that are no UTF-8; only a digest of it is kept, and a short one is noticed."""
    tokens = Tokens(TOKEN.decode())
    assert tokens.judge([(b"authorization", b"Bearer " + shown)]) == (ALLOWED if shown.strip() == TOKEN else DENIED)
    raw = b"\xff\xfesixteen-bytes-and-more"
    assert Tokens(os.fsdecode(raw)).judge([(b"authorization", b"Bearer " + raw)]) == ALLOWED
    assert TOKEN.decode() not in repr(vars(tokens))
    assert [Tokens(text).is_short for text in ("short", TOKEN.decode(), "")] == [True, False, False]


def test_a_token_is_rotated_without_a_restart(tmp_path: Path) -> None:
    """The new token of a file opens with the next request and the old one does not; an empty or lost file changes nothing."""
    file = tmp_path / "gate.token"
    file.write_text("the-first-token-of-it", encoding="utf-8")
    tokens = Tokens(file.read_text(encoding="utf-8"), str(file), lambda: file.read_text(encoding="utf-8").strip())

    def verdicts() -> list[str]:
        words = (b"Bearer the-first-token-of-it", b"Bearer the-second-token-of-it")
        return [tokens.judge([(b"authorization", word)]) for word in words]

    assert verdicts() == [ALLOWED, DENIED]
    (tmp_path / "next").write_text("the-second-token-of-it", encoding="utf-8")
    (tmp_path / "next").replace(file)  # as a mounted secret changes
    assert verdicts() == [DENIED, ALLOWED]
    file.write_text("", encoding="utf-8")
    assert verdicts() == [DENIED, ALLOWED]
    file.unlink()
    assert verdicts() == [DENIED, ALLOWED]


@each(
    ("body", "names", "says"),
    [
        *((body, ("a",), None) for body in (b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"nul", b'{"a":1}x', b"\x00")),
        *((body, ("a",), "not a JSON object") for body in (b"1", b"null", b"[]", b'"a"')),
        (b'{"leas_s": 1}', ("lease_s",), "lease_s"),  # a misspelt bound must not be taken for none
        (b'{"a": 1}', (), "takes none"),
    ],
)
def test_a_body_that_is_not_an_object_of_known_fields_is_refused(body: bytes, names: tuple[str, ...], says: str | None) -> None:
    """Broken, deep, endless, in no known alphabet, nameless or misspelt: one line each; an empty body asks for nothing."""
    with pytest.raises(AskRefused, match=says):
        fields_of(body, names)
    assert [fields_of(empty, ()) for empty in (b"", b"  \n", b"{}")] == [{}, {}, {}]


wild_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**300, 10**420),
    st.floats(),
    st.text(),
    st.lists(st.integers(), max_size=2),
)


@given(value=wild_values)
def test_a_number_is_within_its_bounds_or_refused(value: Any) -> None:
    """Of whatever is handed in comes the default or a number from low to high; a whole one is no fraction, truth or text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        found = number({"x": value}, "x", 0.5, 60.0, 7.0)
    except AskRefused:
        assert not is_number or not 0.5 <= value <= 60
    else:
        assert (found, type(found)) == (7.0 if value is None else value, float)
    try:
        assert whole({"x": value}, "x", 0, 100) is value
    except AskRefused:
        assert type(value) is not int or not 0 <= value <= 100
    assert (whole({"x": 5}, "x", 0, 10), whole({}, "x", 0, 10)) == (5, None)


def _sent(answer: GateAnswer, *, is_head: bool = False) -> list[Message]:
    wire = Wire()
    asyncio.run(send_answer(wire.send, answer, is_head=is_head))
    return wire.sent


def test_an_error_has_openai_s_shape() -> None:
    """As their clients read it; HEAD has its headers and no body; busy says when to come again, over another connection."""
    start, body = _sent(error(400, "no"))
    assert json.loads(body["body"]) == {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    head = _sent(error(400, "no"), is_head=True)
    assert (head[0], head[1]["body"]) == (start, b"")
    start, _ = _sent(busy("full", 7))
    assert start["status"] == 503
    assert {(b"retry-after", b"7"), (b"connection", b"close")} <= set(start["headers"])


def test_headers_replace_those_of_the_same_name() -> None:
    """However it is spelt; the message that was handed in stays as it was."""
    before: Message = {"type": "http.response.start", "status": 200, "headers": [(b"Connection", b"keep-alive"), (b"x", b"1")]}
    assert with_headers(before, ((b"connection", b"close"),))["headers"] == [(b"x", b"1"), (b"connection", b"close")]
    assert before["headers"][0] == (b"Connection", b"keep-alive")
    assert with_headers({"type": "http.response.start"}, ((b"a", b"b"),))["headers"] == [(b"a", b"b")]


@each(
    ("extensions", "status"), [({"websocket.http.response": {}}, 503), (None, None), ({}, None)],
)  # fmt: skip
def test_a_websocket_is_refused_with_the_answer_or_with_try_again_later(extensions: object, status: int | None) -> None:
    """As far as the server knows how."""
    wire = Wire({"type": "websocket.connect"})
    asyncio.run(refuse({"type": "websocket", "extensions": extensions}, wire.receive, wire.send, busy("full", 7)))
    if status is None:
        assert wire.sent == [{"type": "websocket.close", "code": 1013, "reason": "try again later"}]
        return
    start, body = wire.sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
    assert (b"retry-after", b"7") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == status
