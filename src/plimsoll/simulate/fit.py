"""Finds the step-time constants that make a replay run like a measured run did.

The simulator is inside the search: constants are tried, the traffic is replayed, and what comes out is held against the stamps.
Scheduling, queueing and preemption therefore need no model of their own. Nothing is drawn by chance: the same run gives the
same constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.domain.measured_run import MeasuredRun
from plimsoll.domain.trace import Floats, Trace
from plimsoll.errors import BadInput
from plimsoll.simulate.fit_error import FitError, error_of
from plimsoll.simulate.fit_model import BOUNDS, CONTEXT, FRONT, make_model, replayed
from plimsoll.simulate.fit_search import search
from plimsoll.simulate.fit_seen import before, deviations, look_at, needed, picked
from plimsoll.simulate.replay import replay
from plimsoll.simulate.roofline import Experts
from plimsoll.simulate.settings import Settings, StepTime

SCALES = (1.0, 0.5, 2.0, 0.25, 4.0, 8.0)
SCALES_OF_A_START = (1.0, 0.5, 2.0)
TRUST = 0.004
"""How much the start holds against the data: a constant twice too large costs as much as a deviation of 0.4 %."""
TRUST_CONTEXT = 0.05
"""Bytes over bandwidth is sure knowledge, and a run that only fills up cannot tell it from the cost of a request."""
SPREAD = 3
"""Replays for each try, with arrivals that differ by less than a step: catching a step or just missing it evens out."""
SPREAD_NS = 20_000_000
MOST_REQUESTS = 4000
"""More would not make the constants better, only the search slower."""


class Fit(NamedTuple):
    """Constants, how well they fit, and a sentence about it for people."""

    step_time: StepTime
    error: FitError
    """On the stamps that the fit saw."""
    held_out: FitError | None
    """On later stamps of the same run, where there are any."""
    sentence: str
    rounds: int
    """Sets of constants tried."""
    most_running: int
    """Requests at once: how long a step with more of them takes was not measured."""


def fit(
    measured: MeasuredRun,
    settings: Settings,
    *,
    until_ns: int | None = None,
    start: StepTime | None = None,
    sizes: Sequence[int] | None = None,
    experts: Experts | None = None,
    on_try: Callable[[int], None] | None = None,
) -> Fit:
    """The step times of a measured run; with `until_ns` only what was known then is looked at, and the rest is predicted.

    `start` is a first idea, best the roofline's: it decides what the run leaves open. `sizes` are the captured graphs, if they
    are not vLLM's own choice; `experts` are those of a mixture, of which small steps read only some.
    `on_try` is told how often the traffic was replayed.
    """
    known = measured if until_ns is None else before(measured, until_ns)
    trace, rows = needed(known, MOST_REQUESTS)
    if not trace.size:
        raise BadInput("nothing to fit: the run has no stamp of a first or a last token")
    known = picked(known, trace, rows)
    model = make_model(start, settings, sizes, experts)
    seen = look_at(known, ~replay(trace, settings, model.start).is_rejected)
    if not (len(seen.first.members) or len(seen.between.members) or len(seen.whole.members)):
        raise BadInput("nothing to fit: the run has no stamp of a first or a last token")
    traces = _spread(trace)

    tries = itertools.count(1)

    def off(values: Floats) -> list[Floats]:
        if on_try is not None:
            on_try(next(tries))
        step_time = model.step_time(values)
        front_ns = values[FRONT] * step_time.base_ns
        each = [deviations(seen, *replayed(one, settings, step_time), front_ns=front_ns) for one in traces]
        return [np.mean(parts, axis=0) for parts in zip(*each, strict=True)]

    trust = np.full(len(BOUNDS.low), TRUST)
    if start is not None:
        trust[CONTEXT] = TRUST_CONTEXT
    starts = [model.values(scale) for scale in (SCALES if start is None else SCALES_OF_A_START)]
    found = search(off, starts, BOUNDS, trust)
    step_time = model.step_time(found.values)
    whole = replay(measured.trace, settings, step_time)
    error = error_of(measured, whole, until_ns=until_ns)
    held_out = None if until_ns is None else error_of(measured, whole, from_ns=until_ns)
    return Fit(step_time, error, held_out, _sentence(error, trace.size), found.rounds, whole.totals.peak_running)


def _spread(trace: Trace) -> list[Trace]:
    """The same traffic, each request up to SPREAD_NS later, by a different part of it in each."""
    turns = np.arange(trace.size) * 0.6180339887
    late = [np.zeros(trace.size), *((turns * (-1) ** nth + nth / SPREAD) % 1 for nth in range(1, SPREAD))]
    arrivals = [trace.arrival_ns + (one * SPREAD_NS).astype(np.int64) for one in late]
    return [trace._replace(arrival_ns=np.maximum.accumulate(one)) for one in arrivals]


def _sentence(error: FitError, used: int) -> str:
    parts = [
        f"{name} {value:.1%}"
        for name, value in (("TTFT", error.ttft), ("TPOT", error.tpot), ("end to end", error.e2e))
        if value is not None
    ]
    which = f"the first {used:,} of {error.requests:,}" if used < error.requests else f"{error.requests:,}"
    return f"fitted to {which} measured requests; a single one is off by {', '.join(parts)} on average"
