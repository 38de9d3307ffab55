"""Guard's journal in words and as JSON, for its API and for guardctl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.guard.act.journal_entry import (
    APPROVAL,
    BEGUN,
    CLOSED,
    INTENT,
    NOTE,
    OPENED,
    OUTCOME,
    RESTART,
    SEEN,
    SWITCH,
    Entry,
)
from plimsoll.redaction import clean, plain

SCHEMA = "plimsoll.guard/1"
ACTING = "acting"  # the beginning of the troubles that keep guard from acting
LONGEST_HISTORY = 400
_BY_HAND = {"drain": "drain by hand", "undrain": "return to rotation by hand"}
"""Requests of operators by kind: in the journal each is a restart that turns back."""
END_TEXTS = {
    "done": "completed",
    "undone": "undone",
    "stood-back": "skipped",
    "held": "stuck: needs attention",
    "failed": "failed",
}
"""How an action ended, in words, by the `end` of its journal entry."""


def entry_json(entry: Entry) -> dict[str, Any]:
    """A journal entry as the API shows it, redacted once more."""
    return {
        "number": entry.number, "at": entry.at, "kind": clean(entry.kind), "engine": clean(entry.engine),
        "action": clean(entry.action), "step": clean(entry.step), "fields": plain(dict(entry.fields)),
    }  # fmt: skip


def entry_sentence(row: Mapping[str, Any]) -> str:
    """A journal entry in words; empty for entries that only guard itself needs."""
    fields: Mapping[str, Any] = row["fields"] if isinstance(row["fields"], Mapping) else {}
    kind, engine = str(row["kind"]), str(row["engine"])
    before = f"{engine}: " if engine else ""
    action = f" [{row['action']}]" if row["action"] else ""
    said = _said(kind, str(row["step"]), fields)
    return clean(f"{before}{said}{action}")[:LONGEST_HISTORY] if said else ""


def _said(kind: str, step: str, fields: Mapping[str, Any]) -> str:
    if kind == OPENED:
        return f"{_what(fields)} starts: {fields.get('why', '')}"
    if kind in (INTENT, BEGUN, SEEN):
        return ""  # the entry of its outcome has the words
    if kind == OUTCOME:
        done = fields.get("done")
        mark = "" if done is True else " failed" if done is False else " (outcome unknown)"
        return f"{step}{mark}: {fields.get('says', '')}"
    if kind == CLOSED:
        why = f": {fields['why']}" if fields.get("why") else ""
        return f"{_what(fields)} {END_TEXTS.get(str(fields.get('end')), 'ended')}{why}"
    if kind == RESTART:
        times = f" {fields['times']} times" if fields.get("times", 1) != 1 else ""
        return "restarted by guard" if fields.get("own", True) else f"restarted by someone else{times}"
    if kind == SWITCH and step == "knobs":
        who = f", by {fields['who']}" if fields.get("who") else ""
        return f"knobs set: {fields.get('set', '')}{who}" if fields.get("on") else f"knobs let go: {fields.get('why', '')}{who}"
    if kind == SWITCH:
        what = "actions" if step == "pause" else f"{step.removeprefix('rung-')} on all engines"
        who = f" by {fields['who']}" if fields.get("who") else ""
        return f"{what} {'paused' if fields.get('on') else 'resumed'}{who}"
    if kind == APPROVAL:
        who = f" by {fields['who']}" if fields.get("who") else ""
        why = f": {fields['why']}" if fields.get("why") else ""
        what = f"{fields.get('grade', 'action')} waits for approval" if step == "asked" else f"approval {step}{who}"
        return f"{what}{why}"
    if kind == NOTE:
        return "; ".join(f"{name}: {value}" for name, value in fields.items() if name != "done")
    return f"{kind} {step}".strip()


def _what(fields: Mapping[str, Any]) -> str:
    return _BY_HAND.get(str(fields.get("kind")), str(fields.get("grade", "an action")))
