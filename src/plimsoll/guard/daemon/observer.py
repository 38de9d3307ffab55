"""What the judge knows of the fleet, as the one who acts needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from plimsoll.guard.act.capacity import load_of, without
from plimsoll.guard.act.decide import Engine, LastEnd, View, others_of
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.daemon.loop import Fleet, Watched
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import GRADES
from plimsoll.unknown import Condition, Unknown


class Told(NamedTuple):
    """What the configuration says of one engine."""

    group: str = ""
    only_observed: str = ""  # why nothing may be done to it
    has_gate: bool = False
    has_restarter: bool = False


class Life(NamedTuple):
    """Which process of an engine answers, as far as it is known."""

    started: float | None = None  # as its page says
    restarts: int | None = None  # as its cluster counts them
    total: int = 0  # how often another process was seen to answer
    is_shared: bool = False  # several servers answer at its address, in turn


class FleetSight:
    """Sight and view of one guard. `ends`: the engines that restarts did not mend, as the journal tells."""

    def __init__(
        self, fleet: Fleet, told: Mapping[str, Told], every_s: float, clock: Callable[[], float], minute: Callable[[], int],
        ends: Callable[[], Mapping[str, LastEnd]] = dict,
    ) -> None:  # fmt: skip
        self._fleet, self._told, self._every_s, self._clock, self._minute = fleet, told, every_s, clock, minute
        self._ends = ends

    async def look(self, engine: str) -> Look | None:
        """A fresh look."""
        return await self._fleet.look_now(engine)

    def conditions(self, engine: str) -> Mapping[str, Condition]:
        """As of the last look."""
        one = self._fleet.engine(engine)
        return {} if one is None else {condition.kind: condition for condition in one.conditions}

    def engines(self) -> Sequence[str]:
        """All that are watched."""
        return self._fleet.names()

    def suffering(self, engine: str, policy: ActPolicy) -> str:
        """Why this one must stay after all: another of its group has left meanwhile, or cannot carry its load; or nothing."""
        view = self.view(frozenset({engine}))
        mine = next((one for one in view.engines if one.name == engine), None)
        others = [] if mine is None else others_of(mine, view.engines)
        if mine is None or not others:
            return ""
        away = [one.name for one in others if one.is_away]
        if len(away) >= policy.most_away:
            return f"{away[0]} is away meanwhile"
        for one in others:
            found = one.conditions.get("saturated")
            if found is not None and found.is_true:
                return f"{one.name} cannot carry its load: {found.message}"
        answer = without(mine.load, [one.load for one in others if not one.is_away], policy.carries)
        return "" if isinstance(answer, Unknown) else answer

    def life(self, engine: str) -> Life:
        """Which of its processes answers."""
        one = self._fleet.engine(engine)
        if one is None:
            return Life()
        lives, last, answer = one.judge.history.lives, one.judge.history.last, one.judge.history.last_answer
        return Life(
            None if answer is None else answer.started_unix_s, None if last is None else last.container_restarts, lives.total,
            lives.is_shared(self._clock()),
        )  # fmt: skip

    def view(self, at_work: frozenset[str]) -> View:
        """The fleet now. Nothing is decided about those that are being worked on."""
        found, last_ends = [], self._ends()
        for name in self.engines():
            one = self._fleet.engine(name)
            if one is not None:
                found.append(self._engine(one, last_ends.get(name), is_at_work=name in at_work))
        return View(found, minute=self._minute())

    def _engine(self, one: Watched, last_end: LastEnd | None, *, is_at_work: bool) -> Engine:
        history, name = one.judge.history, one.target.name
        model = None if history.last_answer is None else history.last_answer.model
        is_held = last_end is not None and last_end.is_out
        told, last, now_s = (
            self._told.get(name, Told(only_observed="guard was not told what it may do to it")),
            history.last,
            self._clock(),
        )
        conditions = {condition.kind: condition for condition in one.conditions}
        doubted = one.teller.doubted  # it held, and whether it still does is not known
        holds = any((kind in doubted or found.is_true) and kind in GRADES for kind, found in conditions.items())
        observed = "guard is at work on it" if is_at_work else told.only_observed or _connector(last)
        return Engine(
            name, conditions, load_of(name, last, is_well=not holds, model=model),
            math.inf if last is None else max(0.0, now_s - last.at_s), self._every_s, told.group,
            _is_away(last) or is_at_work or is_held,
            now_s - history.changed_at_s if history.changed else None, observed,
            has_gate=told.has_gate and last is not None and last.gate is not None, has_restarter=told.has_restarter,
            last_end=last_end,
        )  # fmt: skip


def _is_away(look: Look | None) -> bool:
    if look is None or look.reach is not Reach.ANSWERS:
        return True
    return look.gate is not None and (not look.gate.ready or look.gate.drain != "serving")


def _connector(look: Look | None) -> str:
    """With a KV connector a request lives in two engines: what one of them says is not all of it."""
    if look is not None and look.figures.get("external_prefix_queries", 0.0) > 0:
        return "it has a KV connector: guard only observes such engines"
    return ""
