"""Traffic: the requests' arrivals, their lengths, and the beginnings they share.

Content is never kept. Two requests share a beginning when their first prefix ids are equal; each id covers `prefix_block`
tokens. A request without ids shares nothing.

    prefix_ids    7 8 9 | 7 8 5 2 |   | ...           one row of numbers for the whole trace
    prefix_start  0       3         7   7 ...          where each request's ids begin; one longer than the trace
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plimsoll.errors import BadInput, TooLarge

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Tuples = npt.NDArray[np.object_]
Flags = npt.NDArray[np.bool_]


class Trace(NamedTuple):
    """Requests in order of arrival; the first arrives at 0 unless the trace was cut out of a longer one."""

    name: str
    arrival_ns: Integers  # Sorted; rows of one instant keep the file's order
    prompt: Integers
    output: Integers  # Tokens to generate, at least 1
    priority: Integers  # Lower goes first, as vLLM's `priority`; only the priority policy looks at it
    adapter: Integers  # LoRA adapters, each as a number; 0 for none
    images: Tuples  # The tokens of each picture or sound at the beginning of the prompt
    prefix_ids: Integers
    prefix_start: Integers
    prefix_block: int = 512  # Tokens that one prefix id covers
    bad_rows: int = 0  # Rows that were left out because they could not be read

    @property
    def size(self) -> int:
        """The number of requests."""
        return len(self.arrival_ns)

    @property
    def shares_content(self) -> bool:
        """True if any request has prefix ids."""
        return len(self.prefix_ids) > 0

    def ids_of(self, request: int) -> Integers:
        """The prefix ids of one request."""
        return self.prefix_ids[self.prefix_start[request] : self.prefix_start[request + 1]]


def make_trace(
    name: str,
    arrival_ns: npt.ArrayLike,
    prompt: npt.ArrayLike,
    output: npt.ArrayLike,
    priority: npt.ArrayLike | None = None,
    ids: list[list[int]] | None = None,
    prefix_block: int = 512,
    adapter: npt.ArrayLike | None = None,
    images: Sequence[tuple[int, ...]] = (),
) -> Trace:
    """A trace from plain lists in order of arrival; for readers and tests."""
    arrivals = np.asarray(arrival_ns, dtype=np.int64)
    start = np.zeros(len(arrivals) + 1, dtype=np.int64)
    flat: list[int] = []
    if ids is not None:
        np.cumsum([len(row) for row in ids], out=start[1:])
        flat = [one for row in ids for one in row]
    return Trace(
        name,
        arrivals,
        np.asarray(prompt, dtype=np.int64),
        np.maximum(1, np.asarray(output, dtype=np.int64)),
        np.zeros_like(arrivals) if priority is None else np.asarray(priority, dtype=np.int64),
        np.zeros_like(arrivals) if adapter is None else np.asarray(adapter, dtype=np.int64),
        tuples(images or [()] * len(arrivals)),
        np.asarray(flat, dtype=np.int64),
        start,
        prefix_block,
    )


# Arrivals for a trace without stamps: a seeded process.

PROCESSES = ("poisson", "constant", "bursty", "at-once")
LATEST_NS = 4_000_000_000_000_000_000
"""No arrival lies further from 0 than this (126 years), so that two of them can be subtracted without a thought."""


class Arrivals(NamedTuple):
    """A process: poisson, constant, bursty or at-once."""

    process: str = "poisson"
    rate_per_s: float = 0.0  # On average; unused by at-once
    seed: int = 0
    burstiness: float = 0.25  # Of `bursty`: the shape of the gamma distribution of the gaps. 1 is poisson, smaller is burstier.


def arrival_times(arrivals: Arrivals, count: int) -> Integers:
    """`count` sorted arrivals in ns, the first at 0; one seed gives the same times, and fewer of them are the first of more."""
    check_arrivals(arrivals)
    if arrivals.process == "at-once" or count == 0:
        return np.zeros(count, dtype=np.int64)
    dice = np.random.Generator(np.random.PCG64(np.random.SeedSequence(arrivals.seed)))
    if arrivals.process == "constant":
        gaps = np.ones(count)
    elif arrivals.process == "poisson":
        gaps = dice.standard_exponential(count)
    else:
        gaps = dice.standard_gamma(arrivals.burstiness, count) / arrivals.burstiness
    gaps[0] = 0.0
    with np.errstate(over="ignore"):  # an infinite result is refused below
        times = np.cumsum(gaps) * (1e9 / arrivals.rate_per_s)
    if not times[-1] <= LATEST_NS:
        raise BadInput(f"at {arrivals.rate_per_s:g} requests a second the last of {count} would arrive after a hundred years")
    return np.rint(times).astype(np.int64)


def check_arrivals(arrivals: Arrivals) -> None:
    """Raises BadInput in one line where the process is wrong."""
    if arrivals.process not in PROCESSES:
        raise BadInput(f"--arrivals takes {', '.join(PROCESSES)}, not {arrivals.process[:40]!r}")
    if not 0 <= arrivals.seed < 1 << 63:
        raise BadInput("--seed must be 0 or more, and below 2^63")
    if arrivals.process != "at-once" and not (math.isfinite(arrivals.rate_per_s) and arrivals.rate_per_s > 0):
        raise BadInput(f"--arrivals {arrivals.process} needs --rate: requests a second, more than 0")
    if arrivals.process == "bursty" and not 0.001 <= arrivals.burstiness <= 1000:
        raise BadInput("--burstiness must lie between 0.001 and 1000; 1 is poisson, smaller is burstier")


# A run measured on a real engine: its traffic, and when each request was scheduled, answered and done.

ABSENT = -1  # A stamp that the run does not have


class RunSeries(NamedTuple):
    """The engine's own figures, a row a second."""

    at_s: Floats
    prompt_tokens_per_s: Floats
    output_tokens_per_s: Floats
    running: Integers
    waiting: Integers
    kv_used_ratio: Floats  # From 0 to 1


class MeasuredRun(NamedTuple):
    """A measured run. Stamps have the trace's order and its zero, in ns; ABSENT where the run has none."""

    trace: Trace
    scheduled_ns: Integers
    first_token_ns: Integers
    finish_ns: Integers
    cached_tokens: Integers  # Prompt tokens found in the prefix cache; ABSENT where the run does not say
    series: RunSeries | None = None


# Picks requests out of a trace, with their prefix ids.

IDS_MAX = 300_000_000  # Prefix ids that are held at once: 2.4 GB


def pick(trace: Trace, rows: Integers) -> Trace:
    """The requests `rows`, in that order, with arrivals as they are."""
    counts = np.diff(trace.prefix_start)[rows]
    return trace._replace(
        arrival_ns=trace.arrival_ns[rows],
        prompt=trace.prompt[rows],
        output=trace.output[rows],
        priority=trace.priority[rows],
        adapter=trace.adapter[rows],
        images=trace.images[rows],
        prefix_ids=trace.prefix_ids[places(trace.prefix_start[:-1][rows], counts)],
        prefix_start=starts(counts),
    )


def tuples(rows: Sequence[tuple[int, ...]]) -> Tuples:
    """An array of tuples, whatever their lengths."""
    found = np.empty(len(rows), dtype=object)
    for at, row in enumerate(rows):
        found[at] = row
    return found


def starts(counts: Integers) -> Integers:
    """Returns the index at which each of consecutive runs begins, and the end of the last one."""
    begin = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=begin[1:])
    return begin


def places(first: Integers, counts: Integers) -> Integers:
    """first[0], first[0]+1, ... (counts[0] of them), first[1], ...: the places of several runs, one after the other."""
    total = int(counts.sum())
    if total > IDS_MAX:
        raise TooLarge(f"{total} prefix ids in all: more than {IDS_MAX} is too much to hold")
    begin = np.cumsum(counts) - counts
    found: Integers = np.arange(total, dtype=np.int64) + np.repeat(first - begin, counts)
    return found


def blocks_of(tokens: Integers, block: int) -> Integers:
    """The number of prefix ids for these tokens, rounded up: a block once begun needs its id."""
    needed: Integers = -(-tokens // block)
    return needed
