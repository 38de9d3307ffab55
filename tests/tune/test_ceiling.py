"""What no run can beat."""

from __future__ import annotations

import pytest

from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import make_trace
from plimsoll.simulate.traffic import generate, parse_synthetic
from plimsoll.tune.goodput import Job, Score, Traffic, do
from plimsoll.tune.search import ceiling, demand
from tests.each import each

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
