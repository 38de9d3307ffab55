"""The lock in etcd where etcd is not itself: scripted answers over a real socket, lost, odd, endless, from strangers."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.etcd_lock import MOST_BYTES, EtcdLock, EtcdLockConfig
from tests.each import each
from tests.net.raw_answers import Answers, answer

HEADER = {"revision": "7"}


def key(epoch: int, mark: str, lease: str = "5", owner: str = "a") -> dict[str, Any]:
    value = base64.b64encode(json.dumps({"owner": owner, "mark": mark}).encode()).decode()
    return {"header": HEADER, "kvs": [{"create_revision": str(epoch), "lease": lease, "value": value}]}


class Script(Answers):
    """Answers in order with bytes or with silence; what it was asked is kept."""

    def __init__(self, *answers: bytes | float) -> None:
        super().__init__(lambda _: self.answers.pop(0) if self.answers else b"")
        self.answers = list(answers)
        self.url = ""

    @property
    def asked(self) -> list[tuple[str, dict[str, str], Any]]:
        """The first line, the headers and the JSON of every request."""
        heads = [one.partition(b"\r\n\r\n") for one in self.got]
        return [(*headed(head.decode()), json.loads(body) if body else None) for head, _, body in heads]


def headed(head: str) -> tuple[str, dict[str, str]]:
    first, *lines = head.split("\r\n")
    return first, {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


@asynccontextmanager
async def scripted(*answers: bytes | float) -> AsyncIterator[Script]:
    script = Script(*answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield script
    server.close()


def run(act: Callable[[], Awaitable[None]]) -> None:

    async def inner() -> None:
        async with asyncio.timeout(30):
            await act()

    asyncio.run(inner())


NOTHING = answer(200, {"header": HEADER})
LEASE = answer(200, {"header": HEADER, "ID": "5", "TTL": "30"})


def given_to(mark: str, epoch: int = 8, lease: str = "5") -> bytes:
    put, look = {"response_put": {"header": HEADER}}, {"response_range": key(epoch, mark, lease)}
    return answer(200, {"header": HEADER, "succeeded": True, "responses": [put, look]})


def test_what_is_sent() -> None:
    """A look, a lease, and one transaction that makes the key only if there is none, bound to the lease."""

    async def act() -> None:
        async with scripted() as etcd:
            lock = EtcdLock(EtcdLockConfig((etcd.url,), "fleet", 30))
            etcd.answers = [NOTHING, LEASE, given_to(lock._mark)]
            taken = await lock.acquire("guard-0")
            assert (taken.is_done, taken.facts["epoch"]) == (True, 8)
            assert 29 < float(taken.facts["left_s"]) <= 30
            assert [first.split()[1] for first, _, _ in etcd.asked] == ["/v3/kv/range", "/v3/lease/grant", "/v3/kv/txn"]
            asked = etcd.asked[2][2]
            name = base64.b64encode(b"fleet").decode()
            assert asked["compare"] == [{"key": name, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}]
            assert asked["success"][0]["request_put"]["lease"] == "5"
            assert json.loads(base64.b64decode(asked["success"][0]["request_put"]["value"]))["owner"] == "guard-0"
            assert not any("authorization" in headers for _, headers, _ in etcd.asked)

    run(act)


def test_a_lost_answer_is_found_again() -> None:
    """The key was made and the answer lost: unsure; the next try knows its own key by its mark, and takes no second one."""

    async def act() -> None:
        async with scripted() as etcd:
            lock = EtcdLock(EtcdLockConfig((etcd.url,)), timeout_s=2.0)
            etcd.answers = [NOTHING, LEASE, b""]
            assert (await lock.acquire("a")).is_done is None
            own = answer(200, key(8, lock._mark))
            etcd.answers = [own, answer(200, {"result": {"ID": "5", "TTL": "30"}}), own]
            again = await lock.acquire("a")
            assert (again.is_done, again.facts["epoch"]) == (True, 8)

    run(act)


def test_an_answer_that_is_read_too_late() -> None:
    """One who was stopped between the question and the answer does not believe an answer that is older than the lease."""

    class Stopped(EtcdLock):
        async def _put(self, owner: str, lease: int, deadline: float) -> Any:
            found = await super()._put(owner, lease, deadline)
            time.sleep(1.1)  # as SIGSTOP would: the whole process waits
            return found

    async def act() -> None:
        async with scripted() as etcd:
            lock = Stopped(EtcdLockConfig((etcd.url,), ttl_s=1))
            short = answer(200, {"header": HEADER, "ID": "5", "TTL": "1"})
            etcd.answers = [NOTHING, short, given_to(lock._mark)]
            assert (await lock.acquire("a")).is_done is None

    run(act)


def test_somebody_was_quicker() -> None:
    """Between the look and the transaction: told who, and the lease that is not needed is given back."""

    async def act() -> None:
        async with scripted() as etcd:
            lock = EtcdLock(EtcdLockConfig((etcd.url,)))
            theirs = {"header": HEADER, "responses": [{"response_range": key(9, "other", "77", "b\x1b[31m\n")}]}
            etcd.answers = [NOTHING, LEASE, answer(200, theirs), answer(200, {"header": HEADER})]
            refused = await lock.acquire("a")
            assert refused.is_done is False
            assert refused.message == "the lock is held by b [31m (epoch 9)"
            assert etcd.asked[-1][2] == {"ID": "5"}

    run(act)


def test_a_revision_that_went_back() -> None:
    """An etcd that counts from an earlier number than before is not believed."""

    async def act() -> None:
        async with scripted() as etcd:
            lock = EtcdLock(EtcdLockConfig((etcd.url,)))
            done = answer(200, {"header": HEADER})
            etcd.answers = [NOTHING, LEASE, given_to(lock._mark, 800), done, NOTHING, LEASE, given_to(lock._mark, 8), done]
            assert (await lock.acquire("a")).is_done
            assert (await lock.release()).is_done
            back = await lock.acquire("a")
            assert back.is_done is None
            assert "went back from 800 to 8" in back.message

    run(act)


def test_the_next_endpoint_is_asked() -> None:
    """One that is away, silent or in trouble is passed over within the time, and the good one comes first afterwards."""

    async def act() -> None:
        async with scripted(30.0) as silent, scripted(answer(503, {"error": "no leader"})) as headless, scripted() as good:
            lock = EtcdLock(EtcdLockConfig(("http://127.0.0.1:9", silent.url, headless.url, good.url)), timeout_s=2.0)
            good.answers = [NOTHING, LEASE, given_to(lock._mark)]
            assert (await lock.acquire("a")).is_done
            assert len(good.asked) == 3
            assert len(silent.asked) == len(headless.asked) == 1

    run(act)


ODD: list[bytes | float] = [
    b"",
    b"SSH-2.0-hello\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n[]",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n" + b"x" * 0xFFFFF + b"\r\n2\r\nxx\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 9_000 + b"\r\n{}",
    b"HTTP/1.1 100 X\r\n\r\n" * 9,
    b"HTTP/1.1 301 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MOST_BYTES + 10),
    30.0,
    answer(200, {"kvs": "x"}),
    answer(200, {"kvs": [{}]}),
    answer(200, {"kvs": [{"create_revision": "-4", "lease": "x"}]}),
    answer(200, {"kvs": [{"create_revision": "9" * 30}]}),
    answer(403, {"error": "etcdserver: permission denied"}),
    answer(400, {"error": {"deep": 1}}),
]


@each("at", [0, 1, 2])
@each("odd", range(len(ODD)))
def test_odd_answers(odd: int, at: int) -> None:
    """Whatever comes instead of an answer, at any step: unsure within the time, and nobody believes that he has the lock."""

    async def act() -> None:
        async with scripted() as etcd:
            lock = EtcdLock(EtcdLockConfig((etcd.url,)), timeout_s=0.5)
            good = [NOTHING, LEASE, given_to(lock._mark)]
            etcd.answers = [*good[:at], ODD[odd]]
            outcome = await lock.acquire("a")
            assert outcome.is_done is None
            assert outcome.message.isprintable()
            assert (await lock.renew()).is_done is False

    run(act)


BODIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("8"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["header", "kvs", "create_revision", "lease", "value", "ID", "TTL", "succeeded", "responses", "result"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(BODIES.filter(lambda body: isinstance(body, dict)), min_size=3, max_size=3))
def test_any_json(bodies: list[dict[str, Any]]) -> None:
    """JSON of any shape never gives anybody the lock, and never raises."""

    class Scripted(EtcdLock):
        async def _ask(self, path: str, body: Any, deadline: float) -> Any:
            del path, body, deadline
            return bodies.pop(0) if bodies else {"header": {}}

    assert not asyncio.run(Scripted(EtcdLockConfig(("http://h",))).acquire("a")).is_done


def test_a_login_is_shown_and_never_told() -> None:
    """The token goes into the header, a new one is fetched when it is over, and no sentence holds password or token."""

    async def act() -> None:
        async with scripted() as etcd:
            config = EtcdLockConfig((etcd.url,), user="guard", password="pa55word-very-secret")
            lock = EtcdLock(config)
            token = answer(200, {"header": HEADER, "token": "tok.1"})
            over = answer(401, {"error": "etcdserver: invalid auth token"})
            etcd.answers = [token, over, token, NOTHING, LEASE, given_to(lock._mark)]
            assert (await lock.acquire("a")).is_done
            assert [headers.get("authorization") for _, headers, _ in etcd.asked] == [None, "tok.1", None, *["tok.1"] * 3]
            etcd.answers = [answer(400, {"error": "invalid user ID or password"})]
            refused = await EtcdLock(config).acquire("a")
            assert refused.is_done is None
            assert "pa55word" not in refused.message + repr(config) + lock.label

    run(act)


def test_wrong_settings() -> None:
    """Addresses that are none, a login in an address, no key, no time: refused at the start, without repeating a password."""
    for url in ("127.0.0.1:2379", "ftp://h", "http://u:s3cret@h:1", "http://h:99999", "http://h:0", "http://h/?x", "unix:/h"):
        with pytest.raises(BadInput) as problem:
            EtcdLock(EtcdLockConfig((url,)))
        assert "s3cret" not in str(problem.value)
    for endpoints, name, ttl_s in ((), "k", 30), (("http://h",), "", 30), (("http://h",), "k", 0):
        with pytest.raises(BadInput):
            EtcdLock(EtcdLockConfig(tuple(endpoints), name, ttl_s))


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    crt, own_key = folder / f"{name}.crt", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(own_key), "-out", str(crt),
             "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]  # fmt: skip
    try:
        subprocess.run(words, capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate with")
    return crt, own_key


def test_tls_in_both_directions(tmp_path: Path) -> None:
    """The server's certificate must be known, ours is shown; a stranger's server gets no question."""
    server_crt, server_key = certificate(tmp_path, "server")
    client_crt, client_key = certificate(tmp_path, "client")

    async def act() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server_crt, server_key)
        context.load_verify_locations(client_crt)
        context.verify_mode = ssl.CERT_REQUIRED
        script = Script()
        server = await asyncio.start_server(script.serve, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        lock = EtcdLock(EtcdLockConfig((url,), ca_file=str(server_crt), cert_file=str(client_crt), key_file=str(client_key)))
        script.answers = [NOTHING, LEASE, given_to(lock._mark)]
        assert (await lock.acquire("a")).is_done
        strangers = ["", str(client_crt), str(server_crt), "/nonexistent"]
        for ca_file in strangers:
            asked = len(script.asked)
            assert (await EtcdLock(EtcdLockConfig((url,), ca_file=ca_file)).acquire("a")).is_done is None
            assert len(script.asked) == asked
        server.close()

    run(act)
