"""The pulse: what is learned from the engine's steps, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.pulse import GAP_LIMIT_S, STEP_LIMIT_S, STEP_MEMORY_S, Pulse


def busy(pulse: Pulse, begin: float, steps: int, each_s: float = 0.1, tokens: int = 50, waiting: int = 2) -> float:
    """So many steps with work, then one after which nothing runs; when that one was."""
    for step in range(steps):
        pulse.note_step(4, waiting, 0.5, 0, tokens, begin + step * each_s)
    end = begin + steps * each_s
    pulse.note_step(0, 0, 0.0, 0, tokens, end)
    return end


def test_nothing_is_known_before_the_first_step() -> None:
    """Unknown is None, never 0."""
    pulse = Pulse()
    assert (pulse.running, pulse.waiting, pulse.kv_usage, pulse.last_step, pulse.sleep_level) == (None,) * 5
    assert pulse.full_tokens_per_s(5.0) is None
    assert (pulse.mean_prompt(), pulse.mean_output()) == (None, None)
    assert (pulse.steps, pulse.finished, pulse.longest_step_s, pulse.is_fed) == (0, 0, 0.0, False)


def test_idle_time_does_not_change_the_rate() -> None:
    """Neither an hour of nothing nor a large prefill after it, whose beginning is unknown."""
    pulse = Pulse()
    end = busy(pulse, 100.0, 30)
    assert pulse.full_tokens_per_s(end) == pytest.approx(500, rel=0.01)
    busy(pulse, end + 3600, 30)
    assert pulse.full_tokens_per_s(end + 7200) == pytest.approx(500, rel=0.01)
    pulse = Pulse()
    at = 0.0
    for _ in range(20):
        at += 60
        pulse.note_step(4, 2, 0.5, 100_000, 0, at)
        at = busy(pulse, at + 0.1, 5)
    assert pulse.full_tokens_per_s(at) == pytest.approx(500, rel=0.05)


def test_the_rate_needs_a_second_of_work_and_follows_the_engine() -> None:
    """A handful of steps is no basis to refuse anybody; after a minute at a fifth of the speed the old one is forgotten."""
    pulse = Pulse()
    assert pulse.full_tokens_per_s(busy(pulse, 0.0, 9)) is None
    assert pulse.full_tokens_per_s(busy(pulse, 5.0, 9)) is not None
    pulse = Pulse()
    end = busy(pulse, 0.0, 300)
    end = busy(pulse, end + 1, 600, tokens=10)
    assert pulse.full_tokens_per_s(end) == pytest.approx(100, rel=0.25)


def test_a_stuck_engine_gets_slower_by_the_second() -> None:
    """While work is there and no step comes, the time counts, up to a bound."""
    pulse = Pulse()
    for step in range(20):
        pulse.note_step(4, 2, 0.5, 0, 50, step * 0.1)
    at_once, later, much_later = (pulse.full_tokens_per_s(1.9 + gap) for gap in (0.0, 5.0, 10_000.0))
    assert at_once is not None
    assert later is not None
    assert much_later is not None
    assert at_once > later > much_later > 0


def test_the_rate_of_a_full_engine_is_learned_only_while_requests_wait() -> None:
    """One lone request shows how fast one is served, not what the engine can do."""
    pulse = Pulse()
    end = busy(pulse, 0.0, 50, tokens=5, waiting=0)
    assert pulse.full_tokens_per_s(end) is None
    end = busy(pulse, end + 1, 50, tokens=500, waiting=3)
    assert pulse.full_tokens_per_s(end) == pytest.approx(5000, rel=0.05)
    busy(pulse, end + 1, 500, tokens=5, waiting=0)
    assert pulse.full_tokens_per_s(end + 60) == pytest.approx(5000, rel=0.05)


def test_the_longest_step_is_between_two_steps_with_work() -> None:
    """Idling is no step, however long; the gap after a step that left work is one."""
    pulse = Pulse()
    end = busy(pulse, 0.0, 10)
    busy(pulse, end + 500, 10, each_s=0.7)
    assert pulse.longest_step_s == pytest.approx(0.7)


def test_a_pause_is_not_believed_to_be_a_step_for_ever() -> None:
    """What looks like a step of a day counts as ten minutes at most and is forgotten within an hour of steps."""
    pulse = Pulse()
    pulse.note_step(1, 0, 0.1, 0, 1, 0.0)
    pulse.note_step(1, 0, 0.1, 0, 1, 86_400.0)
    assert pulse.longest_step_s == STEP_LIMIT_S
    at = 86_400.0
    while at < 86_400 + 2 * STEP_MEMORY_S + 10:
        at += 5
        pulse.note_step(1, 0, 0.1, 0, 1, at)
    assert pulse.longest_step_s == 5


def test_a_pause_counts_little_for_the_rate() -> None:
    """A gap of an hour with work counts as a few seconds of busy time."""
    pulse = Pulse()
    for step in range(100):
        pulse.note_step(4, 2, 0.5, 0, 50, step * 0.1)
    pulse.note_step(4, 2, 0.5, 0, 50, 3600.0)
    rate = pulse.full_tokens_per_s(3600.0)
    assert rate is not None
    assert rate > 500 * 0.3
    assert GAP_LIMIT_S < 30


def test_time_asleep_is_no_step() -> None:
    """Sleep is told with its level, and the hours of it are not the longest step."""
    pulse = Pulse()
    pulse.note_step(1, 0, 0.1, 0, 1, 0.0)
    levels = []
    for is_asleep, level in ((True, 2), (False, 0)):
        pulse.note_sleep(is_asleep, level)
        levels.append(pulse.sleep_level)
    assert levels == [2, None]
    pulse.note_step(1, 0, 0.1, 0, 1, 5000.0)
    pulse.note_step(1, 0, 0.1, 0, 1, 5000.2)
    assert pulse.longest_step_s == pytest.approx(0.2)


def test_engines_are_summed_up_step_by_step() -> None:
    """Sums, and the fullest cache; the longest step is one engine's own; without the scheduler's figures the last ones stay."""
    pulse = Pulse()
    pulse.note_step(3, 1, 0.2, 0, 10, 1.0, engine=0)
    pulse.note_step(5, 0, 0.9, 0, 10, 1.1, engine=1)
    assert (pulse.running, pulse.waiting, pulse.kv_usage) == (8, 1, 0.9)
    pulse.note_step(0, 0, 0.0, 0, 10, 1.2, engine=1)
    assert (pulse.running, pulse.waiting, pulse.kv_usage) == (3, 1, 0.2)
    pulse = Pulse()
    pulse.note_step(1, 0, 0.1, 0, 1, 0.0, engine=0)
    for step in range(1, 40):
        pulse.note_step(1, 0, 0.1, 0, 1, step * 0.1, engine=1)
    pulse.note_step(1, 0, 0.1, 0, 1, 4.0, engine=0)
    assert pulse.longest_step_s == pytest.approx(4.0)
    pulse = Pulse()
    pulse.note_step(7, 2, 0.4, 0, 1, 0.0)
    pulse.note_step(None, None, None, 0, 1, 0.1)
    assert (pulse.running, pulse.waiting, pulse.kv_usage, pulse.steps) == (7, 2, 0.4, 2)


def test_where_other_servers_hear_of_steps_too_a_long_gap_is_not_taken_for_work() -> None:
    """The last figures said that one runs, another server heard that it ended: neither a slow engine nor a long step."""
    pulse = Pulse()
    for begin in (0.0, 300.0, 9000.0):
        for step in range(15):
            is_told = bool(step % 2)
            pulse.note_step(1 if is_told else None, 2 if is_told else None, 0.1, 0, 50, begin + step * 0.1)
    assert pulse.is_partial
    assert pulse.figures_at == pytest.approx(9001.3)
    assert pulse.full_tokens_per_s(9001.4) == pytest.approx(500, rel=0.05)
    assert pulse.longest_step_s == pytest.approx(0.1)


def test_one_server_alone_is_told_everything() -> None:
    """A step that says nothing of the scheduler and brought no token, as after an abort, is no sign of other servers."""
    pulse = Pulse()
    pulse.note_step(1, 0, 0.1, 5, 5, 0.0)
    pulse.note_step(None, None, None, 0, 0, 0.1)
    assert not pulse.is_partial


def test_means_forget_slowly_and_leave_out_what_was_cut_off() -> None:
    """The mean is exact while there are few; an aborted request says nothing about how long outputs are."""
    pulse = Pulse()
    for prompt, output in ((100, 10), (300, 30), (800, None)):
        pulse.note_finished(prompt, output)
    assert (pulse.mean_prompt(), pulse.mean_output(), pulse.finished) == (400, 20, 3)
    for _ in range(2000):
        pulse.note_finished(50, 5)
    assert pulse.mean_prompt() == pytest.approx(50, rel=0.01)
    assert pulse.mean_output() == pytest.approx(5, rel=0.01)


@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 1000),
            st.integers(0, 1000),
            st.integers(0, 10**6),
            st.floats(-1e9, 1e9),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_no_order_of_steps_and_no_clock_breaks_it(steps: list[tuple[int | None, int, int, float, int]]) -> None:
    """A clock that jumps back or far ahead leaves figures that are possible, in a memory that does not grow."""
    pulse = Pulse()
    for running, waiting, tokens, now, engine in steps:
        pulse.note_step(running, waiting if running is not None else None, 0.5, tokens, 0, now, engine)
        rate = pulse.full_tokens_per_s(now)
        assert rate is None or rate >= 0
        assert 0 <= pulse.longest_step_s <= STEP_LIMIT_S
    assert len(pulse._engines) <= 4
