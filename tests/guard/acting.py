"""What of a judge's verdict could lead to an action."""

from __future__ import annotations

from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from plimsoll.unknown import Condition


def acting(judge: Judge) -> tuple[Condition, ...]:
    """The conditions that hold and could lead to an action."""
    return tuple(one for one in judge.conditions if one.is_true and GRADES.get(one.kind, Grade.ADVICE).is_action)
