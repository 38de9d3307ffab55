"""The log of a process that guard started: a file that the process itself appends to, so that it needs nobody to read it.

A pipe with a reader in guard would cost the process its log, and soon its life, whenever guard dies. So the file is kept small
by copying it and cutting it to nothing ("copytruncate"). What the process writes between the last look and the cut is lost: as
a rule that is a few microseconds, on busy cores a few milliseconds, once for every 64 MiB. Everything else is kept.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

LARGEST_BYTES = 64 << 20
KEPT = 3
BLOCK_BYTES = 1 << 20
NEW_LIFE = b"plimsoll: the engine is started anew\n"


def open_log(path: Path) -> int:
    """A descriptor to append by, readable by this user alone; OSError where it is no plain file or cannot be had."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(22, "it is no plain file")
        os.fchmod(descriptor, 0o600)
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_for_new_life(path: Path) -> int:
    """As `open_log`; where an earlier process has written to it, with a line after that."""
    descriptor = open_log(path)
    with contextlib.suppress(OSError):  # on a full disk it is started all the same
        if os.fstat(descriptor).st_size:
            os.write(descriptor, b"\n" + NEW_LIFE)
    return descriptor


def rotate(path: Path, largest_bytes: int = LARGEST_BYTES, kept: int = KEPT) -> bool:
    """Keep a log that has outgrown its size as NAME.1, the older ones as NAME.2 and so on; whether it had.

    OSError where there is no room: then the log itself is as it was.
    """
    try:
        source = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        what = os.fstat(source)
        if not stat.S_ISREG(what.st_mode) or what.st_size < largest_bytes:
            return False
        _copy_and_cut(source, path, kept)
    finally:
        os.close(source)
    return True


def _copy_and_cut(source: int, path: Path, kept: int) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    target = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        at = _copy(source, target, 0)
        for number in range(kept - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(f"{path.name}.{number}").replace(path.with_name(f"{path.name}.{number + 1}"))
        fresh.replace(path.with_name(f"{path.name}.1"))
        _copy(source, target, at)  # what has come meanwhile
        os.ftruncate(source, 0)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    finally:
        os.close(target)


def _copy(source: int, target: int, at: int) -> int:
    """From there to the end; where the end was."""
    while block := os.pread(source, BLOCK_BYTES, at):
        at += len(block)
        while block:
            block = block[os.write(target, block) :]
    return at
