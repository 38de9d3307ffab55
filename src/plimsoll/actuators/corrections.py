"""Writes down what real starts taught: one JSON file of numbers in the user's state folder, whole or not at all.

Two that write at once wait for each other. A file that cannot be understood is never written over: it may be a newer
plimsoll's, or the only copy of something.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plimsoll.domain.correction import FILE_MAX_BYTES, KEYS_MAX, Correction, corrections_file, decoded, encoded
from plimsoll.errors import BadInput, TimedOut, WorldFailed

LOCK_SECONDS = 10.0
_LOCK_PAUSE = 0.05


def store(key: str, correction: Correction, path: Path | None = None, *, wait_seconds: float = LOCK_SECONDS) -> None:
    """Add these starts to what is known under the key."""
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target, wait_seconds):
            known = _known(target)
            earlier = known.pop(key, None)
            known[key] = correction if earlier is None else earlier.joined(correction)
            if len(known) > KEYS_MAX:
                raise BadInput(f"{target}: full with {KEYS_MAX:,} corrections; plimsoll plan --forget empties it")
            _write(target, encoded(known))
    except OSError as error:
        raise WorldFailed(f"{target}: cannot be written: {error.strerror or error}") from None


def forget(path: Path | None = None, *, wait_seconds: float = LOCK_SECONDS) -> int:
    """Drop all that was learned; how many corrections that were."""
    target = _target(path)
    try:
        if not target.exists():
            return 0
        with _locked(target, wait_seconds):
            known = _known(target)
            target.unlink(missing_ok=True)
            return len(known)
    except OSError as error:
        raise WorldFailed(f"{target}: cannot be removed: {error.strerror or error}") from None


def _target(path: Path | None) -> Path:
    if path is None:
        path = Path(corrections_file(os.environ, os.path.expanduser("~")))  # noqa: PTH111  (Path.home may raise)
    return Path(os.path.realpath(path))  # a link stays a link: what it leads to is replaced


def _known(target: Path) -> dict[str, Correction]:
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BadInput(f"{target}: not a regular file")
        return decoded(file.read(FILE_MAX_BYTES + 1), str(target))


def _write(target: Path, text: str) -> None:
    import tempfile

    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".corrections-", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(target: Path, wait_seconds: float) -> Iterator[None]:
    """Alone with the file. The lock is a file of its own, because the other one is replaced; it is never removed."""
    import fcntl
    import time

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
