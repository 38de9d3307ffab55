"""When an engine is asked whether it is paused: once, and then only where it stands still with work for longer than a crash."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.daemon.engine_look import ABSENT_AGAIN_S, AGAIN_S, STILL_S, PauseState
from plimsoll.guard.judge.look import Canary


def page(steps: float = 7, running: float = 0, waiting: float = 0) -> dict[str, float]:
    return {"steps": steps, "running": running, "waiting": waiting}


def met(*, is_paused: bool = False) -> PauseState:
    """One that was asked at second 0, while it had nothing to do."""
    pause = PauseState()
    assert pause.is_due(page(), None, 0.0)
    pause.answered(0.0, is_paused=is_paused)
    return pause


def test_an_engine_that_works_or_has_nothing_to_do_is_never_asked_again() -> None:
    """For a day, every five seconds: what it was told holds while it is idle, and its steps say that it is not paused."""
    for is_paused in (False, True):
        idle = met(is_paused=is_paused)
        assert not any(idle.is_due(page(), None, 5.0 * number) for number in range(1, 17_280))
        assert idle.state() == (is_paused, False)
        busy = met(is_paused=is_paused)
        assert not any(busy.is_due(page(number + 7.0, 3), None, 5.0 * number) for number in range(1, 17_280))
        assert busy.state() == (False, False)


@pytest.mark.parametrize("before", [0, 1], ids=["was idle", "was busy"])
def test_one_that_stands_still_with_work_is_asked_when_a_crash_would_be_over(before: int) -> None:
    """Until then it is not known whether it rests; then it is asked, and again every minute while it stands still."""
    pause = met()
    pause.is_due(page(8, before), None, 5.0)
    asked = []
    for number in range(2, 40):
        now_s = 5.0 * number
        if pause.is_due(page(8, 2), None, now_s):
            asked.append(now_s)
            pause.answered(now_s, is_paused=True)
        assert pause.state() == ((True, False) if asked else (None, True))
    assert asked[0] - 10.0 >= STILL_S
    assert all(later - sooner >= AGAIN_S for sooner, later in pairwise(asked))
    pause.is_due(page(9, 2), None, 200.0)
    assert pause.state() == (False, False)


def test_a_pause_between_two_standstills_is_not_missed() -> None:
    """What was said of an earlier standstill says nothing of the next one."""
    pause = met()
    for now_s in (100.0, 125.0):
        if pause.is_due(page(7, 1), None, now_s):
            pause.answered(now_s, is_paused=False)
    assert pause.state() == (False, False)
    pause.is_due(page(8, 1), None, 130.0)
    pause.is_due(page(8, 1), None, 135.0)
    assert pause.state() == (None, True)


def test_a_test_request_without_an_answer_is_work_that_waits() -> None:
    """An idle engine that somebody has paused is found by it."""
    pause = met()
    assert not pause.is_due(page(), Canary(30.0, True), 45.0)
    assert pause.is_due(page(), Canary(60.0, False), 60.0 + STILL_S)
    assert pause.state() == (None, True)
    pause.answered(80.0, is_paused=True)
    assert pause.state() == (True, False)


def test_a_lost_answer_is_not_asked_for_at_every_look() -> None:
    """Each leaves a question in a server whose core may be stuck."""
    pause = PauseState()
    assert pause.is_due(page(), None, 0.0)
    pause.lost(0.0)
    assert pause.state() == (None, True)
    assert not pause.is_due(page(), None, AGAIN_S - 1)
    assert pause.is_due(page(), None, AGAIN_S)


def test_a_server_that_does_not_know_the_question_does_not_rest() -> None:
    """Asked every five minutes; one that has known it is taken to know it still."""
    pause = PauseState()
    pause.absent(0.0)
    assert pause.state() == (None, False)
    assert not pause.is_due(page(7, 1), None, ABSENT_AGAIN_S - 1)
    assert pause.is_due(page(7, 1), None, ABSENT_AGAIN_S)
    other = met()
    other.is_due(page(7, 1), None, 10.0)
    other.absent(30.0)
    assert other.state() == (None, True)


LOOKS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from(["yes", "no", "lost", "absent"])), max_size=60)


@given(looks=LOOKS, every_s=st.sampled_from([0.5, 1.0, 5.0, 30.0]))
def test_no_question_within_a_crash_of_the_last_sign_of_life(looks: list[tuple[bool, int, str]], every_s: float) -> None:
    """Whatever it shows and answers: once it has answered, the next question comes when work has stood still for STILL_S."""
    pause, has_answered, still_since, steps = PauseState(), False, 0.0, 0
    for number, (moves, work, says) in enumerate(looks):
        now_s = every_s * number
        steps += moves
        still_since = now_s if moves or not work or not number else still_since
        is_asked = pause.is_due(page(steps, work), None, now_s)
        if is_asked:
            assert not has_answered or now_s - still_since >= STILL_S - every_s
            how: Any = {"yes": True, "no": False}.get(says)
            if how is None:
                getattr(pause, says)(now_s)
            else:
                has_answered = True
                pause.answered(now_s, is_paused=how)
        is_paused, is_unknown = pause.state()
        assert not (is_paused and is_unknown)
        if moves and has_answered and number and not is_asked:
            assert is_paused is False
