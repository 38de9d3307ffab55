"""One run as a piece of work."""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import make_trace
from plimsoll.tune.goodput import Failed, Job, Score, Slo, Traffic, do, job_digest, traffic_digest

TRAFFIC = Traffic(make_trace("a", [0, 5], [40, 50], [3, 4], ids=[[1], [1]], prefix_block=16), 1.0, Slo(ttft=1.0))
JOB = Job(EngineLimits(), StepTime(by_tokens=np.arange(3000)))


def test_the_same_job_gives_the_same_result() -> None:
    """To the digit."""
    assert isinstance(do(TRAFFIC, JOB), Score)
    assert do(TRAFFIC, JOB) == do(TRAFFIC, JOB)


def test_what_cannot_end_is_a_result_too() -> None:
    """A request that can never fit is a sentence, not an exception that stops a sweep."""
    big = Traffic(make_trace("big", [0], [400], [4]))
    found = do(big, Job(EngineLimits(num_blocks=4, max_model_len=512, max_num_batched_tokens=512), StepTime()))
    assert isinstance(found, Failed | Score)
    stuck = do(Traffic(make_trace("x", [0], [8], [1])), Job(EngineLimits(block_size=0), StepTime()))
    assert isinstance(stuck, Failed)
    assert stuck.why


def test_results_are_found_again_by_what_matters_alone() -> None:
    """Another file name is the same traffic; another arrival, promise, setting, step time or scheduler is not."""
    same = traffic_digest(TRAFFIC)
    assert traffic_digest(TRAFFIC._replace(trace=TRAFFIC.trace._replace(name="b"))) == same
    others = [
        TRAFFIC._replace(speedup=2.0),
        TRAFFIC._replace(slo=Slo(ttft=2.0)),
        TRAFFIC._replace(trace=TRAFFIC.trace._replace(arrival_ns=TRAFFIC.trace.arrival_ns + 1)),
        TRAFFIC._replace(trace=TRAFFIC.trace._replace(prefix_ids=TRAFFIC.trace.prefix_ids + 1)),
    ]
    assert len({same, *map(traffic_digest, others)}) == 5
    jobs = [
        JOB,
        JOB._replace(settings=EngineLimits(max_num_seqs=8)),
        JOB._replace(step_time=JOB.step_time._replace(seq_ns=1)),
        JOB._replace(step_time=StepTime(by_tokens=np.arange(3000) + 1)),
    ]
    assert len({job_digest(job, same, "1") for job in jobs} | {job_digest(JOB, same, "2"), job_digest(JOB, "x", "1")}) == 6
