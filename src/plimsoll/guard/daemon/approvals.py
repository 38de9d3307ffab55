"""Asks people for approval before an action, keeps their answers in the journal, and lets approved actions through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from plimsoll.doctor.rules.trend_growth import duration
from plimsoll.guard.act.decide import ActionPlan, Decision
from plimsoll.guard.act.journal_entry import APPROVAL, OPENED, Entry
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import JournalWriter
from plimsoll.guard.judge.tracker import Grade

OVER_S = 60.0  # a request is withdrawn when nothing has called for its action for this long


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
            why = str(fields.get("why", ""))
            found[entry.action] = Approval(
                entry.action, entry.engine, Grade(grade), why, entry.at, float(until), changed_at=entry.at
            )
    return found


class Approvals:
    """The approval requests of one guard. `tell` gets each as it is now, and a sentence."""

    def __init__(
        self,
        journal: JournalWriter,
        kept: Callable[[], list[Entry]],
        policy: ActPolicy,
        wall: Callable[[], float],
        name: Callable[[], str],
        tell: Callable[[Approval, str], None],
    ) -> None:
        self._journal, self._kept, self._policy, self._wall, self._name, self._tell = journal, kept, policy, wall, name, tell
        self._called_at: dict[str, float] = {}  # by id: when its action was last called for

    def pending(self) -> list[Approval]:
        now = self._wall()
        return [one for one in read_approvals(self._kept()).values() if one.is_pending(now)]

    def needs(self) -> dict[str, str]:
        """Returns the engines for which guard waits for a person, and what to type."""
        return {one.engine: _waits(one) for one in self.pending()}

    def decide(self, id_: str, *, is_approved: bool, who: str) -> tuple[Approval | None, str]:
        """Records a person's answer; returns the request, or None and why it cannot be answered."""
        one = read_approvals(self._kept()).get(id_)
        if one is None:
            return None, "no such question: guardctl actions lists those that wait"
        if not one.is_pending(self._wall()):
            by = f" by {one.who}" if one.who else ""
            state = ApprovalState.EXPIRED if one.state is ApprovalState.ASKED else one.state
            return None, f"it waits no longer: {state}{by}"
        state = ApprovalState.APPROVED if is_approved else ApprovalState.DENIED
        self._close(one, state, f"{one.grade} {state} by {who}", who=who)
        return one, ""

    def allowed(self, plans: Sequence[ActionPlan], decisions: Sequence[Decision]) -> list[ActionPlan]:
        """Returns the plans that need no approval or have it; asks for the others, once."""
        if not any(plan.needs_approval for plan in plans) and not self._called_at:
            return list(plans)
        now, known = self._wall(), read_approvals(self._kept())
        self._close_old(known, decisions, now)
        found = []
        for plan in plans:
            if not plan.needs_approval:
                found.append(plan)
                continue
            mine = (one for one in reversed(known.values()) if (one.engine, one.grade) == (plan.engine, plan.grade))
            one = next(mine, None)  # the newest
            if one is not None and one.state is ApprovalState.APPROVED and now < one.until:
                why = f"{plan.why} (approved by {one.who})"
                found.append(ActionPlan(plan.engine, plan.grade, plan.kind, why, plan.steps, action=one.id))
            elif one is None or one.state in (ApprovalState.USED, ApprovalState.WITHDRAWN):
                self._ask(plan, now)
            else:  # it waits; or it was denied or expired, and is not asked again for a while
                ended = one.changed_at if one.state in (ApprovalState.DENIED, ApprovalState.EXPIRED) else one.until
                if now - ended >= self._policy.approve_within_s:
                    self._ask(plan, now)
        return found

    def _ask(self, plan: ActionPlan, now: float) -> None:
        until = now + self._policy.approve_within_s
        one = Approval(self._name(), plan.engine, plan.grade, plan.why, now, until)
        fields = {"grade": str(plan.grade), "kind": plan.kind, "why": plan.why, "until": until}
        self._journal.append(APPROVAL, engine=one.engine, action=one.id, step=ApprovalState.ASKED, fields=fields)
        self._called_at[one.id] = now
        self._tell(one, _waits(one))

    def _close_old(self, known: dict[str, Approval], decisions: Sequence[Decision], now: float) -> None:
        """Ends the requests that nobody answered in time, and those whose reason is over."""
        called = {(decision.engine, decision.grade) for decision in decisions}
        for one in list(known.values()):
            if one.state is not ApprovalState.ASKED:
                self._called_at.pop(one.id, None)
            elif now >= one.until:
                span = duration(one.until - one.asked_at)
                self._close(one, ApprovalState.EXPIRED, f"{one.grade} was not approved within {span}: not done")
            elif (one.engine, one.grade) in called:
                self._called_at[one.id] = now
            elif now - self._called_at.setdefault(one.id, now) >= OVER_S:
                says = f"{one.grade} needs no approval any more: nothing calls for it"
                self._close(one, ApprovalState.WITHDRAWN, says)

    def _close(self, one: Approval, state: ApprovalState, says: str, **fields: str) -> None:
        self._journal.append(APPROVAL, engine=one.engine, action=one.id, step=state, fields=fields)
        self._tell(replace(one, state=state), says)


def _waits(one: Approval) -> str:
    until = time.strftime("%H:%M", time.localtime(one.until))
    return f"{one.grade} waits for approval until {until}: {one.why}; guardctl approve {one.id}, or guardctl deny {one.id}"
