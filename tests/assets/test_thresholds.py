"""The numbers of the alerts are guard's own wherever both ask the same, so that neither contradicts the other."""

from __future__ import annotations

import pytest

from plimsoll.assets.alerts import thresholds_of
from plimsoll.assets.settings import AssetSettings
from plimsoll.doctor.rules.trend_growth import matters, recomputed_share
from plimsoll.guard.judge.load import RISES
from plimsoll.guard.judge.policy import Policy
from tests.assets.watched import PLAN, PLANNED

USUAL = thresholds_of(AssetSettings("0.32.0"))


def test_a_queue_matters_to_both_from_the_same_length_on_and_so_does_the_share_done_twice() -> None:
    """More than four, and more than a tenth of what runs; preemptions over preemptions and requests that ended."""
    bounds = USUAL
    for waiting, running in ((4, 0), (5, 0), (5, 50), (5, 49), (11, 100), (10, 100)):
        assert matters(waiting, running) is (waiting > bounds["queue_least"] and waiting > bounds["queue_share"] * running)
    assert bounds["rises"] == RISES
    for preempted, ended, tokens in ((10, 90, 70_000), (3, 400, 1e6), (50, 1, 12)):
        assert recomputed_share(preempted, tokens, tokens / ended) == pytest.approx(preempted / (preempted + ended))


def test_a_plan_with_little_slack_is_not_called_thin_for_ever() -> None:
    """Where the plan leaves less than the general bound twice over, half of what it leaves is the bound."""
    assert USUAL["thin_bytes"] == Policy().number("slack", "least")
    assert thresholds_of(PLANNED)["thin_bytes"] == PLAN.slack_bytes // 2
