"""One engine's conditions, from look to look. Pure: what was seen, the policy and the time go in, judgements come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from plimsoll.guard.judge import life, load, memory
from plimsoll.guard.judge import life as survival
from plimsoll.guard.judge import memory as card
from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.guard.judge.tracker import Assessment, Grade, Tracker, unknown, yes
from plimsoll.unknown import Condition

Question = Callable[[History, Policy, float], Assessment]
QUESTIONS: tuple[tuple[str, Question], ...] = (
    ("dead", life.dead), ("wedged", life.wedged), ("hung", life.hung), ("slow", life.slow), ("garbage", life.garbage),
    ("stalled", life.stalled),
    ("saturated", load.saturated), ("storm", load.storm),
    ("backlog", load.backlog), ("retries", memory.retries), ("growth", memory.held_growth), ("exhausted", memory.exhausted),
    ("slack", memory.slack), ("neighbour", memory.neighbour), ("contained", survival.contained),
    ("limping", survival.limping), ("host", memory.host_growth), ("card", card.sick),
    ("prefix", load.low_hits), ("loop", life.crash_loop), ("changed", life.changed),
)  # fmt: skip


SEVERAL = yes("SeveralServers", "several servers answer at this address in turn: none of them can be judged")
SHARED = unknown("SeveralServers", "several servers answer at this address in turn: give guard the address of each")


class Change(NamedTuple):
    """A condition that is another one than at the last look."""

    engine: str
    condition: Condition
    grade: Grade

    def __str__(self) -> str:
        return f"{self.engine}: {self.condition}"


class Judge:
    """Of one engine."""

    def __init__(self, engine: str, policy: Policy) -> None:
        self.engine = engine
        self.policy = policy
        self.history = History(policy.every_s)
        every = policy.every_s
        self._trackers = {
            kind: Tracker(kind, policy.number(kind, "for"), policy.number(kind, "clear"), every, is_strict=kind in GRADES)
            for kind, _ in QUESTIONS
        }
        self._rules = {rule.name: Tracker(rule.name, rule.for_s, rule.clear_s, every) for rule in policy.rules}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """All of them as of the last look."""
        return tuple(tracker.condition for tracker in (*self._trackers.values(), *self._rules.values()))

    def see(self, look: Look) -> tuple[Change, ...]:
        """What this look changes; one that is not later than the last changes nothing."""
        if not self.history.add(look):
            return ()
        now_s, history, policy = look.at_s, self.history, self.policy
        if history.lives.is_shared(now_s):
            says = {"changed": SEVERAL}
            all_of_them = (*self._trackers.values(), *self._rules.values())
            return self._told([one for one in all_of_them if one.note(says.get(one.kind, SHARED), now_s)])
        changed = [
            tracker
            for (_, question), tracker in zip(QUESTIONS, self._trackers.values(), strict=True)
            if tracker.note(question(history, policy, now_s), now_s)
        ]
        for rule in policy.rules:
            tracker = self._rules[rule.name]
            if tracker.note(load.user_rule(rule, history), now_s):
                changed.append(tracker)
        return self._told(changed)

    def _told(self, changed: Iterable[Tracker]) -> tuple[Change, ...]:
        return tuple(Change(self.engine, one.condition, GRADES.get(one.kind, Grade.ADVICE)) for one in changed)
