"""The HTTP client of guard against servers that break every rule: it ends in time, in little memory, and says what happened."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.daemon.engine_http import AnswerReader, EngineClient, EngineReply, RequestFailed, RequestTimedOut
from plimsoll.guard.judge.look import Reach
from tests.net.raw_server import RawServer, Talk, Visitor, free_port, raw_server

OK = b"HTTP/1.1 200 OK\r\n"
MOST = 1 << 20


def asked(
    talk: Talk, path: str = "/metrics", *, deadline_s: float = 3.0, times: int = 1, follows: bool = False
) -> list[EngineReply]:
    """What a client gets from such a server, asked so often."""

    async def run() -> list[EngineReply]:
        async with raw_server(talk) as server:
            client = EngineClient(server.url)
            try:
                return [await client.get(path, deadline_s=deadline_s, most_bytes=MOST, follows=follows) for _ in range(times)]
            finally:
                client.close()

    return asyncio.run(run())


def says(*pieces: bytes, hangs: bool = False) -> Talk:
    """A server that says this whatever it is asked, and then hangs up or hangs."""

    async def talk(visitor: Visitor) -> None:
        await visitor.asked()
        await visitor.say(*pieces)
        if hangs:
            await asyncio.sleep(30)

    return talk


def missed(talk: Talk, deadline_s: float = 3.0) -> RequestFailed:
    """How a client fails with such a server."""
    with pytest.raises(RequestFailed) as caught:
        asked(talk, deadline_s=deadline_s)
    return caught.value


def test_bodies_of_every_kind() -> None:
    """With a length, in chunks, until the connection ends, packed, after a word in between, with an empty body."""
    packed = gzip.compress(b"hello" * 1000)
    length = b"Content-Length: %d\r\n" % len(packed)
    for raw, body in (
        (OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nhe\r\n003\r\nllo\r\n0\r\nX: y\r\n\r\n", b"hello"),
        (OK + b"Connection: close\r\n\r\nhello", b"hello"),
        (OK + length + b"Content-Encoding: gzip\r\n\r\n" + packed, b"hello" * 1000),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (OK + b"Content-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.0 200\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    ):
        assert [reply.body for reply in asked(says(raw))] == [body]
        assert asked(says(*(raw[at : at + 1] for at in range(len(raw)))))[0].body == body


def test_a_connection_is_kept_and_one_that_was_closed_is_replaced() -> None:
    """Ten questions over one connection; where the server hangs up after each, every question still gets its answer."""
    servers: list[RawServer] = []

    def counting(asks: int) -> Callable[[Visitor], Awaitable[None]]:
        async def talk(visitor: Visitor) -> None:
            for _ in range(asks):
                if not await visitor.asked():
                    return
                await visitor.answer(b"hello")

        return talk

    async def run(asks: int) -> int:
        async with raw_server(counting(asks)) as server:
            servers.append(server)
            client = EngineClient(server.url)
            for _ in range(10):
                assert (await client.get("/", deadline_s=3, most_bytes=MOST)).body == b"hello"
            client.close()
            return server.connections

    assert asyncio.run(run(100)) == 1
    assert asyncio.run(run(1)) == 10


def test_nobody_listens() -> None:
    """A refused connection is the one failure that says something; a name that does not exist says nothing."""

    async def run(url: str) -> RequestFailed:
        with pytest.raises(RequestFailed) as caught:
            await EngineClient(url).get("/", deadline_s=3, most_bytes=MOST)
        return caught.value

    assert asyncio.run(run(f"http://127.0.0.1:{free_port()}")).reach is Reach.REFUSED
    assert asyncio.run(run(f"http://localhost:{free_port()}")).reach is Reach.REFUSED
    assert asyncio.run(run("http://no-such-name.invalid:8000")).reach is Reach.SILENT


def test_an_address_that_nobody_answers_from_leaves_time_for_the_next() -> None:
    """Of a name's addresses the first may be a hole; the one behind it is still found."""

    class Elsewhere(EngineClient):
        async def _addresses(self) -> list[str]:
            return ["192.0.2.1", "127.0.0.1"]  # the first is one that is never given to anybody

    async def run() -> bytes:
        async with raw_server(says(OK + b"Content-Length: 2\r\n\r\nhi")) as server:
            return (await Elsewhere(server.url).get("/", deadline_s=5, most_bytes=MOST)).body

    assert asyncio.run(run()) == b"hi"


def test_a_unix_socket(tmp_path: Path) -> None:
    """A gate with a socket of its own is asked there; without the file nobody listens."""

    async def run() -> tuple[bytes, RequestFailed]:
        path, talk = tmp_path / "p.sock", RawServer(says(OK + b"Content-Length: 2\r\n\r\nhi"))
        client = EngineClient(f"unix:{path}")
        with pytest.raises(RequestFailed) as caught:
            await client.get("/", deadline_s=3, most_bytes=MOST)
        server = await asyncio.start_unix_server(talk.visited, path)
        body = (await client.get("/", deadline_s=3, most_bytes=MOST)).body
        server.close()
        return body, caught.value

    body, error = asyncio.run(run())
    assert (body, error.reach) == (b"hi", Reach.REFUSED)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 abc OK\r\n\r\n", id="garbage status"),
        pytest.param(b"HTTP/1.1 20\xb2 OK\r\n\r\n", id="a digit that is none"),
        pytest.param(b"HTTP/1.1 999 Odd\r\n\r\n", id="status out of range"),
        pytest.param(b"HTTP/9.9 200 OK\r\n\r\n", id="version of its own"),
        pytest.param(OK + b"no colon here\r\n\r\n", id="header without a colon"),
        pytest.param(OK + b"Content-Length: 50\r\n\r\nhello", id="cut off before its length"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", id="cut off in a chunk"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", id="cut off between chunks"),
        pytest.param(OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", id="two lengths"),
        pytest.param(OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello", id="length and chunks"),
        pytest.param(OK + b"Content-Length: -5\r\n\r\n", id="negative length"),
        pytest.param(OK + b"Content-Length: 1_0\r\n\r\n", id="length that Python would take"),
        pytest.param(OK + b"Content-Length: 99999999999\r\n\r\nhello", id="huge length"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", id="chunk size that is none"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", id="negative chunk"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX", id="chunk without its end"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n", id="huge chunk"),
        pytest.param(OK + b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello", id="packed otherwise"),
        pytest.param(OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", id="not packed at all"),
        pytest.param(OK + b"X: " + b"y" * 100_000, id="endless head"),
        pytest.param(OK + b"X: y\r\n" * 1000 + b"\r\n", id="a thousand headers"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * 50, id="never gets to it"),
        pytest.param(b"\x00\xff" * 50, id="noise"),
    ],
)
def test_what_is_against_the_rules_is_nonsense(raw: bytes) -> None:
    """Every way to break HTTP ends at once in one word, never in an exception of another kind."""
    assert missed(says(raw)).reach is Reach.NONSENSE


def test_hanging_up_without_a_word_says_nothing() -> None:
    """A server that closes instead of answering is silent, not dead and not mad."""
    error = missed(says())
    assert (error.reach, error.was_sent, error.was_begun) == (Reach.SILENT, True, False)


def test_the_deadline_holds_for_the_whole_exchange() -> None:
    """One that never answers, one that drips a byte at a time, one that stops in the middle: all end at the deadline."""

    async def drips(visitor: Visitor) -> None:
        await visitor.asked()
        for letter in OK + b"Content-Length: 500\r\n\r\n" + b"x" * 500:
            await visitor.say(bytes([letter]))
            await asyncio.sleep(0.02)

    for talk, was_begun in (
        (says(hangs=True), False),
        (drips, True),
        (says(OK + b"Content-Length: 9\r\n\r\nx", hangs=True), True),
    ):
        began = time.monotonic()
        error = missed(talk, 0.3)
        assert time.monotonic() - began < 1.5
        assert isinstance(error, RequestTimedOut)
        assert (error.reach, error.was_sent, error.was_begun) == (Reach.SILENT, True, was_begun)


def endless(kind: bytes) -> Talk:
    """A hundred megabytes, in chunks or until the connection ends."""

    async def talk(visitor: Visitor) -> None:
        await visitor.asked()
        await visitor.say(OK + (b"Transfer-Encoding: chunked\r\n\r\n" if kind != b"close" else b"\r\n"))
        piece = b"x" * 100_000
        for _ in range(1000):
            await visitor.say(
                b"186a0\r\n" + piece + b"\r\n" if kind == b"large" else b"1\r\nx\r\n" * 20_000 if kind == b"tiny" else piece
            )

    return talk


@pytest.mark.parametrize("kind", [b"large", b"tiny", b"close"])
def test_a_hundred_megabytes_cost_no_memory(kind: bytes) -> None:
    """It is cut off at the limit, and never more than a few pieces of it are held."""
    tracemalloc.start()
    began = time.monotonic()
    assert missed(endless(kind), 20).reach is Reach.NONSENSE
    took, (_, peak) = time.monotonic() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert took < 15


def test_a_bomb_in_gzip_is_cut_off() -> None:
    """A hundred megabytes packed into a hundred kilobytes end at the limit."""
    bomb = gzip.compress(b"\0" * 100_000_000)
    raw = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb
    tracemalloc.start()
    assert missed(says(raw)).reach is Reach.NONSENSE
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_redirects_stay_on_the_server() -> None:
    """Another host, port or scheme is refused; another path of the same server is followed, but not for ever."""
    visits: list[str] = []

    def to(target: str) -> Talk:
        async def talk(visitor: Visitor) -> None:
            while head := await visitor.asked():
                visits.append(head.split()[1])
                if head.split()[1] == "/metrics":
                    await visitor.answer(b"", "307 Temporary Redirect", f"Location: {target}")
                elif head.split()[1] == "/round":
                    await visitor.answer(b"", "302 Found", "Location: /round")
                else:
                    await visitor.answer(b"page")

        return talk

    assert asked(to("/metrics/"), follows=True)[0].body == b"page"
    for target in (
        "http://127.0.0.2/metrics",
        "//evil.example/",
        "https://127.0.0.1/",
        "http://u:p@127.0.0.1/",
        "http://[",
        "/round",
    ):
        visits.clear()
        with pytest.raises(RequestFailed) as caught:
            asked(to(target), follows=True)
        assert caught.value.reach is Reach.NONSENSE
        assert set(visits) <= {"/metrics", "/round"}
    assert asked(to("/metrics/"))[0].status == 307


def test_half_closed() -> None:
    """A server that has shut its side down after its answer has answered; one that did so before is silent."""

    def half(raw: bytes) -> Talk:
        async def talk(visitor: Visitor) -> None:
            await visitor.asked()
            await visitor.say(raw)
            visitor.writer.write_eof()
            await asyncio.sleep(5)

        return talk

    assert asked(half(OK + b"\r\nhello"))[0].body == b"hello"
    assert missed(half(b"")).reach is Reach.SILENT
    assert missed(half(OK + b"Content-Length: 9\r\n\r\nx")).reach is Reach.NONSENSE


def test_more_than_the_length_is_not_the_next_answer() -> None:
    """What follows an answer is thrown away with its connection: the next question gets its own answer."""
    count = 0

    async def talk(visitor: Visitor) -> None:
        nonlocal count
        while await visitor.asked():
            count += 1
            await visitor.answer(b"answer %d" % count)
            await visitor.say(OK + b"Content-Length: 4\r\n\r\nfake")

    assert [reply.body for reply in asked(talk, times=3)] == [b"answer 1", b"answer 2", b"answer 3"]


def test_addresses_that_cannot_be() -> None:
    """An address that would end its line early is refused before anything is sent."""
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x y", "http://ü", "http://h:99999"):
        with pytest.raises(BadInput):
            EngineClient(url)
    assert "hunter2" not in EngineClient("http://u:hunter2@127.0.0.1:1").shown


def test_tls_is_checked(tmp_path: Path) -> None:
    """A certificate that nobody vouches for is not spoken to; plain HTTP on a port of TLS is nonsense or silence."""
    import ssl

    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", str(key),
         "-days", "1", "-out", str(certificate)], check=False, capture_output=True,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip("openssl is not there")

    async def run() -> RequestFailed:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        talk = RawServer(says(OK + b"Content-Length: 2\r\n\r\nhi"))
        server = await asyncio.start_server(talk.visited, "127.0.0.1", 0, ssl=context)
        with pytest.raises(RequestFailed) as caught:
            await EngineClient(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}").get(
                "/", deadline_s=5, most_bytes=MOST
            )
        server.close()
        return caught.value

    error = asyncio.run(run())
    assert (error.reach, error.why) == (Reach.SILENT, "has a certificate that is not trusted")

    async def plain() -> RequestFailed:
        async def talk(visitor: Visitor) -> None:
            await visitor.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        async with raw_server(talk) as server:
            with pytest.raises(RequestFailed) as caught:
                await EngineClient(server.url.replace("http:", "https:")).get("/", deadline_s=5, most_bytes=MOST)
            return caught.value

    assert asyncio.run(plain()).reach in (Reach.NONSENSE, Reach.SILENT)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([OK, b"\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n",
                             b"0\r\n\r\n", b"Content-Encoding: gzip\r\n", gzip.compress(b"abc")]),
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 20), max_size=20),
)  # fmt: skip
def test_the_reader_of_answers_takes_any_bytes(pieces: list[bytes], sizes: list[int]) -> None:
    """Any bytes in any pieces end in an answer, in Missed, or in waiting for more; the same in one piece as in many."""

    def outcome(cuts: list[int]) -> tuple[str, int, bytes]:
        raw, got = b"".join(pieces), bytearray()
        reader = AnswerReader(50, got.extend)
        try:
            for size in cuts:
                reader.feed(raw[:size])
                raw = raw[size:]
            reader.feed(raw)
            reader.end()
        except RequestFailed as error:
            return error.why, 0, b""
        return "", reader.status, bytes(got)

    assert outcome(sizes)[0] == outcome([])[0]
    assert outcome(sizes)[1:] == outcome([])[1:]
