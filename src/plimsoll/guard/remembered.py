"""What guard knows of earlier days: switches, restarts and how actions ended, read from the entries that the journal keeps."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.domain.journal_entry import CLOSED, RESTART, SWITCH, Entry
from plimsoll.guard.budget import Restart
from plimsoll.guard.decide import Switches
from plimsoll.guard.grades import Grade
from plimsoll.guard.steps import End

PAUSE, RUNGS = "pause", "rung-"


def switches_of(entries: Iterable[Entry]) -> Switches:
    """What people have switched off, and not on again."""
    last = {(one.engine, one.step): bool(one.fields.get("on")) for one in entries if one.kind == SWITCH}
    off = [key for key, is_on in last.items() if is_on]
    rungs = frozenset(grade for grade in Grade for _, name in off if name == f"{RUNGS}{grade}")
    return Switches(("", PAUSE) in off, frozenset(engine for engine, name in off if engine and name == PAUSE), rungs)


def restarts_of(entries: Iterable[Entry]) -> list[Restart]:
    """Everybody's. An action of ours counts once, whoever went on with it, and not at all where nothing was stopped."""
    found: dict[str, Restart] = {}
    for number, entry in enumerate(entries):
        key = entry.action or f"#{number}"
        if entry.kind == RESTART:
            found[key] = Restart(entry.at, entry.engine, bool(entry.fields.get("own", True)))
        elif entry.kind == CLOSED and entry.fields.get("end") == End.UNDONE:
            found.pop(key, None)
    return list(found.values())


def last_ends_of(entries: Iterable[Entry]) -> dict[str, tuple[str, str]]:
    """How the last restart of each engine ended, unless somebody has resumed it since."""
    found: dict[str, tuple[str, str]] = {}
    for entry in entries:
        if entry.kind == CLOSED and entry.fields.get("grade") == Grade.RESTART:
            found[entry.engine] = (str(entry.fields.get("kind", "")), str(entry.fields.get("end", "")))
        elif entry.kind == SWITCH and entry.step == PAUSE and not entry.fields.get("on"):
            found = {} if not entry.engine else {name: end for name, end in found.items() if name != entry.engine}
    return found
