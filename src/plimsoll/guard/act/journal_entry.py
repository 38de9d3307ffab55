"""One entry of guard's journal, free of secrets and of bounded size; and which entries are still needed. No file here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from plimsoll.redaction import REDACTED, hide_user_text, printable, redact, redact_value, redact_words

FIELDS_MAX = 32 << 10
TEXT_MAX = 4_000  # letters of one text
SEARCHED = 64 << 10  # letters that are searched for secrets before a text is cut, so that no secret is cut in two
NAME_MAX = 500  # of an engine, an action, a step, a kind
DEEPEST = 6
ITEMS_MAX = 200

# The kinds that the journal itself knows; others are kept as they are.
BEGUN = "begun"  # the first entry of a file
OPENED = "opened"  # an action begins: it is open until it is closed
INTENT = "intent"  # written before a step is done
OUTCOME = "outcome"  # and after
CLOSED = "closed"  # the action is over
RESTART = "restart"  # an engine was restarted, by guard or by somebody else: budgets count these
SWITCH = "switch"  # `step` names it, `engine` is its engine (empty: all); the last one counts
NOTE = "note"
APPROVAL = "approval"  # a person is asked for approval, or has answered: `step` says which, `action` is its id
SEEN = "seen"  # which process of an engine answers, by its start; the last one counts


class Entry(NamedTuple):
    """One row of the journal. `engine`, `action` and `step` are empty where the entry concerns none."""

    number: int  # rises from entry to entry
    at: float  # seconds since 1970
    kind: str
    engine: str = ""
    action: str = ""
    step: str = ""
    fields: Mapping[str, Any] = {}


def cleaned(entry: Entry) -> Entry:
    """Returns the entry without secrets and users' texts, and of bounded size."""
    shown = _clean("", dict(entry.fields), DEEPEST)
    text = json.dumps(shown)
    if len(text) > FIELDS_MAX:
        shown, text = {"left_out": f"{len(text):,} bytes: too large"}, "{}"
    hidden = redact(text)  # once more as a text: some secrets are recognised only by the words around them
    if hidden != text:
        try:
            shown = json.loads(hidden)
        except ValueError:
            shown = REDACTED
    fields = shown if isinstance(shown, dict) else {"left_out": REDACTED}
    kind, engine, action, step = map(_name, (entry.kind, entry.engine, entry.action, entry.step))
    return Entry(entry.number, entry.at, kind, engine, action, step, fields)


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


WINDOW_S = 2 * 86_400.0  # the longest budget is a day's; a second one, so that no edge is missed
COUNTED_MAX = 20_000
ENTRIES_PER_ACTION = 1_000  # the first, and the newest of the rest


def needed(entries: Iterable[Entry], now: float) -> list[Entry]:
    """Returns the entries still needed at this time, in order.

    Open actions, restarts that budgets count, ends of restarts that decide about the next, the last of each switch (on and off:
    a later on does not undo what an off ended), and which process of each engine answered last.
    """
    by_action: dict[str, list[Entry]] = {}
    counted: list[Entry] = []
    last: dict[tuple[object, ...], Entry] = {}
    for entry in entries:
        kind, end = entry.kind, entry.fields.get("end")
        if (kind == OPENED and entry.action) or entry.action in by_action:
            by_action.setdefault(entry.action, []).append(entry)
        if kind in (OPENED, CLOSED, RESTART, APPROVAL) and now - entry.at < WINDOW_S:
            counted.append(entry)
        if kind == CLOSED:
            by_action.pop(entry.action, None)
        if kind == SWITCH:
            last[kind, entry.engine, entry.step, bool(entry.fields.get("on"))] = entry
        elif kind == CLOSED and entry.fields.get("grade") == "restart" and end in ("done", "failed", "held"):
            last[kind, entry.engine, str(entry.fields.get("kind", "")), end] = entry
        elif kind == SEEN or (kind == RESTART and "started" in entry.fields):
            last[SEEN, entry.engine] = entry
    kept = [*counted[-COUNTED_MAX:], *last.values()]
    for rows in by_action.values():
        kept += [rows[0], *rows[-ENTRIES_PER_ACTION:]]
    return [entry for _, entry in sorted({entry.number: entry for entry in kept}.items())]
