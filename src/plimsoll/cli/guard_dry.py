"""What a guard that only says what it would do has in place of journal and lock: it reads the one, and takes neither."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plimsoll.actuators.journal_read import ABSENT, DAMAGED, TORN, Reading, read_journal
from plimsoll.domain.journal_carry import Carry
from plimsoll.domain.journal_entry import SWITCH, Entry
from plimsoll.domain.outcome import Outcome, done, failed
from plimsoll.guard.remembered import PAUSE

READ_EVERY_S = 10.0


class DryBook:
    """The journal that a guard with --act would write: read now and then, and what is new stays in memory."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        self._path, self._wall = path, wall
        self._carry, self._number = Carry(), 0
        self._signature: tuple[int, ...] | None = None
        self._next_s = 0.0
        self.trouble = ""  # why what was before is not known

    async def refresh(self, now_s: float) -> None:
        """Read it again, where it has changed; a guard that acts may be writing it."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + READ_EVERY_S
        signature = _signature(self._path)
        if signature != self._signature:
            self._signature = signature
            self._take(await asyncio.to_thread(read_journal, self._path))

    def _take(self, reading: Reading) -> None:
        """What was noted here before is in it by now, or will be."""
        self._carry, self._number = Carry(), 0
        for entry in reading.entries:
            self._carry.note(entry)
            self._number = entry.number
        kinds = {one.kind for one in reading.wrong}
        self.trouble = next((one.says for one in reading.wrong if one.kind not in (ABSENT, TORN)), "")
        if DAMAGED in kinds:  # as a guard that acts would do
            self.append(SWITCH, step=PAUSE, fields={"on": True})

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        """Only here."""
        self._number += 1
        entry = Entry(self._number, self._wall(), kind, engine, action, step, fields or {})
        self._carry.note(entry)
        return entry

    def kept(self) -> list[Entry]:
        """What is still needed of it."""
        return self._carry.entries(self._wall())


class NoLock:
    """Nobody takes it."""

    said = "no lock"

    async def acquire(self, owner: str) -> Outcome:
        """Never."""
        return failed(f"nothing is done without --act, so nobody takes the lock for {owner}")

    async def renew(self) -> Outcome:
        """There is none."""
        return failed("there is no lock")

    async def release(self) -> Outcome:
        """There is none."""
        return done("there is no lock")


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  (the figures alone)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
