"""How long until requests wait too long and the cache is full: said where they plainly grow, and not said otherwise."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.load import NO_LENGTH, kv_forecast, queue_forecast, recompute_share
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import Policy
from plimsoll.unknown import Unknown


def seen(rows: Sequence[Mapping[str, float]]) -> History:
    """A history of looks five seconds apart that show these figures."""
    history = History(5.0)
    for number, figures in enumerate(rows):
        more = {"steps": 100.0 * number, **figures}
        history.add(Look(5.0 * number, 1e9 + 5.0 * number, Reach.ANSWERS, figures=more, started_unix_s=1e9 - 100))
    return history


def queued(queue: Sequence[float]) -> History:
    """A queue before 64 that run, of whom two end each second."""
    return seen([{"running": 64.0, "waiting": waiting, "success": 10.0 * number} for number, waiting in enumerate(queue)])


def test_a_queue_that_grows_steadily_is_foretold() -> None:
    """One request more every two seconds; 60 may wait at 2 a second for a bound of 30 s."""
    found = queue_forecast(queued([5.0 + 2.5 * number / 5 for number in range(60)]), Policy())
    assert not isinstance(found, Unknown)
    left = (60 - (5.0 + 0.5 * 59)) / 0.1
    assert abs(found.likely_s - left) < 0.1 * left
    assert found.soonest_s <= found.likely_s <= found.latest_s


def test_one_that_goes_up_and_down_is_not() -> None:
    """Noise, no queue, one that shrinks, a young history, one that is past the bound: no forecast, with the reason."""
    dice = random.Random(7)
    cases = {
        "the queue does not grow": ([dice.uniform(0, 20) for _ in range(60)], [40.0 - 0.5 * number for number in range(60)]),
        "not enough samples of the queue": (range(15),),
        "already past the bound": ([200.0 + number for number in range(60)],),
    }  # fmt: skip
    for reason, queues in cases.items():
        for queue in queues:
            assert queue_forecast(queued(queue), Policy()) == Unknown(reason)
    assert isinstance(queue_forecast(queued([0.0] * 60), Policy()), Unknown)


def filling(usage: Sequence[float]) -> History:
    return seen([{"kv_cache_usage": share} for share in usage])


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
        done = {"preemptions": preempted, "prompt_tokens": 1_000.0, "generation_tokens": 1_000.0, "success": ended}
        return seen([{name: each * number for name, each in done.items()} for number in range(looks)])

    assert recompute_share(worked(0.0, 1.0), 300.0) == 0.0
    share = recompute_share(worked(1.0, 4.0), 300.0)
    assert not isinstance(share, Unknown)
    assert abs(share - 0.2) < 1e-9, "one of four requests lost its 500 tokens for each 2,000 that were computed"
    assert recompute_share(worked(1.0, 0.0), 300.0) is NO_LENGTH
    assert isinstance(recompute_share(worked(1.0, 4.0, looks=10), 300.0), Unknown)
