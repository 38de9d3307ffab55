"""Finds the step-time constants that make a replay run like a measured run did.

The simulator is inside the search: constants are tried, the traffic is replayed, and what comes out is held against the stamps.
Scheduling, queueing and preemption therefore need no model of their own. Nothing is drawn by chance: the same run gives the
same constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.domain.measured_run import Measured
from plimsoll.domain.trace import Integers, Trace
from plimsoll.errors import BadInput
from plimsoll.simulate.fit_error import FitError, error_of
from plimsoll.simulate.fit_search import Bounds, Numbers, search
from plimsoll.simulate.fit_seen import before, deviations, look_at, needed
from plimsoll.simulate.graphs import graph_sizes, padded, step_table
from plimsoll.simulate.replay import replay
from plimsoll.simulate.result import STEP_COLUMNS, Replay
from plimsoll.simulate.roofline import Experts
from plimsoll.simulate.settings import Settings, StepTime

GUESS = StepTime(12_000_000, 40_000, 10_000, 60_000)
"""Where the search begins if nobody knows better."""
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
STEP_UP = 0.3
"""What a step beyond the largest graph costs more, as a share of the base, before anything is known."""
EXPERTS_SHARE = 0.5
"""Of the base, what reading all experts takes, before anything is known."""
TRUST = 0.004
"""How much the start holds against the data: a constant twice too large costs as much as a deviation of 0.4 %."""
TRUST_CONTEXT = 0.05
"""Bytes over bandwidth is sure knowledge, and a run that only fills up cannot tell it from the cost of a request."""
SPREAD = 3
"""Replays for each try, with arrivals that differ by less than a step: catching a step or just missing it evens out."""
MOST_REQUESTS = 4000
"""More would not make the constants better, only the search slower."""


CONTEXT, SHARE, FRONT = 3, 5, 6
"""Places of numbers that are treated apart."""
LOW = np.array([0.02, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
HIGH = np.array([50.0, 50.0, 50.0, 50.0, 50.0, 0.95, 1.0])


class Fit(NamedTuple):
    """Constants, how well they fit, and a sentence about it for people."""

    step_time: StepTime
    error: FitError
    """On the stamps that the fit saw."""
    held_out: FitError | None
    """On later stamps of the same run, where there are any."""
    sentence: str
    rounds: int
    """Replays made."""


def fit(
    measured: Measured,
    settings: Settings,
    *,
    until_ns: int | None = None,
    start: StepTime | None = None,
    sizes: Sequence[int] | None = None,
    experts: Experts | None = None,
) -> Fit:
    """The step times of a measured run; with `until_ns` only what was known then is looked at, and the rest is predicted.

    `start` is a first idea, best the roofline's: it decides what the run leaves open. `sizes` are the captured graphs, if they
    are not vLLM's own choice.
    """
    known = measured if until_ns is None else before(measured, until_ns)
    trace, rows = needed(known, MOST_REQUESTS)
    if not trace.size:
        raise BadInput("nothing to fit: the run has no stamp of a first or a last token")
    known = Measured(trace, *(column[rows] for column in known[1:5]), known.series)
    model = _Model(start or GUESS, settings, graph_sizes(settings.max_num_seqs) if sizes is None else sizes, experts)
    seen = look_at(known, ~replay(trace, settings, start or GUESS).is_rejected)
    if not (len(seen.first.members) or len(seen.between.members) or len(seen.whole.members)):
        raise BadInput("nothing to fit: the run has no stamp of a first or a last token")
    traces = _spread(trace)

    def off(values: Numbers) -> list[Numbers]:
        step_time = model.step_time(values)
        front_ns = values[FRONT] * step_time.base_ns
        each = [deviations(seen, *_replayed(one, settings, step_time), front_ns=front_ns) for one in traces]
        return [np.mean(parts, axis=0) for parts in zip(*each, strict=True)]

    trust = np.full(len(LOW), TRUST)
    if start is not None:
        trust[CONTEXT] = TRUST_CONTEXT
    starts = model.starts(SCALES if start is None else (0.5, 1.0, 2.0))
    found = search(off, starts, Bounds(LOW, HIGH), trust)
    step_time = model.step_time(found.values)
    whole = replay(measured.trace, settings, step_time)
    error = error_of(measured, whole, until_ns=until_ns)
    held_out = None if until_ns is None else error_of(measured, whole, from_ns=until_ns)
    return Fit(step_time, error, held_out, _sentence(error), found.rounds)


class _Model(NamedTuple):
    """From seven numbers to a step time: five constants over those of the start, the experts' share, the front in steps."""

    start: StepTime
    settings: Settings
    sizes: Sequence[int]
    experts: Experts | None

    def starts(self, scales: Sequence[float]) -> list[Numbers]:
        share = EXPERTS_SHARE if self.experts else 0.0
        scaled = [np.array([*[scale] * 4, scale * STEP_UP, share, 0.0]) for scale in scales]
        return sorted(scaled, key=lambda one: abs(one[0] - 1))

    def step_time(self, values: Numbers) -> StepTime:
        base, token, seq, ctx = values[:4] * self.start[:4]
        most = self.settings.max_num_batched_tokens
        table = step_table(base, token, most, self.sizes, values[4] * self.start.base_ns)
        if self.experts is not None:
            unread = 1 - self.experts._replace(weights_share=1.0).read(padded(self.sizes, most).astype(np.float64))
            table = table - np.rint(base * values[SHARE] * unread).astype(np.int64)
        return StepTime(round(base), round(token), round(seq), round(ctx), table)


def _spread(trace: Trace) -> list[Trace]:
    """The same traffic, each request up to half a step later, by a different part of it in each."""
    turns = np.arange(trace.size) * 0.6180339887
    late = [np.zeros(trace.size), *(((turns * (-1) ** nth + nth / SPREAD) % 1) for nth in range(1, SPREAD))]
    return [trace._replace(arrival_ns=np.maximum.accumulate(trace.arrival_ns + (one * 2e7).astype(np.int64))) for one in late]


def _replayed(trace: Trace, settings: Settings, step_time: StepTime) -> tuple[Replay, Integers]:
    steps: list[Integers] = []
    done = replay(trace, settings, step_time, on_steps=lambda rows: steps.append(rows.copy()))
    return done, np.concatenate(steps) if steps else np.zeros((0, len(STEP_COLUMNS)), dtype=np.int64)


def _sentence(error: FitError) -> str:
    parts = [
        f"{name} {value:.1%}"
        for name, value in (("TTFT", error.ttft), ("TPOT", error.tpot), ("end to end", error.e2e))
        if value is not None
    ]
    return f"fitted to {error.requests} measured requests; off by {', '.join(parts)} for a single request on average"
