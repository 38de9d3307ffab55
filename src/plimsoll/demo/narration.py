"""What guard said and wrote down, as lines for a reader: what it saw, what it decided, what it did. Nothing is added to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.domain.journal_entry import CLOSED, OPENED, OUTCOME, Entry

SAW, DECIDED, DID, ENDED = "saw", "decided", "did", "ended"
QUIET = ("lock", "unlock", "hold", "gone")  # steps that a reader need not see; they are in the journal
STEPS = {
    "evidence": "kept evidence", "leave": "took it out", "drain": "took it out", "idle": "waited", "stop": "stopped it",
    "start": "started it", "ready": "saw it ready", "check": "checked it", "warm": "warmed it up", "undrain": "put it back",
    "probation": "watched it", "shed": "sheds", "unshed": "ended that", "compact": "compacted", "verify": "verified",
}  # fmt: skip
ENDS = {"done": "done and confirmed", "undone": "taken back", "stood-back": "left to another guard", "failed": "did not help",
        "held": "held: a person is needed"}  # fmt: skip


class Line(NamedTuple):
    """One line: when, which of guard's four kinds of word, of which engine, and the words."""

    at: float  # seconds since 1970
    how: str
    engine: str
    text: str


def of_change(told: Mapping[str, Any]) -> Line | None:
    """From a line that guard printed: a condition that begins or is over. What it did comes from its journal."""
    engine, what, code = str(told.get("engine") or ""), told.get("what"), told.get("code")
    sentence = str(told.get("sentence") or "").removeprefix(f"{engine}: ")
    if what == "begins":
        mark = f" ({code}): "
        name, found, because = sentence.partition(mark)
        return Line(_at(told), SAW, engine, f"{because} ({code})" if found else name)
    if what == "over":
        return Line(_at(told), SAW, engine, sentence)
    if what == "needs-a-person":
        return Line(_at(told), ENDED, engine, sentence)
    return None


def of_entry(entry: Entry) -> Line | None:
    """From an entry of its journal; None for what a reader need not see."""
    fields = entry.fields
    if entry.kind == OPENED:
        return Line(entry.at, DECIDED, entry.engine, f"to {fields.get('grade', 'act')}")
    if entry.kind == OUTCOME:
        if entry.step in QUIET and fields.get("done"):
            return None
        word = STEPS.get(entry.step, entry.step)
        failed = "" if fields.get("done") else " (not done)"
        return Line(entry.at, DID, entry.engine, f"{word}{failed}: {_plain(entry.step, str(fields.get('says', '')))}")
    if entry.kind == CLOSED:
        end = str(fields.get("end", "unknown"))
        return Line(entry.at, ENDED, entry.engine, f"{fields.get('grade', 'it')}: {ENDS.get(end, end)}")
    return None


def _plain(step: str, says: str) -> str:
    """Guard's own words, without a word that only repeats the step."""
    again = {"stop": "stopped: ", "start": "started: "}.get(step, "")
    return says.removeprefix(again)


def _at(told: Mapping[str, Any]) -> float:
    at = told.get("at")
    return float(at) if isinstance(at, int | float) else 0.0
