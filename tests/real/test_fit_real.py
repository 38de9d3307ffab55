"""Fits of measured runs: fitted on the first third of their time, the rest is predicted as docs/step-time.md promises."""

from __future__ import annotations

import pytest

from benchmarks import simulate_accuracy as accuracy
from benchmarks.simulate_h200 import PREEMPTED, by_stamps
from lab.measured_runs import before


@pytest.mark.skipif(not accuracy.RUNS.is_dir(), reason="the measured runs are not beside the repository")
@pytest.mark.parametrize("run", accuracy.ALL_RUNS, ids=lambda run: run.name)
def test_the_rest_is_predicted(run: accuracy.Run) -> None:
    """Duration, mean TTFT and mean TPOT within 5 % (RTX 4090) or 8 %, and the curve of KV use within 3 points."""
    measured = accuracy.load(run, accuracy.RUNS)
    until = accuracy.third(measured)
    outcome = accuracy.predict(run, measured, accuracy.fit_run(run, before(measured, until)).step_time, measured, until)
    assert outcome.worst <= accuracy.PROMISED.get(run.name, accuracy.PROMISED_OTHERS), outcome
    if run.name in accuracy.PROMISED:
        assert outcome.kv_points is not None
        assert outcome.kv_points <= accuracy.PROMISED_POINTS
    else:
        assert (outcome.kv_points, outcome.preemptions) == (None, 0)


@pytest.mark.parametrize("name", ["steady", "tight", "storm"])
def test_the_rest_of_a_run_on_the_h200_is_predicted(name: str) -> None:
    """Duration and time per token within 8 %, preemptions within a few; TTFT within 5 % where requests wait for seconds."""
    found = by_stamps(name)
    assert max(abs(found.duration), abs(found.tpot)) < 0.08
    assert abs(found.preemptions - PREEMPTED[name]) <= 10
    assert name != "storm" or abs(found.ttft) < 0.05
