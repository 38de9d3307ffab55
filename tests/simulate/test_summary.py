"""The numbers of a run: equal to those vLLM's own scheduler gave, and honest where there is nothing to count."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.simulate.settings import CacheGroup, EngineLimits
from plimsoll.simulate.summary import Latency, latencies_of, percentile, summarise
from tests.simulate.golden_runs import hand_made

MS = 1_000_000
# req arrival first_sched first_token finish prompt output preemptions cached
TWO = [[0, 0, 0, 10 * MS, 30 * MS, 100, 3, 0, 0], [1, 0, 10 * MS, 20 * MS, 20 * MS, 100, 1, 1, 0]]
# t_start t_end running waiting tokens preempted used waste
STEPS = [[0, 10 * MS, 1, 1, 100, 0, 5, 8], [10 * MS, 20 * MS, 2, 0, 101, 1, 10, 16], [20 * MS, 40 * MS, 1, 0, 1, 0, 2, 4]]


def test_times_are_seconds_of_finished_requests() -> None:
    """Each latency is counted from arrival, and time per token leaves out a request of one token."""
    times = latencies_of(hand_made(TWO, STEPS))
    assert times.ttft.tolist() == [0.01, 0.02]
    assert times.tpot.tolist() == [0.01]
    assert times.e2e.tolist() == [0.02, 0.03]
    assert times.queue.tolist() == [0.0, 0.01]


def test_cache_use_and_waste_are_weighted_by_busy_time() -> None:
    """Half of the time 2 of 10 blocks were used; a share of slots is unknown for mixed block sizes."""
    usage = summarise(hand_made(TWO, STEPS)).kv_usage
    assert usage.mean == pytest.approx(0.475)
    assert (usage.p50, usage.p99, usage.peak, usage.nearly_full) == (0.5, 1.0, 1.0, 0.25)
    waste = summarise(hand_made(TWO, STEPS)).waste
    assert waste.mean_slots == pytest.approx(8.0)
    assert waste.mean_percent == pytest.approx(100 * 8 / (4.75 * 16))
    mixed = EngineLimits(num_blocks=11, groups=(CacheGroup(block_size=16), CacheGroup("mamba", 64)))
    same = EngineLimits(num_blocks=11, groups=(CacheGroup(block_size=32), CacheGroup("sliding", 32, 128)))
    assert summarise(hand_made(TWO, STEPS, mixed)).waste.mean_percent is None
    assert summarise(hand_made(TWO, STEPS, same)).waste.mean_percent == pytest.approx(100 * 8 / (4.75 * 32))


def test_what_did_not_happen_is_unknown_not_zero() -> None:
    """No request, no latency; a rejected or cut-off request has none either."""
    got = summarise(hand_made([], []))
    assert (got.requests, got.finished, got.steps, got.sim_seconds) == (0, 0, 0, 0.0)
    assert {got.ttft, got.tpot, got.e2e, got.queue} == {Latency(None, None, None, None)}
    assert set(got.kv_usage) == set(got.waste) == set(got.throughput) == {None}
    assert got.recomputed_share == 0.0
    got = summarise(hand_made([*TWO, [2, 0, -1, -1, -1, 100, 0, 0, 0]], STEPS, rejected=1))
    assert (got.requests, got.finished, got.rejected) == (4, 2, 1)
    assert got.ttft.mean == pytest.approx(0.015)


def test_throughput_is_over_simulated_time() -> None:
    """Four tokens and two requests in 40 ms."""
    assert summarise(hand_made(TWO, STEPS)).throughput == pytest.approx((100.0, 50.0))


@pytest.mark.parametrize(("percent", "count", "place"), [(50, 1, 0), (99, 1, 0), (50, 2, 1), (90, 10, 9), (99, 200, 198)])
def test_percentile_is_an_element(percent: int, count: int, place: int) -> None:
    """The element at int(p / 100 * n), never between two."""
    assert percentile(np.arange(count, dtype=np.float64), percent) == place
