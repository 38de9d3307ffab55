"""Follows guard while it works: what it prints and what it writes into its journal, each once and in its order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from plimsoll.demo.fleet import Guard
from plimsoll.demo.screen import Line, of_change, of_entry
from plimsoll.guard.act.journal_entry import CLOSED, OUTCOME, Entry
from plimsoll.guard.daemon.journal import read_journal

LOOK_S = 0.2


class Watch:
    """Of one guard. `say` gets every line that is worth one."""

    def __init__(self, guard: Guard, say: Callable[[Line], None]) -> None:
        self.changes: list[dict[str, Any]] = []
        self.entries: list[Entry] = []
        self._guard, self._say = guard, say
        self._read = 0

    async def run(self) -> None:
        """For ever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Take what is new."""
        lines = [*self._printed(), *self._written()]
        for line in sorted(lines, key=lambda one: one.at):
            self._say(line)

    def _printed(self) -> list[Line]:
        try:
            with self._guard.said.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        new = [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]
        self.changes += new
        return [line for one in new if (line := of_change(one)) is not None]

    def _written(self) -> list[Line]:
        if not self._guard.journal.exists():
            return []
        last = self.entries[-1].number if self.entries else 0
        new = [one for one in read_journal(self._guard.journal).entries if one.number > last]
        self.entries += new
        return [line for one in new if (line := of_entry(one)) is not None]

    async def until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait for something; whether it came in time."""
        end_s = asyncio.get_running_loop().time() + within_s
        while True:
            self.look()
            if holds():
                return True
            if asyncio.get_running_loop().time() >= end_s or not self._guard.is_running:
                return False
            await asyncio.sleep(LOOK_S)

    def ends(self, grade: str, engine: str = "", since: int = 0) -> list[str]:
        """How actions of this rung ended, after the entry of that number."""
        mine = [one for one in self.entries if one.kind == CLOSED and one.number > since and one.fields.get("grade") == grade]
        return [str(one.fields.get("end")) for one in mine if not engine or one.engine == engine]

    def did(self, step: str, engine: str = "", since: int = 0) -> Entry | None:
        """The last time that this step was done."""
        mine = [one for one in self.entries if one.number > since and one.kind == OUTCOME and one.step == step]
        done = [one for one in mine if one.fields.get("done") and (not engine or one.engine == engine)]
        return done[-1] if done else None

    @property
    def last(self) -> int:
        """The number of the last entry."""
        return self.entries[-1].number if self.entries else 0
