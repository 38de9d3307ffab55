"""The lock in a real etcd: two real processes that are stopped, woken and killed; logins; and etcd itself going away."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.guard.contenders import Contender, judge, pause
from lab.guard.epoch_gate import EpochGate, open_gate
from plimsoll.actuators.etcd_lock import EtcdLock, Login
from plimsoll.actuators.lock_http import Unanswered, call, place_of

DISTURBANCES = 12
TTL_S = 1


def _need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        message = f"{program} is not installed: it comes with the system package etcd-server"
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return found


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Etcd:
    """One member, on ports and a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._program, self._folder = _need("etcd"), folder
        self._ports = _free_ports(2)
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        peer = f"http://127.0.0.1:{self._ports[1]}"
        words = ["--data-dir", str(self._folder / "data"), "--listen-client-urls", self.url,
                 "--advertise-client-urls", self.url, "--listen-peer-urls", peer,
                 "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
                 "--heartbeat-interval", "50", "--election-timeout", "500"]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen([self._program, *words], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while self.ask("/v3/kv/range", {"key": "AA=="}) != 200:
            assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.05)
        return process

    def ask(self, path: str, body: dict[str, object]) -> int:
        """One question; 0 if there was no answer."""
        try:
            return asyncio.run(call(place_of(self.url), "POST", path, body, seconds=5.0)).status
        except Unanswered:
            return 0

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """With the data it had."""
        self.process = self._start()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """One of the test's own."""
    member = Etcd(tmp_path)
    yield member
    member.kill()


@pytest.fixture
def gate() -> Iterator[EpochGate]:
    """What the epochs are for."""
    with open_gate() as one:
        yield one


def test_stopped_and_killed_holders(etcd: Etcd, gate: EpochGate) -> None:
    """Rounds of SIGSTOP past the lease and of SIGKILL: epochs only grow, the waker's renewal says no, the gate refuses him."""
    epochs, lost = disturbed(etcd, gate, rounds=0, disturbances=DISTURBANCES)
    assert lost >= 3
    assert len(epochs) > DISTURBANCES


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_rounds(etcd: Etcd, gate: EpochGate) -> None:
    """The same until the lock has had a thousand holders, one in ten of them stopped or killed."""
    epochs, lost = disturbed(etcd, gate, rounds=1_000, disturbances=100)
    assert lost >= 20
    assert len(epochs) >= 1_000


def disturbed(etcd: Etcd, gate: EpochGate, *, rounds: int, disturbances: int) -> tuple[list[int], int]:
    """Two contenders, one of whom is stopped or killed so often; the epochs that there were, and who woke too late."""
    lock = f"etcd:{etcd.url}"
    names = (f"guard-{number}" for number in itertools.count())
    running = [Contender(lock, gate.url, next(names), ttl_s=TTL_S) for _ in range(2)]
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
                running = [other, Contender(lock, gate.url, next(names), ttl_s=TTL_S)]
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
    return epochs, lost


def test_without_etcd_both_stand_back(etcd: Etcd, gate: EpochGate) -> None:
    """Nobody gets the lock while etcd is away, not even the one who had it last; afterwards epochs go on growing."""
    lock = f"etcd:{etcd.url}"
    running = [Contender(lock, gate.url, name, ttl_s=TTL_S) for name in "ab"]
    try:
        running[0].wait_for("got", 2)
        etcd.kill()
        for contender in running:
            contender.wait_for("unsure", 3)
        got = [contender.count("got") for contender in running]
        time.sleep(2.0)
        assert [contender.count("got") for contender in running] == got
        etcd.start()
        for contender in running:
            contender.wait_for("got")
    finally:
        for contender in running:
            contender.kill()
    judge(running, gate.deeds)


def test_an_etcd_that_is_stopped(etcd: Etcd) -> None:
    """One that takes connections and says nothing is not waited for: unsure while the lease runs, lost after it."""

    async def act() -> None:
        lock = EtcdLock([etcd.url], ttl_s=2, timeout_s=0.5)
        first = await lock.acquire("a")
        assert first.is_done
        pause(etcd.process)
        try:
            began = time.monotonic()
            again = await lock.renew()
            assert time.monotonic() - began < 1.5
            assert again.is_done is None
            assert again.facts["epoch"] == first.facts["epoch"]
            await asyncio.sleep(2.5)
            assert (await lock.renew()).is_done is False
            assert (await EtcdLock([etcd.url], timeout_s=0.5).acquire("b")).is_done is None
        finally:
            etcd.process.send_signal(signal.SIGCONT)

    asyncio.run(act())


def test_a_login(etcd: Etcd) -> None:
    """With authentication on: the right password works, also after its token is over; without it nobody is let in."""
    for path, body in (
        ("/v3/auth/user/add", {"name": "root", "password": "r00t-password"}),
        ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
        ("/v3/auth/enable", {}),
    ):
        assert etcd.ask(path, dict(body)) == 200, path

    async def act() -> None:
        lock = EtcdLock(["http://127.0.0.1:9", etcd.url], ttl_s=5, login=Login("root", "r00t-password"))
        first = await lock.acquire("a")
        assert first.is_done, first
        lock._token = "made-up.7"
        assert (await lock.renew()).is_done
        assert lock._token != "made-up.7"
        for login in (Login(), Login("root", "wrong-password")):
            refused = await EtcdLock([etcd.url], login=login).acquire("b")
            assert refused.is_done is None
            assert "password" not in str(refused.says).replace("invalid user ID or password", "")
        assert (await lock.release()).is_done

    asyncio.run(act())


def test_a_key_that_was_taken_away(etcd: Etcd) -> None:
    """Deleted or written over by hand: the next renewal says that the lock is lost."""

    async def act() -> None:
        for path, more in (("/v3/kv/deleterange", {}), ("/v3/kv/put", {"value": "eA=="})):
            lock = EtcdLock([etcd.url], "k", ttl_s=5)
            assert (await lock.acquire("a")).is_done
            await call(place_of(etcd.url), "POST", path, {"key": "aw==", **more}, seconds=5.0)
            again = await lock.renew()
            assert again.is_done is False
            assert again.facts["lost"] is True
        held = await lock.acquire("a")
        assert held.is_done is False  # somebody's key without a lease: it is not ours to remove
        assert held.facts["holder"] == "somebody else"

    asyncio.run(act())
