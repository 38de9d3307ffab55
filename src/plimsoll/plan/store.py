"""Reads a real start, and stores the corrections from it: one JSON file of numbers in the user's state folder (docs/learn.md).

Two processes that write at once wait for each other. A file that cannot be understood is never written over: it may be a
newer plimsoll's, or the only copy of something.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.models.safetensors import open_plain, replace_file
from plimsoll.net.inputs import unpacked
from plimsoll.plan.learned import KEYS_MAX, Correction, encoded
from plimsoll.plan.read import corrections_file, read_corrections
from plimsoll.vllm.log_lines import Measured, measured_of, needles

LOCK_SECONDS = 10.0
_LOCK_PAUSE = 0.05


def store(key: str, correction: Correction, path: Path | None = None, *, wait_seconds: float = LOCK_SECONDS) -> None:
    """Adds these starts to those stored under the key."""
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target, wait_seconds):
            known = read_corrections(target)
            earlier = known.pop(key, None)
            known[key] = correction if earlier is None else earlier.joined(correction)
            if len(known) > KEYS_MAX:
                raise BadInput(f"{target}: full with {KEYS_MAX:,} corrections; plimsoll plan --forget empties it")
            replace_file(target, encoded(known))
    except OSError as error:
        raise WorldFailed(f"{target}: cannot be written: {error.strerror or error}") from None


def forget(path: Path | None = None, *, wait_seconds: float = LOCK_SECONDS) -> int:
    """Drops all corrections and returns how many there were."""
    target = _target(path)
    try:
        if not target.exists():
            return 0
        with _locked(target, wait_seconds):
            known = read_corrections(target)
            target.unlink(missing_ok=True)
            return len(known)
    except OSError as error:
        raise WorldFailed(f"{target}: cannot be removed: {error.strerror or error}") from None


def _target(path: Path | None) -> Path:
    return Path(os.path.realpath(path or corrections_file()))  # a link stays a link: its target is replaced


@contextmanager
def _locked(target: Path, wait_seconds: float) -> Iterator[None]:
    """Holds the file's lock. The lock is a file of its own, because the other one is replaced; it is never removed."""
    descriptor = os.open(target.with_name(target.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimedOut(f"{target}: another plimsoll has been writing for {wait_seconds:g} s") from None
                time.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


# A start is read from its log, plain or packed. Only numbers leave this module; arguments, paths and names in it are skipped.
LOG_MAX_BYTES = 256 << 20  # unpacked
LINE_MAX_BYTES = 64 << 10
BLOCK_BYTES = 1 << 20


def read_start(path: Path | str) -> Measured:
    """The figures of a start; BadInput in one line where the file holds none, TooLarge past 256 MiB."""
    path = Path(path)
    with open_plain(path) as file:
        try:
            stream = unpacked(str(path), file, whole=True)
            head = stream.read(LINE_MAX_BYTES)
            found = measured_of(_lines(head, stream, path))
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    if not found.has_memory:
        raise BadInput(
            f"{path}: no memory figures of a vLLM start in it; wanted is the log from the first line "
            '("Model loading took", "Available KV cache memory"), best with VLLM_LOGGING_LEVEL=DEBUG'
        )
    return found


def _lines(head: bytes, stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yields the lines that may hold a figure, an endless one in pieces. Most of a log is skipped a block at a time."""
    read, rest = len(head), head
    while more := stream.read(BLOCK_BYTES):
        read += len(more)
        if read > LOG_MAX_BYTES:
            raise TooLarge(f"{path}: more than {LOG_MAX_BYTES >> 20} MiB; give the part that holds the start")
        block = rest + more
        end = block.rfind(b"\n") + 1 or len(block)
        rest = block[end:]
        yield from _telling(block[:end])
    yield from _telling(rest)


def _telling(block: bytes) -> Iterator[bytes]:
    known = needles()
    if any(needle in block for needle in known):
        for line in block.split(b"\n"):
            if any(needle in line for needle in known):
                yield from (line[at : at + LINE_MAX_BYTES] for at in range(0, len(line), LINE_MAX_BYTES))
