"""What may come of a condition: a word to a person, or a rung of the ladder."""

from __future__ import annotations

from enum import StrEnum


class Grade(StrEnum):
    """The most that a condition may lead to."""

    ADVICE = "advice"  # rung 0: somebody is told
    SHED = "shed"  # rung 1
    COMPACT = "compact"  # rung 2
    RESTART = "restart"  # rung 3

    @property
    def is_action(self) -> bool:
        """Whether guard could do something about it that changes the world."""
        return self is not Grade.ADVICE
