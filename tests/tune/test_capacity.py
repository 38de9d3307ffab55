"""How many servers a promise needs: the answer is replayed at its own rate and beyond."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.simulate.replay import replay
from plimsoll.simulate.replicas import RoutedEngines
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.traffic import generate, parse_synthetic
from plimsoll.tune.capacity import CLOSE, find_capacity, replay_fleet
from plimsoll.tune.goodput import Job, Slo, Traffic, score

JOB = Job(EngineLimits(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096), StepTime())


def traffic(rate: float, slo: Slo) -> Traffic:
    made = f"synthetic:requests=120,rate={rate},prompt=300,output=60,prompt_max=1000,seed=3"
    return Traffic(generate(parse_synthetic(made)), slo=slo)


def test_the_fewest_servers_that_keep_it_and_the_rate_they_keep_it_for() -> None:
    """One server less breaks the promise; the promised rate keeps it when it is replayed, and a little more breaks it."""
    asked = traffic(60, Slo(ttft=0.5, tpot=0.05))
    found = find_capacity(asked, JOB, 0.95)
    assert found.servers is not None
    assert found.servers > 1
    assert replay_fleet(asked, JOB, found.servers - 1).share < 0.95 <= replay_fleet(asked, JOB, found.servers).share
    assert found.highest is not None
    assert found.is_bounded
    assert found.highest.speedup >= 1.0
    assert replay_fleet(asked, JOB, found.servers, found.highest.speedup).share >= 0.95
    broken = [one.speedup for one in found.trials if one.servers == found.servers and one.share < 0.95]
    assert 1.0 < min(broken) / found.highest.speedup <= 1 + CLOSE


def test_a_server_that_is_too_slow_by_itself_is_not_helped_by_more() -> None:
    """Where no number of servers keeps the promise, there is no answer, and few are tried."""
    found = find_capacity(traffic(20, Slo(tpot=0.001)), JOB, 0.99)
    assert found.servers is None
    assert found.highest is None
    assert max(one.servers for one in found.trials) <= 8


def test_one_server_is_the_plain_replay_and_idle_traffic_has_headroom() -> None:
    """A fleet of one counts as the plain replay does; little traffic is kept beyond the largest speed-up that is tried."""
    asked = traffic(0.2, Slo(ttft=2.0))
    one = replay_fleet(asked, JOB, 1)
    assert one.met == score(replay(asked.trace, JOB.settings, JOB.step_time), asked.slo).met
    found = find_capacity(asked, JOB, 0.99)
    assert (found.servers, found.is_bounded) == (1, False)


def test_a_server_of_several_engines_counts_all_of_them() -> None:
    """Three servers of two engines are a fleet of six; a number that was asked for is not lowered, and has its own rate."""
    asked = traffic(60, Slo(ttft=0.5, tpot=0.05))
    of_two = JOB._replace(engines=RoutedEngines(2))
    assert replace(replay_fleet(asked, of_two, 3), servers=6) == replay_fleet(asked, JOB, 6)
    fewest, more = find_capacity(asked, of_two, 0.95), find_capacity(asked, JOB, 0.95, servers=6)
    assert fewest.servers is not None
    assert 2 * fewest.servers >= (find_capacity(asked, JOB, 0.95).servers or 0)
    assert {one.servers for one in more.trials} == {6}
    assert more.highest == replay_fleet(asked, JOB, 6, more.highest.speedup if more.highest is not None else 0.0)
    none = find_capacity(asked, JOB, 0.95, servers=1)
    assert (none.servers, len(none.trials)) == (None, 1)
