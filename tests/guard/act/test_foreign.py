"""Restarts that somebody else made are counted, each once, and ours are not."""

from __future__ import annotations

import pytest

from plimsoll.guard.act.remembered import Known, Seen, foreign

AT = Seen(100.0, 3)


@pytest.mark.parametrize(
    ("known", "now", "lives", "times"),
    [
        (Known(), Seen(100.0), 0, 0),  # the first that was ever seen
        (Known(AT), AT, 0, 0),
        (Known(AT), Seen(100.4, 3), 0, 0),  # the same start, as another clock writes it
        (Known(AT), Seen(500.0, 3), 0, 1),  # while guard was down
        (Known(AT), Seen(500.0, 7), 0, 4),  # and its manager knows how often
        (Known(AT), Seen(500.0, 1), 0, 1),  # a count that began anew says nothing of what was before
        (Known(AT), Seen(500.0), 3, 3),  # three were seen to answer
        (Known(AT), Seen(None, 5), 0, 2),  # two that never answered
        (Known(AT, own=1), Seen(500.0, 0), 1, 0),  # ours
        (Known(AT, own=1), Seen(500.0, 0), 2, 1),  # ours, and one after it: during probation
        (Known(AT, is_awaited=True), Seen(500.0, 3), 1, 0),  # counted before it answered
        (Known(AT, is_awaited=True), Seen(500.0, 3), 2, 1),
        (Known(Seen(None, 3)), Seen(500.0, 3), 0, 0),
        (Known(), Seen(), 2, 2),  # without a start time: by counters that fell
    ],
)
def test_each_is_counted_once(known: Known, now: Seen, lives: int, times: int) -> None:
    """By the start time, by what was seen to answer, and by the count of whoever runs it, whichever knows most."""
    assert foreign(known, now, lives).times == times


def test_what_was_found_is_written_down_once_and_kept_where_it_is_not_known_any_more() -> None:
    """The same again is nothing new; a page that does not answer forgets nothing; one that was counted is awaited."""
    found = foreign(Known(AT), Seen(None, 5), 0)
    assert (found.seen, found.is_awaited, found.is_new) == (Seen(100.0, 5), True, True)
    again = foreign(Known(found.seen, is_awaited=True), Seen(None, 5), 0)
    assert (again.times, again.is_new, again.is_awaited) == (0, False, True)
    answers = foreign(Known(found.seen, is_awaited=True), Seen(500.0, 5), 1)
    assert (answers.times, answers.is_new, answers.is_awaited) == (0, True, False)
    assert not foreign(Known(Seen(500.0, 5)), Seen(500.0, 5), 0).is_new
    assert not foreign(Known(), Seen(), 0).is_new
