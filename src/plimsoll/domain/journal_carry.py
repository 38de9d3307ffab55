"""What of a journal is still needed: open actions, what budgets count, how restarts ended, the switches. No clock of its own.

It goes into the next file when a file is full, and it is what a guard that starts again begins with.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from plimsoll.domain.journal_entry import BEGUN, CLOSED, OPENED, RESTART, SEEN, SWITCH, Entry

WINDOW_S = 2 * 86_400.0  # the longest budget is a day's; a second one, so that no edge is missed
COUNTED = frozenset((OPENED, CLOSED, RESTART))
ENTRIES_PER_ACTION = 1_000  # the first, and the newest of the rest
ACTIONS_MAX = 1_000
COUNTED_MAX = 20_000
SWITCHES_MAX = 2_000  # of each the last on and the last off
DECIDING_MAX = 10_000
SEEN_MAX = 10_000
DECIDING = ("done", "failed", "held")
"""How a restart ends that says something of the next one."""


def _put(kept: OrderedDict[Any, Entry], key: str | tuple[str | bool, ...], entry: Entry, most: int) -> None:
    """The newest of its key; the one that was longest not renewed goes when there are too many."""
    kept[key] = entry
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


class Carry:
    """Takes the entries in order, and knows which of them are still needed."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, deque[Entry]] = OrderedDict()
        self._first: dict[str, Entry] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()  # so that a late entry does not open an action again
        self._counted: deque[Entry] = deque(maxlen=COUNTED_MAX)
        self._switches: OrderedDict[tuple[str, str, bool], Entry] = OrderedDict()
        self._deciding: OrderedDict[tuple[str, str, str], Entry] = OrderedDict()  # by engine, reason and end
        self._seen: OrderedDict[str, Entry] = OrderedDict()  # by engine

    def note(self, entry: Entry) -> None:
        """One more."""
        if entry.kind == BEGUN:
            return
        if entry.kind in COUNTED:
            self._counted.append(entry)
        if entry.kind == SWITCH:  # that one was switched off also ends other things: a later on does not undo that
            _put(self._switches, (entry.engine, entry.step, bool(entry.fields.get("on"))), entry, SWITCHES_MAX)
        end = str(entry.fields.get("end", ""))
        if entry.kind == CLOSED and entry.fields.get("grade") == "restart" and end in DECIDING:
            _put(self._deciding, (entry.engine, str(entry.fields.get("kind", "")), end), entry, DECIDING_MAX)
        if entry.kind == SEEN or (entry.kind == RESTART and "started" in entry.fields):
            _put(self._seen, entry.engine, entry, SEEN_MAX)
        if entry.kind == CLOSED and entry.action:
            self._close(entry.action)
        elif entry.action and entry.action not in self._closed:
            self._first.setdefault(entry.action, entry)
            self._open.setdefault(entry.action, deque(maxlen=ENTRIES_PER_ACTION)).append(entry)
            if len(self._open) > ACTIONS_MAX:
                self._close(next(iter(self._open)))

    def entries(self, now: float) -> list[Entry]:
        """All that is needed at this time, in the order in which it was first written."""
        kept = [entry for entry in self._counted if now - entry.at < WINDOW_S]
        kept += [*self._first.values(), *(entry for entries in self._open.values() for entry in entries)]
        kept += [*self._switches.values(), *self._deciding.values(), *self._seen.values()]
        return [entry for _, entry in sorted({entry.first_number: entry for entry in kept}.items())]

    def _close(self, action: str) -> None:
        self._open.pop(action, None)
        self._first.pop(action, None)
        self._closed[action] = None
        if len(self._closed) > COUNTED_MAX:
            self._closed.popitem(last=False)
