"""What of a judge's verdict could lead to an action."""

from __future__ import annotations

from plimsoll.domain.condition import Condition
from plimsoll.guard.grades import Grade
from plimsoll.guard.judge import Judge
from plimsoll.guard.policy import GRADES


def acting(judge: Judge) -> tuple[Condition, ...]:
    """The conditions that hold and could lead to an action."""
    return tuple(one for one in judge.conditions if one.is_true and GRADES.get(one.kind, Grade.ADVICE).is_action)
