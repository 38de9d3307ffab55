"""Windows, hysteresis, and what is not known in between."""

from __future__ import annotations

import pytest

from plimsoll.domain.condition import Status
from plimsoll.guard.tracker import Tracker, no, unknown, yes

SAYS = {"y": yes("Is", "it is"), "n": no("IsNot", "it is not"), "?": unknown("Lost", "not known")}


def after(says: str, *, is_strict: bool, for_s: float = 20.0) -> Status:
    """The status after looks that say so, one every five seconds; a dot: nobody looked."""
    tracker = Tracker("kind", for_s, 20.0, 5.0, is_strict=is_strict)
    for number, word in enumerate(says):
        if word != ".":
            tracker.note(SAYS[word], 5.0 * number)
    return tracker.status


@pytest.mark.parametrize(
    ("says", "strict", "lenient"),
    [
        ("yyyy", "false", "false"),
        ("yyyyy", "true", "true"),
        ("yynyyyy", "false", "false"),
        ("yy?yy", "false", "true"),
        ("yy?yyyyy", "true", "true"),
        ("yy.yy", "false", "true"),
        ("yy???yyyy", "false", "false"),
        ("yy...yyyy", "false", "false"),
        ("yyyyy?", "unknown", "unknown"),
        ("yyyyyn", "true", "true"),
        ("yyyyynnnnn", "false", "false"),
        ("yyyyynnynnnn", "true", "true"),
    ],
)
def test_a_window_must_be_seen_whole(says: str, strict: str, lenient: str) -> None:
    """What could lead to an action is said after looks that all said so; advice forgives a look or two that said nothing."""
    assert after(says, is_strict=True) == strict
    assert after(says, is_strict=False) == lenient


def test_a_condition_that_is_watched_says_for_how_long() -> None:
    """Before its window is over it is false, with the reason that it is watched."""
    tracker = Tracker("kind", 20.0, 20.0, 5.0)
    tracker.note(SAYS["n"], 0.0)
    condition = tracker.see(SAYS["y"], 5.0)
    assert (condition.status, condition.reason, condition.message) == ("false", "Watching", "it is; for 0 of 20 s")
    assert condition.since_s == 0.0
    assert tracker.see(SAYS["y"], 10.0).message == "it is; for 5 of 20 s"
