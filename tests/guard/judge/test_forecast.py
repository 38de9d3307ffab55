"""How long until requests wait too long and the cache is full: said where they plainly grow, and not said otherwise."""

from __future__ import annotations

import random

from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.load import NO_LENGTH, kv_forecast, queue_forecast, recompute_share
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import Policy
from plimsoll.unknown import Unknown


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


def filling(usage: list[float]) -> History:
    """A history of the KV cache, five seconds a look."""
    history = History(5.0)
    for number, share in enumerate(usage):
        figures = {"kv_cache_usage": share, "steps": 100.0 * number}
        history.add(Look(5.0 * number, 1e9 + 5.0 * number, Reach.ANSWERS, figures=figures, started_unix_s=1e9 - 100))
    return history


def test_a_cache_that_fills_steadily_is_foretold() -> None:
    """One hundredth every five seconds: what is left takes five seconds for each hundredth."""
    found = kv_forecast(filling([0.01 * number for number in range(50)]))
    assert not isinstance(found, Unknown)
    assert abs(found.likely_s - 5.0 * 51) < 10.0
    assert found.soonest_s <= found.likely_s <= found.latest_s


def test_a_cache_that_is_full_empties_or_was_hardly_seen_is_not() -> None:
    """No forecast, with the reason."""
    cases = {
        "already full": [0.99] * 50, "the cache does not fill": [0.9 - 0.01 * number for number in range(50)],
        "not enough samples of the cache": [0.01 * number for number in range(10)],
    }  # fmt: skip
    for reason, usage in cases.items():
        assert kv_forecast(filling(usage)) == Unknown(reason)


def test_the_share_of_work_done_twice() -> None:
    """None lost is none; without an end of any request it is not known; before five minutes were seen neither."""

    def worked(preempted: float, ended: float, looks: int = 80) -> History:
        history = History(5.0)
        for number in range(looks):
            figures = {
                "preemptions": preempted * number, "prompt_tokens": 1_000.0 * number, "generation_tokens": 1_000.0 * number,
                "success": ended * number, "steps": 100.0 * number,
            }  # fmt: skip
            history.add(Look(5.0 * number, 1e9 + 5.0 * number, Reach.ANSWERS, figures=figures, started_unix_s=1e9 - 100))
        return history

    assert recompute_share(worked(0.0, 1.0), 300.0) == 0.0
    share = recompute_share(worked(1.0, 4.0), 300.0)
    assert not isinstance(share, Unknown)
    assert abs(share - 0.2) < 1e-9, "one of four requests lost its 500 tokens for each 2,000 that were computed"
    assert recompute_share(worked(1.0, 0.0), 300.0) is NO_LENGTH
    assert isinstance(recompute_share(worked(1.0, 4.0, looks=10), 300.0), Unknown)
