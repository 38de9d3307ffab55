"""One HTTP call: whole answers in every framing, and an end to those that have none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from plimsoll.errors import BadInput
from plimsoll.net.http_call import Lost, Reply, Server
from tests.net.raw_server import Visitor, free_port, raw_server

MOST = 1_000
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def run(scene: Awaitable[Any]) -> Any:
    async def go() -> Any:
        return await asyncio.wait_for(scene, 30)

    return asyncio.run(go())


async def asked(*pieces: bytes, ends: bool = True, deadline_s: float = 20.0) -> Reply | Lost:
    """What is made of these bytes; the last piece is said again and again where it does not end."""

    async def talk(visitor: Visitor) -> None:
        await visitor.asked()
        await visitor.say(*pieces)
        with contextlib.suppress(ConnectionError):
            while not ends:
                await visitor.say(pieces[-1])

    async with raw_server(talk) as server:
        return await Server(server.url).call("POST", "/", b"{}", {}, deadline_s, MOST)


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}trailing',
        b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}',
        CHUNKED + b'3;x=y\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n',
        b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}',
    ],
)
def test_a_whole_answer_is_read_in_every_framing(answer: bytes) -> None:
    """By its length, to the end of the connection, in chunks, and after words that only announce it."""
    found = run(asked(answer))
    assert isinstance(found, Reply)
    assert (found.status, found.table()) == (200, {"a": 1})


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 500),
        (CHUNKED, b"64\r\n" + b"x" * 100 + b"\r\n"),
        (CHUNKED + b"ffffff\r\n", b"x" * 500),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", b"x" * 500),
        (b"HTTP/1.1 200 OK\r\n", b"X-More: " + b"x" * 500 + b"\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\n\r\n"),
    ],
)
def test_an_endless_answer_is_left_at_its_limit(first: bytes, again: bytes) -> None:
    """Long before the deadline: what is too large is not read on."""
    began = time.monotonic()
    found = run(asked(first, again, ends=False))
    assert isinstance(found, Lost)
    assert found.was_sent is True
    assert "no HTTP that we read" in found.why
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}##0\r\n\r\n",
        CHUNKED + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n" + b"x" * 10,
        b"HTTP/2 200\r\n\r\n{}",
        b"HTTP/1.1 099 X\r\n\r\n{}",
    ],
)
def test_a_framing_against_the_rules_is_no_answer(answer: bytes) -> None:
    """Sizes are plain numbers, chunks end where they say, and a status is one."""
    found = run(asked(answer))
    assert isinstance(found, Lost)
    assert (found.was_sent, "no HTTP that we read" in found.why) == (True, True)


def test_where_the_status_is_enough_no_body_is_read() -> None:
    """An endless one does not matter then."""

    async def talk(visitor: Visitor) -> None:
        await visitor.asked()
        with contextlib.suppress(ConnectionError):
            await visitor.say(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                await visitor.say(b"x" * 500)

    async def scene() -> Reply | Lost:
        async with raw_server(talk) as server:
            return await Server(server.url).call("POST", "/", b"{}", {}, 20.0, most_bytes=0)

    assert run(scene()) == Reply(200, b"")


def test_the_path_of_the_address_is_asked_as_it_was_given() -> None:
    """With its last slash where nothing comes after it, once where something does, and with its query."""
    heads: list[str] = []

    async def talk(visitor: Visitor) -> None:
        heads.append(await visitor.asked())
        await visitor.say(b"HTTP/1.1 204 No Content\r\n\r\n")

    async def scene() -> None:
        async with raw_server(talk) as server:
            for address, path in (("", ""), ("/hook/?a=1", ""), ("/hook/", "/state"), ("", "/state?t=3")):
                await Server(server.url + address).call("GET", path, b"", {}, 20.0)

    run(scene())
    assert [head.split()[1] for head in heads] == ["/", "/hook/?a=1", "/hook/state", "/state?t=3"]


@pytest.mark.parametrize("login", ["tok\r\nX: y", "tök", "tok\0"])
def test_a_login_that_no_header_may_hold_is_not_sent(login: str) -> None:
    """Nobody is asked, and it is not repeated in the sentence."""
    lost = run(Server(f"http://127.0.0.1:{free_port()}").call("GET", "/", b"", {"Authorization": login}, 5.0))
    assert isinstance(lost, Lost)
    assert (lost.was_sent, login in lost.why) == (False, False)
    assert "no header may have" in lost.why


@pytest.mark.parametrize(
    "url", ["http://u:s3cret@h", "http://h:0", "http://h:70000", "ftp://h", "unix:here", "http://h h", "http://"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """At once, and without repeating a password."""
    with pytest.raises(BadInput) as refused:
        Server(url)
    assert "s3cret" not in str(refused.value)


def test_whether_it_was_sent_is_known() -> None:
    """Not where nobody listens, nor where no secure connection comes about; where one stood, it may have been read."""

    async def scene() -> None:
        nobody = await Server(f"http://127.0.0.1:{free_port()}").call("GET", "/", b"", {}, 5.0)
        assert isinstance(nobody, Lost)
        assert nobody.was_sent is False
        hung_up = await asked(b"")
        assert isinstance(hung_up, Lost)
        assert hung_up.was_sent is True

        async def talk(visitor: Visitor) -> None:
            await visitor.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        async with raw_server(talk) as server:
            plain = await Server(server.url.replace("http:", "https:")).call("GET", "/", b"", {"Authorization": "x"}, 5.0)
        assert isinstance(plain, Lost)
        assert plain.was_sent is False

    run(scene())
