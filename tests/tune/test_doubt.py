"""How much hangs on step times that nobody measured."""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.settings import StepTime
from plimsoll.simulate.silicon import RELATIVE_BAND
from plimsoll.tune.answer import tune
from tests.tune.servers import SMALL, run, server, traffic


def test_every_part_of_a_step_is_stretched() -> None:
    """Constants and the table alike."""
    times = StepTime(100, 20, 10, 40, np.array([100, 120]), 8, 4, 500).scaled(1.5)
    assert times[:4] == (150, 30, 15, 60)
    assert (times.pair_fs, times.prompt_ns, times.front_ns) == (12, 6, 500), "the way to the scheduler is no part of a step"
    assert times.by_tokens is not None
    assert times.by_tokens.tolist() == [150, 180]


def test_without_a_fit_there_are_three_clocks_and_a_range() -> None:
    """The chosen setting lies in it; with a fit there is no doubt of this kind."""
    found = tune(traffic(), server(), SMALL, run)
    assert found.found is not None
    assert found.doubt is not None
    assert [clock.factor for clock in found.doubt.clocks] == [1.0, *RELATIVE_BAND]
    for name, (low, high) in found.doubt.ranges.items():
        assert low <= getattr(found.found.best.option.candidate, name) <= high
    assert found.doubt.clocks[1].best >= found.doubt.clocks[2].best, "slower steps cannot be better"
    fitted = tune(traffic(), server()._replace(step_time=StepTime(), fitted="fitted to a run"), SMALL, run)
    assert fitted.doubt is None
