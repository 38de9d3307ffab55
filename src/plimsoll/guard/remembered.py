"""What guard knows of earlier days: switches, restarts and how actions ended, read from the entries that the journal keeps."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.domain.journal_entry import CLOSED, RESTART, SEEN, SWITCH, Entry
from plimsoll.guard.budget import Restart
from plimsoll.guard.decide import LastEnd, Switches, reason_of
from plimsoll.guard.foreign import Known, Seen
from plimsoll.guard.grades import Grade
from plimsoll.guard.steps import End

PAUSE, RUNGS = "pause", "rung-"
DRAIN, UNDRAIN = "drain", "undrain"
"""In place of a condition: an engine that a person takes out, and one that was held and is put back."""
MOST_TIMES = 1_000  # restarts that one entry may stand for


def switches_of(entries: Iterable[Entry]) -> Switches:
    """What people have switched off, and not on again."""
    last = {(one.engine, one.step): bool(one.fields.get("on")) for one in entries if one.kind == SWITCH}
    off = [key for key, is_on in last.items() if is_on]
    rungs = frozenset(grade for grade in Grade for _, name in off if name == f"{RUNGS}{grade}")
    return Switches(("", PAUSE) in off, frozenset(engine for engine, name in off if engine and name == PAUSE), rungs)


def restarts_of(entries: Iterable[Entry]) -> list[Restart]:
    """Everybody's. An action of ours counts once, whoever went on with it, and not at all where nothing was stopped."""
    found: dict[str, list[Restart]] = {}
    for number, entry in enumerate(entries):
        key = entry.action or f"#{number}"
        if entry.kind == RESTART:
            found[key] = [Restart(entry.at, entry.engine, bool(entry.fields.get("own", True)))] * _times(entry)
        elif entry.kind == CLOSED and entry.fields.get("end") == End.UNDONE:
            found.pop(key, None)
    return [one for restarts in found.values() for one in restarts]


def _times(entry: Entry) -> int:
    """How many restarts an entry stands for: of somebody else's several may be found at once."""
    times = entry.fields.get("times", 1)
    return min(MOST_TIMES, max(1, times)) if isinstance(times, int) else 1


def last_ends_of(entries: Iterable[Entry]) -> dict[str, LastEnd]:
    """The engines that restarts did not mend.

    Only a restart that is done changes it, or somebody who resumes that engine: neither what was taken back, nor a drain by
    hand, nor the end of a pause of everything says that it is mended.
    """
    found: dict[str, LastEnd] = {}
    for entry in entries:
        if entry.kind == SWITCH and entry.step == PAUSE and not entry.fields.get("on"):
            found.pop(entry.engine, None)
        if entry.kind != CLOSED or entry.fields.get("grade") != Grade.RESTART:
            continue
        kind, end, before = str(entry.fields.get("kind", "")), entry.fields.get("end"), found.get(entry.engine)
        if kind == UNDRAIN:
            if end == End.DONE and before is not None:
                found[entry.engine] = before._replace(is_out=False)
        elif end == End.DONE and kind != DRAIN:
            found.pop(entry.engine, None)
        elif end in (End.FAILED, End.HELD):
            unmended = frozenset() if before is None else before.unmended
            is_held = end == End.HELD or (before is not None and before.end == End.HELD)
            found[entry.engine] = LastEnd(
                kind, str(End.HELD if is_held else End.FAILED), unmended | {reason_of(kind)},
                is_out=end == End.HELD or (before is not None and before.is_out),
            )  # fmt: skip
    return found


def known_of(entries: Iterable[Entry]) -> dict[str, Known]:
    """What was last known of each engine's processes, and how many restarts of our own came after that."""
    found: dict[str, Known] = {}
    own: dict[str, set[str]] = {}
    for entry in entries:
        fields = entry.fields
        if entry.kind == SEEN or (entry.kind == RESTART and "started" in fields):
            seen = Seen(_number(fields.get("started")), _count(fields.get("count")))
            found[entry.engine] = Known(seen, is_awaited=bool(fields.get("awaited")))
            own[entry.engine] = set()
        elif entry.kind == RESTART and entry.action:
            own.setdefault(entry.engine, set()).add(entry.action)
        elif entry.kind == CLOSED and fields.get("end") == End.UNDONE:
            own.get(entry.engine, set()).discard(entry.action)
    return {name: found.get(name, Known())._replace(own=len(own.get(name, ()))) for name in {*found, *own}}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
