"""The HTTP client against servers that break every rule: it ends in time, in little memory, and says what happened."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.net import client as client_file
from plimsoll.net.address import Address, address
from plimsoll.net.client import HttpClient, Loss, Lost, NameCache, Reply, bearer, look_up, same_host, same_server
from tests.certificates import certificate
from tests.each import cases, each
from tests.net.page_server import serving
from tests.net.raw_server import RawServer, Talk, Visitor, by_path, free_port, raw_server

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MOST = 1 << 20


def asked(talk: Talk, *, deadline_s: float = 10.0, method: str = "GET", **options: Any) -> Reply | Lost:
    async def run() -> Reply | Lost:
        async with raw_server(talk) as server:
            call = HttpClient(server.url).call(method, "/metrics", deadline_s=deadline_s, **{"most_bytes": MOST, **options})
            return await asyncio.wait_for(call, 30)

    return asyncio.run(run())


def says(*pieces: bytes, hangs: bool = False, again: bytes = b"") -> Talk:
    """A server that says this whatever it is asked, or the same again and again, and then hangs up or hangs."""

    async def talk(visitor: Visitor) -> None:
        await visitor.asked()
        await visitor.say(*pieces)
        while again:
            await visitor.say(again)
        if hangs:
            await asyncio.sleep(30)

    return talk


def lost(talk: Talk, **options: Any) -> Lost:
    found = asked(talk, **options)
    assert isinstance(found, Lost), found
    return found


PACKED = gzip.compress(b"hello" * 1000)
GZIPPED = f"{{OK}}Content-Length: {len(PACKED)}\r\nContent-Encoding: gzip\r\n\r\n{PACKED.decode('latin-1')}"


def raw_of(text: str) -> bytes:
    """The bytes of a row."""
    return text.encode("latin-1").replace(b"{CHUNKED}", CHUNKED).replace(b"{OK}", OK)


@each(("raw", "body"), [*cases("net", "framings"), (GZIPPED, "hello" * 1000)])
def test_a_whole_answer_is_read_in_every_framing(raw: str, body: str) -> None:
    """By its length, in chunks, to the end of the connection, packed, after words that only announce it; also byte by byte."""
    whole = raw_of(raw)
    for pieces in ([whole], [whole[at : at + 1] for at in range(len(whole))]):
        found = asked(says(*pieces))
        assert isinstance(found, Reply)
        assert found.body == body.encode()


@each("raw", [*cases("net", "what_is_no_answer"), "{OK}X: " + "y" * 100_000])
def test_what_is_against_the_rules_is_no_answer(raw: str) -> None:
    """Every way to break HTTP ends at once in one sentence, never in an exception."""
    found = lost(says(raw_of(raw)))
    assert found.loss in (Loss.NONSENSE, Loss.TOO_LARGE)
    assert found.was_sent


def test_hanging_up_without_a_word_says_nothing() -> None:
    """A server that closes instead of answering is silent, not dead and not mad; what it was sent it may have read."""
    assert lost(says())[0::2] == (Loss.SILENT, True)


@each(
    ("first", "again"),
    [
        (OK + b"\r\n", b"x" * 100_000), (CHUNKED, b"186a0\r\n" + b"x" * 100_000 + b"\r\n"), (CHUNKED, b"1\r\nx\r\n" * 20_000),
        (CHUNKED + b"ffffffff\r\n", b"x" * 100_000), (OK + b"Content-Length: 104857600\r\n\r\n", b"x" * 100_000),
        (OK, b"X-More: " + b"x" * 500 + b"\r\n"),
    ],
)  # fmt: skip
def test_an_endless_answer_is_left_at_its_limit(first: bytes, again: bytes) -> None:
    """Not at the deadline, and never more than a few pieces of it are held."""
    tracemalloc.start()
    found = lost(says(first, again=again), deadline_s=60.0, most_bytes=100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found.was_sent, found.loss in (Loss.TOO_LARGE, Loss.NONSENSE)) == (True, True)
    assert peak < 8 << 20


def test_a_bomb_in_gzip_is_cut_off() -> None:
    """A hundred megabytes packed into a hundred kilobytes end at the limit."""
    bomb = gzip.compress(b"\0" * 100_000_000)
    tracemalloc.start()
    found = lost(says(OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.loss is Loss.TOO_LARGE
    assert peak < 8 << 20


def test_where_the_status_is_enough_no_body_is_read() -> None:
    """An endless one does not matter then; of a longer one the beginning may be enough."""
    found = asked(says(OK + b"\r\n", again=b"x" * 500), most_bytes=0, cuts=True)
    assert isinstance(found, Reply)
    assert (found.status, found.body) == (200, b"")
    found = asked(says(OK + b"\r\n", again=b"x" * 500), most_bytes=7, cuts=True)
    assert isinstance(found, Reply)
    assert found.body == b"x" * 7


def test_the_deadline_holds_for_the_whole_exchange() -> None:
    """One that never answers, one that drips a byte at a time, one that stops in the middle: all end at the deadline."""

    async def drips(visitor: Visitor) -> None:
        await visitor.asked()
        for letter in OK + b"Content-Length: 500\r\n\r\n" + b"x" * 500:
            await visitor.say(bytes([letter]))
            await asyncio.sleep(0.002)

    for talk, was_begun in (
        (says(hangs=True), False),
        (drips, True),
        (says(OK + b"Content-Length: 9\r\n\r\nx", hangs=True), True),
    ):
        found = lost(talk, deadline_s=0.8)
        assert found == Lost(Loss.LATE, "did not answer within 0.8 s", was_sent=True, was_begun=was_begun)


def test_a_connection_is_kept_and_one_that_was_closed_is_replaced() -> None:
    """Ten questions over one connection; where the server hangs up after each, every question still gets its answer."""

    def counting(asks: int) -> Callable[[Visitor], Awaitable[None]]:
        async def talk(visitor: Visitor) -> None:
            for _ in range(asks):
                if not await visitor.asked():
                    return
                await visitor.answer(b"hello")

        return talk

    async def run(asks: int, *, keeps: bool) -> int:
        async with raw_server(counting(asks)) as server:
            client = HttpClient(server.url, keeps=keeps)
            for _ in range(10):
                found = await client.call("GET", "/", deadline_s=3)
                assert isinstance(found, Reply)
                assert found.body == b"hello"
            await client.close()
            return server.connections

    assert asyncio.run(run(100, keeps=True)) == 1
    assert asyncio.run(run(1, keeps=True)) == 10
    assert asyncio.run(run(100, keeps=False)) == 10


async def test_whether_it_was_sent_is_known(tmp_path: Path) -> None:
    """Not where nobody listens, nor where no secure connection comes about; where one stood, it may have been read."""

    async def call(url: str) -> Lost:
        found = await HttpClient(url).call("POST", "/", b"{}", {"Authorization": "x"}, deadline_s=5.0)
        assert isinstance(found, Lost)
        return found

    for url in (f"http://127.0.0.1:{free_port()}", f"http://localhost:{free_port()}", f"unix:{tmp_path}/none.sock"):
        assert (await call(url))[0::2] == (Loss.REFUSED, False)
    assert (await call("http://no-such-name.invalid:8000"))[0::2] == (Loss.SILENT, False)

    async def plain_talk(visitor: Visitor) -> None:
        await visitor.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with raw_server(plain_talk) as server:
        plain = await call(server.url.replace("http:", "https:"))
        assert (plain.loss, plain.was_sent) == (Loss.NONSENSE, False)
    talk = RawServer(says(OK + b"Content-Length: 2\r\n\r\nhi"))
    secure = await asyncio.start_server(talk.visited, "127.0.0.1", 0, ssl=certificate(tmp_path))
    stranger = await call(f"https://127.0.0.1:{secure.sockets[0].getsockname()[1]}")
    assert stranger[:3] == (Loss.SILENT, "has a certificate that is not trusted", False)
    trusting = HttpClient(
        f"https://127.0.0.1:{secure.sockets[0].getsockname()[1]}",
        tls=lambda: ssl.create_default_context(cafile=str(tmp_path / "ca.crt")),
    )
    assert isinstance(await trusting.call("GET", "/", deadline_s=5.0), Reply)
    secure.close()


def test_an_act_is_never_sent_twice() -> None:
    """Whatever the server does with the connection."""
    for method in ("POST", "PUT"):
        heads: list[str] = []

        async def talk(visitor: Visitor, heads: list[str] = heads) -> None:
            heads.append(await visitor.asked())

        assert lost(talk, method=method, body=b"{}").was_sent
        assert len(heads) == 1


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

    found = asked(to("/metrics/"), follow=same_server)
    assert isinstance(found, Reply)
    assert found.body == b"page"
    for target in ("http://127.0.0.2/", "//evil.example/", "https://127.0.0.1/", "http://u:p@127.0.0.1/", "http://[", "/round"):
        visits.clear()
        assert lost(to(target), follow=same_server).loss is Loss.NONSENSE
        assert set(visits) <= {"/metrics", "/round"}
    found = asked(to("/metrics/"))
    assert isinstance(found, Reply)
    assert found.status == 307
    assert same_host("http://h/a", {"Location": "https://h/b"}) == "https://h/b"


async def test_the_path_of_the_address_is_asked_as_it_was_given() -> None:
    """With its last slash where nothing comes after it, once where something does, and with its query."""
    heads: list[str] = []

    async def talk(visitor: Visitor) -> None:
        heads.append(await visitor.asked())
        await visitor.say(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with raw_server(talk) as server:
        for end, path in (("", ""), ("/hook/?a=1%2F", ""), ("/hook/", "/state"), ("", "/a%2Fb?t=3")):
            await HttpClient(server.url + end).call("GET", path, deadline_s=20.0)
    assert [head.split()[1] for head in heads] == ["/", "/hook/?a=1%2F", "/hook/state", "/a%2Fb?t=3"]


@each("login", ["tok\r\nX: y", "tök", "tok\0"])
def test_a_login_that_no_header_may_hold_is_not_sent(login: str) -> None:
    """Nobody is asked, and it is not repeated in the sentence."""
    client = HttpClient(f"http://127.0.0.1:{free_port()}")
    found = asyncio.run(client.call("GET", "/", b"", {"Authorization": login}, deadline_s=5.0))
    assert isinstance(found, Lost)
    assert (found.was_sent, login in found.why) == (False, False)
    assert "no header may have" in found.why
    for token in ("", "a b", "a\r\nX: y", "ä"):
        with pytest.raises(BadInput):
            bearer(token)


@each(
    "url",
    ["http://u:s3cret@h", "http://h:0", "http://h:70000", "ftp://h", "unix:here", "http://h h", "http://", "http://ü", "h:80"],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """At once, and without repeating a password."""
    with pytest.raises(BadInput) as refused:
        HttpClient(url)
    assert "s3cret" not in str(refused.value)
    assert "s3cret" not in HttpClient(address("http://u:s3cret@127.0.0.1:1")).shown


def test_those_who_wait_get_the_answer_or_one_sentence() -> None:
    """Whatever the server does, within the time, also where the sentence is about its size."""
    with serving(lambda h: h.answer(b"hello")) as server:
        where = address(f"http://u:hunter2@{server.host}/x?y=1")
        assert where.get(most_bytes=10, timeout_s=5).body == b"hello"
        assert server.seen == [("/x?y=1", "Basic dTpodW50ZXIy")]
        with pytest.raises(TooLarge, match=r"/x: answers with more than 3 bytes$"):
            where.get(most_bytes=3, timeout_s=5)
    with serving(lambda _: time.sleep(2)) as server, pytest.raises(TimedOut, match=r"did not answer within 0\.2 s$"):
        address(f"http://{server.host}").get(most_bytes=10, timeout_s=0.2)
    with pytest.raises(WorldFailed, match=r"cannot be reached \(Connection refused\)$"):
        Address(f"http://127.0.0.1:{free_port()}", "it").get(most_bytes=10, timeout_s=5)


def test_the_proxy_that_the_environment_names_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By those who ask for a user's own server; not for hosts that it excepts."""
    with serving(lambda h: h.answer(b"by the proxy")) as proxy, serving(lambda h: h.answer(b"directly")) as server:
        monkeypatch.setenv("http_proxy", proxy.host)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert address(f"http://{server.host}/").get(most_bytes=99, timeout_s=5).body == b"directly"
        assert address("http://far.example/x").get(most_bytes=99, timeout_s=5).body == b"by the proxy"
        assert proxy.seen[0][0] == "http://far.example/x"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([OK, b"\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n",
                             b"0\r\n\r\n", b"Content-Encoding: gzip\r\n", gzip.compress(b"abc")]),
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_any_bytes_end_in_an_answer_or_in_none(pieces: list[bytes]) -> None:
    """Never in an exception."""
    asked(says(*pieces), most_bytes=50)


# Names
class Resolver:
    """A resolver whose answers a test sets: an address, an error, or an event that it waits for first."""

    def __init__(self, **answers: str | Exception | threading.Event) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, host: str) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        answer = self.answers[host.rstrip("0123456789")]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, threading.Event):
            answer.wait(10)
            answer = "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 0))]


async def addresses(names: NameCache, host: str) -> list[str]:
    return [found["host"] for found in await names.resolve(host, 80)]


async def test_an_answer_is_kept_for_a_while_and_doubted_when_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once within its time, by however many; again as soon as nobody answers at the address."""
    resolver = Resolver(good="127.0.0.1")
    names = NameCache(resolver)
    monkeypatch.setattr(client_file, "NAMES", names)
    found = await asyncio.gather(*(addresses(names, "good") for _ in range(20)))
    assert {tuple(one) for one in found} == {("127.0.0.1",)}
    async with raw_server(by_path({"/": b"hello"})) as server:
        assert isinstance(await HttpClient(f"http://good:{server.port}").call("GET", "/", deadline_s=3), Reply)
    assert resolver.asked == ["good"]
    assert isinstance(await HttpClient(f"http://good:{free_port()}").call("GET", "/", deadline_s=3), Lost)
    names.doubt("never-heard-of")
    await addresses(names, "good")
    assert resolver.asked == ["good", "good"]


async def test_the_last_good_answer_serves_while_a_new_one_is_slow() -> None:
    """Nobody waits longer than a moment for a name that was known; the new answer is taken when it comes."""
    go = threading.Event()
    resolver = Resolver(good="127.0.0.9")
    names = NameCache(resolver)
    assert await addresses(names, "good") == ["127.0.0.9"]
    resolver.answers["good"] = go
    names.doubt("good")
    for _ in range(3):
        assert await addresses(names, "good") == ["127.0.0.9"], "not waited for: nobody has let the slow one go on"
    assert len(resolver.asked) == 2
    go.set()
    while await addresses(names, "good") != ["127.0.0.1"]:
        await asyncio.sleep(0.01)


@each(
    ("error", "is_kept"),
    [(socket.gaierror(socket.EAI_AGAIN, "try again"), True), (socket.gaierror(socket.EAI_NONAME, "unknown"), False),
     (OSError("broken"), True), (ValueError("a mistake"), True)],
)  # fmt: skip
def test_a_resolver_that_fails_for_now_takes_nothing_back(error: Exception, is_kept: bool) -> None:
    """One that knows of no such name does."""
    resolver = Resolver(good="127.0.0.9", bad=error)
    names = NameCache(resolver)

    async def run() -> None:
        await addresses(names, "good")
        resolver.answers["good"] = error
        names.doubt("good")
        if is_kept:
            assert await addresses(names, "good") == ["127.0.0.9"]
        else:
            with pytest.raises(OSError, match="unknown"):
                await addresses(names, "good")
        with pytest.raises(OSError, match=r"."):
            await addresses(names, "bad")

    asyncio.run(run())


async def test_slow_names_delay_nobody_else_and_outlast_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred names that do not come back: another one is asked beside them, and the deadline holds for them."""
    go = threading.Event()
    resolver = Resolver(slow=go, good="127.0.0.1")
    monkeypatch.setattr(client_file, "NAMES", NameCache(resolver))
    async with raw_server(by_path({"/": b"hello"})) as server:
        slow = [asyncio.create_task(HttpClient(f"http://slow{n}:1").call("GET", "/", deadline_s=1)) for n in range(100)]
        while len(resolver.asked) < 100:
            await asyncio.sleep(0.01)
        assert isinstance(await HttpClient(f"http://good:{server.port}").call("GET", "/", deadline_s=60), Reply)
        assert {one.loss for one in await asyncio.gather(*slow) if isinstance(one, Lost)} == {Loss.LATE}, "no name came back"
    go.set()


def test_this_machine_s_own_resolver() -> None:
    """localhost has an address here, and a name that cannot be has none."""
    assert {"127.0.0.1", "::1"} & {where[4][0] for where in look_up("localhost")}
    with pytest.raises(OSError, match="too long"):
        asyncio.run(addresses(NameCache(), "a" * 70 + ".invalid"))
