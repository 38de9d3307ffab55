"""What of a judge's verdict could lead to an action and why nothing does; and a fleet that was looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from plimsoll.guard.act.decide import BlockedAction, FailedRestarts
from plimsoll.guard.daemon.observer import EngineCapabilities, Fleet, FleetObserver, WatchedEngine
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.guard.judge.tracker import Grade
from plimsoll.unknown import Condition


def acting(judge: Judge) -> tuple[Condition, ...]:
    """The conditions that hold and could lead to an action."""
    return tuple(one for one in judge.conditions if one.is_true and GRADES.get(one.kind, Grade.ADVICE).is_action)


def reason(decision: object) -> str:
    """Why it is blocked, and "" where it is not."""
    return decision.reason if isinstance(decision, BlockedAction) else ""


class LookedAt:
    """A fleet of engines that were looked at; `observer` is what an action runner sees of them."""

    def __init__(self, policy: Policy = Policy(), **looks: Iterable[Look]) -> None:  # noqa: B008
        self._engines, self.now_s = dict[str, WatchedEngine](), 1.0
        self.ends: Mapping[str, FailedRestarts] = {}
        for name, seen in looks.items():
            self._engines[name] = WatchedEngine(EngineConfig(name, "http://x:1"), policy, cast("Any", SimpleNamespace()), 0.0)
            for look in seen:
                self.now_s = max(self.now_s, look.at_s)
                self._engines[name].take(look)
        capable = EngineCapabilities(has_gate=True, has_restarter=True)
        told = cast("Fleet", self), lambda _: capable, 5.0, lambda: self.now_s, lambda: 0, lambda: self.ends
        self.observer = FleetObserver(*told)

    def names(self) -> list[str]:
        return sorted(self._engines)

    def engine(self, name: str) -> WatchedEngine | None:
        return self._engines.get(name)
