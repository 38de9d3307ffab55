"""How many restarts are allowed, whoever made them and whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.decide import Restart, spent
from plimsoll.guard.act.policy import DAY_S, HOUR_S, ActPolicy

NOW = 1_700_000_000.0
POLICY = ActPolicy()
WIDE = ActPolicy(restarts_per_hour=99, restarts_per_day=99, fleet_restarts_per_hour=99, fleet_restarts_per_day=99)


def ago(*seconds: float, engine: str = "a", is_own: bool = True) -> list[Restart]:
    return [Restart(NOW - one, engine, is_own) for one in seconds]


def test_a_budget_counts_the_restarts_of_a_day_whoever_made_them() -> None:
    """Without one all is allowed; yesterday's are forgotten; a budget of nought refuses for ever."""
    assert not spent([], "a", POLICY, NOW).message
    assert spent(ago(100, 3_000, is_own=False), "a", POLICY, NOW).message
    assert not spent(ago(*(DAY_S + one for one in range(50))), "a", POLICY, NOW).message
    assert spent([], "a", ActPolicy(restarts_per_hour=0), NOW).message


def test_each_of_the_four_budgets_ends_by_itself() -> None:
    """Of the engine and of the fleet, in an hour and in a day: one more is allowed at the time that is told."""
    cases = [
        (ago(100, 3_000), "of this engine in an hour"),
        (ago(*(5_000 + 4_000 * one for one in range(6))), "of this engine in a day"),
        (ago(10, 20, 30, 40, engine="b"), "of the fleet in an hour"),
        (ago(*(4_000 + 3_000 * one for one in range(20)), engine="b"), "of the fleet in a day"),
    ]
    for restarts, words in cases:
        found = spent(restarts, "a", POLICY, NOW)
        assert words in found.message
        assert found.until > NOW
        assert words not in spent(restarts, "a", POLICY, found.until + 1).message


def test_the_pause_after_a_restart_doubles_up_to_its_bound() -> None:
    """Five minutes after one in a day, ten after two, and never more than the longest."""
    for count in range(1, 12):
        pause_s = min(WIDE.longest_backoff_s, WIDE.backoff_s * 2 ** (count - 1))
        others = [80_000.0 - one for one in range(count - 1)]
        if pause_s > 1:
            assert spent(ago(*others, pause_s - 1), "a", WIDE, NOW).until == NOW + 1
        assert not spent(ago(*others, pause_s + 1), "a", WIDE, NOW).message


def test_a_clock_that_jumps_gives_no_new_budget() -> None:
    """What is dated later than now counts as of now; a year ahead nothing is known of today, and back again it is."""
    for jump_s in (1.0, HOUR_S, 30 * DAY_S, 10 * 365 * DAY_S):
        restarts = ago(-jump_s, -jump_s - 5)
        assert spent(restarts, "a", POLICY, NOW).message
        assert spent(restarts, "a", POLICY, NOW + jump_s).message
    restarts = ago(10, 20)
    assert not spent(restarts, "a", POLICY, NOW + 365 * DAY_S).message
    assert spent(restarts, "a", POLICY, NOW).message


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.sampled_from("ab")), max_size=40))
def test_whoever_obeys_it_stays_within_every_budget(times: list[tuple[float, str]]) -> None:
    """Where it allows one more, there is one more in each budget, counted by hand."""
    restarts = [Restart(NOW - at, engine) for at, engine in times]
    if not spent(restarts, "a", POLICY, NOW).message:
        for span_s, own, fleet in (
            (HOUR_S, POLICY.restarts_per_hour, POLICY.fleet_restarts_per_hour),
            (DAY_S, POLICY.restarts_per_day, POLICY.fleet_restarts_per_day),
        ):
            recent = [one for one in restarts if one.at > NOW - span_s]
            assert len(recent) < fleet
            assert sum(one.engine == "a" for one in recent) < own
