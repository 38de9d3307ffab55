"""The search: as good as trying everything, for a part of it, and below what no run can beat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from plimsoll.errors import BadInput
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import make_trace
from plimsoll.simulate.traffic import generate, parse_synthetic
from plimsoll.tune.goodput import Failed, Job, Result, Score, Traffic, do
from plimsoll.tune.runners import on_cores, runner_on, with_progress
from plimsoll.tune.search import Search, Trial, busiest, ceiling, demand, preferred
from plimsoll.tune.space import Space, candidate_of, plan_all
from tests.each import SOAK, each
from tests.tune.servers import SMALL, run, server, traffic

WIDE = Space((8, 16, 24, 32, 48, 64, 128, 256), (512, 1024, 2048, 4096), (16, 32), (0.85, 0.88, 0.9, 0.92, 0.94))


LOADS, PROMISES = (0.4, 0.8, 1.2), ("ttft=5s,tpot=200ms", "ttft=1s", "tpot=90ms")


@pytest.mark.parametrize(("rate", "slo"), [*product(LOADS, PROMISES)] if SOAK else [(0.8, "ttft=1s")])
def test_within_one_per_cent_of_trying_everything(rate: float, slo: str) -> None:
    """Over loads and promises, for no more than the budget; the full grids of real traces are in benchmarks/tune_grid.py."""
    given, asked = server(), traffic(slo, rate)
    options = plan_all(WIDE.candidates, given.ledger, given.replan)
    search = Search(asked, options, WIDE, given.job_of, run, least_requests=0)
    found = search.find(candidate_of(given.ledger))
    assert found is not None
    safe = [one for one in options if one.is_safe]
    everything = [result for _, result in run(asked, [given.job_of(one) for one in safe]) if isinstance(result, Score)]
    assert found.best.score.goodput >= 0.99 * max(one.goodput for one in everything)
    assert found.requests <= search.budget
    assert found.requests < 0.2 * len(safe) * asked.trace.size


def test_nothing_unsafe_is_ever_run() -> None:
    """Not in screening, not while climbing, not for the curve: each job's pool is that of a safe candidate."""
    given, asked = server(), traffic()
    space = SMALL._replace(gpu_memory_utilization=(0.9, 0.94, 0.97, 0.99))
    options = plan_all(space.candidates, given.ledger, given.replan)
    unsafe = {given.job_of(one).settings for one in options if not one.is_safe}
    safe = {given.job_of(one).settings for one in options if one.is_safe}
    seen: list[Job] = []

    def watched(part: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        seen.extend(jobs)
        yield from run(part, jobs)

    assert Search(asked, options, space, given.job_of, watched, least_requests=0).find(candidate_of(given.ledger)) is not None
    assert unsafe
    assert {job.settings for job in seen} <= safe


def test_without_a_candidate_that_is_safe_and_runs_there_is_no_answer() -> None:
    """None, and nothing unsafe was run; runs that fail are left out."""
    given = server()
    space = SMALL._replace(gpu_memory_utilization=(0.99,))
    options = plan_all(space.candidates, given.ledger, given.replan)
    search = Search(traffic(), options, space, given.job_of, run)
    assert search.find(options[0].candidate) is None
    assert search.runs == 0
    options = plan_all(SMALL.candidates, given.ledger, given.replan)

    def failing(_: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        yield from ((place, Failed("stuck")) for place in range(len(jobs)))

    assert Search(traffic(), options, SMALL, given.job_of, failing).find(options[0].candidate) is None


def test_of_equals_the_own_setting_stays() -> None:
    """Then the one that changes least, and of those the one with the most memory left; a better one beats all."""
    given, asked = server(), traffic()
    options = plan_all([one for one in SMALL.candidates if one[:3] == (32, 512, 16)], given.ledger, given.replan)
    (result,) = [one for _, one in run(asked, [given.job_of(options[0])])]
    assert isinstance(result, Score)
    alike = [Trial(option, result) for option in options]
    assert preferred(alike, options[-1].candidate) is alike[-1]
    near = next(one for one in alike if one.option.candidate.gpu_memory_utilization == 0.92)
    assert preferred(alike, candidate_of(given.ledger)) is near, "it has the command's own share of the card"
    far = candidate_of(given.ledger)._replace(gpu_memory_utilization=0.5)
    assert preferred(alike, far) is alike[0], "all differ alike: the smallest share of the card leaves the most"
    better = Trial(options[1], result._replace(goodput=1.1 * result.goodput))
    assert preferred([better, *alike], options[-1].candidate) is better
    hardly = Trial(options[0], result._replace(goodput=1.0055 * result.goodput))
    clearly = Trial(options[1], result._replace(goodput=1.0095 * result.goodput))
    own = Trial(options[-1], result._replace(goodput=1.003 * result.goodput))
    assert preferred([clearly, hardly, own], own.option.candidate) is clearly, "a change is worth its trouble or not advised"
    kept = Trial(options[-1], result._replace(met=result.requests - result.rejected))
    assert preferred([better, kept], options[-1].candidate, keeps_promises=True) is kept, "who keeps every promise stays"


def test_every_flag_of_the_answer_was_also_run_as_the_command_had_it() -> None:
    """Whatever that brings up: no flag is set without its own worth being known."""
    given = server()
    for slo in ("ttft=5s,tpot=200ms", "ttft=20s,tpot=90ms", "tpot=80ms"):
        asked = traffic(slo)
        options = plan_all(SMALL.candidates, given.ledger, given.replan)
        own = candidate_of(given.ledger)
        found = Search(asked, [*options, *plan_all([own], given.ledger, given.replan)], SMALL, given.job_of, run).find(own)
        assert found is not None
        chosen = found.best.option.candidate
        tried = {one.option.candidate for one in found.tried}
        for name in chosen.differences(own):
            wanted = chosen._replace(**{name: getattr(own, name)})
            safe = {one.candidate for one in options if one.is_safe}
            assert wanted in tried or wanted not in safe


def test_the_busiest_stretch() -> None:
    """So many in a row that ask for the most in the shortest time; all of them if there are no more."""
    second = 10**9
    trace = make_trace("bursts", [0, 10 * second, 20 * second, 21 * second, 22 * second, 60 * second], [100] * 6, [10] * 6)
    assert busiest(trace, 2).arrival_ns.tolist() == [0, second]
    assert busiest(trace, 9) is trace


TIMES = StepTime(base_ns=20_000_000, token_ns=100_000, seq_ns=20_000, ctx_ps=100_000)


@each("seats", [1, 4, 32, 256])
@each("blocks", [300, 3000])
@each("budget", [256, 2048])
@each("extra", ["", ",families=3,family_tokens=256", ",arrivals=at-once"])
def test_no_run_is_above_it(seats: int, blocks: int, budget: int, extra: str) -> None:
    """Not with few seats, not with a small cache, not with small steps, not with prefixes that hit."""
    rate = "" if "at-once" in extra else ",rate=5"
    traffic = Traffic(
        generate(parse_synthetic(f"synthetic:requests=150{rate},prompt=600,output=120,prompt_max=2048,seed=5{extra}"))
    )
    job = Job(EngineLimits(num_blocks=blocks, max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=4096), TIMES)
    found = do(traffic, job)
    assert isinstance(found, Score)
    assert found.goodput <= ceiling(demand(traffic, 4096), job)


def test_a_ceiling_is_near_where_one_thing_rules() -> None:
    """Nothing but decoding one after the other; ten requests in ten seconds are one a second, however fast the card."""
    traffic = Traffic(make_trace("same", [0] * 20, [16] * 20, [101] * 20))
    job = Job(EngineLimits(max_num_seqs=1), StepTime(10**7, 0, 0, 0))
    found = do(traffic, job)
    assert isinstance(found, Score)
    assert found.goodput == pytest.approx(ceiling(demand(traffic, 16384), job), rel=0.02)
    traffic = Traffic(make_trace("slow", [n * 10**9 for n in range(11)], [8] * 11, [2] * 11))
    job = Job(EngineLimits(), StepTime(1, 0, 0, 0))
    assert ceiling(demand(traffic, 16384), job) == pytest.approx(1.1)
    assert ceiling(demand(traffic._replace(speedup=2.0), 16384), job) == pytest.approx(2.2)


def test_all_cores_give_the_same_results_and_an_unknown_place_is_one_line() -> None:
    """Each with the place of its job, and progress after each."""
    short = Traffic(make_trace("t", [0, 0, 0], [40, 80, 20], [30, 40, 9]))
    jobs = [Job(EngineLimits(max_num_seqs=seats), StepTime()) for seats in (1, 2, 3)]
    told: list[tuple[int, int]] = []
    runner = with_progress(on_cores, lambda done, of: told.append((done, of)))
    assert dict(runner(short, jobs)) == dict(run(short, jobs))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert runner_on(None) is runner_on("local") is on_cores
    with pytest.raises(BadInput, match="ray"):
        runner_on("spark://x")
