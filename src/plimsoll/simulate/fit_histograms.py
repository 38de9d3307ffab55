"""Fits step times to histograms alone: what /metrics keeps of a run whose single requests nobody wrote down.

Means and shares say less than stamps, so only two numbers are looked for: how much slower or faster than the start a step is
as a whole, and how much a token in it. All other ratios stay as the start has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput, TooLarge
from plimsoll.simulate.fit import Bounds, Fit, FitError, make_model, search
from plimsoll.simulate.replay import replay
from plimsoll.simulate.result import NEVER, Replay
from plimsoll.simulate.roofline import Experts
from plimsoll.simulate.settings import Settings, StepTime
from plimsoll.simulate.trace import Floats, Trace
from plimsoll.simulate.trace_columns import read_lines
from plimsoll.vllm.metrics_page import LINE_MAX, PAGE_MAX, Histogram, Labels, Page, is_sample, parse_page

TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
BETWEEN = "vllm:inter_token_latency_seconds"
E2E = "vllm:e2e_request_latency_seconds"
SCALES = (1.0, 0.25, 0.5, 2.0, 4.0)
TRUST = 0.002
SHARES_WEIGHT = 0.3  # Of bucket shares against means: buckets are wide, and a share moves only when a value crosses a bound


class _Simulated(NamedTuple):
    mean: float
    values: Floats | None  # None where single values are not known


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


# Reads the histograms of a saved page of metrics for a fit, which a wrong one would mislead: what makes no sense is
# refused.
#
# Engines and models of one page are added up. Everything that is not a histogram is passed over.

_SHOWN = 60


def looks_like_metrics(path: str) -> bool:
    """Whether the file's first line is one of a page of metrics; a file that cannot be read is not."""
    if path == "-":
        return False
    try:
        first = next((chunk.lines[0] for chunk in read_lines(path) if chunk.lines), b"")
    except BadInput:
        return False
    text = first[:LINE_MAX].decode("utf-8", "replace").lstrip("\ufeff").strip()
    return text.startswith(("# HELP ", "# TYPE ", "# UNIT ")) or is_sample(text)


def read_histograms(path: str) -> tuple[Histogram, ...]:
    """All histograms of the page, in its order; BadInput where a line or one of them makes no sense."""
    data = bytearray()
    for chunk in read_lines(path):
        data += b"\n".join(chunk.lines) + b"\n"
        if len(data) > PAGE_MAX:
            raise TooLarge(f"{path}: too long for a page of metrics")
    page = parse_page(bytes(data), path, None)
    if page.skipped:
        lines = (line.strip() for line in data.decode("utf-8", "replace").lstrip("\ufeff").split("\n"))
        bad = next((line for line in lines if line and not line.startswith("#") and not is_sample(line)), "")
        raise BadInput(f"{path}: not a line of metrics: {bad[:_SHOWN]!r}")
    declared = [name for name, kind in page.types.items() if kind == "histogram"]
    return tuple(_sound(page, name) for name in declared if page.of(f"{name}_bucket") or page.of(f"{name}_sum"))


def _sound(page: Page, name: str) -> Histogram:
    """A page adds up the sums that are numbers: here each label set must have one, or the mean would be another."""
    found = page.histogram(name)
    sums = [sample.value for sample in page.of(f"{name}_sum")]
    sets = {_without_bound(sample.labels) for sample in page.of(f"{name}_bucket")}
    if found is None or len(sums) != len(sets) or not all(map(math.isfinite, sums)):
        wrong = "its buckets do not rise, do not end in +Inf or differ between its label sets, or a sum is not a number"
        raise BadInput(f"{page.source}: the histogram {name[:_SHOWN]} makes no sense: {wrong}")
    return found


def _without_bound(labels: Labels) -> frozenset[tuple[str, str]]:
    return frozenset(one for one in labels.items() if one[0] != "le")
