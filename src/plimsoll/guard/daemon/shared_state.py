"""State that must outlive guard's node: pauses, budgets, approvals and open actions, kept small beside the Lease.

It consists of journal entries in an annotation of the Lease. A guard that starts takes over all of them; a running one takes
over what others switched, restarted and ended. A separate annotation, which kubectl can set, pauses every guard of the Lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from plimsoll.guard.act.journal_entry import APPROVAL, CLOSED, OPENED, RESTART, SWITCH, Entry, needed
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.act.steps import Step
from plimsoll.guard.adapters.locks import LeaseLock
from plimsoll.guard.daemon.journal import Journal
from plimsoll.redaction import plain

LOOK_EVERY_S, SAVE_EVERY_S = 5.0, 1.0
MOST_LETTERS = 128 << 10  # the annotations of an object may have 256 KiB together
MOST_ENTRIES = 2_000
TEXT_MAX = 300  # letters of one text: whole sentences stay in the journal itself
ORPHAN_S = 7_200.0  # an action that only waited and was never closed is abandoned after this
_OF_OTHERS = frozenset({SWITCH, RESTART, CLOSED, APPROVAL})
"""What a guard that runs takes up of another; an open action of a guard that lives is its own."""
_Row = tuple[Annotated[float, msgspec.Meta(gt=0, lt=1e11)], str, str, str, str, dict[str, Any]]
_QUIET = frozenset({"probation", "hold", "unshed", "unlock"})


def _short(text: str) -> str:
    return text[:TEXT_MAX]


def written(entries: Sequence[Entry], now: float) -> str:
    """Returns the entries that the next guard needs, as a text of bounded size; drops the oldest that only count first."""
    kept = needed(entries, now)
    begun = {entry.action: entry.at for entry in kept if entry.kind == OPENED}
    is_open = {
        run.action for run in open_actions(kept) if str(run.step) not in _QUIET or now - begun[run.action] < ORPHAN_S
    }  # fmt: skip
    kept = [one for one in kept if one.kind in _OF_OTHERS or one.action in is_open]
    rows = [[entry.at, entry.kind, entry.engine, entry.action, entry.step, plain(entry.fields, _short)] for entry in kept]
    while (text := json.dumps(rows, separators=(",", ":"))) and (len(text) > MOST_LETTERS or len(rows) > MOST_ENTRIES):
        del rows[: max(1, len(rows) // 10)]
    return text


def read_state(text: str) -> list[Entry]:
    """Returns the entries in such a text; leaves out anything else."""
    entries = []
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        for row in msgspec.json.decode(text[: 2 * MOST_LETTERS] or "[]", type=list[msgspec.Raw])[:MOST_ENTRIES]:
            with contextlib.suppress(msgspec.ValidationError):
                entries.append(Entry(0, *msgspec.json.decode(row, type=_Row)))
    return entries


def missing(local: Sequence[Entry], remote: Sequence[Entry], *, with_open: bool) -> list[Entry]:
    """Returns another guard's entries that this one lacks, in order. `with_open`: also of actions that are not over.

    Its shedding ends by itself. A probation is repeated: if that guard still lives, both come to the same end.
    """
    have = {(round(one.at, 3), one.kind, one.engine, one.action, one.step) for one in local}
    own = {one.action for one in local if one.kind == OPENED}
    switched: dict[tuple[str, str], float] = {}
    for one in local:
        if one.kind == SWITCH:
            switched[one.engine, one.step] = max(one.at, switched.get((one.engine, one.step), 0.0))
    quiet = {run.action for run in open_actions(remote) if str(run.step) in _QUIET and run.step is not Step.PROBATION}
    found = []
    for one in sorted(remote, key=lambda entry: entry.at):
        is_wanted = one.kind in _OF_OTHERS or (with_open and one.action not in own and one.action not in quiet)
        is_old = one.kind == SWITCH and one.at <= switched.get((one.engine, one.step), 0.0)
        if is_wanted and not is_old and (round(one.at, 3), one.kind, one.engine, one.action, one.step) not in have:
            found.append(one)
    return found


class SharedState:
    """Keeps a journal and the annotation of a Lease in step."""

    def __init__(self, journal: Journal, lock: LeaseLock, wall: Callable[[], float]) -> None:
        self._journal, self._lock, self._wall = journal, lock, wall
        self._saved = ""
        self.trouble = ""

    async def begin(self) -> None:
        """Takes over an earlier guard's entries, also those of open actions."""
        self.trouble = await self._lock.look()
        self.absorb(with_open=True)

    def absorb(self, *, with_open: bool = False) -> None:
        """Writes the Lease's entries, as last read, that the journal lacks into the journal."""
        remote = read_state(self._lock.state)
        if new := missing(self._journal.kept(), remote, with_open=with_open):
            for one in new:
                self._journal.append(
                    one.kind, engine=one.engine, action=one.action, step=one.step, fields=one.fields, at=one.at
                )  # fmt: skip

    async def save(self) -> str:
        """Writes the entries that the next guard needs to the Lease; returns why that failed, or ""."""
        text = written(self._journal.kept(), self._wall())
        if text != self._saved or self._lock.state != text:
            self.trouble = await self._lock.save(text)
            self._saved = "" if self.trouble else text
        return self.trouble

    async def run(self) -> None:
        """Reads the Lease and writes changes to it, for ever."""
        looked_s = -LOOK_EVERY_S
        while True:
            if time.monotonic() - looked_s >= LOOK_EVERY_S:
                looked_s = time.monotonic()
                self.trouble = await self._lock.look()
                if not self.trouble:
                    self.absorb()
            if not self.trouble:
                await self.save()
            await asyncio.sleep(SAVE_EVERY_S)
