"""One run as a piece of work, and how good it was: requests a second that were served as promised."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.errors import BadInput
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import make_trace
from plimsoll.tune.goodput import Failed, Job, Score, Slo, Traffic, do, parse_slo, score

SECOND = StepTime(base_ns=10**9, token_ns=0, seq_ns=0, ctx_ps=0)
"""Every step takes a second."""


def test_promises_are_read_with_their_units() -> None:
    """And said again as they were typed."""
    assert parse_slo("ttft=2s,tpot=50ms") == Slo(2.0, 0.05)
    assert parse_slo("e2e=1.5m").e2e == 90
    assert str(parse_slo("ttft=2s,tpot=50ms")) == "ttft=2s,tpot=50ms"
    assert Slo().is_empty


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=2", "ttft=-1s", "ttft=0s", "speed=2s", "ttft=1s,ttft=2s", "tpot=2h", "ttft=99999s"]
)
def test_a_wrong_promise_is_one_line(text: str) -> None:
    """No unit, no such promise, twice, or nonsense."""
    with pytest.raises(BadInput, match="--slo"):
        parse_slo(text)


def test_each_promise_is_held_against_each_request() -> None:
    """One seat, one second a step: the first is answered after 1 s and done after 3, the second waits for it."""
    run = replay(make_trace("two", [0, 0], [4, 4], [3, 3]), EngineLimits(max_num_seqs=1), SECOND)
    both = score(run, Slo())
    assert (both.met, both.requests, both.seconds) == (2, 2, 6.0)
    assert both.goodput == pytest.approx(2 / 6)
    first = score(run, Slo(ttft=1.0))
    assert (first.met, first.late_first) == (1, 1)
    assert first.goodput == pytest.approx(1 / 6)
    assert score(run, Slo(tpot=0.9)).late_further == 2
    assert score(run, Slo(tpot=1.0)).met == 2
    assert score(run, Slo(e2e=3.0)).met == 1


def test_a_request_that_is_refused_was_not_served() -> None:
    """It counts among all and never among the good; one token has no further ones to be promised."""
    run = replay(make_trace("long", [0, 0], [4, 500], [2, 2]), EngineLimits(max_model_len=100), SECOND)
    found = score(run, Slo())
    assert (found.met, found.requests, found.rejected) == (1, 2, 1)
    run = replay(make_trace("one", [0], [4], [1]), EngineLimits(), SECOND)
    assert score(run, Slo(tpot=0.001)).met == 1


TRAFFIC = Traffic(make_trace("a", [0, 5], [40, 50], [3, 4], ids=[[1], [1]], prefix_block=16), 1.0, Slo(ttft=1.0))
JOB = Job(EngineLimits(), StepTime(by_tokens=np.arange(3000)))


def test_the_same_job_gives_the_same_result_also_where_it_cannot_end() -> None:
    """To the digit; a request that can never fit is a sentence, not an exception that stops a sweep."""
    assert isinstance(do(TRAFFIC, JOB), Score)
    assert do(TRAFFIC, JOB) == do(TRAFFIC, JOB)
    stuck = do(Traffic(make_trace("x", [0], [8], [1])), Job(EngineLimits(block_size=0), StepTime()))
    assert isinstance(stuck, Failed)
    assert stuck.why
