"""A real etcd, its lock, and two guards of one fleet: who is stopped or killed amid a deed does no harm when it comes late."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.guard.contenders import Contender, judge, pause
from lab.guard.epoch_gate import open_gate
from lab.guard.etcd import Etcd
from lab.guard.fronts import Trap
from lab.guard.two_guards import ENGINES, Places, rounds, scene
from plimsoll.guard.adapters.locks import EtcdLock, EtcdLockConfig
from plimsoll.net.client import HttpClient, Reply
from tests.real.small_farm import need, until

pytestmark = pytest.mark.once
SAYS = "not drained: the lock cannot be taken: etcd cannot be reached"


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    """One of the test's own."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-etcd-") as folder:
        member = Etcd(need("etcd", "etcd-server"), Path(folder))
        yield member
        member.kill()


@pytest.fixture
def places(etcd: Etcd) -> Iterator[Places]:
    """Where two guards find it, and a folder of theirs."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-two-") as folder:
        yield Places(Path(folder), etcd.url)


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(20, 37, marks=pytest.mark.timeout(300)),
        pytest.param(1_000, 11, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
async def test_rounds_with_holders_that_are_stopped_and_killed(
    places: Places, record_property: Callable[[str, object], None], count: int, seed: int
) -> None:
    """No drain or undrain of an old epoch is taken after a newer one, some came too late, and in the end nothing is open."""
    found = await rounds(places, count, seed)
    assert found["late_drains"] > 0, found
    assert found["late"] > found["late_drains"], found
    record_property("figures", str(found["says"]))


async def test_without_etcd_both_stand_back(places: Places, etcd: Etcd) -> None:
    """Each says so to whoever asked, nothing reaches a gate or the balancer, and with etcd back both act again."""
    async with scene(places, has_front=False) as here:
        for hand in here.hands.values():
            await hand.until_done("drain", "a")
            await hand.until_done("undrain", "a")
        await asyncio.to_thread(etcd.kill)
        before = len(here.world.deeds)
        for hand in here.hands.values():
            for engine in ENGINES:
                told = await hand.ask("drain", engine)
                assert told.status == 409, told
                assert told.json()["reason"] == "NotDone"
                assert "etcd cannot be reached" in told.json()["says"]
            await until(lambda log=hand.guard.log: SAYS in log())  # type: ignore[misc]
        assert len(here.world.deeds) == before
        await asyncio.to_thread(etcd.start)
        for hand in here.hands.values():
            await hand.until_done("drain", "b")
            await hand.until_done("undrain", "b")
        assert len(here.world.deeds) > before


async def test_a_take_out_that_comes_late_is_taken_back(places: Places) -> None:
    """A balancer knows no epochs: it takes an engine out for a guard that was overtaken. That guard puts it back."""
    async with scene(places, hook_fences=False) as here:
        one, two = here.hands["one"], here.hands["two"]
        for hand in (one, two):
            await hand.until_done("drain", "a")
            await hand.until_done("undrain", "a")
        trap = Trap("one", "hook", "take-out", lambda: pause(one.guard.pid), keeps_back=True)
        here.world.trap = trap
        asking = asyncio.create_task(one.ask("drain", "a"))
        await trap.sprung.wait()
        await two.until_done("drain", "a")
        await two.until_done("undrain", "a")
        here.world.trap = None
        trap.let_go()
        os.kill(one.guard.pid, signal.SIGCONT)
        assert (await asking).status == 409
        await until(lambda: not here.world.out["a"])
        assert (await here.gate_state("a"))["phase"] == "serving"


@pytest.mark.parametrize(
    ("rounds", "disturbances", "least_lost"),
    [(0, 12, 3), pytest.param(1_000, 100, 20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_stopped_and_killed_holders(etcd: Etcd, rounds: int, disturbances: int, least_lost: int) -> None:
    """Rounds of SIGSTOP past the lease and of SIGKILL: epochs only grow, the waker's renewal says no, the gate refuses him."""
    lock = f"etcd:{etcd.url}"
    names = (f"guard-{number}" for number in itertools.count())
    with open_gate() as gate:
        running = [Contender(lock, gate.url, next(names), ttl_s=1) for _ in range(2)]
        gone: list[Contender] = []
        lost = number = 0
        try:
            while number < disturbances or sum(one.count("got") for one in (*running, *gone)) < rounds:
                number += 1
                victim, other = running if number % 2 else running[::-1]
                victim.wait_for("got", 1 + (number % 5 if rounds else 0))
                if number % 3 == 2:
                    victim.kill()
                    gone.append(victim)
                    other.wait_for("got", 2)
                    running = [other, Contender(lock, gate.url, next(names), ttl_s=1)]
                    continue
                victim.stop()
                held, before = victim.holds, victim.count("lost")
                other.wait_for("got", 2)
                victim.wake()
                if held:
                    victim.wait_for("lost", 1 - (victim.count("lost") - before))
                    lost += 1
            for contender in running:
                contender.wait_for("released", 2)
        finally:
            for contender in running:
                contender.kill()
    epochs = judge([*gone, *running], gate.deeds)
    refused = sum(not deed.was_taken for deed in gate.deeds)
    print(f"{len(epochs)} holders, {number} of them disturbed, {lost} woke late, {refused} deeds refused at the gate")
    assert lost >= least_lost
    assert len(epochs) > max(disturbances, rounds - 1)


async def test_an_etcd_that_is_stopped_a_key_that_is_taken_away_and_a_login(etcd: Etcd) -> None:
    """One that says nothing is not waited for; a key taken away is a lost lock; the right password works, no other."""
    lock = EtcdLock(EtcdLockConfig((etcd.url,), ttl_s=2), timeout_s=0.5)
    first = await lock.acquire("a")
    assert first.is_done
    pause(etcd.process.pid)
    try:
        began = time.monotonic()
        again = await lock.renew()
        assert time.monotonic() - began < 1.5
        assert (again.is_done, again.facts["epoch"]) == (None, first.facts["epoch"])
        await asyncio.sleep(2.5)
        assert (await lock.renew()).is_done is False
        assert (await EtcdLock(EtcdLockConfig((etcd.url,)), timeout_s=0.5).acquire("b")).is_done is None
    finally:
        etcd.process.send_signal(signal.SIGCONT)
    for path, more in (("/v3/kv/deleterange", {}), ("/v3/kv/put", {"value": "eA=="})):
        lock = EtcdLock(EtcdLockConfig((etcd.url,), "k", 5))
        assert (await lock.acquire("a")).is_done
        told = await HttpClient(etcd.url).call("POST", path, json.dumps({"key": "aw==", **more}).encode(), deadline_s=5.0)
        assert isinstance(told, Reply)
        again = await lock.renew()
        assert (again.is_done, again.facts["lost"]) == (False, True)
    held = await lock.acquire("a")
    assert held.is_done is False  # somebody's key without a lease: it is not ours to remove
    assert held.facts["holder"] == "somebody else"
    for path, body in (
        ("/v3/auth/user/add", {"name": "root", "password": "r00t-password"}),
        ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
        ("/v3/auth/enable", {}),
    ):
        assert etcd.ask(path, dict(body)) == 200, path
    lock = EtcdLock(EtcdLockConfig(("http://127.0.0.1:9", etcd.url), ttl_s=5, user="root", password="r00t-password"))
    first = await lock.acquire("a")
    assert first.is_done, first
    lock._token = "made-up.7"
    assert (await lock.renew()).is_done
    assert lock._token != "made-up.7"
    for user, password in (("", None), ("root", "wrong-password")):
        refused = await EtcdLock(EtcdLockConfig((etcd.url,), user=user, password=password)).acquire("b")
        assert refused.is_done is None
        assert "password" not in str(refused.message).replace("invalid user ID or password", "")
    assert (await lock.release()).is_done
