"""The fleet's lock in a file: `flock` says who holds it, and a counter in the file is the epoch.

For guards on one host; or on several with a shared disk whose locks work between hosts, as those of NFS version 4 do. Many FUSE
file systems, object stores and CIFS mounts lock on each host alone: two guards would both believe that they hold it. `renew`
reads the counter again and so notices that another guard has raised it, but only afterwards: there, use etcd or Kubernetes.

The kernel keeps a lock as long as its holder lives. A holder that was killed gives it up at once. One that is stopped (SIGSTOP)
keeps it, however long: then nobody acts, and no epoch grows. The file holds the counter twice, each with its checksum, and
the older one is overwritten: a crash in the middle leaves the other. If the file is lost, as in a container without a volume,
the counter would begin at one again, and gates that saw greater epochs would refuse every action: so each epoch is also
greater than the greatest that the gates report (`above`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.locks import EPOCH_MAX, TIMEOUT_S, is_epoch, shown
from plimsoll.guard.adapters.run_command import in_thread
from plimsoll.guard.daemon.journal import sync_folder

SLOT = 2048
_LOST = (errno.EWOULDBLOCK, errno.ENOENT, errno.EIO, errno.ESTALE, errno.ENOLCK)
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class FileLockConfig(key.ConfigTable):
    """[lock] with file."""

    path: str = key.path(
        "for guards on one host; without [lock]: fleet.lock beside the journal", key="file", example='"/run/fleet.lock"'
    )

    def build(self) -> FileLock:
        return FileLock(Path(self.path))


class _Slot(msgspec.Struct, order=True):
    """One of the two copies of the counter."""

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=EPOCH_MAX)]
    owner: str
    slot: int = 0


class FileLock:
    """One guard's handle on the lock. Its methods end within `timeout_s`, even if the disk does not answer."""

    def __init__(self, path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path.absolute()
        self._timeout_s = timeout_s
        self._file = -1
        self._epoch = 0
        self.above: Callable[[], int] = lambda: 0  # the greatest epoch that a gate of the fleet has seen
        self._is_busy = False  # a worker waits for the disk
        self._one_at_a_time = asyncio.Lock()
        self.label = f"file {shown(path)}"

    async def acquire(self, owner: str) -> Outcome:
        """Takes the lock: done with its epoch, failed if somebody else has it, unsure if the file cannot be used."""
        return await self._in_time(lambda given_up: self._acquire(owner, given_up))

    async def renew(self) -> Outcome:
        """Checks that this guard still holds the lock; a file lock never expires."""
        return await self._in_time(lambda _: self._renew())

    async def release(self) -> Outcome:
        return await self._in_time(lambda _: self._release())

    async def _in_time(self, work: Callable[[threading.Event], Outcome]) -> Outcome:
        """Runs the work in a thread of its own and stops waiting after `timeout_s`: a hanging disk cannot be interrupted."""
        given_up = threading.Event()

        def run() -> Outcome:
            try:
                return work(given_up)
            except OSError as problem:
                return unsure(f"the lock's file cannot be used: {self._path}: {problem.strerror or problem}")
            finally:
                self._is_busy = False

        async with self._one_at_a_time:
            if self._is_busy:
                return unsure(f"the lock's file does not answer: {self._path}")
            self._is_busy = True
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await in_thread(run)
            except TimeoutError:
                return unsure(f"the lock's file did not answer within {self._timeout_s:g} s: {self._path}")
            finally:
                given_up.set()

    def _acquire(self, owner: str, given_up: threading.Event) -> Outcome:
        if self._file >= 0:
            again = self._renew()
            if again.is_done:
                return again
        file = _open(self._path)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found = _read(file)
                holder = shown(found.owner) if found else "another guard"
                return failed(f"the lock is held by {holder}", holder=holder)
            if not os.path.samestat(os.fstat(file), self._path.stat(follow_symlinks=False)):
                return failed("the lock's file was just replaced: try again")
            found = _read(file)
            if found is None:
                return unsure(f"{self._path} is no lock's file, or was damaged: which epoch comes next, nobody can tell")
            seen = self.above()
            epoch = max(found.epoch, seen if is_epoch(seen) else 0) + 1
            _write(file, epoch, owner, 1 - found.slot)
            if given_up.is_set():
                return unsure("it took too long")  # the caller has been told so
            self._file, file, self._epoch = file, -1, epoch
            return self._renew()
        finally:
            if file >= 0:
                os.close(file)

    def _renew(self) -> Outcome:
        if self._file < 0:
            return failed("the lock is not ours")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a lock that NFS has lost says so here
            is_there = os.path.samestat(os.fstat(self._file), self._path.stat(follow_symlinks=False))
        except OSError as problem:
            if problem.errno not in _LOST:
                raise
            is_there = False
        found = _read(self._file) if is_there else None
        if found is None or found.epoch != self._epoch:
            self._close()
            return failed("the lock is not ours any more: its file was replaced, or another guard has counted on", lost=True)
        return done(f"the lock is ours (epoch {self._epoch})", epoch=self._epoch)

    def _release(self) -> Outcome:
        if self._file < 0:
            return done("the lock was not ours")
        self._close()
        return done("the lock is given up", epoch=self._epoch)

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)  # no child of guard inherits it


def _open(path: Path) -> int:
    """Opens the lock's file; creates a complete one if there is none."""
    for _ in range(3):
        try:
            file = os.open(path, _FLAGS)
        except FileNotFoundError:
            _make(path)
            continue
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    raise OSError(errno.EAGAIN, "it comes and goes")


def _make(path: Path) -> None:
    """Creates a file that counts from zero; it appears complete or not at all, and never replaces another."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    file = os.open(draft, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write(file, 0, "", 0)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(file)
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def _write(file: int, epoch: int, owner: str, slot: int) -> None:
    value = {"epoch": epoch, "owner": shown(owner) if owner else "", "pid": os.getpid(), "since": round(time.time(), 3)}
    text = json.dumps(value)
    line = f"{zlib.crc32(text.encode()):08x} {text}".encode().ljust(SLOT - 1) + b"\n"
    if os.pwrite(file, line, slot * SLOT) != SLOT:
        raise OSError(errno.ENOSPC, "there is no room")
    os.fsync(file)


def _read(file: int) -> _Slot | None:
    """Returns the newer of the two copies with a right checksum; zero for an empty file; None if neither is right."""
    data = os.pread(file, 2 * SLOT, 0)
    if not data:
        return _Slot(0, "", 1)
    found = []
    for slot in (0, 1):
        checksum, _, text = data[slot * SLOT : (slot + 1) * SLOT].rstrip().partition(b" ")
        if checksum == f"{zlib.crc32(text):08x}".encode():
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.structs.replace(msgspec.json.decode(text, type=_Slot), slot=slot))
    return max(found, default=None)
