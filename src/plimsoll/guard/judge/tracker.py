"""Turns the assessments of looks into a condition that does not flicker: one window before it is true, another before it ends.

Unknown is reported at once, and never makes a condition true. For a condition that only advises, a look or two without an
answer do not break the window. For one that can lead to an action, four fifths of the looks due in the window must have said
yes, the last among them, and a missing look counts as a no: missing looks can delay such a condition and never cause it.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import NamedTuple

from plimsoll.findings import Evidence
from plimsoll.unknown import Condition, Status


class Grade(StrEnum):
    """The most disruptive action that a condition may lead to."""

    ADVICE = "advice"  # rung 0: only a message
    SHED = "shed"  # rung 1
    COMPACT = "compact"  # rung 2
    RESTART = "restart"  # rung 3

    @property
    def is_action(self) -> bool:
        """True if it is more than advice."""
        return self is not Grade.ADVICE


FORGIVEN_LOOKS = 2.5
YES_SHARE = 0.8
LOOK_S = 5.0  # a look may take as long: no condition needs more than one look in this time


class Assessment(NamedTuple):
    """The answer of one look to one question."""

    status: Status
    reason: str
    message: str
    evidence: tuple[Evidence, ...] = ()


def yes(reason: str, message: str, *evidence: Evidence) -> Assessment:
    return Assessment(Status.TRUE, reason, message, evidence)


def no(reason: str, message: str, *evidence: Evidence) -> Assessment:
    return Assessment(Status.FALSE, reason, message, evidence)


def unknown(reason: str, message: str) -> Assessment:
    return Assessment(Status.UNKNOWN, reason, message)


WORST = (Status.TRUE, Status.UNKNOWN, Status.FALSE)
"""Of several parts of an engine the worst decides, and one that is not known is worse than one that is well."""
_NOT_YET = unknown("NotLookedAt", "not looked at yet")


class Tracker:
    """One condition of one engine over time."""

    def __init__(self, kind: str, for_s: float, clear_s: float, every_s: float, *, is_strict: bool = False) -> None:
        """`is_strict`: it could lead to an action, so missing looks count against it."""
        self.kind = kind
        self.status = Status.UNKNOWN
        self._for_s, self._clear_s = for_s, clear_s
        self._hole_s = FORGIVEN_LOOKS * every_s
        between_s = max(every_s, LOOK_S)
        self._wanted = math.ceil(YES_SHARE * (for_s / between_s + 1.0) - 1e-9) if is_strict else 0
        self._window_s = for_s + between_s / 2
        self._looks: deque[tuple[float, bool]] = deque()  # in the window: when, and whether it said yes
        self._yes = 0
        self._true_since: float | None = None
        self._false_since: float | None = None
        self._known_at: float | None = None
        self._seen = _NOT_YET
        self._since_s = 0.0
        self._watching_s: float | None = None  # seconds for which it has been seen, while not yet long enough
        self._is_held = False  # it was true when it was last known
        self._held = _NOT_YET

    def see(self, seen: Assessment, now_s: float) -> Condition:
        self.note(seen, now_s)
        return self.condition

    def note(self, seen: Assessment, now_s: float) -> bool:
        """Takes this look; True if the status changed."""
        before = self.status
        if self._wanted:
            self._looks.append((now_s, seen.status is Status.TRUE))
            self._yes += seen.status is Status.TRUE
            while self._looks[0][0] < now_s - self._window_s:
                self._yes -= self._looks.popleft()[1]
        if seen.status is Status.UNKNOWN:
            if self._known_at is None or now_s - self._known_at > self._hole_s:
                self._true_since = self._false_since = None
            self._become(seen, seen.status, now_s)
            return self.status is not before
        if self._known_at is not None and now_s - self._known_at > self._hole_s:
            self._true_since = self._false_since = None  # no look: the time between is unknown
        self._known_at = now_s
        if seen.status is Status.TRUE:
            self._false_since = None
            if self._true_since is None:
                self._true_since = now_s
            if before is not Status.TRUE and not self._is_long_enough(now_s):
                # If it was true before it became unknown, it has not ended since.
                self._become(seen, Status.UNKNOWN if self._is_held else Status.FALSE, now_s)
                self._watching_s = now_s - self._true_since
            else:
                self._become(seen, Status.TRUE, now_s)
        else:
            self._true_since = None
            if self._false_since is None:
                self._false_since = now_s
            # It must be false for a while before it ends; a look without an answer does not end it sooner.
            if not self._is_held or now_s - self._false_since >= self._clear_s:
                self._become(seen, Status.FALSE, now_s)
            elif before is not Status.TRUE:
                self._become(self._held, Status.TRUE, now_s)
        return self.status is not before

    def _is_long_enough(self, now_s: float) -> bool:
        if self._wanted:
            began_s = next((at_s for at_s, is_yes in self._looks if is_yes), now_s)
            is_whole = now_s - began_s >= 2 * self._for_s - self._window_s - 1e-9
            return is_whole and self._yes >= max(self._wanted, YES_SHARE * len(self._looks))
        return self._true_since is not None and now_s - self._true_since >= self._for_s

    def _become(self, seen: Assessment, status: Status, now_s: float) -> None:
        if status is not self.status:
            self.status, self._since_s = status, now_s
        self._seen, self._watching_s = seen, None
        if status is Status.TRUE:
            self._is_held, self._held = True, seen
        elif status is Status.FALSE:
            self._is_held = False

    @property
    def condition(self) -> Condition:
        seen = self._seen
        if self._watching_s is not None:
            message = f"{seen.message}; for {self._watching_s:.0f} of {self._for_s:.0f} s"
            return Condition(self.kind, self.status, "Watching", message, self._since_s, seen.evidence)
        is_ending = self.status is Status.TRUE and self._false_since is not None
        return Condition(self.kind, self.status, seen.reason, seen.message, self._since_s, seen.evidence, is_ending)
