"""Fits step times to histograms alone: what /metrics keeps of a run whose single requests nobody wrote down.

Means and shares say less than stamps, so only two numbers are looked for: how much slower or faster than the start a step is
as a whole, and how much a token in it. All other ratios stay as the start has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.domain.histogram import Histogram
from plimsoll.domain.trace import Floats, Trace
from plimsoll.errors import BadInput
from plimsoll.simulate.fit import Fit
from plimsoll.simulate.fit_error import FitError
from plimsoll.simulate.fit_model import make_model
from plimsoll.simulate.fit_search import Bounds, search
from plimsoll.simulate.replay import replay
from plimsoll.simulate.result import NEVER, Replay
from plimsoll.simulate.roofline import Experts
from plimsoll.simulate.settings import Settings, StepTime

TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
BETWEEN = "vllm:inter_token_latency_seconds"
E2E = "vllm:e2e_request_latency_seconds"
SCALES = (1.0, 0.25, 0.5, 2.0, 4.0)
TRUST = 0.002
SHARES_WEIGHT = 0.3
"""Of bucket shares against means: buckets are wide, and a share moves only when a value crosses a bound."""


class _Simulated(NamedTuple):
    mean: float
    values: Floats | None
    """None where single values are not known."""


def fit_histograms(
    trace: Trace,
    settings: Settings,
    histograms: Sequence[Histogram],
    *,
    start: StepTime | None = None,
    sizes: Sequence[int] | None = None,
    experts: Experts | None = None,
    on_try: Callable[[int], None] | None = None,
) -> Fit:
    """The step times with which this traffic gives these histograms; others than those of latencies are passed over."""
    wanted = {one.name: one for one in histograms if one.name in (TTFT, TPOT, BETWEEN, E2E) and (one.mean or 0) > 0}
    if not wanted:
        raise BadInput(f"nothing to fit: no histogram of latencies with a value in it ({TTFT}, {TPOT}, {BETWEEN}, {E2E})")
    model = make_model(start, settings, sizes, experts)

    def step_time(pair: Floats) -> StepTime:
        return model.step_time(model.values(pair[0], pair[1]))

    tries = itertools.count(1)

    def off(pair: Floats) -> list[Floats]:
        if on_try is not None:
            on_try(next(tries))
        simulated = _latencies(replay(trace, settings, step_time(pair)))
        return [_deviation(wanted[name], simulated[name]) for name in wanted if name in simulated]

    if not off(np.ones(2)):
        raise BadInput("nothing to fit: the traffic has no request that the histograms could be about")
    starts = [np.array([one, one]) for one in SCALES] + [np.array([one, two]) for one, two in ((1.0, 0.4), (1.0, 2.5))]
    found = search(off, starts, Bounds(np.full(2, 0.02), np.full(2, 50.0)), np.full(2, TRUST))
    best = step_time(found.values)
    run = replay(trace, settings, best)
    error = _error(wanted, _latencies(run))
    return Fit(best, error, None, _sentence(error), found.rounds, run.totals.peak_running)


def _latencies(run: Replay) -> dict[str, _Simulated]:
    done = np.flatnonzero(run.finish_ns != NEVER)
    if not len(done):
        return {}
    first = (run.first_token_ns - run.arrival_ns)[done] / 1e9
    whole = (run.finish_ns - run.arrival_ns)[done] / 1e9
    found = {TTFT: _Simulated(float(first.mean()), first), E2E: _Simulated(float(whole.mean()), whole)}
    further = run.trace.output[done] - 1
    several = further > 0
    if several.any():
        decoding = (run.finish_ns - run.first_token_ns)[done][several] / 1e9
        each = decoding / further[several]
        found[TPOT] = _Simulated(float(each.mean()), each)
        found[BETWEEN] = _Simulated(float(decoding.sum() / further[several].sum()), None)
    return found


def _deviation(histogram: Histogram, simulated: _Simulated) -> Floats:
    mean = np.array([np.log(max(simulated.mean, 1e-9) / (histogram.mean or 1e-9))])
    if simulated.values is None or not histogram.bounds:
        return mean
    ours = np.searchsorted(np.sort(simulated.values), histogram.bounds, side="right") / len(simulated.values)
    theirs = np.cumsum(histogram.counts)[:-1] / histogram.size
    return np.append(mean, SHARES_WEIGHT * (ours - theirs))


def _error(wanted: Mapping[str, Histogram], simulated: Mapping[str, _Simulated]) -> FitError:
    means: dict[str, float] = {}
    for name, histogram in wanted.items():
        if name in simulated and histogram.mean:
            means[name] = simulated[name].mean / histogram.mean - 1
    requests = max(int(one.size) for name, one in wanted.items() if name != BETWEEN) if set(wanted) - {BETWEEN} else 0
    return FitError(requests, None, None, None, means.get(TTFT), means.get(TPOT, means.get(BETWEEN)), means.get(E2E))


def _sentence(error: FitError) -> str:
    parts = [
        f"{name} {value:+.1%}"
        for name, value in (("TTFT", error.mean_ttft), ("TPOT", error.mean_tpot), ("end to end", error.mean_e2e))
        if value is not None
    ]
    about = f"histograms of {error.requests} requests" if error.requests else "histograms"
    return f"fitted to {about}; means are off by {', '.join(parts)}"
