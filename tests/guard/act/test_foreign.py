"""Restarts that somebody else made are counted, each once, and ours are not."""

from __future__ import annotations

from plimsoll.guard.act.journal_replay import EngineProcess, KnownProcess, foreign_restarts
from tests.each import each

AT = EngineProcess(100.0, 3)


@each(
    ("known", "now", "lives", "times"),
    [
        (KnownProcess(), EngineProcess(100.0), 0, 0),  # the first that was ever seen
        (KnownProcess(AT), AT, 0, 0),
        (KnownProcess(AT), EngineProcess(100.4, 3), 0, 0),  # the same start, as another clock writes it
        (KnownProcess(AT), EngineProcess(500.0, 3), 0, 1),  # while guard was down
        (KnownProcess(AT), EngineProcess(500.0, 7), 0, 4),  # and its manager knows how often
        (KnownProcess(AT), EngineProcess(500.0, 1), 0, 1),  # a count that began anew says nothing of what was before
        (KnownProcess(AT), EngineProcess(500.0), 3, 3),  # three were seen to answer
        (KnownProcess(AT), EngineProcess(None, 5), 0, 2),  # two that never answered
        (KnownProcess(AT, own=1), EngineProcess(500.0, 0), 1, 0),  # ours
        (KnownProcess(AT, own=1), EngineProcess(500.0, 0), 2, 1),  # ours, and one after it: during probation
        (KnownProcess(AT, is_awaited=True), EngineProcess(500.0, 3), 1, 0),  # counted before it answered
        (KnownProcess(AT, is_awaited=True), EngineProcess(500.0, 3), 2, 1),
        (KnownProcess(EngineProcess(None, 3)), EngineProcess(500.0, 3), 0, 0),
        (KnownProcess(), EngineProcess(), 2, 2),  # without a start time: by counters that fell
    ],
)
def test_each_is_counted_once(known: KnownProcess, now: EngineProcess, lives: int, times: int) -> None:
    """By the start time, by what was seen to answer, and by the count of whoever runs it, whichever knows most."""
    assert foreign_restarts(known, now, lives).times == times


def test_what_was_found_is_written_down_once_and_kept_where_it_is_not_known_any_more() -> None:
    """The same again is nothing new; a page that does not answer forgets nothing; one that was counted is awaited."""
    found = foreign_restarts(KnownProcess(AT), EngineProcess(None, 5), 0)
    assert (found.seen, found.is_awaited, found.is_new) == (EngineProcess(100.0, 5), True, True)
    again = foreign_restarts(KnownProcess(found.seen, is_awaited=True), EngineProcess(None, 5), 0)
    assert (again.times, again.is_new, again.is_awaited) == (0, False, True)
    answers = foreign_restarts(KnownProcess(found.seen, is_awaited=True), EngineProcess(500.0, 5), 1)
    assert (answers.times, answers.is_new, answers.is_awaited) == (0, True, False)
    assert not foreign_restarts(KnownProcess(EngineProcess(500.0, 5)), EngineProcess(500.0, 5), 0).is_new
    assert not foreign_restarts(KnownProcess(), EngineProcess(), 0).is_new
