"""True, false or unknown."""

from __future__ import annotations

import pytest

from plimsoll.domain.condition import Condition, Status


def _condition(status: Status, since_s: float = 10.0) -> Condition:
    return Condition("KvSaturated", status, "UsageHigh", "the cache is full", since_s)


def test_unknown_is_not_true() -> None:
    """What could not be read neither holds nor is known not to hold."""
    unknown = _condition(Status.UNKNOWN)
    assert (unknown.is_true, unknown.is_known) == (False, False)
    assert (_condition(Status.FALSE).is_true, _condition(Status.FALSE).is_known) == (False, True)


def test_since_moves_only_when_the_status_changes() -> None:
    """A new message does not restart the clock; a new status does."""
    first = _condition(Status.TRUE)
    same = first.updated(Status.TRUE, "UsageHigh", "still full", now_s=20.0)
    changed = same.updated(Status.UNKNOWN, "NoPage", "the page is gone", now_s=30.0)
    assert (same.since_s, changed.since_s) == (10.0, 30.0)
    assert same.held_for_s(25.0) == 15.0


def test_a_clock_that_goes_back_gives_no_negative_time() -> None:
    """Time is an argument, and arguments can be wrong."""
    assert _condition(Status.TRUE).held_for_s(5.0) == 0.0


def test_a_condition_reads_as_a_sentence() -> None:
    """Its text is what an operator reads."""
    assert str(_condition(Status.TRUE)) == "KvSaturated is true: the cache is full"


def test_a_condition_needs_a_reason() -> None:
    """A reason a program can test is part of it."""
    with pytest.raises(AssertionError):
        Condition("KvSaturated", Status.TRUE, "", "the cache is full", 0.0)
