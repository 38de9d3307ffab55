"""Which changes are worth a sentence: what begins to hold, what is over, and an engine that is gone or back. The rest is quiet.

A condition that is not known and never held says nothing: one sentence about the engine says why.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.doctor.trend_words import duration
from plimsoll.domain.condition import Condition, Status
from plimsoll.domain.look import Look, Reach
from plimsoll.guard.findings import finding
from plimsoll.report.guard import Told, What

NEVER_S = 60.0  # without any answer since guard began, before that is said as well
LOOKS_GONE = 3  # that bring nothing before an engine is said not to answer: one slow answer is no news
_SAYS = {
    Reach.REFUSED: "nobody listens there",
    Reach.SILENT: "does not answer",
    Reach.NONSENSE: "answers something that is no page of metrics",
}


class Teller:
    """Of one engine."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._held: dict[str, float] = {}  # the conditions that were told to hold, and since when
        self._doubted: set[str] = set()
        self._gone_looks = 0
        self._gone_since_s: float | None = None
        self._is_gone: bool | None = None  # as it was told; None: nothing yet
        self._is_never_told = False
        self._note = ""  # as it was told
        self._note_looks = 0
        self.has_answered = False

    def tell(self, look: Look, changes: Sequence[Condition], answer: Look | None, note: str = "") -> list[Told]:
        """What of these changes is said; `answer` is the last look that brought figures, `note` what one could not have."""
        said = self._reach(look) + self._noted(look, note)
        for condition in changes:
            told = self._condition(look, condition, answer)
            said += [] if told is None else [told]
        return said

    def leave(self, unix_s: float, now_s: float, conditions: Sequence[Condition]) -> list[Told]:
        """The engine is no longer watched: what held is closed."""
        said = [
            Told(unix_s, self._engine, What.OVER, "it is no longer watched", one, None, now_s - self._held[one.kind])
            for one in conditions if one.kind in self._held
        ]  # fmt: skip
        if self._is_gone:
            said.append(Told(unix_s, self._engine, What.REACHED, "it is no longer watched"))
        return [*said, Told(unix_s, self._engine, What.UNLISTED, "is no longer in the list of engines")]

    @property
    def doubted(self) -> frozenset[str]:
        """The conditions that held and are not known any more."""
        return frozenset(self._doubted)

    @property
    def note(self) -> str:
        """What cannot be had of it, as it was told; empty when all can."""
        return self._note

    @property
    def gone_since_s(self) -> float | None:
        """Since when it was told not to answer; None if it does."""
        return self._gone_since_s if self._is_gone else None

    def _reach(self, look: Look) -> list[Told]:
        if look.reach is Reach.ANSWERS:
            gone_s = None if self._gone_since_s is None else look.at_s - self._gone_since_s
            before, self._is_gone, self._gone_looks, self._gone_since_s = self._is_gone, False, 0, None
            if before is False:
                return []
            version = f", vLLM {look.vllm}" if look.vllm else ""
            again = f" again after {duration(gone_s)}" if self.has_answered and gone_s is not None else ""
            self.has_answered = True
            return [Told(look.unix_s, self._engine, What.REACHED, f"answers{again}{version}")]
        self._gone_looks += 1
        self._gone_since_s = look.at_s if self._gone_since_s is None else self._gone_since_s
        if self._is_gone and not self.has_answered and not self._is_never_told and look.at_s - self._gone_since_s >= NEVER_S:
            self._is_never_told = True
            message = "has not answered since guard began: it is still starting, was never started, or is not at this address"
            return [Told(look.unix_s, self._engine, What.UNREACHABLE, message)]
        if self._is_gone or (self._is_gone is False and self._gone_looks < LOOKS_GONE):
            return []
        self._is_gone = True
        why = f" ({look.why})" if look.why and look.reach is not Reach.REFUSED else ""
        message = f"{_SAYS[look.reach]}{why}; what rests on its figures is not known"
        return [Told(look.unix_s, self._engine, What.UNREACHABLE, message)]

    def _noted(self, look: Look, note: str) -> list[Told]:
        """One look that a gate left without an answer is no news; a token that is wrong stays so."""
        if look.reach is not Reach.ANSWERS:
            return []
        self._note_looks = self._note_looks + 1 if note else 0
        if note and self._note:
            self._note = note
        elif note and self._note_looks >= LOOKS_GONE:
            self._note = note
            return [Told(look.unix_s, self._engine, What.TROUBLE, f"{note}; what only the gate tells is not known")]
        elif self._note and not note:
            self._note = ""
            return [Told(look.unix_s, self._engine, What.MENDED, "the gate answers")]
        return []

    def _condition(self, look: Look, condition: Condition, answer: Look | None) -> Told | None:
        kind = condition.kind
        if condition.is_true:
            self._doubted.discard(kind)
            if kind in self._held:  # it was in doubt for a while; it is still the same trouble
                return None
            self._held[kind] = condition.since_s
            return Told(look.unix_s, self._engine, What.BEGINS, condition.message, condition, finding(condition, answer))
        if kind not in self._held:
            return None
        if condition.status is Status.UNKNOWN:
            if kind in self._doubted:
                return None
            self._doubted.add(kind)
            return Told(look.unix_s, self._engine, What.UNKNOWN, condition.message, condition)
        self._doubted.discard(kind)
        lasted_s = look.at_s - self._held.pop(kind)
        return Told(look.unix_s, self._engine, What.OVER, condition.message, condition, None, lasted_s)
