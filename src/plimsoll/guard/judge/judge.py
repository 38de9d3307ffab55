"""Judges one engine from look to look. Pure: looks, a policy and the time go in, changed conditions come out."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.guard.judge import life, load, memory
from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.policy import GRADES, Policy
from plimsoll.guard.judge.tracker import Assessment, Tracker, unknown, yes
from plimsoll.unknown import Condition

Question = Callable[[History, Policy, Look], Assessment]
QUESTIONS: tuple[tuple[str, Question], ...] = (
    ("dead", life.dead), ("wedged", life.wedged), ("hung", life.hung), ("slow", life.slow), ("garbage", life.garbage),
    ("stalled", life.stalled),
    ("saturated", load.saturated), ("storm", load.storm),
    ("backlog", load.backlog), ("retries", memory.retries), ("growth", memory.held_growth), ("exhausted", memory.exhausted),
    ("slack", memory.slack), ("neighbour", memory.neighbour), ("contained", life.contained),
    ("limping", life.limping), ("host", memory.host_growth), ("card", memory.sick),
    ("prefix", load.low_hits), ("loop", life.crash_loop), ("changed", life.changed),
)  # fmt: skip


SEVERAL = yes("SeveralServers", "several servers answer at this address in turn: none of them can be judged")
SHARED = unknown("SeveralServers", "several servers answer at this address in turn: give guard the address of each")


class Judge:
    """Judges one engine: takes its looks in order and keeps its conditions."""

    def __init__(self, engine: str, policy: Policy) -> None:
        self.engine = engine
        self.policy = policy
        self.history = History(policy.every_s, policy.number("wedged", "still"))
        every = policy.every_s
        self._trackers = {
            kind: Tracker(kind, policy.number(kind, "for"), policy.number(kind, "clear"), every, is_strict=kind in GRADES)
            for kind, _ in QUESTIONS
        }
        self._conditions: tuple[Condition, ...] | None = None

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Every condition as of the last look."""
        if self._conditions is None:  # read several times a second, and changed only by looks
            self._conditions = tuple(tracker.condition for tracker in self._trackers.values())
        return self._conditions

    def see(self, look: Look) -> tuple[Condition, ...]:
        """Takes a look and returns the conditions it changed; a look that is not later than the last changes nothing."""
        if not self.history.add(look):
            return ()
        self._conditions = None
        now_s, history, policy = look.at_s, self.history, self.policy
        if history.lives.is_shared(now_s):
            answers = [(tracker, SEVERAL if kind == "changed" else SHARED) for kind, tracker in self._trackers.items()]
        else:
            answers = [(self._trackers[kind], question(history, policy, look)) for kind, question in QUESTIONS]
        return tuple(tracker.condition for tracker, answer in answers if tracker.note(answer, now_s))
