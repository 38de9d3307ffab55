"""True, false or unknown."""

from __future__ import annotations

import pytest

from plimsoll.unknown import Condition, Status


def _condition(status: Status) -> Condition:
    return Condition("KvSaturated", status, "UsageHigh", "the cache is full", 10.0)


def test_unknown_is_not_true() -> None:
    """What could not be read neither holds nor is known not to hold."""
    unknown = _condition(Status.UNKNOWN)
    assert (unknown.is_true, unknown.is_known) == (False, False)
    assert (_condition(Status.FALSE).is_true, _condition(Status.FALSE).is_known) == (False, True)


def test_a_condition_reads_as_a_sentence() -> None:
    """Its text is what an operator reads."""
    assert str(_condition(Status.TRUE)) == "KvSaturated is true: the cache is full"


def test_a_condition_needs_a_reason() -> None:
    """A reason a program can test is part of it."""
    with pytest.raises(AssertionError):
        Condition("KvSaturated", Status.TRUE, "", "the cache is full", 0.0)
