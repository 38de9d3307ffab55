"""Several engines behind a router: choices that repeat, engines that are exact, sums that add up."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.errors import BadInput
from plimsoll.simulate import layout as at
from plimsoll.simulate.options import ROUTERS
from plimsoll.simulate.replay import FOREVER, Replay, replay
from plimsoll.simulate.replicas import (
    GATEWAY,
    LEAST_LOAD,
    PREFIX,
    ROUND_ROBIN,
    Lockstep,
    RoutedEngine,
    RoutedEngines,
    merge_replays,
    replay_each,
    replay_routed,
    route,
)
from plimsoll.simulate.settings import CacheGroup, EngineLimits, StepTime
from plimsoll.simulate.summary import summarise
from plimsoll.simulate.trace import Integers, Trace, make_trace, pick
from plimsoll.simulate.traffic import generate, parse_synthetic

LIMITS = EngineLimits(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096)
TIMES = StepTime()


def traffic(rate: int = 20) -> Trace:
    return generate(parse_synthetic(f"synthetic:requests=120,rate={rate},prompt=300,output=60,prompt_max=2000,seed=3"))


def chosen_by(trace: Trace, engines: int, router: str = LEAST_LOAD) -> Integers:
    return route(trace, LIMITS, TIMES, RoutedEngines(engines, router))[0]


def stamps(run: Replay) -> list[Integers]:
    return [run.first_sched_ns, run.first_token_ns, run.finish_ns, run.preemptions, run.cached_tokens]


def test_each_engine_is_exactly_its_own_part_of_the_trace() -> None:
    """For every router, N engines equal N separate replays of the split trace, stamp by stamp and step by step."""
    trace = traffic()
    for router in ROUTERS:
        engine_of = chosen_by(trace, 3, router)
        runs = replay_each(trace, LIMITS, TIMES, engine_of, 3)
        whole = merge_replays(trace, runs, engine_of)
        for engine in range(3):
            mine = np.flatnonzero(engine_of == engine)
            alone = replay(pick(trace, mine), LIMITS, TIMES)
            assert runs[engine].totals == alone.totals, router
            for found, wanted in zip(stamps(whole), stamps(alone), strict=True):
                assert found[mine].tolist() == wanted.tolist(), router
        assert whole.totals.steps == sum(run.totals.steps for run in runs)
        assert whole.totals.finished == trace.size


def test_what_a_router_looks_at_is_what_the_replay_then_does() -> None:
    """The engines that a router watches make the replay's steps: at every arrival both agree on who is in flight."""
    trace = traffic()
    engine_of = chosen_by(trace, 2, LEAST_LOAD)
    runs = replay_each(trace, LIMITS, TIMES, engine_of, 2)
    engines = [RoutedEngine(LIMITS, TIMES, trace.prefix_block) for _ in range(2)]
    for request, arrival in enumerate(trace.arrival_ns.tolist()):
        for engine, run in zip(engines, runs, strict=True):
            engine.go_on(arrival)
            begun = run.arrival_ns < arrival
            begun[: int((engine_of[:request] == engines.index(engine)).sum())] = True
            assert engine.in_flight == int((begun & ~((run.finish_ns >= 0) & (run.finish_ns <= arrival))).sum())
        engines[engine_of[request]].take(trace, request, arrival)


def test_choices_repeat_and_follow_the_router() -> None:
    """Round robin takes turns; the least loaded engine is the one with the fewest in flight; a beginning stays where it was."""
    trace = traffic()
    assert chosen_by(trace, 3, ROUND_ROBIN).tolist() == [number % 3 for number in range(trace.size)]
    for router in (LEAST_LOAD, PREFIX, GATEWAY):
        assert chosen_by(trace, 3, router).tolist() == chosen_by(trace, 3, router).tolist()
    second = 10**9
    slow_then_fast = make_trace("t", [0, second, 2 * second, 3 * second], [100] * 4, [2000, 5, 5, 5])
    assert chosen_by(slow_then_fast, 2, LEAST_LOAD).tolist() == [0, 1, 1, 1]
    talks = make_trace(
        "t", [0, second, *(n * 100 * second for n in range(1, 5))], [600] * 6, [500, 5, 5, 5, 5, 5],
        ids=[[1, 2], [7, 8], [1, 2], [7, 8], [1, 3], [7, 8]],
    )  # fmt: skip
    assert chosen_by(talks, 2, PREFIX).tolist() == [0, 1, 0, 1, 0, 1]
    assert chosen_by(talks, 2, GATEWAY).tolist() == [0, 1, 0, 1, 0, 1], "the second comes while the first is busy"


def test_a_second_engine_helps_an_overloaded_one() -> None:
    """With more than one engine can serve, two finish sooner and nobody waits as long; one engine is the plain replay."""
    trace = traffic(rate=80)
    one = replay(trace, LIMITS, TIMES)
    same = merge_replays(trace, [one], chosen_by(trace, 1))
    assert summarise(same) == summarise(one)
    engine_of = chosen_by(trace, 2)
    two = merge_replays(trace, replay_each(trace, LIMITS, TIMES, engine_of, 2), engine_of)
    assert two.totals.end_ns < one.totals.end_ns
    assert (summarise(two).ttft.p99 or 0) < (summarise(one).ttft.p99 or 0)


def test_a_request_that_is_too_long_stands_in_nobodys_way() -> None:
    """vLLM's API server refuses it: the engines that a router watches go on, and end with nothing in flight."""
    trace = generate(parse_synthetic("synthetic:requests=120,rate=20,prompt=1500,output=60,prompt_max=9000,seed=3"))
    engine_of = chosen_by(trace, 2)
    engines = [RoutedEngine(LIMITS, TIMES, trace.prefix_block) for _ in range(2)]
    for request, arrival in enumerate(trace.arrival_ns.tolist()):
        for engine in engines:
            engine.go_on(arrival)
        engines[engine_of[request]].take(trace, request, arrival)
    for engine in engines:
        engine.go_on(10**15)
    rejected = sum(run.totals.rejected for run in replay_each(trace, LIMITS, TIMES, engine_of, 2))
    assert 0 < rejected == sum(engine.run.count(at.REJECTED_COUNT) for engine in engines)
    assert [engine.in_flight for engine in engines] == [0, 0]


def test_engines_in_lockstep_wait_for_the_slowest() -> None:
    """One alone is the plain replay; with a second one that has long prompts to read, every step of the first takes as long."""
    trace = traffic()
    engine, plain = RoutedEngine(LIMITS, TIMES, trace.prefix_block, trace.size), replay(trace, LIMITS, TIMES)
    alone = Lockstep([engine])
    for request, arrival in enumerate(trace.arrival_ns.tolist()):
        alone.go_on(arrival)
        engine.take(trace, request, alone.begin_ns(arrival))
    alone.go_on(FOREVER)
    state, _ = engine.run.ended()
    for column, wanted in ((at.FIRST_SCHED, plain.first_sched_ns), (at.FINISH, plain.finish_ns)):
        assert state.stamps[:, column].tolist() == wanted.tolist()
    times = StepTime(10**6, 10**4, 0, 0)
    both = make_trace("two", [0, 0, 10**6], [10, 400, 5], [5, 1, 1])
    engine_of, runs = replay_routed(both, LIMITS, times, RoutedEngines(2, ROUND_ROBIN, 2))
    assert engine_of.tolist() == [0, 1, 0]
    whole = merge_replays(both, runs, engine_of)
    long, decoding = 10**6 + 400 * 10**4, 10**6 + 10**4
    assert whole.first_token_ns.tolist() == [long, long, long + 10**6 + 6 * 10**4]
    assert whole.finish_ns[0] == long + 10**6 + 6 * 10**4 + 3 * decoding
    assert (whole.totals.finished, whole.arrival_ns.tolist()) == (3, [0, 0, 10**6])


def test_each_server_in_lockstep_is_exactly_its_own_part_of_the_trace() -> None:
    """Engines wait for those of their own server alone: two servers of two are two separate replays of the split trace."""
    trace = traffic(rate=60)
    engine_of, runs = replay_routed(trace, LIMITS, TIMES, RoutedEngines(4, LEAST_LOAD, 2))
    for server in (0, 1):
        mine = np.flatnonzero(engine_of // 2 == server)
        assert 20 < len(mine) < 100
        choices, alone = replay_routed(pick(trace, mine), LIMITS, TIMES, RoutedEngines(2, LEAST_LOAD, 2))
        assert choices.tolist() == (engine_of[mine] % 2).tolist()
        for found, wanted in zip(runs[2 * server : 2 * server + 2], alone, strict=True):
            assert found.totals == wanted.totals
            assert [one.tolist() for one in stamps(found)] == [one.tolist() for one in stamps(wanted)]


def test_engines_in_lockstep_that_never_end_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one alone does: a window that needs more blocks than the pool has, and two requests that push each other out."""
    monkeypatch.setattr("plimsoll.simulate.replicas.PATIENCE_STEPS", 100)
    groups = (CacheGroup("full", 16), CacheGroup("sliding", 16, 100_000))
    stuck = EngineLimits(num_blocks=100, groups=groups)
    with pytest.raises(BadInput, match="2 requests wait and none can ever be scheduled"):
        replay_routed(make_trace("t", [0, 0], [700, 1000], [400, 50]), stuck, TIMES, RoutedEngines(2, together=2))
    endless = EngineLimits(
        num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=40, prefix_caching=False, long_prefill_token_threshold=1,
        reserve_full_isl=False, policy="priority",
    )  # fmt: skip
    with pytest.raises(BadInput, match="keep preempting each other"):
        replay_routed(make_trace("t", [0] * 4, [7] * 4, [2, 2, 4, 4]), endless, TIMES, RoutedEngines(2, ROUND_ROBIN, 2))
