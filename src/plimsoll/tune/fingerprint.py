"""Traffic in a few numbers, so that the next tuning can say what has changed since the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from plimsoll.domain.trace import Integers
from plimsoll.tune.work import Traffic

MINUTE_NS = 60 * 10**9
CHANGED = 0.2
"""A figure that grew or shrank by more has changed."""
CHANGED_SHARE = 0.1
"""The same for shares, in points."""


class Fingerprint(NamedTuple):
    """Counts, tokens, seconds; no text and no single request."""

    requests: int
    span_s: float
    rate: float
    """Requests a second."""
    busiest_minute_rate: float
    prompt_mean: float
    prompt_p50: float
    prompt_p99: float
    output_mean: float
    output_p50: float
    output_p99: float
    shared: float
    """Share of the prompts' beginnings that an earlier request had too."""


NAMES: Mapping[str, str] = {
    "rate": "requests a second",
    "busiest_minute_rate": "requests a second in the busiest minute",
    "prompt_mean": "tokens in a prompt, mean",
    "prompt_p99": "tokens in the longest prompts (p99)",
    "output_mean": "tokens in an answer, mean",
    "output_p99": "tokens in the longest answers (p99)",
    "shared": "share of prompt beginnings seen before",
}
"""What is compared, and how it is called."""


class Change(NamedTuple):
    """One figure, then and now."""

    name: str
    before: float
    now: float

    @property
    def is_large(self) -> bool:
        """Whether it is worth a word."""
        if self.name == "shared":
            return abs(self.now - self.before) > CHANGED_SHARE
        low, high = sorted((self.before, self.now))
        return high > low * (1 + CHANGED)


def fingerprint(traffic: Traffic) -> Fingerprint:
    """The numbers of this traffic, as fast as it comes."""
    trace, span = traffic.trace, traffic.span_s
    arrivals = trace.arrival_ns / traffic.speedup
    return Fingerprint(
        requests=trace.size,
        span_s=span,
        rate=trace.size / span if span > 0 else 0.0,
        busiest_minute_rate=_busiest_minute(arrivals.astype(np.int64)),
        prompt_mean=float(trace.prompt.mean()),
        prompt_p50=_at(trace.prompt, 50),
        prompt_p99=_at(trace.prompt, 99),
        output_mean=float(trace.output.mean()),
        output_p50=_at(trace.output, 50),
        output_p99=_at(trace.output, 99),
        shared=1 - len(np.unique(trace.prefix_ids)) / len(trace.prefix_ids) if trace.shares_content else 0.0,
    )


def _busiest_minute(arrivals: Integers) -> float:
    after = np.searchsorted(arrivals, arrivals + MINUTE_NS, side="left")
    most = int((after - np.arange(len(arrivals))).max())
    seconds = min(60.0, max(1e-9, float(arrivals[-1] - arrivals[0]) / 1e9))
    return most / seconds if len(arrivals) > 1 and arrivals[-1] > arrivals[0] else 0.0


def _at(values: Integers, percent: int) -> float:
    return float(np.sort(values)[min(len(values) - 1, int(percent / 100 * len(values)))])


def drift(before: Fingerprint, now: Fingerprint) -> tuple[Change, ...]:
    """Every figure that is compared, then and now."""
    return tuple(Change(name, getattr(before, name), getattr(now, name)) for name in NAMES)
