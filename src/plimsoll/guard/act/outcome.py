"""What became of something that was done to the world: done, not done, or not known, with a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Outcome(NamedTuple):
    """Of one deed. Whoever acts on it treats "not known" as neither: it looks again, or stands back."""

    is_done: bool | None  # None: it is not known whether it took effect
    says: str  # one sentence, with nothing secret in it
    facts: Mapping[str, str | int | float | bool] = {}

    def __str__(self) -> str:
        return self.says


def done(says: str, **facts: str | float | bool) -> Outcome:
    """It took effect."""
    return Outcome(is_done=True, says=says, facts=facts)


def failed(says: str, **facts: str | float | bool) -> Outcome:
    """It did not."""
    return Outcome(is_done=False, says=says, facts=facts)


def unsure(says: str, **facts: str | float | bool) -> Outcome:
    """Nobody can tell."""
    return Outcome(is_done=None, says=says, facts=facts)
