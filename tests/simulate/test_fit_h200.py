"""Fits of runs that the method was not made with: what docs/step-time.md says of them holds (tests/real has the slow ones)."""

from __future__ import annotations

from benchmarks.simulate_h200 import by_histograms
from tests.each import each


@each("name", ["steady", "tight", "storm"])
def test_a_real_page_of_metrics_is_enough_for_the_means(name: str) -> None:
    """Two numbers fitted to histograms: duration and mean latencies within 5 %."""
    found = by_histograms(name)
    assert max(abs(found.duration), abs(found.ttft), abs(found.tpot)) < 0.05
