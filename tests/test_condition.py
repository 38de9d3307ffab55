"""True, false or unknown."""

from __future__ import annotations

import pytest

from plimsoll.unknown import Condition, Status


def _condition(status: Status) -> Condition:
    return Condition("KvSaturated", status, "UsageHigh", "the cache is full", 10.0)


def test_unknown_is_not_true() -> None:
    """It neither holds nor is known not to hold; a condition has a reason and reads as a sentence."""
    unknown = _condition(Status.UNKNOWN)
    assert (unknown.is_true, unknown.is_known) == (False, False)
    assert (_condition(Status.FALSE).is_true, _condition(Status.FALSE).is_known) == (False, True)
    assert str(_condition(Status.TRUE)) == "KvSaturated is true: the cache is full"
    with pytest.raises(AssertionError):
        Condition("KvSaturated", Status.TRUE, "", "the cache is full", 0.0)
