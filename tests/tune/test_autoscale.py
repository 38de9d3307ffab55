"""Autoscaling rules: what an autoscaler wants and does, and that the chosen rule keeps the promise when it is replayed."""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import make_trace
from plimsoll.tune.autoscale import IN_FLIGHT, MORE_TRAFFIC, WAITING, ScalingRule, find_rule, next_count, replay_rule, wish
from plimsoll.tune.capacity import replay_fleet
from plimsoll.tune.goodput import Job, Slo, Traffic
from tests.each import each

JOB = Job(EngineLimits(num_blocks=600, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2048), StepTime(20_000_000))
RULE = ScalingRule(IN_FLIGHT, 4, 1, 10, 0, 60)
SECOND = 10**9


def waves(slo: Slo) -> Traffic:
    """Quiet, busy and quiet again, four minutes each: one server has enough to do with a quarter of the busy ones."""
    parts = [np.arange(begin, begin + 240, gap) for begin, gap in ((0, 2.0), (240, 0.08), (480, 2.0))]
    arrivals = (np.concatenate(parts) * SECOND).astype(np.int64)
    return Traffic(make_trace("waves", arrivals, [100] * len(arrivals), [60] * len(arrivals)), slo=slo)


@each(
    ("figure", "current", "wanted"),
    [(0.0, 1, 1), (4.3, 1, 1), (4.5, 1, 2), (40, 2, 10), (999, 2, 10), (30, 8, 8), (21, 8, 6), (0.0, 8, 1), (37, 10, 10)],
)
def test_the_wish_follows_the_figure(figure: float, current: int, wanted: int) -> None:
    """The sum over the target, rounded up, between the bounds; a difference of a tenth is none."""
    assert wish(RULE, figure, current) == wanted


@each(
    ("up_s", "down_s", "wishes", "current", "count"),
    [
        (0, 0, [(30, 9)], 1, 5),  # at most four more, or twice as many
        (0, 0, [(30, 9)], 6, 9),
        (30, 0, [(0, 2), (15, 7), (30, 9)], 1, 2),  # the lowest of the window counts on the way up
        (30, 0, [(0, 1), (15, 7), (30, 9)], 2, 2),
        (0, 30, [(0, 5), (15, 2), (30, 1)], 6, 5),  # and the highest on the way down
        (0, 0, [(0, 5), (15, 2), (30, 1)], 6, 1),
        (0, 60, [(0, 9), (15, 2), (30, 1)], 6, 6),
    ],
)
def test_windows_and_steps_hold_it_back(
    up_s: int, down_s: int, wishes: list[tuple[float, int]], current: int, count: int
) -> None:
    """As the autoscaler's own documentation says."""
    assert next_count(ScalingRule(IN_FLIGHT, 4, 1, 10, up_s, down_s), wishes, 30, current) == count


def test_replicas_come_and_go_with_the_traffic() -> None:
    """More while it is busy, fewer after it; a start that takes long costs promises; with equal bounds it is a plain fleet."""
    traffic = waves(Slo(ttft=1.0))
    found = replay_rule(traffic, JOB, RULE, 20)
    assert found.peak_replicas > 1
    assert 1 < found.mean_replicas < found.peak_replicas
    assert found.changes >= 2
    assert replay_rule(traffic, JOB, RULE, 120).met < found.met
    assert replay_rule(traffic, JOB, RULE, 20) == found, "nothing is drawn by chance"
    fixed = replay_rule(traffic, JOB, ScalingRule(WAITING, 1, 3, 3), 30)
    assert (fixed.met, fixed.mean_replicas, fixed.changes) == (replay_fleet(traffic, JOB, 3).met, 3.0, 0)


def test_the_rule_that_is_chosen_keeps_the_promise_and_a_tenth_more() -> None:
    """Replayed again it does what the table says, cheaper than as many replicas all the time; no other that does is cheaper."""
    traffic = waves(Slo(ttft=5.0, tpot=0.08))
    found = find_rule(traffic, JOB, 0.9, 10)
    assert found.chosen is not None
    always, rule = found.trials[0], found.chosen.rule
    assert always.share >= 0.9
    assert found.chosen.mean_replicas < always.mean_replicas
    for speedup in (1.0, MORE_TRAFFIC):
        again = replay_rule(traffic, JOB, rule, 10, speedup)
        assert again in found.trials
        assert again.share >= 0.9
    assert find_rule(waves(Slo(tpot=0.001)), JOB, 0.9, 10).chosen is None, "a server that is too slow by itself"
