"""When an engine is suspected to be stuck, and what clears it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.tick import LONGEST_STEPS, Progress, is_suspect

SILENT = Progress(has_work=True, work_since=100.0, last_step=90.0, longest_step_s=2.0, is_excused=False)


def test_long_silence_with_work_is_suspect() -> None:
    """After the bound, counted from when work came, not from the last step before it."""
    assert not is_suspect(SILENT, 120.0, 219.0)
    assert is_suspect(SILENT, 120.0, 221.0)
    assert not is_suspect(SILENT._replace(last_step=150.0), 120.0, 221.0)


def test_an_engine_known_for_long_steps_gets_more_time() -> None:
    """Three times the longest step seen."""
    slow = SILENT._replace(longest_step_s=100.0)
    assert not is_suspect(slow, 120.0, 399.0)
    assert is_suspect(slow, 120.0, 401.0)


def test_no_work_or_an_excuse_is_never_suspect() -> None:
    """An idle, sleeping or dead engine does not step, and is not stuck."""
    assert not is_suspect(SILENT._replace(has_work=False), 1.0, 1e9)
    assert not is_suspect(SILENT._replace(is_excused=True), 1.0, 1e9)


def test_an_engine_that_never_stepped_is_judged_from_its_first_work() -> None:
    """The first step may never come."""
    assert is_suspect(SILENT._replace(last_step=None), 120.0, 221.0)
    assert not is_suspect(SILENT._replace(last_step=None), 120.0, 219.0)


times = st.floats(0, 1e6)


@given(work_since=times, last=st.none() | times, longest=st.floats(0, 1e4), bound=st.floats(0.5, 1e4), now=times)
def test_a_recent_step_always_clears(work_since: float, last: float | None, longest: float, bound: float, now: float) -> None:
    """Suspect means silent for longer than both the bound and three longest steps."""
    if is_suspect(
        Progress(has_work=True, work_since=work_since, last_step=last, longest_step_s=longest, is_excused=False), bound, now
    ):
        assert now - (last or 0.0) > max(bound, LONGEST_STEPS * longest)


def test_a_step_as_long_as_the_bound_was_a_failure_and_is_not_learnt() -> None:
    """The third hang is put to the test as soon as the first; a long step that is normal still counts."""
    assert is_suspect(SILENT._replace(longest_step_s=200.0), 120.0, 221.0)
    assert not is_suspect(SILENT._replace(longest_step_s=100.0), 120.0, 399.0)


def test_the_test_request_is_sent_so_early_that_it_fails_at_the_bound() -> None:
    """With a deadline of 30 s it is sent after 90 s without a step."""
    assert not is_suspect(SILENT, 120.0, 189.0, 30.0)
    assert is_suspect(SILENT, 120.0, 191.0, 30.0)
