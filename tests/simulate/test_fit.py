"""Fits: constants that were used are found again, what was not known is not used, and nonsense is refused."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate_h200 import by_histograms
from lab.measured_runs import before, duration_error, only_first
from plimsoll.errors import BadInput
from plimsoll.simulate.fit import (
    BETWEEN,
    E2E,
    TPOT,
    TTFT,
    FitError,
    deviations,
    error_of,
    fit,
    fit_histograms,
    look_at,
    replayed,
    search,
)
from plimsoll.simulate.replay import STEP_COLUMNS, Replay, replay
from plimsoll.simulate.settings import EngineLimits, StepTime, graph_sizes, step_table
from plimsoll.simulate.trace import ABSENT, MeasuredRun, RunSeries, make_trace
from plimsoll.simulate.traffic import Synthetic, generate
from plimsoll.vllm.metrics_page import Histogram
from tests.each import each

SETTINGS = EngineLimits(num_blocks=3000, max_num_seqs=32, max_num_batched_tokens=1024)
TRUE = StepTime(9_000_000, 50_000, 15_000, 90_000, step_table(9e6, 50e3, 1024, graph_sizes(32), 3e6))


def traffic_run(seed: int = 3, requests: int = 120) -> MeasuredRun:
    """A run with known constants, as if it had been measured."""
    dice = np.random.default_rng(seed)
    arrivals = np.cumsum(dice.exponential(2e8, requests)).astype(np.int64)
    trace = make_trace("made", arrivals - arrivals[0], dice.integers(50, 1500, requests), dice.integers(20, 200, requests))
    return as_measured(replay(trace, SETTINGS, TRUE))


def as_measured(run: Replay) -> MeasuredRun:
    """The stamps of a replay."""
    none = np.full(run.trace.size, ABSENT, dtype=np.int64)
    return MeasuredRun(run.trace, run.first_sched_ns, run.first_token_ns, run.finish_ns, none)


def test_a_run_with_known_constants_is_predicted() -> None:
    """Fitted on the first third of its time, from no idea at all, the rest comes out: TTFT within 5 %, the others 2 %."""
    measured = traffic_run()
    third = int(measured.finish_ns.max()) // 3
    found = fit(before(measured, third), SETTINGS)
    run = replay(measured.trace, SETTINGS, found.step_time)
    rest = error_of(measured, run, from_ns=third)
    assert abs(rest.mean_ttft or 1) < 0.05
    assert abs(rest.mean_tpot or 1) < 0.02
    assert abs(duration_error(measured, run)) < 0.02
    table, true = found.step_time.table(1024), TRUE.table(1024)
    decode = 16 * found.step_time.seq_ns + 16 * 600 * found.step_time.ctx_ps // 1000 + int(table[16])
    assert decode == pytest.approx(16 * 15_000 + 16 * 600 * 90 + int(true[16]), rel=0.05)
    assert table[1000] == pytest.approx(true[1000], rel=0.05)
    assert min(found.step_time[:4]) >= 0


def test_the_same_run_gives_the_same_constants() -> None:
    """No dice are thrown."""
    measured = only_first(traffic_run(requests=30), 20)
    one, two = fit(measured, SETTINGS, start=TRUE), fit(measured, SETTINGS, start=TRUE)
    assert one.step_time[:4] == two.step_time[:4]
    assert np.array_equal(one.step_time.table(1024), two.step_time.table(1024))
    assert "20 measured requests" in one.sentence


def test_before_keeps_what_was_known() -> None:
    """Stamps up to the moment stay, later ones are absent, and so are later rows of the series."""
    at = np.array([1.0, 2.0, 3.0])
    series = RunSeries(at, at, at, at.astype(np.int64), at.astype(np.int64), at / 3)
    stamps = np.array([1_000_000_000, 3_000_000_000])
    measured = MeasuredRun(make_trace("two", [0, 0], [1, 1], [1, 1]), stamps, stamps, stamps, stamps, series)
    known = before(measured, 2_000_000_000)
    assert known.first_token_ns.tolist() == [1_000_000_000, ABSENT]
    assert known.cached_tokens.tolist() == [1_000_000_000, ABSENT]
    assert known.series is not None
    assert known.series.at_s.tolist() == [1.0, 2.0]
    assert only_first(measured, 1).finish_ns.tolist() == [1_000_000_000, ABSENT]


def test_what_an_engine_said_of_itself_counts() -> None:
    """A series of output rates is one more kind of deviation: none for the run's own, large for one twice as fast."""
    measured = traffic_run(requests=40)
    run, steps = replayed(measured.trace, SETTINGS, TRUE)
    at_s = np.arange(1.0, int(run.finish_ns.max()) // 10**9)
    came = np.searchsorted(steps[:, STEP_COLUMNS.index("t_end_ns")], at_s * 1e9, side="right")
    tokens = np.concatenate(([0], np.cumsum(steps[:, STEP_COLUMNS.index("sched_reqs")])))[came]
    none = np.zeros(len(at_s))
    kinds = []
    for times in (1, 2):
        series = RunSeries(at_s, none, times * np.diff(tokens, prepend=0), none.astype(np.int64), none.astype(np.int64), none)
        compared = look_at(measured._replace(series=series), ~run.is_rejected)
        kinds.append(deviations(compared, run, steps)[-1])
    assert np.abs(kinds[0]).mean() < 0.1 < np.abs(kinds[1]).mean()


def test_a_run_without_stamps_is_refused() -> None:
    """There is nothing to fit, and it is said in one line."""
    measured = traffic_run(requests=5)
    with pytest.raises(BadInput, match="no stamp"):
        fit(only_first(measured, 0), SETTINGS)


def test_errors_are_of_the_stretch_that_was_asked_for() -> None:
    """A run against itself is not off; against a slower one it is, with the sign of slower."""
    measured = traffic_run(requests=20)
    same = error_of(measured, replay(measured.trace, SETTINGS, TRUE))
    assert same.ttft == same.tpot == same.e2e == 0
    assert same.requests == 20
    slow = replay(measured.trace, SETTINGS, TRUE._replace(by_tokens=TRUE.table(1024) * 2))
    assert (error_of(measured, slow).mean_tpot or 0) > 0.3
    none = error_of(measured, slow, from_ns=int(measured.finish_ns.max()))
    assert none.requests == 0
    assert none.mean_ttft is None


def histogram_of(name: str, seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Histogram:
    """What a server would have kept of these values."""
    bounds = (0.005, 0.01, 0.02, 0.04, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
    counts = np.histogram(seconds, bins=[-np.inf, *bounds, np.inf])[0]
    return Histogram(name, bounds, tuple(float(one) for one in counts), float(seconds.sum()))


def test_histograms_give_back_how_much_slower_a_card_is() -> None:
    """From a start that is twice too fast, means come out within 3 %."""
    measured = traffic_run()
    each = (measured.finish_ns - measured.first_token_ns) / np.maximum(1, measured.trace.output - 1) / 1e9
    histograms = [
        histogram_of(TTFT, (measured.first_token_ns - measured.trace.arrival_ns) / 1e9),
        histogram_of(TPOT, each),
        histogram_of(E2E, (measured.finish_ns - measured.trace.arrival_ns) / 1e9),
        Histogram("vllm:request_prompt_tokens", (1.0,), (0.0, 5.0), 10.0),
    ]
    found = fit_histograms(measured.trace, SETTINGS, histograms, start=StepTime(4_500_000, 25_000, 7_500, 45_000))
    error = error_of(measured, replay(measured.trace, SETTINGS, found.step_time))
    assert abs(error.mean_ttft or 1) < 0.03
    assert abs(error.mean_tpot or 1) < 0.03
    assert "histograms of 120 requests" in found.sentence


def test_histograms_without_a_latency_are_refused() -> None:
    """Empty ones and others do not count; the mean between tokens alone is enough."""
    measured = traffic_run(requests=20)
    with pytest.raises(BadInput, match="nothing to fit"):
        fit_histograms(measured.trace, SETTINGS, [Histogram(TTFT, (1.0,), (0.0, 0.0), 0.0)])
    found = fit_histograms(measured.trace, SETTINGS, [Histogram(BETWEEN, (), (100.0,), 2.0)])
    assert abs(found.error.mean_tpot or 1) < 0.03


def test_the_search_finds_the_bottom_inside_its_bounds() -> None:
    """A plain valley, and one whose bottom lies outside."""
    bounds = (np.zeros(2), np.full(2, 10.0))
    found = search(lambda at: [at - np.array([3.0, 4.0])], [np.ones(2), np.full(2, 9.0)], bounds, np.zeros(2))
    assert found == pytest.approx([3.0, 4.0], abs=0.01)
    edge = search(lambda at: [at - np.array([-3.0, 4.0])], [np.ones(2)], bounds, np.zeros(2))
    assert edge == pytest.approx([0.0, 4.0], abs=0.01)


def test_histograms_are_compared_with_all_of_the_traffic() -> None:
    """A second half that is ten times as busy counts: the times are found again, however long the trace."""
    slow = generate(Synthetic(requests=6000, rate_per_s=4, prompt_mean=300, output_mean=60, seed=1))
    gaps = np.diff(slow.arrival_ns, prepend=0)
    gaps[3000:] //= 10
    trace = slow._replace(arrival_ns=np.cumsum(gaps))
    true = StepTime(6_000_000, 40_000, 10_000, 40_000)
    run = replay(trace, EngineLimits(), true)
    ttft = (run.first_token_ns - run.arrival_ns) / 1e9
    bounds = (0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
    counts = np.bincount(np.searchsorted(bounds, ttft), minlength=len(bounds) + 1)
    histogram = Histogram(TTFT, bounds, tuple(counts.tolist()), float(ttft.sum()))
    found = fit_histograms(trace, EngineLimits(), [histogram], start=true)
    assert found.step_time.base_ns == pytest.approx(true.base_ns, rel=0.1)


def test_a_poor_fit_is_off_in_what_is_not_chance() -> None:
    """Further tokens and the whole count, a first token that just misses a step does not; means where a page has no more."""
    none = (None, None, None)
    for of_single, of_means, is_poor in (
        ((0.034, 0.028, 0.027), none, False), ((0.29, 0.023, 0.015), none, False), ((0.19, None, None), none, False),
        ((0.11, 0.764, 0.2), none, True), ((0.05, 0.1, 0.25), none, True), ((0.9, 0.05, 0.05), none, True),
        (none, none, False), (none, (0.01, -0.3, 0.0), True), (none, (-0.3, 0.1, -0.1), False),
    ):  # fmt: skip
        assert FitError(500, *of_single, *of_means).is_poor == is_poor, (of_single, of_means)


@each("name", ["steady", "tight", "storm"])
def test_a_real_page_of_metrics_is_enough_for_the_means(name: str) -> None:
    """Two numbers fitted to histograms: duration and mean latencies within 5 %."""
    found = by_histograms(name)
    assert max(abs(found.duration), abs(found.ttft), abs(found.tpot)) < 0.05
