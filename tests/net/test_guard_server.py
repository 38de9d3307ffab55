"""Guard's own HTTP server over real sockets: who may ask, under which names, and what rude clients get."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.net import server as guard_server
from plimsoll.net.server import MOST_BODY, Answer, Deeds, GuardServer

TOKEN = "a-token-that-is-long-enough"
BEARER = f"authorization: Bearer {TOKEN}"
READS = "another-token-that-only-reads"


def answers(path: str, query: Mapping[str, str]) -> Answer:
    """Repeats the question; one path breaks."""
    if path == "/breaks":
        raise RuntimeError("secret detail")
    return Answer(200, f"{path} {dict(query)}".encode(), "text/plain")


async def deeds(path: str, body: bytes) -> Answer:
    """Repeats what was posted; one path breaks."""
    if path == "/breaks":
        raise RuntimeError("secret detail")
    return Answer(200, f"{path} {body.decode()}".encode(), "text/plain")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where one listens that only reads."""
    with listening(None) as found:
        yield found


@pytest.fixture(scope="module")
def acting() -> Iterator[int]:
    """Where one listens that also does."""
    with listening(deeds) as found:
        yield found


@contextlib.contextmanager
def listening(does: Deeds | None) -> Iterator[int]:
    """One in a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = GuardServer(answers, TOKEN, ("Guard.Example",), does, READS)
    asyncio.run_coroutine_threadsafe(server.open("127.0.0.1", 0), loop).result(10)
    yield server.port
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def sent(port: int, data: bytes) -> bytes:
    """What comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        pieces = []
        while piece := client.recv(65_536):
            pieces.append(piece)
    return b"".join(pieces)


def ask(port: int, path: str, *headers: str, method: str = "GET", host: str | None = "127.0.0.1") -> tuple[int, str]:
    """One question: the status and the body."""
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else []), *headers]
    head, _, body = sent(port, "\r\n".join(lines).encode() + b"\r\n\r\n").partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def test_a_question_with_the_token(port: int) -> None:
    """Path and query reach who answers, decoded."""
    assert ask(port, "/engines/a%20b?x=1&y=", BEARER) == (200, "/engines/a b {'x': '1', 'y': ''}")
    assert ask(port, "/engines", BEARER, method="HEAD") == (200, "")


def test_a_token_that_only_reads_is_refused_every_deed(acting: int, port: int) -> None:
    """It asks whatever may be asked, and 403 is the answer to all that is posted; a wrong one is still 401."""
    reads, post = f"authorization: Bearer {READS}", ("content-type: application/json", "content-length: 0")
    for place in (acting, port):
        for path in ("/engines", "/metrics", "/v1/journal", "/openapi.json"):
            assert ask(place, path, reads)[0] == 200
    for path in ("/v1/pause", "/v1/engines/a/restart", "/nowhere"):
        assert ask(acting, path, reads, *post, method="POST") == (403, '{"error": "this token only reads"}')
        assert ask(acting, path, BEARER, *post, method="POST")[0] == 200
        assert ask(acting, path, "authorization: Bearer other", *post, method="POST")[0] == 401
    for odd in (f"authorization: Basic {READS}", f"authorization: {READS}", f"authorization: Bearer {READS}x"):
        assert ask(acting, "/engines", odd)[0] == 401


@pytest.mark.parametrize(
    "headers",
    [(), ("authorization: Bearer wrong",), (f"authorization: Basic {TOKEN}",), (f"authorization: {TOKEN}",), (BEARER, BEARER),
     ("authorization: Bearer ",), (f"x-authorization: Bearer {TOKEN}",)],
)  # fmt: skip
def test_without_the_token_only_healthz_answers(headers: tuple[str, ...], port: int) -> None:
    """Whatever else is shown, it is 401; whether guard lives anybody may know."""
    for path in ("/engines", "/metrics", "/openapi.json", "/nowhere", "/", "/healthz/", "//healthz", "/healthz%2f"):
        assert ask(port, path, *headers)[0] == 401, path
    assert ask(port, "/healthz", *headers)[0] == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9790", "localhost:1", "LOCALHOST", "[::1]:9790", "10.1.2.3", "guard.example:80",
             socket.gethostname()],
)  # fmt: skip
def test_addresses_and_known_names_are_hosts(host: str, port: int) -> None:
    """A page of a stranger cannot have them as its name."""
    assert ask(port, "/healthz", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "a b", "[x]", "1.2.3", None]
)
def test_a_foreign_name_is_refused_even_with_the_token(host: str | None, port: int) -> None:
    """A browser that was lured to a name that leads here gets nothing."""
    assert ask(port, "/engines", BEARER, host=host)[0] == 421
    assert ask(port, "/healthz", host=host)[0] == 421
    assert ask(port, "/healthz", "host: localhost")[0] == 421, "two of them"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_it_only_reads(method: str, port: int) -> None:
    """No other method is anything here."""
    assert ask(port, "/engines", BEARER, method=method)[0] == 405


JSON = "content-type: application/json"


def post(port: int, path: str, body: str, *headers: str) -> tuple[int, str]:
    """One wish: the status and the body."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    head, _, answer = sent(port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body.encode()).partition(b"\r\n\r\n")
    return int(head.split()[1]), answer.decode()


def test_what_is_posted_reaches_who_does_it(acting: int) -> None:
    """With the token, as JSON, with its length; reading goes on as ever."""
    assert post(acting, "/v1/a%20b", '{"x": 1}', BEARER, JSON, "content-length: 8") == (200, '/v1/a b {"x": 1}')
    assert post(acting, "/v1/x", "{}", BEARER, "content-type: Application/JSON; charset=utf-8", "content-length: 2")[0] == 200
    assert post(acting, "/v1/x", "", BEARER, JSON, "content-length: 0") == (200, "/v1/x ")
    assert ask(acting, "/engines", BEARER)[0] == 200
    status, body = post(acting, "/breaks", "{}", BEARER, JSON, "content-length: 2")
    assert (status, "secret" in body) == (500, False)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (401, (JSON, "content-length: 2")),
        (401, ("authorization: Bearer wrong", JSON, "content-length: 2")),
        (415, (BEARER, "content-length: 2")),
        (415, (BEARER, "content-type: text/plain", "content-length: 2")),
        (415, (BEARER, "content-type: application/x-www-form-urlencoded", "content-length: 2")),
        (415, (BEARER, "content-type: text/plain; application/json", "content-length: 2")),
        (415, (BEARER, JSON, JSON, "content-length: 2")),
        (411, (BEARER, JSON)),
        (411, (BEARER, JSON, "transfer-encoding: chunked")),
        (411, (BEARER, JSON, "content-length: 2", "transfer-encoding: chunked")),
        (411, (BEARER, JSON, "content-length: 2", "content-length: 3")),
        (411, (BEARER, JSON, "content-length: -2")),
        (413, (BEARER, JSON, f"content-length: {MOST_BODY + 1}")),
        (421, (BEARER, JSON, "content-length: 2", "host: evil.example")),
    ],
)
def test_what_no_page_of_a_stranger_could_post(status: int, headers: tuple[str, ...], acting: int) -> None:
    """Without the token, as a form, without a length, too long, under two names: it is not done."""
    assert post(acting, "/v1/pause", "{}", *headers)[0] == status


def test_a_body_that_never_comes_whole_is_not_done(acting: int) -> None:
    """Fewer bytes than were promised are no wish."""
    assert sent(acting, f"POST /v1/x HTTP/1.1\r\nHost: x\r\n{BEARER}\r\n{JSON}\r\n".encode()) == b""
    head = f"POST /v1/x HTTP/1.1\r\nHost: localhost\r\n{BEARER}\r\n{JSON}\r\ncontent-length: 9\r\n\r\n{{}}"
    assert sent(acting, head.encode()) == b""
    assert ask(acting, "/healthz")[0] == 200


def test_a_mistake_is_said_without_its_detail(port: int) -> None:
    """The client learns the kind, and the next one is answered."""
    status, body = ask(port, "/breaks", BEARER)
    assert (status, "secret" in body) == (500, False)
    assert ask(port, "/healthz")[0] == 200


def test_rude_clients(port: int) -> None:
    """Not HTTP, headers without end, nothing at all: a refusal or nothing, and the next one is answered."""
    assert sent(port, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert sent(port, b"GET /healthz HTTP/1.1\r\nHost : x\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert sent(port, b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n").startswith(b"HTTP/1.1 431 ")
    assert sent(port, b"") == b""
    assert sent(port, b"GET /healthz HT") == b""
    assert ask(port, "/healthz")[0] == 200


def test_clients_that_say_nothing_do_not_keep_others_out(port: int) -> None:
    """However many connections are open and silent, whoever asks is answered; the silent ones go, the oldest first."""
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * guard_server.MOST_CLIENTS)]
    try:
        assert [ask(port, "/healthz")[0] for _ in range(20)] == [200] * 20
        idle[0].settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b"", "it was the first to go"
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
    finally:
        for one in idle:
            one.close()
    assert ask(port, "/healthz")[0] == 200


@given(st.binary(max_size=300))
def test_no_bytes_are_more_than_a_refusal(data: bytes) -> None:
    """Whatever is sent, what is read is a request or none."""
    found = guard_server._read(data + b"\r\n\r\n")
    assert found is None or found.path.startswith("/")
