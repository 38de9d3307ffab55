"""The statistics of paired runs."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.paired import alternate, compared, loss_of, t95, upper_bound


def test_the_bound_is_the_one_of_the_textbook() -> None:
    """For 1, 2, 3, 4, 5 that of 4 degrees; one pair has none; more pairs give a smaller factor, down to that of 30."""
    assert upper_bound([1, 2, 3, 4, 5]) == pytest.approx(3 + 2.132 * math.sqrt(2.5 / 5))
    assert upper_bound([0.1]) is None
    loss = loss_of([(9.0, 10.0)])
    assert loss.upper is None
    assert loss.mean == pytest.approx(0.1)
    assert "unknown" in str(loss)
    quantiles = [t95(degrees) for degrees in range(1, 40)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[-1] == 1.697 > statistics.NormalDist().inv_cdf(0.95)


@given(st.lists(st.floats(1.0, 1e6), min_size=2, max_size=40), st.floats(0.5, 1.5))
def test_a_constant_loss_is_found_whatever_the_machine_does(rates: list[float], ratio: float) -> None:
    """Where each pair has the same ratio, mean and bound are that loss, however the rates drift."""
    loss = loss_of([(rate * ratio, rate) for rate in rates])
    assert loss.mean == pytest.approx(1 - ratio, abs=1e-9)
    assert loss.upper == pytest.approx(1 - ratio, abs=1e-9)


def test_the_first_changes_from_pair_to_pair() -> None:
    """With, without, without, with, with, without; each pair keeps its order of values."""
    order: list[str] = []

    def note(name: str, number: int) -> str:
        order.append(name)
        return f"{name}{number}"

    pairs = alternate(3, lambda n: note("with", n), lambda n: note("without", n))
    assert order == ["with", "without", "without", "with", "with", "without"]
    assert pairs == [("with0", "without0"), ("with1", "without1"), ("with2", "without2")]


def test_a_comparison_counts_failures_of_both_and_keeps_unknown_latencies_unknown() -> None:
    """A run without streams long enough for a gap has no latency, and the difference is none."""
    latencies = {"gap_p50_ms": 10.0, "gap_p99_ms": None, "first_token_p50_ms": 5.0, "first_token_p99_ms": 9.0}
    slow = {**latencies, "gap_p50_ms": 11.0, "tokens_per_s": 97.0, "failed": 1}
    fast = {**latencies, "tokens_per_s": 100.0, "failed": 2}
    found = compared([(slow, fast), (slow, fast)])
    assert found["mean"] == pytest.approx(0.03)
    assert found["upper"] == pytest.approx(0.03)
    assert found["failed"] == 6
    assert found["gap_p50_ms"] == {"with": 11.0, "without": 10.0, "more": 1.0, "more_upper": 1.0}
    assert found["gap_p99_ms"] == {"with": None, "without": None, "more": None, "more_upper": None}
