"""How long until requests wait too long: said where the queue plainly grows, and not said otherwise."""

from __future__ import annotations

import random

from plimsoll.domain.look import Look, Reach
from plimsoll.domain.unknown import Unknown
from plimsoll.guard.forecast import queue_forecast
from plimsoll.guard.history import History
from plimsoll.guard.policy import Policy


def seen(queue: list[float], ended_per_s: float = 2.0) -> History:
    """A history of looks five seconds apart."""
    history = History(5.0)
    for number, waiting in enumerate(queue):
        figures = {"running": 64.0, "waiting": waiting, "success": 5.0 * ended_per_s * number, "steps": 100.0 * number}
        history.add(Look(5.0 * number, 1e9 + 5.0 * number, Reach.ANSWERS, figures=figures, started_unix_s=1e9 - 100))
    return history


def test_a_queue_that_grows_steadily_is_foretold() -> None:
    """One request more every two seconds; 60 may wait at 2 a second for a bound of 30 s."""
    found = queue_forecast(seen([5.0 + 2.5 * number / 5 for number in range(60)]), Policy())
    assert not isinstance(found, Unknown)
    left = (60 - (5.0 + 0.5 * 59)) / 0.1
    assert abs(found.likely_s - left) < 0.1 * left
    assert found.soonest_s <= found.likely_s <= found.latest_s


def test_one_that_goes_up_and_down_is_not() -> None:
    """Noise, a short queue, a queue that shrinks, a young history: no forecast, with the reason."""
    dice = random.Random(7)
    for queue in (
        [dice.uniform(0, 20) for _ in range(60)],
        [0.0] * 60,
        [40.0 - 0.5 * number for number in range(60)],
        [float(number) for number in range(10)],
    ):
        found = queue_forecast(seen(queue), Policy())
        assert isinstance(found, Unknown)
        assert found.reason


def test_what_is_past_the_bound_is_no_forecast() -> None:
    """It is a condition by then."""
    assert isinstance(queue_forecast(seen([200.0 + number for number in range(60)]), Policy()), Unknown)
