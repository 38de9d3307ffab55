"""When a fit is too far from its run to be called one."""

from __future__ import annotations

import pytest

from plimsoll.simulate.fit import FitError


@pytest.mark.parametrize(
    ("ttft", "tpot", "e2e", "is_poor"),
    [
        (0.034, 0.028, 0.027, False),
        (0.29, 0.023, 0.015, False),
        (0.11, 0.764, 0.2, True),
        (0.05, 0.1, 0.25, True),
        (0.9, 0.05, 0.05, True),
        (0.19, None, None, False),
        (None, None, None, False),
    ],
)
def test_a_poor_fit_is_off_in_what_is_not_chance(
    ttft: float | None, tpot: float | None, e2e: float | None, is_poor: bool
) -> None:
    """Further tokens and the whole count; a first token that just misses a step on a quiet server does not."""
    assert FitError(500, ttft, tpot, e2e, None, None, None).is_poor == is_poor


def test_means_count_where_a_page_of_metrics_has_no_more() -> None:
    """With either sign."""
    assert FitError(500, None, None, None, 0.01, -0.3, 0.0).is_poor
    assert not FitError(500, None, None, None, -0.3, 0.1, -0.1).is_poor
