"""Unknown figures and three-valued conditions: what could not be read is never guessed and never acted on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plimsoll.findings import Evidence


class Status(StrEnum):
    """The three answers to a yes-or-no question about the world."""

    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    kind: str  # the condition, e.g. "KvSaturated"
    status: Status
    reason: str  # one CamelCase word a program can test
    message: str  # one sentence a person can read
    since_s: float  # when the status last changed
    evidence: tuple[Evidence, ...] = ()
    is_ending: bool = False  # true, but the last look no longer showed it: it must stay away for a while before it ends

    def __post_init__(self) -> None:
        assert self.reason, "a condition without a reason explains nothing"

    @property
    def is_true(self) -> bool:
        """True if the condition is known to be true. Unknown is not true, and not false either."""
        return self.status is Status.TRUE

    @property
    def is_known(self) -> bool:
        return self.status is not Status.UNKNOWN

    def __str__(self) -> str:
        return f"{self.kind} is {self.status}: {self.message}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """A figure that could not be read."""

    reason: str

    def __bool__(self) -> bool:
        raise TypeError(f"unknown ({self.reason}) is neither true nor false; test with isinstance")


Reading = float | Unknown
