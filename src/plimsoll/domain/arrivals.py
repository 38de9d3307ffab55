"""When requests arrive, where a trace does not say: a seeded process in place of stamps."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from plimsoll.domain.trace import Floats, Integers
from plimsoll.errors import BadInput

PROCESSES = ("poisson", "constant", "bursty", "at-once")
LATEST_NS = 4_000_000_000_000_000_000
"""No arrival lies further from 0 than this (126 years), so that two of them can be subtracted without a thought."""


class Arrivals(NamedTuple):
    """A process: poisson, constant, bursty or at-once."""

    process: str = "poisson"
    rate_per_s: float = 0.0
    """On average; of no meaning to at-once."""
    seed: int = 0
    burstiness: float = 0.25
    """Of `bursty`: the shape of the gamma distribution of the gaps. 1 is poisson, smaller is burstier."""


def arrival_times(arrivals: Arrivals, count: int) -> Integers:
    """`count` sorted arrivals in ns, the first at 0; the same seed gives the same times, and fewer are a part of more."""
    check_arrivals(arrivals)
    if arrivals.process == "at-once" or count == 0:
        return np.zeros(count, dtype=np.int64)
    dice = np.random.Generator(np.random.PCG64(np.random.SeedSequence(arrivals.seed)))
    gaps = _gaps(arrivals, dice, count)
    gaps[0] = 0.0
    with np.errstate(over="ignore"):  # what becomes infinite is refused below
        times = np.cumsum(gaps) * (1e9 / arrivals.rate_per_s)
    if not times[-1] <= LATEST_NS:
        raise BadInput(f"at {arrivals.rate_per_s:g} requests a second the last of {count} would arrive after a hundred years")
    return np.rint(times).astype(np.int64)


def _gaps(arrivals: Arrivals, dice: np.random.Generator, count: int) -> Floats:
    """Gaps with a mean of 1."""
    if arrivals.process == "constant":
        return np.ones(count)
    if arrivals.process == "poisson":
        return dice.standard_exponential(count)
    return dice.standard_gamma(arrivals.burstiness, count) / arrivals.burstiness


def check_arrivals(arrivals: Arrivals) -> None:
    """Nothing, or one line that says what is wrong with the process."""
    if arrivals.process not in PROCESSES:
        raise BadInput(f"--arrivals takes {', '.join(PROCESSES)}, not {arrivals.process[:40]!r}")
    if not 0 <= arrivals.seed < 1 << 63:
        raise BadInput("--seed must be 0 or more, and below 2^63")
    if arrivals.process != "at-once" and not (math.isfinite(arrivals.rate_per_s) and arrivals.rate_per_s > 0):
        raise BadInput(f"--arrivals {arrivals.process} needs --rate: requests a second, more than 0")
    if arrivals.process == "bursty" and not 0.001 <= arrivals.burstiness <= 1000:
        raise BadInput("--burstiness must lie between 0.001 and 1000; 1 is poisson, smaller is burstier")
