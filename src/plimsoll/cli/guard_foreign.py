"""Writes down which process of each engine answers, and counts those that somebody else started, also while guard was away."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.cli.guard_act import Conductor
from plimsoll.cli.guard_sight import FleetSight
from plimsoll.domain.journal_entry import SEEN
from plimsoll.guard.foreign import Known, Seen, foreign
from plimsoll.guard.ports import Book
from plimsoll.guard.remembered import known_of
from plimsoll.guard.steps import Step

MOST_A_ROUND = 20  # entries: each is brought to the disk before the next


class ForeignRestarts:
    """Of one fleet. `counts`: how often whoever runs an engine has started it again by itself; None where nobody says."""

    def __init__(self, conductor: Conductor, book: Book, sight: FleetSight, counts: Callable[[str], int | None]) -> None:
        self._conductor, self._book, self._sight, self._counts = conductor, book, sight, counts
        self._totals: dict[str, int] = {}

    def note(self) -> None:
        """One round. What becomes of those that guard itself stops and starts just now is looked at when that is over."""
        courses = self._conductor.courses.items()
        at_work = {name for name, course in courses if course.is_down and course.step is not Step.PROBATION}
        known, left = known_of(self._conductor.kept()), MOST_A_ROUND
        for name in self._sight.engines():
            if name in at_work or left <= 0:
                continue
            life, before = self._sight.life(name), known.get(name, Known())
            if life.is_shared:  # which of them answers says nothing
                self._totals[name] = life.total
                continue
            count = self._counts(name)
            seen = Seen(life.started, life.restarts if count is None else count)
            found = foreign(before, seen, max(0, life.total - self._totals.get(name, 0)))
            if found.is_new:
                left -= 1
                fields = {"started": found.seen.started, "count": found.seen.restarts, "awaited": found.is_awaited}
                if found.times:
                    self._conductor.foreign_restart(name, times=found.times, **fields)
                else:
                    self._book.append(SEEN, engine=name, fields=fields)
            self._totals[name] = life.total
