"""One line of guard's journal: what it says, how it is written and how it is checked. No file here.

A line is one JSON object and its newline. Its last member, `sum`, is a checksum over the bytes before it and over the `sum` of
the line before, so that a changed byte, a missing line and lines in another order are noticed. It is no signature: whoever may
write the file may also write it anew. The sum is taken over the bytes as they are, so a line with members or kinds that this
version does not know is read, checked and kept like any other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.errors import printable
from plimsoll.redaction import REDACTED, hide_user_text, redact, redact_value, redact_words

SCHEMA = "plimsoll.journal/1"
LINE_MAX = 256 << 10  # no line of ours comes near; more is no journal
FIELDS_MAX = 32 << 10
TEXT_MAX = 4_000  # letters of one text
SEARCHED = 64 << 10  # letters that are looked through for secrets before a text is cut, so that none is cut in two
NAME_MAX = 500  # of an engine, an action, a step, a kind
DEEPEST = 6
ITEMS_MAX = 200
SEED = "0" * 16  # the sum before the first line of a file
_SUM = ',"sum":"'
_TAIL = len(_SUM) + len(SEED) + 2

# The kinds that the journal itself knows; others are kept as they are.
BEGUN = "begun"  # the first line of a file
OPENED = "opened"  # an action begins: it is open until it is closed
INTENT = "intent"  # written before a step is done
OUTCOME = "outcome"  # and after
CLOSED = "closed"  # the action is over
RESTART = "restart"  # an engine was restarted, by guard or by somebody else: budgets count these
SWITCH = "switch"  # `step` names it, `engine` the engine it is of (empty: all); the last one holds
NOTE = "note"
SEEN = "seen"  # which process of an engine answers, by its start; the last one holds


class Entry(NamedTuple):
    """One line. `engine`, `action` and `step` are empty where the entry is of none."""

    number: int  # one more than the line before, also from file to file
    at: float  # seconds since 1970
    kind: str
    engine: str = ""
    action: str = ""
    step: str = ""
    fields: Mapping[str, Any] = {}
    was: int = 0  # carried over from an earlier file, where it had this number
    more: Mapping[str, Any] = {}  # members that this version does not know

    @property
    def first_number(self) -> int:
        """The number it was first written with."""
        return self.was or self.number


_OWN = ("n", "t", "kind", "engine", "action", "step", "fields", "was", "sum")


def cleaned(entry: Entry) -> Entry:
    """The entry without secrets and users' texts, and of bounded size."""
    return entry._replace(
        kind=_name(entry.kind),
        engine=_name(entry.engine),
        action=_name(entry.action),
        step=_name(entry.step),
        fields=clean_fields(entry.fields),
    )


def clean_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What may be written of these: secrets and users' texts hidden, texts and lists cut."""
    shown = _clean("", dict(fields), DEEPEST)
    text = json.dumps(shown)
    if len(text) > FIELDS_MAX:
        shown, text = {"left_out": f"{len(text):,} bytes: too large"}, "{}"
    hidden = redact(text)  # once more as a text: some secrets are known by their neighbours only
    if hidden != text:
        try:
            shown = json.loads(hidden)
        except ValueError:
            shown = REDACTED
    return shown if isinstance(shown, dict) else {"left_out": REDACTED}


def encode(entry: Entry, previous: str) -> tuple[bytes, str]:
    """The line with its newline, and its sum."""
    members: dict[str, Any] = {"n": entry.number, "t": round(entry.at, 3), "kind": entry.kind}
    members |= {name: value for name in ("engine", "action", "step") if (value := getattr(entry, name))}
    members |= {"fields": dict(entry.fields)} if entry.fields else {}
    members |= {"was": entry.was} if entry.was else {}
    members |= {name: value for name, value in entry.more.items() if name not in _OWN}
    body = json.dumps(members, separators=(",", ":"), allow_nan=False)[:-1]  # ASCII: any terminal can show it
    found = _sum_of(body.encode(), previous)
    return f'{body}{_SUM}{found}"}}\n'.encode(), found


class LineReader:
    """Reads the lines of one file in order. After the first that is not right nothing can be believed."""

    def __init__(self) -> None:
        self.number = 0  # of the last good line; 0 before the first
        self.sum = SEED

    def read(self, line: bytes) -> Entry | str:
        """The entry of a line without its newline, or what is wrong with it."""
        body, tail = line[:-_TAIL], line[-_TAIL:]
        found = _sum_of(body, self.sum)
        if len(line) > LINE_MAX or tail != f'{_SUM}{found}"}}'.encode():
            return "its checksum is not right"
        entry = _entry_of(body + b"}")
        if entry is None:
            return "it is no entry"
        if self.number and entry.number != self.number + 1:
            return f"its number is {entry.number} and should be {self.number + 1}"
        self.number, self.sum = entry.number, found
        return entry


def _sum_of(body: bytes, previous: str) -> str:
    return hashlib.sha256(previous.encode() + b"\n" + body).hexdigest()[: len(SEED)]


def _entry_of(text: bytes) -> Entry | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    members: dict[str, Any] = {"n": 0, "t": None, "was": 0, "fields": {}, **found}
    number, at, was, fields = (members[name] for name in ("n", "t", "was", "fields"))
    kind, engine, action, step = (found.get(name, "") for name in ("kind", "engine", "action", "step"))
    is_time = isinstance(at, int | float) and not isinstance(at, bool) and -1e12 < at < 1e12
    is_text = all(isinstance(name, str) for name in (kind, engine, action, step))
    if not (is_time and is_text and isinstance(fields, dict) and _is_count(number) and number > 0 and _is_count(was)):
        return None
    more = {name: value for name, value in found.items() if name not in _OWN}
    return Entry(number, float(at), kind, engine, action, step, fields, was, more)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _name(text: str) -> str:
    return redact(printable(text[:SEARCHED]))[:NAME_MAX]


def _clean(name: str, value: object, depth: int) -> Any:
    if isinstance(value, str):
        return redact_value(name, hide_user_text(value[:SEARCHED]))[:TEXT_MAX]
    if isinstance(value, int) and abs(value) >= 2**63:
        return "left out: too large"
    if value is None or isinstance(value, bool | int | float):
        is_plain = not isinstance(value, float) or math.isfinite(value)
        return (value if is_plain else str(value)) if redact_value(name, str(value)) == str(value) else REDACTED
    if isinstance(value, Mapping):
        if depth == 0:
            return "left out: too deep"
        pairs = list(value.items())[:ITEMS_MAX]
        return {_name(str(key)): _clean(str(key)[:SEARCHED], one, depth - 1) for key, one in pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)[:ITEMS_MAX]
        if items and all(isinstance(one, str) for one in items):  # a command line: what follows --api-key is a key
            items = redact_words([one[:SEARCHED] for one in items])
        return [_clean(name, one, depth - 1) for one in items] if depth else "left out: too deep"
    return _clean(name, str(value), depth)


# What of a journal is still needed: open actions, what budgets count, how restarts ended, the switches. No clock of its
# own.
#
# It goes into the next file when a file is full, and it is what a guard that starts again begins with.

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


class CarryOver:
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
