"""One simulated run as a job, and its score: requests a second that were served as promised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.simulate.replay import NEVER, Replay, replay
from plimsoll.simulate.replicas import ONE_ENGINE, RoutedEngines, merge_replays, replay_routed
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.summary import latencies_of, percentile
from plimsoll.simulate.trace import Trace

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_NS = 1e9
_MOST_S = 86_400.0


class Slo(NamedTuple):
    """The promise to each request, in seconds; None: no limit."""

    ttft: float | None = None  # To the first token
    tpot: float | None = None  # For each further token, on average over the request
    e2e: float | None = None  # To the last token

    @property
    def is_empty(self) -> bool:
        """True if nothing is promised."""
        return self == Slo()

    @property
    def word(self) -> str:
        """The word for requests that got what was promised."""
        return "served" if self.is_empty else "as promised"

    def __str__(self) -> str:
        given = ((name, seconds) for name, seconds in self._asdict().items() if seconds is not None)
        return ",".join(f"{name}={seconds * 1e3:g}ms" if seconds < 1 else f"{name}={seconds:g}s" for name, seconds in given)


def parse_slo(text: str) -> Slo:
    """ttft=2s,tpot=50ms"""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in Slo._fields or not equals:
            raise BadInput(f"--slo: {part.strip()[:40]!r} is not ttft=2s, tpot=50ms or e2e=30s")
        if name in found:
            raise BadInput(f"--slo: {name} is given twice")
        matched = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m)", value.strip())
        if matched is None:
            raise BadInput(f"--slo: {name}={value.strip()[:40]!r} needs a time with its unit, such as 50ms or 2s")
        found[name] = float(matched[1]) * _UNITS[matched[2]]
        if not 0 < found[name] <= _MOST_S:
            raise BadInput(f"--slo: {name}={value.strip()[:40]} must lie above 0 and at most at a day")
    return Slo(**found)


class Score(NamedTuple):
    """A setting's results with the traffic. Times are seconds, None where no request finished."""

    goodput: float  # Requests a second that were served as promised
    met: int  # Requests served as promised
    requests: int
    rejected: int
    seconds: float  # From the first arrival to the last token
    requests_per_second: float
    output_tokens_per_second: float
    preemptions: int
    recomputed_share: float  # The share of all computed tokens that had been computed before
    peak_running: int
    peak_waiting: int
    kv_mean: float  # Share of the blocks in use, over busy time
    kv_peak: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    late_first: int  # Finished requests whose first token came too late
    late_further: int  # Finished requests whose further tokens came too slowly
    refused: int = 0  # They came when the queue was full


def score(run: Replay, slo: Slo) -> Score:
    """Scores the run against the promise."""
    done = np.flatnonzero(run.finish_ns != NEVER)
    first = (run.first_token_ns - run.arrival_ns)[done] / _NS
    whole = (run.finish_ns - run.arrival_ns)[done] / _NS
    further = np.maximum(1, run.produced[done] - 1)
    each = np.where(run.produced[done] > 1, (run.finish_ns - run.first_token_ns)[done] / _NS / further, 0.0)
    late_first, late_further, late_whole = (
        took > (np.inf if promised is None else promised) for took, promised in zip((first, each, whole), slo, strict=True)
    )
    met = int(np.count_nonzero(~(late_first | late_further | late_whole)))
    totals, times = run.totals, latencies_of(run)
    seconds = totals.end_ns / _NS
    usable = max(1, run.settings.num_blocks - 1)
    return Score(
        **{name: value for name, value in totals._asdict().items() if name in Score._fields},
        goodput=met / seconds if seconds > 0 else 0.0,
        met=met,
        seconds=seconds,
        requests_per_second=totals.finished / seconds if seconds > 0 else 0.0,
        output_tokens_per_second=int(run.produced.sum()) / seconds if seconds > 0 else 0.0,
        recomputed_share=totals.recomputed_tokens / totals.scheduled_tokens if totals.scheduled_tokens else 0.0,
        kv_mean=totals.used_block_ns / totals.busy_ns / usable if totals.busy_ns else 0.0,
        kv_peak=totals.peak_blocks / usable,
        ttft_p50=percentile(times.ttft, 50),
        ttft_p99=percentile(times.ttft, 99),
        tpot_p50=percentile(times.tpot, 50),
        tpot_p99=percentile(times.tpot, 99),
        late_first=int(np.count_nonzero(late_first)),
        late_further=int(np.count_nonzero(late_further)),
    )


class Traffic(NamedTuple):
    """The trace to replay, its speed, and the promise."""

    trace: Trace
    speedup: float = 1.0
    slo: Slo = Slo()

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.trace.arrival_ns[-1]) / 1e9 / self.speedup if self.trace.size else 0.0


class Job(NamedTuple):
    """One run of one traffic."""

    settings: EngineLimits
    step_time: StepTime
    engines: RoutedEngines = ONE_ENGINE

    def replay(self, traffic: Traffic, servers: int = 1, speedup: float = 1.0) -> Replay:
        """The run of so many such servers with the traffic `speedup` times as fast."""
        faster, engines = traffic.speedup * speedup, self.engines._replace(number=self.engines.number * servers)
        if engines.number == 1:
            return replay(traffic.trace, self.settings, self.step_time, faster)
        engine_of, runs = replay_routed(traffic.trace, self.settings, self.step_time, engines, speedup=faster)
        return merge_replays(traffic.trace, runs, engine_of)


class Failed(NamedTuple):
    """A run that is impossible: nothing fits, or it never ends."""

    why: str


Result = Score | Failed
RunAll = Callable[[Traffic, Sequence[Job]], Iterator[tuple[int, Result]]]
"""Does all jobs, anywhere and in any order, and gives each result with the place of its job."""


def do(traffic: Traffic, job: Job) -> Result:
    """Replays and scores a job; the same job gives the same result to the digit on any machine."""
    try:
        return score(job.replay(traffic), traffic.slo)
    except BadInput as error:
        return Failed(str(error))
