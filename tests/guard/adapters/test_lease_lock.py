"""The lock as a Lease: what is sent over a real socket to an API server that knows versions and conflicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.guard.contenders import Contender, judge
from lab.guard.epoch_gate import open_gate
from plimsoll.errors import BadInput
from plimsoll.guard.adapters.lease_lock import LeaseLock
from plimsoll.guard.adapters.locks import Unanswered
from tests.lease_api import LEASES, TOKEN, LeaseApi, lease_api


@pytest.fixture
def api() -> Iterator[LeaseApi]:
    with lease_api() as one:
        yield one


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A service account, as a pod has it."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "namespace").write_text("default")
    return str(tmp_path)


def lock_at(api: LeaseApi, folder: str, ttl_s: int = 1, timeout_s: float = 2.0) -> LeaseLock:
    return LeaseLock("guard", url=api.url, folder=folder, ttl_s=ttl_s, timeout_s=timeout_s)


def run(act: Callable[[], Awaitable[None]]) -> None:

    async def inner() -> None:
        async with asyncio.timeout(30):
            await act()

    asyncio.run(inner())


def test_taken_renewed_and_given_up(api: LeaseApi, folder: str) -> None:
    """The Lease says who holds it, and each new holder's epoch is one more, also when the same guard comes again."""

    async def act() -> None:
        first, second = lock_at(api, folder), lock_at(api, folder)
        taken = await first.acquire("guard-0")
        assert (taken.is_done, taken.facts["epoch"]) == (True, 1)
        assert api.spec()["holderIdentity"].startswith("guard-0_")
        assert api.spec()["leaseDurationSeconds"] == 1
        other = await second.acquire("guard-0")
        assert other.is_done is False
        assert "guard-0" in other.message
        before = api.spec()["renewTime"]
        assert (await first.renew()).is_done
        assert api.spec()["renewTime"] > before
        assert (await first.acquire("guard-0")).facts["epoch"] == 1
        assert (await first.release()).is_done
        assert "holderIdentity" not in api.spec()
        assert (await second.acquire("guard-0")).facts["epoch"] == 2
        assert (await first.renew()).is_done is False
        assert (await second.release()).is_done
        assert (await second.acquire("guard-0")).facts["epoch"] == 3

    run(act)
    assert api.asked[:2] == [("GET", f"{LEASES}/guard"), ("POST", LEASES)]


def test_clocks_are_not_compared(api: LeaseApi, folder: str) -> None:
    """A holder whose clock is years off keeps the lock while it renews, and loses it when nothing changes for its time."""

    async def act() -> None:
        for stamp in ("1999-01-01T00:00:00.000000Z", "2199-01-01T00:00:00.000000Z"):
            spec: dict[str, Any] = {"holderIdentity": "x", "leaseDurationSeconds": 1, "leaseTransitions": 7, "renewTime": stamp}
            api.keep("guard", {"kind": "Lease", "metadata": {}, "spec": spec})
            lock = lock_at(api, folder)
            for number in range(4):
                assert (await lock.acquire("a")).is_done is False
                api.keep("guard", {**api.leases["guard"], "spec": {**spec, "renewTime": f"{stamp[:-4]}{number:03}Z"}})
                await asyncio.sleep(0.4)
            assert (await lock.acquire("a")).is_done is False
            await asyncio.sleep(1.05)
            assert (await lock.acquire("a")).facts["epoch"] == 8

    run(act)


def test_the_late_one_is_told(api: LeaseApi, folder: str) -> None:
    """A holder that slept past its time: the other takes over with a greater epoch, and the sleeper's renewal says no."""

    async def act() -> None:
        sleeper, other = lock_at(api, folder), lock_at(api, folder)
        assert (await sleeper.acquire("a")).facts["epoch"] == 1
        assert (await other.acquire("b")).is_done is False
        await asyncio.sleep(1.1)
        assert (await other.acquire("b")).facts["epoch"] == 2
        late = await sleeper.renew()
        assert (late.is_done, late.facts.get("lost")) == (False, True)
        assert (await sleeper.release()).is_done
        assert (await other.renew()).is_done

    run(act)


def test_one_that_slept_and_was_not_missed(api: LeaseApi, folder: str) -> None:
    """If nobody took it in the meantime it is still its own, with the epoch it had; a label set by others does not matter."""

    async def act() -> None:
        lock = lock_at(api, folder)
        await lock.acquire("a")
        api.keep("guard", {**api.leases["guard"], "metadata": {**api.leases["guard"]["metadata"], "labels": {"a": "b"}}})
        await asyncio.sleep(1.1)
        assert (await lock.renew()).facts["epoch"] == 1
        assert api.leases["guard"]["metadata"]["labels"] == {"a": "b"}
        del api.leases["guard"]
        assert (await lock.renew()).is_done is False

    run(act)


def test_answers_that_are_lost(api: LeaseApi, folder: str) -> None:
    """Not known is said as such; the next try finds out, with the epoch that was given, and nobody is locked out."""

    async def act() -> None:
        lock, other = lock_at(api, folder, ttl_s=10), lock_at(api, folder, ttl_s=10)
        api.trouble = ["", "lost"]
        assert (await lock.acquire("a")).is_done is None
        assert (await other.acquire("b")).is_done is False
        assert (await lock.acquire("a")).facts["epoch"] == 1
        api.trouble = ["lost"]
        unsure = await lock.renew()
        assert unsure.is_done is None
        assert 0 < float(unsure.facts["left_s"]) <= 10
        assert (await lock.renew()).is_done
        api.trouble = ["lost"]
        assert (await lock.release()).is_done is None
        assert (await lock.release()).is_done
        assert (await other.acquire("b")).facts["epoch"] == 2

    run(act)


def test_two_at_once(api: LeaseApi, folder: str) -> None:
    """Of twenty that try at the same moment exactly one gets it, round after round."""

    async def act() -> None:
        locks = [lock_at(api, folder, ttl_s=30) for _ in range(20)]
        for number in range(1, 6):
            outcomes = await asyncio.gather(*(lock.acquire("a") for lock in locks))
            winners = [lock for lock, outcome in zip(locks, outcomes, strict=True) if outcome.is_done]
            assert len(winners) == 1
            assert [outcome.facts["epoch"] for outcome in outcomes if outcome.is_done] == [number]
            assert (await winners[0].release()).is_done

    run(act)


@pytest.mark.parametrize("trouble", ["401", "403", "404", "422", "500", "503", "302"])
def test_an_api_server_in_trouble(api: LeaseApi, folder: str, trouble: str) -> None:
    """Whatever it answers, nobody gets the lock for it; a lock that is held is not known to be lost until its time is over."""

    async def act() -> None:
        lock = lock_at(api, folder, ttl_s=10)
        api.trouble = [trouble] * 3
        assert (await lock.acquire("a")).is_done is None
        api.trouble = []
        assert (await lock.acquire("a")).is_done
        api.trouble = [trouble] * 3
        again = await lock.renew()
        assert again.is_done is (False if trouble == "404" else None)

    run(act)


def test_time_runs_out(api: LeaseApi, folder: str) -> None:
    """When nobody can be asked for as long as the lock was granted, it is lost."""

    async def act() -> None:
        lock = lock_at(api, folder)
        assert (await lock.acquire("a")).is_done
        api.trouble = ["500"] * 9
        assert (await lock.renew()).is_done is None
        await asyncio.sleep(1.1)
        assert (await lock.renew()).is_done is False

    run(act)


def test_without_a_token(api: LeaseApi, folder: str) -> None:
    """It stands back, and never shows a token that is not taken."""
    (Path(folder) / "token").write_text("another-token")

    async def act() -> None:
        lock = lock_at(api, folder)
        refused = await lock.acquire("a")
        assert refused.is_done is None
        assert "401" in refused.message
        assert "another-token" not in refused.message
        for words in ("ab\r\nX: y", "\udc00".encode("utf-8", "surrogatepass").decode("utf-8", "replace")):
            (Path(folder) / "token").write_text(words, encoding="utf-8")
            assert (await lock.acquire("a")).is_done is None
        (Path(folder) / "token").unlink()
        assert "no token" in (await lock.acquire("a")).message

    run(act)


def test_wrong_names(tmp_path: Path) -> None:
    """What Kubernetes would not take as a name is refused at the start; so is a place that is no pod."""
    for name, namespace in (("Bad", "default"), ("a/b", "default"), ("a", "x/../y"), ("", "d"), ("a", "")):
        with pytest.raises(BadInput):
            LeaseLock(name, namespace, url="http://h", folder=str(tmp_path))
    for url in ("ftp://h", "http://u:p@h", "http://h\r\nX: y", "http://", "http://[x"):
        with pytest.raises(BadInput):
            LeaseLock("a", "b", url=url, folder=str(tmp_path))
    with pytest.raises(BadInput, match="no pod"):
        LeaseLock("a", "b", folder=str(tmp_path))


LEAVES = st.none() | st.booleans() | st.integers(-3, 2**70) | st.text(max_size=5) | st.floats()
SPECS = st.fixed_dictionaries(
    {},
    optional={
        name: LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(st.text(max_size=3), LEAVES, max_size=2)
        for name in ("holderIdentity", "renewTime", "leaseTransitions", "leaseDurationSeconds", "acquireTime")
    },
)


@given(lease=st.fixed_dictionaries({}, optional={"spec": SPECS | LEAVES, "kind": st.sampled_from(["Lease", "Status"])}))
def test_a_lease_that_makes_no_sense(lease: dict[str, Any]) -> None:
    """Whatever stands in it, there is an outcome: ours only if it was free or we waited, with a count that is one."""

    class Scripted(LeaseLock):
        async def _ask(self, method: str, path: str, body: Any, deadline: float) -> Any:
            del path, deadline
            return 200, lease if method == "GET" else json.loads(json.dumps(body))

    lock = Scripted("a", "b", url="http://h", folder="/nonexistent")
    outcome = asyncio.run(lock.acquire("a"))
    if outcome.is_done:
        assert isinstance(outcome.facts["epoch"], int)
        assert outcome.facts["epoch"] > 0
        spec = lease.get("spec") or {}
        assert not spec.get("holderIdentity")
    assert not isinstance(outcome, Unanswered)


@pytest.mark.real
def test_processes_that_are_stopped_and_killed(api: LeaseApi, folder: str) -> None:
    """Two real processes: a stopped holder wakes late and is told so, a killed one is replaced, the gate takes no old epoch."""
    with open_gate() as gate:
        contenders = [Contender(f"lease:{api.url}#{folder}", gate.url, name, ttl_s=1, hold_s=0.2) for name in "ab"]
        try:
            for victim, other in (contenders, contenders[::-1]):
                victim.wait_for("got")
                victim.stop()
                held = victim.holds
                other.wait_for("got", 2)
                victim.wake()
                if held:
                    victim.wait_for("lost")
            contenders[0].wait_for("got")
            contenders[0].kill()
            contenders[1].wait_for("got", 2)
        finally:
            for contender in contenders:
                contender.kill()
        judge(contenders, gate.deeds)
