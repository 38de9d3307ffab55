"""One reading of one engine."""

from __future__ import annotations

import pytest

from plimsoll.domain.observation import Observation, Unknown


def test_an_absent_figure_stays_absent_with_its_reason() -> None:
    """What was not on the page is Unknown, never zero."""
    seen = Observation("e", 1.0, {"running": 3.0}, {"waiting": "the page was cut off"})
    assert seen.reading("running") == 3.0
    assert seen.reading("waiting") == Unknown("the page was cut off")
    assert seen.reading("preemptions") == Unknown("not on the page")


def test_unknown_cannot_be_used_as_a_truth_value() -> None:
    """`if reading:` on something unknown is a mistake that shows at once."""
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(Unknown("no page"))


@pytest.mark.parametrize(
    ("earlier", "later", "restarted"),
    [
        (Observation("e", 1, started_at_s=5), Observation("e", 2, started_at_s=5), False),
        (Observation("e", 1, started_at_s=5), Observation("e", 2, started_at_s=9), True),
        (Observation("e", 1, {"prompt_tokens": 10}), Observation("e", 2, {"prompt_tokens": 12}), None),
        (Observation("e", 1, {"prompt_tokens": 10}), Observation("e", 2, {"prompt_tokens": 3}), True),
        (Observation("e", 1, {"running": 10}), Observation("e", 2, {"running": 3}), None),
    ],
)
def test_a_restart_is_seen_by_start_time_or_by_counters_that_fall(
    earlier: Observation, later: Observation, restarted: bool | None
) -> None:
    """A falling counter or a later start time is a restart; counters that rise and gauges that fall say nothing."""
    assert later.restarted_since(earlier) is restarted
