"""Actions that wait for a person: asked for, approved, denied, expired or withdrawn, as the journal tells it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from plimsoll.guard.act.journal_entry import APPROVAL, OPENED, Entry
from plimsoll.guard.judge.tracker import Grade


class ApprovalState(StrEnum):
    """State of an approval request; the value is the step of its journal entry."""

    ASKED = "asked"
    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"  # its condition is over
    USED = "used"  # its action has begun


@dataclass(frozen=True, slots=True)
class Approval:
    """One action that a person was asked to approve. Its id becomes the action's own."""

    id: str
    engine: str
    grade: Grade
    why: str
    asked_at: float  # wall clock, as are the others
    until: float
    state: ApprovalState = ApprovalState.ASKED
    changed_at: float = 0.0
    who: str = ""

    def is_pending(self, now: float) -> bool:
        return self.state is ApprovalState.ASKED and now < self.until


def read_approvals(entries: Iterable[Entry]) -> dict[str, Approval]:
    """Returns every approval request by its id, the newest last; leaves out entries that it cannot read."""
    found: dict[str, Approval] = {}
    for entry in entries:
        known, fields = found.get(entry.action), entry.fields
        if entry.kind == OPENED and known is not None:
            found[entry.action] = replace(known, state=ApprovalState.USED, changed_at=entry.at)
        if entry.kind != APPROVAL or entry.step not in list(ApprovalState):
            continue
        state = ApprovalState(entry.step)
        if state is not ApprovalState.ASKED:
            if known is not None:
                found[entry.action] = replace(known, state=state, changed_at=entry.at, who=str(fields.get("who", "")))
            continue
        until, grade = fields.get("until"), str(fields.get("grade"))
        if isinstance(until, int | float) and grade in list(Grade):
            found[entry.action] = Approval(
                entry.action,
                entry.engine,
                Grade(grade),
                str(fields.get("why", "")),
                entry.at,
                float(until),
                changed_at=entry.at,
            )
    return found


def last_of(approvals: Iterable[Approval], engine: str, grade: Grade) -> Approval | None:
    """Returns the newest approval request for this action on this engine."""
    return next((one for one in reversed(list(approvals)) if one.engine == engine and one.grade is grade), None)
