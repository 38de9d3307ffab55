"""Fits of runs that the method was not made with: what docs/step-time.md says of them holds."""

from __future__ import annotations

import pytest

from benchmarks.simulate_h200 import PREEMPTED, by_stamps


@pytest.mark.parametrize("name", ["steady", "tight", "storm"])
def test_the_rest_of_a_run_is_predicted(name: str) -> None:
    """Fitted on the first third: duration and time per token within 8 %, preemptions within a few."""
    found = by_stamps(name)
    assert abs(found.duration) < 0.08
    assert abs(found.tpot) < 0.08
    assert abs(found.preemptions - PREEMPTED[name]) <= 10


def test_waiting_in_a_full_cache_is_predicted() -> None:
    """Where requests wait for seconds, the time to the first token comes out of the replay: within 5 %."""
    assert abs(by_stamps("storm").ttft) < 0.05
