"""One HTTP call: whole answers in every framing, and an end to those that have none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from plimsoll.actuators.http_call import Lost, Reply, Server
from tests.sources.raw_server import Visitor, free_port, raw_server

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
