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
    kind: str  # what is asked, e.g. "KvSaturated"
    status: Status
    reason: str  # one CamelCase word a program can test
    message: str  # one sentence a person can read
    since_s: float  # when the status became what it is
    evidence: tuple[Evidence, ...] = ()
    is_ending: bool = False  # it holds, but the last look did not show it any more: it must stay away before it is over

    def __post_init__(self) -> None:
        assert self.reason, "a condition without a reason explains nothing"

    @property
    def is_true(self) -> bool:
        """Whether it is known to hold. Unknown is not true, and not false either."""
        return self.status is Status.TRUE

    @property
    def is_known(self) -> bool:
        return self.status is not Status.UNKNOWN

    def __str__(self) -> str:
        return f"{self.kind} is {self.status}: {self.message}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """A figure that could not be had."""

    reason: str

    def __bool__(self) -> bool:
        raise TypeError(f"unknown ({self.reason}) is neither true nor false; test with isinstance")


Reading = float | Unknown
