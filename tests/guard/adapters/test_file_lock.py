"""The lock in a file: one holder among real processes, an epoch that survives whatever ends them, and odd files."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from pathlib import Path

import pytest

from lab.guard.contenders import Contender, judge
from lab.guard.epoch_gate import open_gate
from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.adapters.file_lock import SLOT, FileLock, _write
from tests.each import in_loop


async def acquire(path: Path, owner: str = "a") -> tuple[FileLock, Outcome]:
    """One guard's hand, and what came of its try."""
    lock = FileLock(path)
    return lock, await lock.acquire(owner)


@in_loop
async def test_one_holder_and_a_growing_epoch_also_where_the_file_was_lost(tmp_path: Path) -> None:
    """A second one is told who has it; each counts one on, and from what the gates have seen; no epoch is not believed."""
    path = tmp_path / "folder" / "lock"
    first, taken = await acquire(path, "guard on host-1")
    assert (taken.is_done, taken.facts) == (True, {"epoch": 1})
    second, refused = await acquire(path, "b")
    assert (refused.is_done, refused.message) == (False, "the lock is held by guard on host-1")
    assert (await first.acquire("guard on host-1")).facts == {"epoch": 1}
    assert (await first.renew()).is_done
    assert (await second.renew()).is_done is False
    assert (await first.release()).is_done
    assert (await first.release()).is_done
    assert (await first.renew()).is_done is False
    assert (await second.acquire("b")).facts == {"epoch": 2}
    assert (await second.release()).is_done
    assert (await second.acquire("b")).facts == {"epoch": 3}
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(one.name for one in path.parent.iterdir()) == ["lock"]
    await second.release()
    lock = FileLock(tmp_path / "lock")
    for seen, epoch in ((7, 8), (3, 9), (2**70, 10), (-1, 11)):
        lock.above = functools.partial(int, seen)
        assert (await lock.acquire("a")).facts == {"epoch": epoch}
        await lock.release()


@in_loop
async def test_the_count_survives_a_torn_write(tmp_path: Path) -> None:
    """Cut or changed anywhere in the newer half, the older one still counts; with neither, nobody gets the lock."""
    path = tmp_path / "lock"
    for _ in range(3):
        await (await acquire(path))[0].release()
    whole = path.read_bytes()
    newer = 1  # epoch 3 lies in the second half
    for at in (newer * SLOT, newer * SLOT + 5, newer * SLOT + 20):
        path.write_bytes(whole[:at] + b"\0" * (len(whole) - at))
        lock, taken = await acquire(path)
        assert taken.facts == {"epoch": 3}
        await lock.release()
    path.write_bytes(b"\0" * len(whole))
    lock, refused = await acquire(path)
    assert refused.is_done is None
    assert "damaged" in refused.message
    path.write_bytes(b"")
    lock, taken = await acquire(path)
    assert taken.facts == {"epoch": 1}
    await lock.release()


@in_loop
async def test_a_file_that_is_replaced_or_cannot_be_a_lock(tmp_path: Path) -> None:
    """The holder is told at its next renewal; a folder, a pipe, a link, no place: unsure, with a sentence, and no waiting."""
    path = tmp_path / "lock"
    lock, _ = await acquire(path)
    path.unlink()
    other, taken = await acquire(path)
    assert taken.is_done
    lost = await lock.renew()
    assert (lost.is_done, lost.facts) == (False, {"lost": True})
    assert (await other.renew()).is_done
    file = os.open(path, os.O_RDWR)
    _write(file, 2, "another", 0)
    os.close(file)
    assert (await other.renew()).is_done is False
    path.unlink()
    assert (await acquire(path))[1].facts == {"epoch": 1}
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("folder", "pipe", "link", "link/below"):
        refused = (await acquire(tmp_path / name))[1]
        assert refused.is_done is None
        assert "cannot be used" in refused.message


@in_loop
async def test_a_disk_that_hangs(tmp_path: Path) -> None:
    """It is not waited for: unsure within the time, and so is everything after it until the disk answers."""
    path, goes_on = tmp_path / "lock", threading.Event()

    class Slow(FileLock):
        def _acquire(self, owner: str, given_up: threading.Event) -> Outcome:
            goes_on.wait()
            return super()._acquire(owner, given_up)

    lock = Slow(path, timeout_s=0.1)
    assert (await lock.acquire("a")).is_done is None
    assert (await lock.release()).is_done is None
    goes_on.set()
    while lock._is_busy:
        await asyncio.sleep(0.01)
    assert (await lock.renew()).is_done is False  # what was given up is not held
    other, taken = await acquire(path)
    assert taken.is_done
    await other.release()


@pytest.mark.real
def test_processes_that_are_stopped_and_killed(tmp_path: Path) -> None:
    """A killed holder gives it up at once; a stopped one keeps it, and nobody else gets it; epochs are never given twice."""
    names = iter("abcdefgh")
    with open_gate() as gate:
        running = [Contender(f"file:{tmp_path / 'lock'}", gate.url, next(names), hold_s=0.2) for _ in range(2)]
        everybody = list(running)
        try:
            for _ in range(3):
                victim, other = running
                victim.wait_for("got")
                victim.stop()
                while not victim.holds:
                    victim.wake()
                    time.sleep(0.03)
                    victim.stop()
                before = other.count("got")
                other.wait_for("waits", 10)
                assert other.count("got") == before
                victim.kill()
                other.wait_for("got")
                running = [other, Contender(f"file:{tmp_path / 'lock'}", gate.url, next(names), hold_s=0.2)]
                everybody.append(running[1])
        finally:
            for contender in running:
                contender.kill()
        judge(everybody, gate.deeds)
        assert all(deed.was_taken for deed in gate.deeds)
