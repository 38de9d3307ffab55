"""Three pairs of runs on an H200: where one predicts the other, and where it cannot."""

from __future__ import annotations

import pytest

from benchmarks.tune_h200 import (
    LIMITED,
    LIMITED_S,
    SEATS,
    SERVER,
    UNLIMITED,
    crossed,
    fitted_to_unlimited,
    paired,
    seconds,
    seen,
    start,
    step_ms,
    traffic,
)
from lab.service import score
from plimsoll.simulate.replay import replay


@pytest.mark.parametrize(("fitted", "predicted"), [("tight", "storm"), ("storm", "tight")])
def test_fitted_to_one_run_the_other_is_predicted(fitted: str, predicted: str) -> None:
    """Within ten per cent in requests a second, in both directions: another load on the same server."""
    assert abs(crossed(fitted, predicted)) < 0.10


@pytest.mark.parametrize("fitted", ["unlimited-2", "seats-24-2", "graphs-unlimited-1", "graphs-seats-24-1"])
def test_with_and_without_a_limit_each_is_predicted_by_the_other(fitted: str) -> None:
    """Two settings of one server in one hour: within ten per cent, and unlimited is the better one, as it was measured."""
    off, gain = paired(fitted)
    assert abs(off) < 0.10
    assert gain > 0
    kind = "graphs-" if fitted.startswith("graphs-") else ""
    assert score.seen(f"{kind}unlimited-2").duration_s < score.seen(f"{kind}seats-24-2").duration_s


def test_the_traffic_is_the_one_that_was_sent() -> None:
    """Its prompt tokens are those that the server counted; of the answers eight tokens were under way at the last look."""
    run = seen()
    assert traffic(UNLIMITED).prompt.sum() == run.prompt_tokens[-1]
    assert 0 <= traffic(UNLIMITED).output.sum() - run.output_tokens[-1] < 10


def test_the_storm_itself_is_replayed() -> None:
    """232 preemptions and 38 at once were measured; the replay has as many within a tenth."""
    found = replay(traffic(UNLIMITED), SERVER, fitted_to_unlimited()).totals
    assert found.preemptions == pytest.approx(232, rel=0.1)
    assert found.peak_running == pytest.approx(38, abs=2)


def test_unlimited_and_24_were_not_equally_fast_servers() -> None:
    """The miss, and its cause: steps of the unlimited run took over 20 ms with any number of requests, one or 38, and those of
    the other 16 ms all told. A fit to one is off by a fifth on the other, and no flag explains a step of one request."""
    times = fitted_to_unlimited()
    predicted = LIMITED / seconds(LIMITED, SEATS, times)
    assert predicted / (LIMITED / LIMITED_S) - 1 == pytest.approx(-0.22, abs=0.03)
    assert min(step_ms(1, 6), step_ms(6, 20), step_ms(26, 40)) > 20
    steps = replay(traffic(LIMITED), SERVER._replace(max_num_seqs=SEATS), start()).totals.steps
    assert 1e3 * LIMITED_S / steps < 17
