"""One simulated run as a piece of work that can be done anywhere: what is replayed, and how good it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import Settings, StepTime
from plimsoll.simulate.trace import Trace
from plimsoll.tune.goodput import Score, Slo, score


class Traffic(NamedTuple):
    """What is replayed, how fast it comes, and what is promised."""

    trace: Trace
    speedup: float = 1.0
    slo: Slo = Slo()

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.trace.arrival_ns[-1]) / 1e9 / self.speedup if self.trace.size else 0.0


class Job(NamedTuple):
    """One run of one traffic."""

    settings: Settings
    step_time: StepTime


class Failed(NamedTuple):
    """A run that cannot be: nothing fits, or nothing ever ends."""

    why: str


Result = Score | Failed
RunAll = Callable[[Traffic, Sequence[Job]], Iterator[tuple[int, Result]]]
"""Does all jobs, anywhere and in any order, and gives each result with the place of its job."""


def do(traffic: Traffic, job: Job) -> Result:
    """Replay and judge; the same job gives the same result to the digit, wherever it is done."""
    try:
        return score(replay(traffic.trace, job.settings, job.step_time, traffic.speedup), traffic.slo)
    except BadInput as error:
        return Failed(str(error))


def traffic_digest(traffic: Traffic) -> str:
    """Equal for equal traffic, whatever its file is called."""
    trace = traffic.trace
    digest = hashlib.sha256(repr((traffic.speedup, traffic.slo, trace.prefix_block)).encode())
    for column in (trace.arrival_ns, trace.prompt, trace.output, trace.priority, trace.prefix_ids, trace.prefix_start):
        digest.update(np.ascontiguousarray(column).tobytes())
        digest.update(b"|")
    return digest.hexdigest()


def job_digest(job: Job, traffic: str, version: str) -> str:
    """By which a result is found again: of the job, its traffic and the simulator's version."""
    times = job.step_time._replace(by_tokens=None)
    digest = hashlib.sha256(repr((version, traffic, job.settings, times)).encode())
    if job.step_time.by_tokens is not None:
        digest.update(np.ascontiguousarray(job.step_time.by_tokens).tobytes())
    return digest.hexdigest()[:32]
