"""The locks that a service keeps: an etcd that answers by script, and an API server that knows versions and conflicts."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.locks import ETCD_BYTES, EtcdLock, EtcdLockConfig, LeaseLock, Unanswered
from tests.certificates import certificate
from tests.cluster_api import ClusterApi, Json, Trouble
from tests.each import each, in_loop, trees
from tests.net.raw_answers import Answers, answer

HEADER = {"revision": "7"}
NOTHING = answer(200, {"header": HEADER})
LEASE = answer(200, {"header": HEADER, "ID": "5", "TTL": "30"})


# etcd
class Script(Answers):
    """Answers in order with bytes or with silence; what it was asked is kept."""

    def __init__(self, *answers: bytes | float) -> None:
        super().__init__(lambda _: self.answers.pop(0) if self.answers else b"")
        self.answers = list(answers)
        self.url = ""

    @property
    def asked(self) -> list[tuple[str, str | None, Any]]:
        """The path, the login and the JSON of every request."""
        heads = [one.decode().partition("\r\n\r\n") for one in self.got]
        logins = [dict(line.partition(": ")[::2] for line in head.split("\r\n")).get("Authorization") for head, _, _ in heads]
        return [(head.split()[1], login, json.loads(body)) for (head, _, body), login in zip(heads, logins, strict=True)]


@asynccontextmanager
async def scripted(*answers: bytes | float, tls: ssl.SSLContext | None = None) -> AsyncIterator[Script]:
    script = Script(*answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0, ssl=tls)
    script.url = f"http{'s' if tls else ''}://localhost:{server.sockets[0].getsockname()[1]}"
    yield script
    server.close()


@asynccontextmanager
async def etcd_lock(timeout_s: float = 5.0, **config: Any) -> AsyncIterator[tuple[Script, EtcdLock]]:
    """A lock at one etcd that says nothing yet."""
    async with scripted() as etcd:
        yield etcd, EtcdLock(EtcdLockConfig((etcd.url,), **config), timeout_s=timeout_s)


def key(epoch: int, mark: str, lease: str = "5", owner: str = "a") -> dict[str, Any]:
    value = base64.b64encode(json.dumps({"owner": owner, "mark": mark}).encode()).decode()
    return {"header": HEADER, "kvs": [{"create_revision": str(epoch), "lease": lease, "value": value}]}


def given_to(mark: str, epoch: int = 8) -> bytes:
    put, look = {"response_put": {"header": HEADER}}, {"response_range": key(epoch, mark)}
    return answer(200, {"header": HEADER, "succeeded": True, "responses": [put, look]})


@in_loop
async def test_what_etcd_is_sent_and_answers_that_are_lost_or_come_late() -> None:
    """A look, a lease, a transaction bound to it; its own key is known by its mark; who reads too late has it not."""
    async with etcd_lock(lock_key="fleet") as (etcd, lock):
        etcd.answers = [NOTHING, LEASE, given_to(lock._mark)]
        taken = await lock.acquire("guard-0")
        assert (taken.is_done, taken.facts["epoch"]) == (True, 8)
        assert 29 < float(taken.facts["left_s"]) <= 30
        assert [path for path, _, _ in etcd.asked] == ["/v3/kv/range", "/v3/lease/grant", "/v3/kv/txn"]
        asked = etcd.asked[2][2]
        name = base64.b64encode(b"fleet").decode()
        assert asked["compare"] == [{"key": name, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}]
        assert asked["success"][0]["request_put"]["lease"] == "5"
        assert json.loads(base64.b64decode(asked["success"][0]["request_put"]["value"]))["owner"] == "guard-0"
        assert not any(login for _, login, _ in etcd.asked)
    async with etcd_lock(2.0) as (etcd, lock):
        etcd.answers = [NOTHING, LEASE, b""]
        assert (await lock.acquire("a")).is_done is None
        own = answer(200, key(8, lock._mark))
        etcd.answers = [own, answer(200, {"result": {"ID": "5", "TTL": "30"}}), own]
        again = await lock.acquire("a")
        assert (again.is_done, again.facts["epoch"]) == (True, 8)

    class Stopped(EtcdLock):
        async def _put(self, owner: str, lease: int, deadline: float) -> Any:
            found = await super()._put(owner, lease, deadline)
            time.sleep(1.1)  # as SIGSTOP would: the whole process waits
            return found

    async with scripted() as etcd:
        lock = Stopped(EtcdLockConfig((etcd.url,), ttl_s=1))
        etcd.answers = [NOTHING, answer(200, {"header": HEADER, "ID": "5", "TTL": "1"}), given_to(lock._mark)]
        assert (await lock.acquire("a")).is_done is None


@in_loop
async def test_whom_etcd_does_not_give_it_to_and_which_endpoint_is_asked() -> None:
    """Told who was quicker; one that is away, silent or in trouble is passed over; a login is shown, and never told."""
    async with etcd_lock() as (etcd, lock):
        theirs = {"header": HEADER, "responses": [{"response_range": key(9, "other", "77", "b\x1b[31m\n")}]}
        etcd.answers = [NOTHING, LEASE, answer(200, theirs), NOTHING]
        refused = await lock.acquire("a")
        assert (refused.is_done, refused.message) == (False, "the lock is held by b [31m (epoch 9)")
        assert etcd.asked[-1][2] == {"ID": "5"}
    async with etcd_lock() as (etcd, lock):
        mark = lock._mark
        etcd.answers = [NOTHING, LEASE, given_to(mark, 800), NOTHING, NOTHING, LEASE, given_to(mark, 8), NOTHING]
        assert (await lock.acquire("a")).is_done
        assert (await lock.release()).is_done
        back = await lock.acquire("a")
        assert back.is_done is None
        assert "went back from 800 to 8" in back.message
    async with scripted(30.0) as silent, scripted(answer(503, {"error": "no leader"})) as headless, scripted() as good:
        lock = EtcdLock(EtcdLockConfig(("http://127.0.0.1:9", silent.url, headless.url, good.url)), timeout_s=2.0)
        good.answers = [NOTHING, LEASE, given_to(lock._mark)]
        assert (await lock.acquire("a")).is_done
        assert (len(good.asked), len(silent.asked), len(headless.asked)) == (3, 1, 1)
    async with etcd_lock(user="guard", password="pa55word-very-secret") as (etcd, lock):
        token = answer(200, {"header": HEADER, "token": "tok.1"})
        over = answer(401, {"error": "etcdserver: invalid auth token"})
        etcd.answers = [token, over, token, NOTHING, LEASE, given_to(lock._mark)]
        assert (await lock.acquire("a")).is_done
        assert [login for _, login, _ in etcd.asked] == [None, "tok.1", None, *["tok.1"] * 3]
        etcd.answers = [answer(400, {"error": "invalid user ID or password"})]
        refused = await EtcdLock(lock._config).acquire("a")
        assert refused.is_done is None
        assert "pa55word" not in refused.message + repr(lock._config) + lock.label


# What is not HTTP at all is tried in tests/net.
ODD: list[bytes | float] = [
    b"", 30.0, answer(200, []), b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, answer(301, {}), answer(200, {"kvs": "x"}),
    b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (ETCD_BYTES + 10), answer(200, {"kvs": [{}]}),
    answer(200, {"kvs": [{"create_revision": "-4", "lease": "x"}]}), answer(200, {"kvs": [{"create_revision": "9" * 30}]}),
    answer(403, {"error": "etcdserver: permission denied"}), answer(400, {"error": {"deep": 1}}),
]  # fmt: skip


@each("at", [0, 1, 2])
@each("odd", ODD)
@in_loop
async def test_odd_answers(odd: bytes | float, at: int) -> None:
    """Whatever comes instead of an answer, at any step: unsure within the time, and nobody believes that he has the lock."""
    async with etcd_lock(0.5) as (etcd, lock):
        etcd.answers = [*[NOTHING, LEASE, given_to(lock._mark)][:at], odd]
        outcome = await lock.acquire("a")
        assert outcome.is_done is None
        assert outcome.message.isprintable()
        assert (await lock.renew()).is_done is False


_NAMES = "header kvs create_revision lease value ID TTL succeeded responses result".split()


@given(st.lists(st.dictionaries(st.sampled_from(_NAMES), trees(_NAMES, 12), max_size=4), min_size=3, max_size=3))
def test_any_json_of_etcds(bodies: list[dict[str, Any]]) -> None:
    """JSON of any shape never gives anybody the lock, and never raises."""

    class Scripted(EtcdLock):
        async def _ask(self, path: str, body: Any, deadline: float) -> Any:
            del path, body, deadline
            return bodies.pop(0) if bodies else {"header": {}}

    assert not asyncio.run(Scripted(EtcdLockConfig(("http://h",))).acquire("a")).is_done


@in_loop
async def test_tls_in_both_directions(tmp_path: Path) -> None:
    """The server's certificate must be known, ours is shown; a stranger's server gets no question."""
    context = certificate(tmp_path / "server", "DNS:localhost")
    certificate(tmp_path / "client")
    server, client, key_file = (str(tmp_path / name) for name in ("server/ca.crt", "client/ca.crt", "client/key.pem"))
    context.load_verify_locations(client)
    context.verify_mode = ssl.CERT_REQUIRED
    async with scripted(tls=context) as etcd:
        lock = EtcdLock(EtcdLockConfig((etcd.url,), ca_file=server, cert_file=client, key_file=key_file))
        etcd.answers = [NOTHING, LEASE, given_to(lock._mark)]
        assert (await lock.acquire("a")).is_done
        for ca_file in ("", client, server, "/nonexistent"):
            assert (await EtcdLock(EtcdLockConfig((etcd.url,), ca_file=ca_file)).acquire("a")).is_done is None
        assert len(etcd.asked) == 3


# A Lease
class Leases(ClusterApi):
    """An API server that is asked for one Lease, by guards with this service account."""

    def __init__(self, account: str) -> None:
        super().__init__()
        self.folder = account

    def lock(self, ttl_s: int = 1) -> LeaseLock:
        return LeaseLock("guard", url=self.url, folder=self.folder, ttl_s=ttl_s, timeout_s=2.0)

    @property
    def kept(self) -> dict[tuple[str, str], Json]:
        return self.kind("coordination.k8s.io/leases")

    @property
    def spec(self) -> Json:
        return dict(self.kept["llm", "guard"]["spec"])

    def change(self, spec: Json, **about: Any) -> None:
        """As somebody else would: another resource version."""
        about = {**self.kept.get(("llm", "guard"), {"metadata": {}})["metadata"], **about}
        lease = {"kind": "Lease", "metadata": {**about, "name": "guard", "namespace": "llm"}, "spec": spec}
        self.put("coordination.k8s.io/leases", lease)

    def fail(self, *statuses: int) -> None:
        """What the next calls get; 0 is an answer that is lost."""
        self.troubles = [Trouble("", "leases", status, is_lost=not status) for status in statuses]


@in_loop
async def test_taken_renewed_and_given_up_and_one_of_twenty_at_once(account: str) -> None:
    """The Lease says who holds it, each new holder's epoch is one more; of twenty at the same moment exactly one gets it."""
    async with Leases(account).serving() as api:
        first, second = api.lock(), api.lock()
        taken = await first.acquire("guard-0")
        assert (taken.is_done, taken.facts["epoch"]) == (True, 1)
        assert api.spec["holderIdentity"].startswith("guard-0_")
        assert api.spec["leaseDurationSeconds"] == 1
        other = await second.acquire("guard-0")
        assert other.is_done is False
        assert "guard-0" in other.message
        before = api.spec["renewTime"]
        assert (await first.renew()).is_done
        assert api.spec["renewTime"] > before
        assert (await first.acquire("guard-0")).facts["epoch"] == 1
        assert (await first.release()).is_done
        assert "holderIdentity" not in api.spec
        assert (await second.acquire("guard-0")).facts["epoch"] == 2
        assert (await first.renew()).is_done is False
        assert (await second.release()).is_done
        assert (await second.acquire("guard-0")).facts["epoch"] == 3
        assert [call.verb for call in api.calls[:2]] == ["get", "create"]
    async with Leases(account).serving() as api:
        locks = [api.lock(30) for _ in range(20)]
        for number in range(1, 6):
            outcomes = await asyncio.gather(*(lock.acquire("a") for lock in locks))
            assert [outcome.facts["epoch"] for outcome in outcomes if outcome.is_done] == [number]
            (winner,) = [lock for lock, outcome in zip(locks, outcomes, strict=True) if outcome.is_done]
            assert (await winner.release()).is_done


@in_loop
async def test_clocks_are_not_compared_and_the_late_one_is_told(account: str) -> None:
    """A holder whose clock is years off keeps it while it renews; one that slept keeps it if nobody took it, else hears no."""
    async with Leases(account).serving() as api:
        locks = []
        for year in (1999, 2199):
            spec = {"holderIdentity": "x", "leaseDurationSeconds": 1, "leaseTransitions": 7}
            locks.append(api.lock())
            for number in range(4):
                api.change({**spec, "renewTime": f"{year}-01-01T00:00:00.{number:06}Z"})
                assert (await locks[-1].acquire("a")).is_done is False
                await asyncio.sleep(0.4)
            assert (await locks[-1].acquire("a")).is_done is False
            await asyncio.sleep(1.05)
            assert (await locks[-1].acquire("a")).facts["epoch"] == 8
    async with Leases(account).serving() as api:
        sleeper, other = api.lock(), api.lock()
        assert (await sleeper.acquire("a")).facts["epoch"] == 1
        api.change(api.spec, labels={"a": "b"})
        await asyncio.sleep(1.1)
        assert (await sleeper.renew()).facts["epoch"] == 1
        assert api.kept["llm", "guard"]["metadata"]["labels"] == {"a": "b"}
        assert (await other.acquire("b")).is_done is False
        await asyncio.sleep(1.1)
        assert (await other.acquire("b")).facts["epoch"] == 2
        before, late = api.spec, await sleeper.renew()
        assert (late.is_done, late.facts.get("lost")) == (False, True)
        assert api.spec == before, "another's Lease is not touched"
        assert (await sleeper.release()).is_done
        assert (await other.renew()).is_done
        api.kept.clear()
        assert (await other.renew()).is_done is False


@in_loop
async def test_answers_that_are_lost(account: str) -> None:
    """Not known is said as such; the next try finds out, and nobody is locked out; past the time granted it is lost."""
    async with Leases(account).serving() as api:
        lock, other = api.lock(10), api.lock(10)
        api.troubles = [Trouble("create", "leases", is_lost=True)]
        assert (await lock.acquire("a")).is_done is None
        assert (await other.acquire("b")).is_done is False
        assert (await lock.acquire("a")).facts["epoch"] == 1
        api.fail(0)
        unsure = await lock.renew()
        assert unsure.is_done is None
        assert 0 < float(unsure.facts["left_s"]) <= 10
        assert (await lock.renew()).is_done
        api.fail(0)
        assert (await lock.release()).is_done is None
        assert (await lock.release()).is_done
        brief = api.lock()
        assert (await brief.acquire("b")).facts["epoch"] == 2
        api.fail(*[500] * 9)
        assert (await brief.renew()).is_done is None
        await asyncio.sleep(1.1)
        assert (await brief.renew()).is_done is False
        assert (await brief.release()).message == "the lock was not ours"


@in_loop
async def test_an_api_server_in_trouble_and_no_token(account: str) -> None:
    """Nobody gets the lock for it, and one that is held is not known to be lost; a token that is not taken is not shown."""
    for status in (401, 403, 404, 422, 500, 503, 302):
        async with Leases(account).serving() as api:
            lock = api.lock(10)
            api.fail(*[status] * 3)
            assert (await lock.acquire("a")).is_done is None, status
            api.fail()
            assert (await lock.acquire("a")).is_done, status
            api.fail(*[status] * 3)
            assert (await lock.renew()).is_done is (False if status == 404 else None), status
    async with Leases(account).serving() as api:
        lock, token = api.lock(), Path(account) / "token"
        for words in ("another-token", "ab\r\nX: y", "\ufffd"):
            token.write_text(words, encoding="utf-8")
            refused = await lock.acquire("a")
            assert refused.is_done is None
            assert words not in refused.message
            assert ("401" in refused.message) is (words == "another-token")
        token.unlink()
        assert "no token" in (await lock.acquire("a")).message


def test_places_that_cannot_be(tmp_path: Path) -> None:
    """Addresses that are none, a login in one, a namespace that is none, no pod: refused, without repeating a password."""
    for url in ("127.0.0.1:2379", "ftp://h", "http://u:s3cret@h:1", "http://h:99999", "http://h:0", "http://h/?x", "unix:/h"):
        with pytest.raises(BadInput) as problem:
            EtcdLock(EtcdLockConfig((url,)))
        assert "s3cret" not in str(problem.value)
    for namespace in ("x/../y", "A", ""):
        with pytest.raises(BadInput, match="needs a namespace"):
            LeaseLock("a", namespace, url="http://h", folder=str(tmp_path))
    for url in ("ftp://h", "http://u:p@h", "http://h\r\nX: y", "http://", "http://[x", ""):
        with pytest.raises(BadInput):
            LeaseLock("a", "b", url=url, folder=str(tmp_path))


SPEC = ("holderIdentity", "renewTime", "leaseTransitions", "leaseDurationSeconds", "acquireTime")
SPECS = st.fixed_dictionaries({}, optional={name: trees(most=3) for name in SPEC})


@given(lease=st.fixed_dictionaries({}, optional={"spec": SPECS | trees(most=3), "kind": st.sampled_from(["Lease", "Status"])}))
def test_a_lease_that_makes_no_sense(lease: dict[str, Any]) -> None:
    """Whatever stands in it, there is an outcome: ours only if it was free or we waited, with a count that is one."""

    class Scripted(LeaseLock):
        async def _ask(self, method: str, path: str, body: Any, deadline: float) -> Any:
            del path, deadline
            return 200, lease if method == "GET" else json.loads(json.dumps(body))

    outcome = asyncio.run(Scripted("a", "b", url="http://h", folder="/nonexistent").acquire("a"))
    if outcome.is_done:
        assert isinstance(outcome.facts["epoch"], int)
        assert outcome.facts["epoch"] > 0
        assert not (lease.get("spec") or {}).get("holderIdentity")
    assert not isinstance(outcome, Unanswered)
