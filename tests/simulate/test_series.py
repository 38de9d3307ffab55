"""The run over time: nothing is lost when bins are merged, and long runs stay small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.simulate.replay import STEP_COLUMNS, Series
from plimsoll.simulate.summary import FIRST_BIN_NS, SeriesBuilder
from plimsoll.simulate.trace import Integers
from tests.simulate.golden_runs import AT, step_rows

MS = 1_000_000


def _built(rows: Integers, bins: int = 1000, chunk: int = 10**9) -> Series:
    builder = SeriesBuilder(bins)
    for start in range(0, len(rows), chunk):
        builder.add(rows[start : start + chunk])
    return builder.finish()


def _total(series: Series, values: np.typing.NDArray[np.float64], end_ns: int) -> float:
    lengths = np.diff(np.minimum(np.arange(len(values) + 1) * series.bin_ns, end_ns))
    return float((values * lengths).sum())


def test_a_bin_holds_the_mean_over_its_time() -> None:
    """A step that lies in two bins counts in each for its part, idle time counts as nothing."""
    series = _built(step_rows([[0, 1_500_000, 4, 2, 7, 1, 8, 16], [3 * MS, 3_500_000, 2, 0, 5, 2, 6, 4]]))
    assert series.bin_ns == FIRST_BIN_NS
    assert series.running.tolist() == [4, 2, 0, 2]  # the last bin is half a bin long, and full
    assert series.waiting.tolist() == [2, 1, 0, 0]
    assert series.used_blocks.tolist() == [8, 4, 0, 6]
    assert series.waste_slots.tolist() == [16, 8, 0, 4]
    assert series.tokens.tolist() == [7, 0, 0, 5]
    assert series.preemptions.tolist() == [1, 0, 0, 2]
    assert series.hit_tokens.tolist() == [10, 0, 0, 10]
    assert series.query_tokens.tolist() == [100, 0, 0, 100]


def test_an_empty_run_has_no_bins_and_steps_without_time_are_counted() -> None:
    """With all constants at 0 every step lies at one instant, also at the end of a bin."""
    builder = SeriesBuilder()
    builder.add(np.zeros((0, len(STEP_COLUMNS)), dtype=np.int64))
    assert all(len(values) == 0 for values in builder.finish()[1:])
    at_once = _built(step_rows([[0, 0, 1, 0, 7, 1, 1, 0]] * 3))
    at_the_edge = _built(step_rows([[0, MS, 1, 0, 7, 1, 1, 0], [MS, MS, 1, 0, 7, 1, 1, 0]]))
    assert (at_once.tokens.tolist(), at_the_edge.tokens.tolist()) == ([21], [14])


def test_bins_double_when_they_are_full() -> None:
    """A thousand seconds in ten bins: each as wide as a power of two of the first."""
    series = _built(step_rows([[n * 10**9, (n + 1) * 10**9, 1, 0, 1, 0, 1, 0] for n in range(1000)]), bins=10)
    ratio = series.bin_ns // FIRST_BIN_NS
    assert 5 < len(series.running) <= 10
    assert ratio & (ratio - 1) == 0
    assert series.running == pytest.approx(np.ones(len(series.running)))


@given(
    st.lists(st.tuples(st.integers(0, 5 * MS), st.integers(0, 40 * MS), st.integers(0, 9)), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 70),
)
def test_nothing_is_lost_or_counted_twice(steps: list[tuple[int, int, int]], bins: int, chunk: int) -> None:
    """Whatever the bins and however the rows arrive, sums over the series are sums over the rows."""
    rows, now = [], 0
    for idle, length, value in steps:
        rows.append([now + idle, now + idle + length, value, value, value, value, value, value])
        now += idle + length
    table = step_rows(rows)
    series = _built(table, bins, chunk)
    lengths = table[:, AT["t_end_ns"]] - table[:, AT["t_start_ns"]]
    assert len(series.running) <= max(2, bins + bins % 2)
    assert series.tokens.sum() == table[:, AT["sched_tokens"]].sum()
    assert series.hit_tokens.sum() == 10 * len(table)
    assert _total(series, series.used_blocks, now) == pytest.approx(float((table[:, AT["used_blocks"]] * lengths).sum()))
