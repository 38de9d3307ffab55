"""What guard did, from its journal: an entry as JSON, and as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.domain.journal_entry import BEGUN, CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SEEN, SWITCH, Entry
from plimsoll.report.doctor import clean, plain

LONGEST = 400
_BY_HAND = {"drain": "drain by hand", "undrain": "putting back by hand"}
"""The kinds of what a person asked for: in the journal each is a restart that turns back."""


def entry_json(entry: Entry) -> dict[str, Any]:
    """One entry as the API shows it. Secrets were taken out when it was written, and are once more."""
    return {
        "number": entry.first_number, "at": entry.at, "kind": clean(entry.kind), "engine": clean(entry.engine),
        "action": clean(entry.action), "step": clean(entry.step), "fields": plain(dict(entry.fields)),
    }  # fmt: skip


def entry_sentence(row: Mapping[str, Any]) -> str:
    """The same for people; empty for what only guard itself needs."""
    fields: Mapping[str, Any] = row["fields"] if isinstance(row["fields"], Mapping) else {}
    kind, engine = str(row["kind"]), str(row["engine"])
    before = f"{engine}: " if engine else ""
    action = f" [{row['action']}]" if row["action"] else ""
    said = _said(kind, str(row["step"]), fields)
    return clean(f"{before}{said}{action}")[:LONGEST] if said else ""


def _said(kind: str, step: str, fields: Mapping[str, Any]) -> str:
    if kind == OPENED:
        return f"{_what(fields)} begins: {fields.get('why', '')}"
    if kind in (INTENT, BEGUN, SEEN):
        return ""  # what became of it is said with its outcome
    if kind == OUTCOME:
        done = fields.get("done")
        mark = "" if done is True else " (not done)" if done is False else " (not known)"
        return f"{step}{mark}: {fields.get('says', '')}"
    if kind == CLOSED:
        why = f": {fields['why']}" if fields.get("why") else ""
        return f"{_what(fields)} is {fields.get('end', 'over')}{why}"
    if kind == RESTART:
        times = f" {fields['times']} times" if fields.get("times", 1) != 1 else ""
        return "is restarted" if fields.get("own", True) else f"somebody else restarted it{times}"
    if kind == SWITCH:
        what = "acting" if step == "pause" else f"{step.removeprefix('rung-')} of every engine"
        who = f" by {fields['who']}" if fields.get("who") else ""
        return f"{what} {'is paused' if fields.get('on') else 'is resumed'}{who}"
    if kind == NOTE:
        return "; ".join(f"{name}: {value}" for name, value in fields.items() if name != "done")
    return f"{kind} {step}".strip()


def _what(fields: Mapping[str, Any]) -> str:
    return _BY_HAND.get(str(fields.get("kind")), str(fields.get("grade", "an action")))
