"""The words a verdict is made of."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Status(StrEnum):
    """What becomes of one flag or variable."""

    OK = "ok"
    DEFAULT_CHANGED = "default-changed"
    DEPRECATED = "deprecated"
    REMOVED = "removed"
    NEVER_EXISTED = "never-existed"
    NO_EFFECT = "no-effect"
    REDUNDANT = "redundant"
    UNKNOWN = "unknown"

    @property
    def is_problem(self) -> bool:
        """Whether the command does not do what it says: it is refused, or a part of it is ignored."""
        return self.is_refused or self is Status.NO_EFFECT

    @property
    def is_refused(self) -> bool:
        """Whether vLLM exits with an error because of it."""
        return self in (Status.REMOVED, Status.NEVER_EXISTED)


class Item(NamedTuple):
    """The verdict on one flag, variable or entry point."""

    name: str  # as typed, with its dashes
    status: Status
    since: str | None = None  # the release from which this status holds
    instead: str | None = None
    note: str | None = None
    values: tuple[str, ...] = ()
