"""Guards that contend for one lock, as real processes that a test may stop, wake and kill at any moment.

    python -m lab.guard.contenders --lock etcd:http://127.0.0.1:2379 --gate http://127.0.0.1:8000 --owner a --rounds 100

Each round: take the lock, do a deed at the gate with its epoch, hold the lock for a while, do another deed WITHOUT asking the
lock's service (so that one who was paused in between is late, and only the gate can stop him), renew, give up. Every event is a
line of JSON on standard output: got, deed, refused, renewing, renewed, lost, released, waits (somebody else has it), unsure
(nobody can be asked), each with the epoch. `Contender` starts such a process and collects its lines.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from lab.guard.epoch_gate import Deed
from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.adapters.file_lock import FileLock
from plimsoll.guard.adapters.locks import EtcdLock, EtcdLockConfig, LeaseLock

ROOT = Path(__file__).resolve().parents[2]


class Lock(Protocol):
    """What guard asks of a fleet's lock."""

    async def acquire(self, owner: str) -> Outcome:
        """Take it."""

    async def renew(self) -> Outcome:
        """Prolong it."""

    async def release(self) -> Outcome:
        """Give it up."""


def lock_of(word: str, ttl_s: int, timeout_s: float) -> Lock:
    """etcd:URL[,URL...][#KEY], file:PATH, or lease:URL#FOLDER with a token, for a Lease named `guard` in `default`."""
    kind, _, rest = word.partition(":")
    place, _, name = rest.partition("#")
    if kind == "etcd":
        return EtcdLock(EtcdLockConfig(tuple(place.split(",")), name or "plimsoll/contenders", ttl_s), timeout_s=timeout_s)
    if kind == "lease":
        return LeaseLock("guard", "default", url=place, folder=name, ttl_s=ttl_s, timeout_s=timeout_s)
    assert kind == "file", word
    return FileLock(Path(rest), timeout_s=timeout_s)


def do_deed(gate: str, owner: str, epoch: int) -> int:
    """Ask the gate for a drain with this epoch; what it answers."""
    parts = urlsplit(gate)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request("POST", "/plimsoll/drain", json.dumps({"epoch": epoch, "lease_s": 1}), {"X-Owner": owner})
        return connection.getresponse().status
    finally:
        connection.close()


async def contend(lock: Lock, gate: str, owner: str, *, rounds: int, hold_s: float, tell: Callable[..., None]) -> None:
    """So many rounds in which the lock was ours."""
    done = 0
    while done < rounds:
        taken = await lock.acquire(owner)
        if not taken.is_done:
            tell("unsure" if taken.is_done is None else "waits", 0)
            await asyncio.sleep(0.02 + 0.05 * random.random())
            continue
        epoch = int(taken.facts["epoch"])
        tell("got", epoch)
        for pause_s in (hold_s, 0.0):
            status = do_deed(gate, owner, epoch)
            tell("deed" if status == 200 else "refused", epoch)
            await asyncio.sleep(pause_s * random.random())
        tell("renewing", epoch)
        renewed = await lock.renew()
        tell({True: "renewed", False: "lost", None: "unsure"}[renewed.is_done], epoch)
        if renewed.is_done:
            await lock.release()
            tell("released", epoch)
        done += 1
        await asyncio.sleep(0.01 * random.random())


def pause(pid: int) -> None:
    """SIGSTOP, and wait until every thread of it has stopped: the signal is not obeyed at once."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not all(_state(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.002)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(") ")[2][:1]


class Contender:
    """One of them in a process of its own. `events` grows while it runs."""

    def __init__(self, lock: str, gate: str, owner: str, *, rounds: int = 10**9, hold_s: float = 0.1, ttl_s: int = 2) -> None:
        words = ["--lock", lock, "--gate", gate, "--owner", owner, "--rounds", str(rounds), "--hold-s", str(hold_s)]
        self.owner = owner
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.guard.contenders", *words, "--ttl-s", str(ttl_s)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # the last one of a process that was killed may be cut
                self.events.append(json.loads(line))

    @property
    def holds(self) -> bool:
        """Whether it has the lock and will ask whether it still does: it has not begun to renew."""
        return bool(self.events) and self.events[-1]["event"] in ("got", "deed")

    def count(self, event: str) -> int:
        return sum(one["event"] == event for one in tuple(self.events))

    def wait_for(self, event: str, more: int = 1, seconds: float = 30.0) -> None:
        """Until it has said this so many times more."""
        wanted, deadline = self.count(event) + more, time.monotonic() + seconds
        while self.count(event) < wanted:
            assert time.monotonic() < deadline, f"{self.owner} did not say {event} within {seconds} s: {self.events[-5:]}"
            assert self.process.poll() is None or self._thread.is_alive(), f"{self.owner} has gone"
            time.sleep(0.005)

    def stop(self) -> None:
        """Pause it in mid-thought; what it said before has been heard when this returns."""
        pause(self.process.pid)
        time.sleep(0.05)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(10)


def judge(contenders: Sequence[Contender], deeds: Sequence[Deed]) -> list[int]:
    """No epoch had two holders, nobody's own went back, and the gate took none that was older than one before; all epochs."""
    holders: dict[int, str] = {}
    for contender in contenders:
        own = [one["epoch"] for one in contender.events if one["event"] == "got"]
        assert own == sorted(own), f"the epochs of {contender.owner} went back"
        for epoch in own:  # one whose release was not answered may find that it still has the lock, with the epoch it had
            assert holders.setdefault(epoch, contender.owner) == contender.owner, f"two holders with epoch {epoch}"
    taken = [deed.epoch for deed in deeds if deed.was_taken]
    assert taken == sorted(taken), "the gate took an old epoch"
    assert all(deed.was_taken or deed.epoch < deed.current for deed in deeds), "the gate refused one that was not old"
    assert all(holders.get(deed.epoch, deed.owner) == deed.owner for deed in deeds), "a deed with another's epoch"
    return sorted(holders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--lock", "--gate", "--owner"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--hold-s", type=float, default=0.1)
    parser.add_argument("--ttl-s", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=1.0)
    asked = parser.parse_args()

    def tell(event: str, epoch: int) -> None:
        line = {"owner": asked.owner, "event": event, "epoch": epoch, "at": round(time.monotonic(), 4)}
        print(json.dumps(line), flush=True)

    lock = lock_of(asked.lock, asked.ttl_s, asked.timeout_s)
    asyncio.run(contend(lock, asked.gate, asked.owner, rounds=asked.rounds, hold_s=asked.hold_s, tell=tell))


if __name__ == "__main__":
    main()
