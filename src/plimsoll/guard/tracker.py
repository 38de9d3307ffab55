"""From what each look shows to a condition that does not flicker: a window before it holds, another before it is over.

What is not known is said at once, and it never makes a condition hold. Of a condition that only advises, a look or two that
say nothing do not break the window; of one that could lead to an action they do: each look of its window must have said yes.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.condition import Condition, Status
from plimsoll.domain.finding import Evidence

FORGIVEN_LOOKS = 2.5
NO_LOOK_MISSING = 1.5


class Seen(NamedTuple):
    """What one look says to one question."""

    status: Status
    reason: str
    message: str
    evidence: tuple[Evidence, ...] = ()


def yes(reason: str, message: str, *evidence: Evidence) -> Seen:
    """It holds at this look."""
    return Seen(Status.TRUE, reason, message, evidence)


def no(reason: str, message: str, *evidence: Evidence) -> Seen:
    """It does not."""
    return Seen(Status.FALSE, reason, message, evidence)


def unknown(reason: str, message: str) -> Seen:
    """It cannot be told."""
    return Seen(Status.UNKNOWN, reason, message)


_NOT_YET = unknown("NotLookedAt", "not looked at yet")


class Tracker:
    """One condition of one engine over time."""

    def __init__(self, kind: str, for_s: float, clear_s: float, every_s: float, *, is_strict: bool = False) -> None:
        """`is_strict`: it could lead to an action, so nothing is forgiven."""
        self.kind = kind
        self.status = Status.UNKNOWN
        self._for_s, self._clear_s = for_s, clear_s
        self._forgiven_s = 0.0 if is_strict else FORGIVEN_LOOKS * every_s
        self._hole_s = (NO_LOOK_MISSING if is_strict else FORGIVEN_LOOKS) * every_s
        self._true_since: float | None = None
        self._false_since: float | None = None
        self._known_at: float | None = None
        self._seen = _NOT_YET
        self._since_s = 0.0
        self._watching_s: float | None = None  # it is seen, and not yet for long enough
        self._is_held = False  # it was true when it could last be told
        self._held = _NOT_YET

    def see(self, seen: Seen, now_s: float) -> Condition:
        """The condition after this look."""
        self.note(seen, now_s)
        return self.condition

    def note(self, seen: Seen, now_s: float) -> bool:
        """Take this look; whether the status is another one."""
        before = self.status
        if seen.status is Status.UNKNOWN:
            if self._known_at is None or now_s - self._known_at > self._forgiven_s:
                self._true_since = self._false_since = None
            self._become(seen, seen.status, now_s)
            return self.status is not before
        if self._known_at is not None and now_s - self._known_at > self._hole_s:
            self._true_since = self._false_since = None  # nobody looked: what was between is not known
        self._known_at = now_s
        if seen.status is Status.TRUE:
            self._false_since = None
            if self._true_since is None:
                self._true_since = now_s
            if before is not Status.TRUE and now_s - self._true_since < self._for_s:
                self._become(seen, Status.FALSE, now_s)
                self._watching_s = now_s - self._true_since
            else:
                self._become(seen, Status.TRUE, now_s)
        else:
            self._true_since = None
            if self._false_since is None:
                self._false_since = now_s
            # It must be over for a while before it is said to be; a look that told nothing does not end it sooner.
            if not self._is_held or now_s - self._false_since >= self._clear_s:
                self._become(seen, Status.FALSE, now_s)
            elif before is not Status.TRUE:
                self._become(self._held, Status.TRUE, now_s)
        return self.status is not before

    def _become(self, seen: Seen, status: Status, now_s: float) -> None:
        if status is not self.status:
            self.status, self._since_s = status, now_s
        self._seen, self._watching_s = seen, None
        if status is Status.TRUE:
            self._is_held, self._held = True, seen
        elif status is Status.FALSE:
            self._is_held = False

    @property
    def condition(self) -> Condition:
        """As of the last look."""
        seen = self._seen
        if self._watching_s is not None:
            message = f"{seen.message}; for {self._watching_s:.0f} of {self._for_s:.0f} s"
            return Condition(self.kind, self.status, "Watching", message, self._since_s, seen.evidence)
        return Condition(self.kind, self.status, seen.reason, seen.message, self._since_s, seen.evidence)
