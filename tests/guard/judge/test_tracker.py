"""Windows, hysteresis, and what is not known in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.judge.tracker import Tracker, no, unknown, yes
from plimsoll.unknown import Status
from tests.each import each

SAYS = {"y": yes("Is", "it is"), "n": no("IsNot", "it is not"), "?": unknown("Lost", "not known")}


def after(says: str, *, is_strict: bool, for_s: float = 20.0) -> Status:
    """The status after looks that say so, one every five seconds; a dot: nobody looked."""
    tracker = Tracker("kind", for_s, 20.0, 5.0, is_strict=is_strict)
    for number, word in enumerate(says):
        if word != ".":
            tracker.note(SAYS[word], 5.0 * number)
    return tracker.status


@each(
    ("says", "strict", "lenient"),
    [
        ("yyyy", "false", "false"),
        ("yyyyy", "true", "true"),
        ("yynyy", "true", "false"),
        ("ynynyy", "false", "false"),
        ("yy?yy", "true", "true"),
        ("y??yyyyy", "true", "true"),
        ("y??yyyy", "false", "false"),
        ("yy?yyyyy", "true", "true"),
        ("yy.yy", "true", "true"),
        ("y.y.y.y.y", "false", "true"),
        ("yy???yyyy", "false", "false"),
        ("yy...yyyy", "false", "false"),
        ("yyyyy?", "unknown", "unknown"),
        ("yyyyyn", "true", "true"),
        ("yyyyynnnnn", "false", "false"),
        ("yyyyynnynnnn", "true", "true"),
    ],
)
def test_a_window_must_be_seen_whole(says: str, strict: str, lenient: str) -> None:
    """Before an action four of five looks said yes, a lost one is a no; advice forgives a look or two that said nothing."""
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


@given(
    says=st.text("yyyn?", min_size=1, max_size=60),
    lost=st.sets(st.integers(0, 59)),
    for_s=st.sampled_from([0.0, 10.0, 20.0, 60.0]),
)
def test_to_lose_looks_never_makes_it_hold_sooner(says: str, lost: set[int], for_s: float) -> None:
    """What could lead to an action holds first with all looks, whichever of them are lost or say nothing."""

    def first(words: str) -> int:
        found = [end for end in range(1, len(words) + 1) if after(words[:end], is_strict=True, for_s=for_s) is Status.TRUE]
        return found[0] if found else len(words) + 1

    for gap in ".?":
        assert first("".join(gap if place in lost else word for place, word in enumerate(says))) >= first(says)


def test_looks_that_take_longer_than_the_time_between_them_are_enough() -> None:
    """Who wants to look every second and needs two for a look is told what was seen all the same."""
    tracker = Tracker("kind", 10.0, 10.0, 1.0, is_strict=True)
    for number in range(8):
        tracker.note(SAYS["y"], 2.0 * number)
    assert tracker.status is Status.TRUE


def test_what_held_before_it_could_not_be_told_is_not_denied_by_one_look() -> None:
    """After looks that told nothing, one that says yes again is in doubt, not over."""
    assert after("yyyyy???????y", is_strict=True) is Status.UNKNOWN
    assert after("yyyyy???????n", is_strict=True) is Status.TRUE
    assert after("yyyyy???????nnnnn", is_strict=True) is Status.FALSE


def test_what_is_about_to_be_over_says_so() -> None:
    """It holds until it has stayed away for a while, and the looks in between are told apart from those that show it."""
    tracker = Tracker("kind", 0.0, 20.0, 5.0, is_strict=True)
    told = [(found.is_true, found.is_ending) for number, word in enumerate("ynynnnnn")
            if (found := tracker.see(SAYS[word], 5.0 * number))]  # fmt: skip
    assert told == [(True, False), (True, True), (True, False), *[(True, True)] * 4, (False, False)]
