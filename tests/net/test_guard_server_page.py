"""Guard's server towards browsers: fences on every answer, no deed from another page, files for all, streams that end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from plimsoll.net import server as guard_server
from plimsoll.net.server import Answer, GuardServer, Stream

TOKEN = "a-token-that-is-long-enough"
BEARER = f"authorization: Bearer {TOKEN}"
POST = ("content-type: application/json", "content-length: 2")
OPEN: list[int] = []  # streams that are being told


async def pieces(count: int) -> AsyncIterator[bytes]:
    """So many, then silence; 0: without end."""
    OPEN.append(1)
    try:
        for number in range(count or 1_000_000):
            yield b"data: %d\n\n" % number + b"x" * (0 if count else 65_536)
        await asyncio.sleep(3_600)
    finally:
        OPEN.pop()


def answers(path: str, query: Mapping[str, str]) -> Answer | Stream:
    """A stream, or an answer."""
    del query
    counts = {"/events": 3, "/flood": 0}
    return Stream(pieces(counts[path])) if path in counts else Answer(200, b"{}")


async def deeds(path: str, body: bytes) -> Answer:
    """Repeats what was posted."""
    return Answer(200, f"{path} {body.decode()}".encode(), "text/plain")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where it listens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    files = {"/": Answer(200, b"<!doctype html>", "text/html")}
    server = GuardServer(answers, TOKEN, ("guard.example",), deeds, files=files)
    asyncio.run_coroutine_threadsafe(server.open("127.0.0.1", 0), loop).result(10)
    yield server.port
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def ask(port: int, line: str, *headers: str, host: str = "127.0.0.1:9790") -> str:
    """All that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall("\r\n".join([f"{line} HTTP/1.1", f"host: {host}", *headers, "", ""]).encode() + b"{}")
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65_536):
                found += piece
                if b"data: 2\n\n" in found:
                    break
    return found.decode()


def status(answer: str) -> int:
    """Its number."""
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "line", ["GET /", "GET /engines", "GET /events", "GET /nowhere", "POST /v1/pause", "DELETE /", "BREAK", "GET /healthz"]
)
def test_every_answer_has_its_fences(line: str, port: int) -> None:
    """Also refusals and streams: a policy that allows nothing from elsewhere, no sniffing, no frame, no referrer."""
    for headers in ((), (BEARER,), (BEARER, *POST)):
        head = ask(port, line, *headers).partition("\r\n\r\n")[0].lower()
        assert "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in head
        assert "frame-ancestors 'none'" in head
        assert "require-trusted-types-for 'script'" in head
        for name in (
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cross-origin-opener-policy: same-origin",
        ):
            assert name in head
        assert "access-control" not in head
        assert "set-cookie" not in head


def test_the_page_is_for_everybody_and_nothing_else_is(port: int) -> None:
    """Its files need no token and say nothing of any engine; what they ask for does, and they cannot be posted to."""
    assert "<!doctype html>" in ask(port, "GET /")
    assert ask(port, "HEAD /").endswith("\r\n\r\n")
    assert status(ask(port, "GET /", host="evil.example")) == 421
    for line in ("GET /events", "GET /engines", "POST /", "GET //", "GET /page/app.js"):
        assert status(ask(port, line, *POST)) == 401


@pytest.mark.parametrize(
    "headers",
    [
        ("origin: http://evil.example",), ("origin: null",), ("origin: http://127.0.0.1:3000",), ("origin: http://localhost:9790",),
        ("origin: http://127.0.0.1:9790.evil.example",), ("origin: http://guard.example@evil.example",), ("origin: ",),
        ("sec-fetch-site: cross-site",), ("sec-fetch-site: same-site",),
        ("origin: http://127.0.0.1:9790", "origin: http://evil.example"),
        ("origin: http://127.0.0.1:9790", "sec-fetch-site: cross-site"),
    ],
)  # fmt: skip
def test_a_deed_from_another_page_is_refused_even_with_the_token(headers: tuple[str, ...], port: int) -> None:
    """Whatever script sends it, the browser says where it came from."""
    assert status(ask(port, "POST /v1/pause", BEARER, *POST, *headers)) == 403


@pytest.mark.parametrize(
    "headers",
    [
        (), ("origin: http://127.0.0.1:9790", "sec-fetch-site: same-origin"), ("origin: https://guard.example",),
        ("sec-fetch-site: none",),
    ],
)  # fmt: skip
def test_a_deed_from_our_own_page_or_from_no_browser_is_done(headers: tuple[str, ...], port: int) -> None:
    """Also behind a proxy, under a name that was allowed; and never without the token."""
    assert status(ask(port, "POST /v1/pause", BEARER, *POST, *headers)) == 200
    assert status(ask(port, "POST /v1/pause", *POST, *headers)) == 401


def test_a_stream_ends_when_its_listener_hangs_up(port: int) -> None:
    """Pieces come as they are made, and whoever has gone is not told any more."""
    assert "data: 2\n\n" in ask(port, "GET /events", BEARER)
    end_s = time.monotonic() + 5
    while OPEN:
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_listener_that_does_not_take_what_is_sent_is_left(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs no more than what the network holds for it."""
    monkeypatch.setattr(guard_server, "PATIENCE_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(f"GET /flood HTTP/1.1\r\nhost: 127.0.0.1\r\n{BEARER}\r\n\r\n".encode())
        time.sleep(0.2)
        assert OPEN
        end_s = time.monotonic() + 10
        while OPEN:
            assert time.monotonic() < end_s
            time.sleep(0.05)
