"""Fits of measured runs: fitted on the first third of their time, the rest is predicted as docs/step-time.md promises."""

from __future__ import annotations

import pytest

from benchmarks.simulate_accuracy import (
    ALL_RUNS,
    PROMISED,
    PROMISED_OTHERS,
    PROMISED_POINTS,
    RUNS,
    Run,
    fit_run,
    load,
    predict,
    third,
)
from benchmarks.simulate_h200 import PREEMPTED, by_stamps
from lab.measured_runs import before


@pytest.mark.skipif(not RUNS.is_dir(), reason="the measured runs are not beside the repository")
@pytest.mark.parametrize("run", ALL_RUNS, ids=lambda run: run.name)
def test_the_rest_is_predicted(run: Run) -> None:
    """Duration, mean TTFT and mean TPOT within 5 % (RTX 4090) or 8 %, and the curve of KV use within 3 points."""
    measured = load(run, RUNS)
    until = third(measured)
    found = fit_run(run, before(measured, until))
    outcome = predict(run, measured, found.step_time, measured, until)
    assert outcome.worst <= PROMISED.get(run.name, PROMISED_OTHERS), outcome
    if run.name in PROMISED:
        assert outcome.kv_points is not None
        assert outcome.kv_points <= PROMISED_POINTS
    else:
        assert outcome.kv_points is None
        assert outcome.preemptions == 0


@pytest.mark.parametrize("name", ["steady", "tight", "storm"])
def test_the_rest_of_a_run_on_the_h200_is_predicted(name: str) -> None:
    """Duration and time per token within 8 %, preemptions within a few; TTFT within 5 % where requests wait for seconds."""
    found = by_stamps(name)
    assert max(abs(found.duration), abs(found.tpot)) < 0.08
    assert abs(found.preemptions - PREEMPTED[name]) <= 10
    assert name != "storm" or abs(found.ttft) < 0.05
