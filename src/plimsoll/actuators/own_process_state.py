"""What guard must know again of a process that it started, after guard itself was killed: one small file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.actuators.journal import sync_folder
from plimsoll.domain.process_table import Mark

SCHEMA = "plimsoll.own-process/1"
MOST_BYTES = 1 << 20
MOST_KIN = 4096


class Started(NamedTuple):
    """One process that was started."""

    pid: int
    start_ticks: int
    session: int
    command: str  # a hash: the words may hold a secret
    boot: str
    asked: bool = False  # whether it was told to stop
    kin: tuple[Mark, ...] = ()  # all that it had started when it was last looked at
    leaders: tuple[Mark, ...] = ()  # those of them that made a session of their own: it outlives them
    cgroup: str = ""

    @property
    def mark(self) -> Mark:
        """The process for good."""
        return self.pid, self.start_ticks


def command_mark(command: Sequence[str]) -> str:
    """The same for the same words only."""
    return hashlib.sha256("\0".join(command).encode("utf-8", "surrogateescape")).hexdigest()


def read_state(path: Path) -> Started | None:
    """None where there is none; ValueError where it is damaged, OSError where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(data)
        if len(data) > MOST_BYTES or not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError
        pid, start, session = (_number(found[name]) for name in ("pid", "start_ticks", "session"))
        command, boot, cgroup = (_text(found[name]) for name in ("command", "boot", "cgroup"))
        kin, leaders = (_marks(found[name]) for name in ("kin", "leaders"))
        return Started(pid, start, session, command, boot, found["asked"] is True, kin, leaders, cgroup)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is damaged") from None


def write_state(path: Path, state: Started) -> None:
    """Whole or not at all, and on the disk before this returns; OSError where that cannot be done."""
    fields: dict[str, Any] = {"schema": SCHEMA, **state._asdict()}
    fields |= {"kin": state.kin[:MOST_KIN], "leaders": state.leaders[:MOST_KIN]}
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # a new file: never one that somebody else has open, or a link
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(fields).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def _number(found: object) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not 1 < found < 2**62:
        raise ValueError
    return found


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError
    return found


def _marks(found: Any) -> tuple[Mark, ...]:
    return tuple((_number(pid), _number(start)) for pid, start in found)
