"""Guard's own HTTP server over real sockets: who may ask, under which names, what rude clients and foreign pages get."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll.net import server as guard_server
from plimsoll.net.server import Deeds, GuardServer, HttpAnswer, Stream
from tests.each import cases, each
from tests.fakes import eventually

TOKEN = "a-token-that-is-long-enough"
BEARER = f"authorization: Bearer {TOKEN}"
READS = "another-token-that-only-reads"
JSON = "content-type: application/json"
POST = (JSON, "content-length: 2")
OPEN: list[int] = []  # streams that are being told


async def pieces(count: int) -> AsyncGenerator[bytes]:
    OPEN.append(1)
    try:
        for number in range(count or 1_000_000):
            yield b"data: %d\n\n" % number + b"x" * (0 if count else 65_536)
        await asyncio.sleep(3_600)
    finally:
        OPEN.pop()


def answers(path: str, query: Mapping[str, str]) -> HttpAnswer | Stream:
    """Repeats the question; one path breaks, two are streams."""
    if path == "/breaks":
        raise RuntimeError("secret detail")
    counts = {"/events": 3, "/flood": 0}
    return Stream(pieces(counts[path])) if path in counts else HttpAnswer(200, f"{path} {dict(query)}".encode(), "text/plain")


async def deeds(path: str, body: bytes, who: str) -> HttpAnswer:
    assert who == "the API's token"
    if path == "/breaks":
        raise RuntimeError("secret detail")
    return HttpAnswer(200, f"{path} {body.decode()}".encode(), "text/plain")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening(None) as found:
        yield found


@pytest.fixture(scope="module")
def acting() -> Iterator[int]:
    with listening(deeds) as found:
        yield found


@contextlib.contextmanager
def listening(does: Deeds | None) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    files = {"/": HttpAnswer(200, b"<!doctype html>", "text/html")}
    server = GuardServer(answers, TOKEN, ("Guard.Example",), does, READS, files)
    asyncio.run_coroutine_threadsafe(server.open("127.0.0.1", 0), loop).result(10)
    yield server.port
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def sent(port: int, data: bytes, *, hangs_up: bool = False) -> bytes:
    """What comes back for these bytes, up to the third piece of a stream."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client, contextlib.suppress(ConnectionError):
        client.sendall(data)
        if hangs_up:
            client.shutdown(socket.SHUT_WR)
        while b"data: 2\n\n" not in found and (piece := client.recv(65_536)):
            found += piece
    return found


def asked(port: int, line: str, *headers: str, host: str | None = "127.0.0.1:9790", body: str = "") -> tuple[int, str, str]:
    """One question: the status, the head in small letters and the body."""
    lines = [f"{line} HTTP/1.1", *([f"Host: {host}"] if host is not None else []), *headers]
    head, _, answer = sent(port, ("\r\n".join(lines) + "\r\n\r\n" + body).encode()).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), answer.decode()


def status(port: int, line: str, *headers: str, host: str | None = "127.0.0.1:9790", body: str = "") -> int:
    return asked(port, line, *headers, host=host, body=body)[0]


def test_a_question_with_the_token_is_answered_and_no_other_method_is_anything(port: int) -> None:
    """Path and query reach who answers, decoded; where nobody acts it only reads."""
    assert asked(port, "GET /engines/a%20b%2Fc?x=1&y=", BEARER)[::2] == (200, "/engines/a b/c {'x': '1', 'y': ''}")
    assert asked(port, "HEAD /engines", BEARER)[::2] == (200, "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert status(port, f"{method} /engines", BEARER) == 405


def test_a_token_that_only_reads_is_refused_every_deed(acting: int, port: int) -> None:
    """It asks whatever may be asked, and 403 is the answer to all that is posted; a wrong one is still 401."""
    reads = f"authorization: Bearer {READS}"
    for place in (acting, port):
        for path in ("/engines", "/metrics", "/v1/journal", "/openapi.json"):
            assert status(place, f"GET {path}", reads) == 200
    for path in ("/v1/pause", "/v1/engines/a/restart", "/nowhere"):
        assert asked(acting, f"POST {path}", reads, *POST, body="{}")[::2] == (403, '{"error": "this token only reads"}')
        assert status(acting, f"POST {path}", BEARER, *POST, body="{}") == 200
        assert status(acting, f"POST {path}", "authorization: Bearer other", *POST, body="{}") == 401
    for odd in (f"authorization: Basic {READS}", f"authorization: {READS}", f"authorization: Bearer {READS}x"):
        assert status(acting, "GET /engines", odd) == 401


@each(
    "headers",
    [(), ("authorization: Bearer wrong",), (f"authorization: Basic {TOKEN}",), (f"authorization: {TOKEN}",), (BEARER, BEARER),
     ("authorization: Bearer ",), (f"x-authorization: Bearer {TOKEN}",)],
)  # fmt: skip
def test_without_the_token_only_healthz_and_the_page_answer(headers: tuple[str, ...], port: int) -> None:
    """Whatever else is shown, it is 401; whether guard lives anybody may know, and the page says nothing of any engine."""
    paths = ("/engines", "/metrics", "/openapi.json", "/nowhere", "/healthz/", "//healthz", "/healthz%2f", "//", "/events")
    for path in paths:
        assert status(port, f"GET {path}", *headers) in (401, 400), path
    assert status(port, "GET /healthz", *headers) == 200
    assert asked(port, "GET /", *headers)[2] == "<!doctype html>"


@each(
    "host", ["127.0.0.1", "127.0.0.1:9790", "localhost:1", "LOCALHOST", "[::1]:9790", "10.1.2.3", "guard.example:80",
             socket.gethostname()],
)  # fmt: skip
def test_addresses_and_known_names_are_hosts(host: str, port: int) -> None:
    """A page of a stranger cannot have them as its name."""
    assert status(port, "GET /healthz", host=host) == 200


@each("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "a b", "[x]", "1.2.3", None])
def test_a_foreign_name_is_refused_even_with_the_token(host: str | None, port: int) -> None:
    """A browser that was lured to a name that leads here gets nothing."""
    for path in ("/engines", "/healthz", "/"):
        assert status(port, f"GET {path}", BEARER, host=host) == (400 if host is None else 421)
    assert status(port, "GET /healthz", "host: localhost") in (400, 421), "two of them"


def test_what_is_posted_reaches_who_does_it(acting: int) -> None:
    """With the token, as JSON, with its length; fewer bytes than were promised are no wish; reading goes on as ever."""
    line = "POST /v1/a%20b"
    assert asked(acting, line, BEARER, JSON, "content-length: 8", body='{"x": 1}')[::2] == (200, '/v1/a b {"x": 1}')
    kind = "content-type: Application/JSON; charset=utf-8"
    assert status(acting, line, BEARER, kind, "content-length: 2", body="{}") == 200
    assert asked(acting, line, BEARER, JSON, "content-length: 0")[::2] == (200, "/v1/a b ")
    assert status(acting, "GET /engines", BEARER) == 200
    for method, headers in (("POST", POST), ("GET", ())):
        found, _, said = asked(acting, f"{method} /breaks", BEARER, *headers, body="{}" if headers else "")
        assert (found, "secret" in said) == (500, False)
    begun = f"POST /v1/x HTTP/1.1\r\nHost: localhost\r\n{BEARER}\r\n{JSON}\r\n".encode()
    assert sent(acting, begun, hangs_up=True) == b""
    assert sent(acting, begun + b"content-length: 9\r\n\r\n{}", hangs_up=True) == b""
    assert status(acting, "GET /healthz") == 200


@each(("statuses", "names"), cases("net", "what_no_page_of_a_stranger_could_post"))
def test_what_no_page_of_a_stranger_could_post(
    statuses: tuple[int, ...], names: tuple[str, ...], acting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the token, as a form, without a length, too long, under two names: it is not done."""
    monkeypatch.setattr(guard_server, "PATIENCE_S", 1.0)  # of a length without its bytes
    known = {"BEARER": (BEARER,), "JSON": (JSON,), "POST": POST}
    headers = [header for name in names for header in known.get(name, (name,))]
    assert status(acting, "POST /v1/pause", *headers, body="{}") in statuses


def test_rude_clients(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not HTTP, headers without end, nothing at all: a refusal or nothing, and the next one is answered."""
    assert b" 400 " in sent(port, b"hello\r\n\r\n")
    assert b" 400 " in sent(port, b"GET /healthz HTTP/1.1\r\nHost : x\r\n\r\n")
    for more in (b"x: y\r\n" * 10_000, b"x: " + b"y" * 100_000 + b"\r\n"):
        assert sent(port, b"GET /healthz HTTP/1.1\r\n" + more + b"\r\n").split()[1:2] in ([b"400"], [b"431"], [])
    assert sent(port, b"", hangs_up=True) == b""
    assert sent(port, b"GET /healthz HT", hangs_up=True) == b""
    monkeypatch.setattr(guard_server, "PATIENCE_S", 1.0)
    assert sent(port, b"GET /healthz HT") == b"", "patience has an end"
    assert status(port, "GET /healthz") == 200


def test_clients_that_say_nothing_do_not_keep_others_out(port: int) -> None:
    """However many connections are open and silent, whoever asks is answered; the silent ones go, the oldest first."""
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * guard_server.MOST_CLIENTS)]
    try:
        assert [status(port, "GET /healthz") for _ in range(20)] == [200] * 20
        idle[0].settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b"", "it was the first to go"
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
    finally:
        for one in idle:
            one.close()
    assert status(port, "GET /healthz") == 200


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_no_bytes_are_more_than_a_refusal(data: bytes, acting: int) -> None:
    """Whatever is sent, what comes back is a refusal or nothing."""
    found = sent(acting, data + b"\r\n\r\n", hangs_up=True)
    assert found == b"" or 400 <= int(found.split()[1]) < 500


@each("line", ["GET /", "GET /engines", "GET /events", "GET /nowhere", "POST /v1/pause", "DELETE /", "BREAK", "GET /healthz"])
def test_every_answer_has_its_fences(line: str, acting: int) -> None:
    """Also refusals and streams: a policy that allows nothing from elsewhere, no sniffing, no frame, no referrer."""
    for headers in ((), (BEARER,), (BEARER, *POST)):
        head = asked(acting, line, *headers, body="{}" if POST[0] in headers else "")[1]
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


@each("headers", cases("net", "a_deed_from_another_page_is_refused_even_with_the_token"))
def test_a_deed_from_another_page_is_refused_even_with_the_token(headers: tuple[str, ...], acting: int) -> None:
    """Whatever script sends it, the browser says where it came from."""
    assert status(acting, "POST /v1/pause", BEARER, *POST, *headers, body="{}") == 403


@each("headers", cases("net", "a_deed_from_our_own_page_or_from_no_browser_is_done"))
def test_a_deed_from_our_own_page_or_from_no_browser_is_done(headers: tuple[str, ...], acting: int) -> None:
    """Also behind a proxy, under a name that was allowed; and never without the token, nor to the page."""
    assert status(acting, "POST /v1/pause", BEARER, *POST, *headers, body="{}") == 200
    for path in ("/v1/pause", "/"):
        assert status(acting, f"POST {path}", *POST, *headers, body="{}") == 401


def test_a_stream_ends_when_its_listener_hangs_up(port: int) -> None:
    """Pieces come as they are made, and whoever has gone is not told any more."""
    assert "data: 2\n\n" in asked(port, "GET /events", BEARER)[2]
    eventually(lambda: not OPEN)


def test_a_listener_that_does_not_take_what_is_sent_is_left(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs no more than what the network holds for it."""
    monkeypatch.setattr(guard_server, "PATIENCE_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(f"GET /flood HTTP/1.1\r\nhost: 127.0.0.1\r\n{BEARER}\r\n\r\n".encode())
        eventually(lambda: bool(OPEN))
        eventually(lambda: not OPEN)
