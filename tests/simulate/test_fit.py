"""Fits: constants that were used are found again, what was not known is not used, and nonsense is refused."""

from __future__ import annotations

import numpy as np
import pytest

from lab.measured_runs import before, duration_error, only_first
from plimsoll.errors import BadInput
from plimsoll.simulate.fit import FitError, deviations, error_of, fit, look_at, replayed, search
from plimsoll.simulate.replay import STEP_COLUMNS, Replay, replay
from plimsoll.simulate.settings import EngineLimits, StepTime, graph_sizes, step_table
from plimsoll.simulate.trace import ABSENT, MeasuredRun, RunSeries, make_trace

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


def test_the_search_finds_the_bottom_inside_its_bounds() -> None:
    """A plain valley, and one whose bottom lies outside."""
    bounds = (np.zeros(2), np.full(2, 10.0))
    found = search(lambda at: [at - np.array([3.0, 4.0])], [np.ones(2), np.full(2, 9.0)], bounds, np.zeros(2))
    assert found == pytest.approx([3.0, 4.0], abs=0.01)
    edge = search(lambda at: [at - np.array([-3.0, 4.0])], [np.ones(2)], bounds, np.zeros(2))
    assert edge == pytest.approx([0.0, 4.0], abs=0.01)


def test_a_poor_fit_is_off_in_what_is_not_chance() -> None:
    """Further tokens and the whole count, a first token that just misses a step does not."""
    none = (None, None, None)
    for of_single, is_poor in (
        ((0.034, 0.028, 0.027), False), ((0.29, 0.023, 0.015), False), ((0.19, None, None), False), (none, False),
        ((0.11, 0.764, 0.2), True), ((0.05, 0.1, 0.25), True), ((0.9, 0.05, 0.05), True),
    ):  # fmt: skip
        assert FitError._make((500, *of_single, *none)).is_poor == is_poor, of_single
