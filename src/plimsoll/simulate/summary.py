"""Summary figures of a replay, each None where the run does not give it. Times are seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from plimsoll.errors import BadInput
from plimsoll.simulate.replay import NEVER, STEP_COLUMNS, AtBlockSize, OnProgress, Replay, Series, replay
from plimsoll.simulate.settings import EngineLimits, StepTime, groups_of
from plimsoll.simulate.trace import Floats, Integers, Trace

ROUGH_GUIDE = "rough guide: not fitted"  # Shown beside every time of a run whose step times were not measured
POOR_GUIDE = "rough guide: poor fit"  # Shown there where the fit is far from its run
POOR_FIT = (
    "the fit does not match its run: are the model, the cache and the limits those that the run had, and is the traffic its "
    "own?"
)
NEARLY_FULL_PERCENT = 95
LATE_SHARE, LATE_SERVICES = 0.1, 2.0
"""Behind is who works on, after the last request came, for more than this share of the time and so many longest requests."""
_NS = 1e9


class Latency(NamedTuple):
    """Seconds over the finished requests; all None where none finished."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class Usage(NamedTuple):
    """Share of the usable blocks (the null block is not one), weighted by busy time."""

    mean: float | None
    p50: float | None
    p99: float | None
    peak: float | None
    nearly_full: float | None  # Share of the busy time in which NEARLY_FULL_PERCENT of the blocks or more were in use


class BlockWaste(NamedTuple):
    """Slots of held blocks that hold no token, weighted by busy time."""

    mean_slots: float | None
    mean_percent: float | None  # Of the slots in used blocks; None where groups of different block sizes share the pool


class Prefix(NamedTuple):
    """Tokens looked up and found in the prefix cache, first admissions apart from resumptions."""

    query_tokens: int
    hit_tokens: int
    resumed_query_tokens: int
    resumed_hit_tokens: int
    hit_rate: float  # Of first admissions; 0 where nothing was looked up


class Throughput(NamedTuple):
    """Over the whole of the simulated time."""

    output_tokens_per_second: float | None
    requests_per_second: float | None


class Summary(NamedTuple):
    """One run in numbers."""

    trace: str
    requests: int
    finished: int
    rejected: int
    refused: int
    bad_rows: int
    steps: int
    sim_seconds: float
    busy_seconds: float
    wall_seconds: float
    scheduled_tokens: int
    output_tokens: int
    preemptions: int
    preempted_requests: int
    recomputed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    host_hit_tokens: int
    peak_blocks: int
    peak_running: int
    peak_waiting: int
    kv_usage: Usage
    waste: BlockWaste
    prefix: Prefix
    throughput: Throughput
    ttft: Latency
    tpot: Latency
    e2e: Latency
    queue: Latency
    settings: EngineLimits
    step_time: StepTime
    step_time_label: str  # How far the times can be trusted, in the words of `trust`
    arrival_seconds: float = 0.0  # When the last request came
    longest_service_seconds: float = 0.0  # The longest time from a request's admission to its last token

    @property
    def servers_to_keep_up(self) -> int | None:
        """The number of such servers that finish requests as fast as they come; None where one does, or all came at once."""
        behind = self.sim_seconds - self.arrival_seconds
        is_behind = behind > max(LATE_SHARE * self.arrival_seconds, LATE_SERVICES * self.longest_service_seconds)
        if not is_behind or self.arrival_seconds <= 0 or not self.finished:
            return None
        return math.ceil(self.sim_seconds / self.arrival_seconds)

    @property
    def is_fitted(self) -> bool:
        """True if the step times come near to a measured run, False if they are assumed or fit poorly."""
        return not self.step_time_label.startswith((ROUGH_GUIDE, POOR_GUIDE))

    @property
    def recomputed_share(self) -> float:
        """The share of all computed tokens that had been computed before; 0 where nothing was computed."""
        return self.recomputed_tokens / self.scheduled_tokens if self.scheduled_tokens else 0.0


def trust(fitted: str | None, *, is_poor: bool) -> str:
    """A label on trust in the times: ROUGH_GUIDE, or the fit's sentence on its error, after POOR_GUIDE where that is large."""
    if fitted is None:
        return ROUGH_GUIDE
    return f"{POOR_GUIDE}; {fitted}" if is_poor else fitted


class Latencies(NamedTuple):
    """Seconds of every finished request, sorted; tpot leaves out those of a single token."""

    ttft: Floats
    tpot: Floats
    e2e: Floats
    queue: Floats


def summarise(replay: Replay, *, fitted: str | None = None, is_poor: bool = False) -> Summary:
    """The numbers of one run; `fitted` is the fit's sentence on its error, `is_poor` says that the error is too large."""
    totals = replay.totals
    seconds = totals.end_ns / _NS
    output = int(replay.produced.sum())
    done = replay.finish_ns != NEVER
    latencies: dict[str, Any] = {
        name: Latency(float(times.mean()) if len(times) else None, *(percentile(times, share) for share in (50, 90, 99)))
        for name, times in latencies_of(replay)._asdict().items()
    }
    return Summary(
        **{name: value for name, value in totals._asdict().items() if name in Summary._fields},
        trace=replay.trace.name,
        bad_rows=replay.trace.bad_rows,
        sim_seconds=seconds,
        busy_seconds=totals.busy_ns / _NS,
        wall_seconds=replay.wall_seconds,
        output_tokens=output,
        kv_usage=_usage(replay),
        waste=_waste(replay),
        prefix=Prefix(
            totals.query_tokens,
            totals.hit_tokens,
            totals.resumed_query_tokens,
            totals.resumed_hit_tokens,
            totals.hit_tokens / totals.query_tokens if totals.query_tokens else 0.0,
        ),
        throughput=Throughput(output / seconds, totals.finished / seconds) if seconds > 0 else Throughput(None, None),
        **latencies,
        settings=replay.settings,
        step_time=replay.step_time,
        step_time_label=trust(fitted, is_poor=is_poor),
        arrival_seconds=float(replay.arrival_ns.max(initial=0)) / _NS,
        longest_service_seconds=float((replay.finish_ns - replay.first_sched_ns)[done].max(initial=0)) / _NS,
    )


def latencies_of(replay: Replay) -> Latencies:
    """The times of each finished request, by every measure."""
    done = np.flatnonzero(replay.finish_ns != NEVER)
    arrival, first, last = replay.arrival_ns[done], replay.first_token_ns[done], replay.finish_ns[done]
    further = replay.produced[done] - 1
    several = further > 0
    took = (first - arrival, (last - first)[several] / further[several], last - arrival, replay.first_sched_ns[done] - arrival)
    return Latencies(*(np.sort(nanoseconds / _NS) for nanoseconds in took))


def percentile(ordered: Floats, percent: int) -> float | None:
    """The value at int(percent / 100 * n) of a sorted array, never interpolated; None if it is empty."""
    count = len(ordered)
    return float(ordered[min(count - 1, int(percent / 100 * count))]) if count else None


def _usage(replay: Replay) -> Usage:
    totals, usable = replay.totals, replay.settings.num_blocks - 1
    if totals.busy_ns <= 0 or usable <= 0:
        return Usage(None, None, None, None, None)
    upto = np.cumsum(replay.usage_ns)
    nearly_full = -(-usable * NEARLY_FULL_PERCENT // 100)  # up: 94.9 % is not 95 %

    def at(percent: int) -> float:
        # Each ns of busy time is one sample; in whole numbers, because a float cannot count that many.
        return int(np.searchsorted(upto, totals.busy_ns * percent // 100, side="right")) / usable

    return Usage(
        totals.used_block_ns / totals.busy_ns / usable,
        at(50),
        at(99),
        totals.peak_blocks / usable,
        int(replay.usage_ns[nearly_full:].sum()) / totals.busy_ns,
    )


def _waste(replay: Replay) -> BlockWaste:
    totals = replay.totals
    if totals.busy_ns <= 0:
        return BlockWaste(None, None)
    sizes = {group.block_size for group in groups_of(replay.settings)}
    used_slot_ns = totals.used_block_ns * min(sizes)
    percent = 100 * totals.waste_slot_ns / used_slot_ns if len(sizes) == 1 and used_slot_ns else None
    return BlockWaste(totals.waste_slot_ns / totals.busy_ns, percent)


# A run over time in a fixed number of bins, whatever its length: when the bins are full, each two become one.

FIRST_BIN_NS = 1_000_000
_AT = {name: place for place, name in enumerate(STEP_COLUMNS)}
_MEANS = ("running", "waiting", "used_blocks", "waste_slots")
_COUNTS = ("sched_tokens", "preempted")
_GROWING = ("hit_tokens_cum", "query_tokens_cum")


class SeriesBuilder:
    """Takes step rows as the run goes and keeps no more than `bins` bins of them."""

    def __init__(self, bins: int = 1000) -> None:
        """`bins` is rounded up to an even number, so that bins pair off."""
        self._bins: Final = max(2, bins + bins % 2)
        self._width = FIRST_BIN_NS
        self._end = 0
        self._any = False
        self._last = dict.fromkeys(_GROWING, 0)
        self._sums = {name: np.zeros(self._bins) for name in (*_MEANS, *_COUNTS, *_GROWING)}

    def add(self, rows: Integers) -> None:
        """Adds rows of STEP_COLUMNS that follow those already given."""
        if len(rows) == 0:
            return
        self._any = True
        start, end = rows[:, _AT["t_start_ns"]], rows[:, _AT["t_end_ns"]]
        self._end = max(self._end, int(end.max()))
        while self._end > self._bins * self._width:
            half = self._bins // 2
            for sums in self._sums.values():
                sums[:half], sums[half:] = sums.reshape(half, 2).sum(axis=1), 0.0
            self._width *= 2
        first = np.minimum(start, max(0, self._end - 1)) // self._width  # a step without length may lie at the very end
        self._add_means(rows, start, end, first)
        for name in _COUNTS:
            self._sums[name] += np.bincount(first, rows[:, _AT[name]], self._bins)
        for name in _GROWING:
            so_far = rows[:, _AT[name]]
            self._sums[name] += np.bincount(first, np.diff(so_far, prepend=self._last[name]), self._bins)
            self._last[name] = int(so_far[-1])

    def finish(self) -> Series:
        """The run so far; the last bin's means are over the part of it that the run reached."""
        count = max(-(-self._end // self._width), int(self._any))
        lengths = np.full(count, float(self._width))
        if count:
            lengths[-1] = max(1, self._end - (count - 1) * self._width)
        means = [self._sums[name][:count] / lengths for name in _MEANS]
        return Series(self._width, *means, *(self._sums[name][:count].copy() for name in (*_COUNTS, *_GROWING)))

    def _add_means(self, rows: Integers, start: Integers, end: Integers, first: Integers) -> None:
        """A step counts in every bin it touches, for as long as it lies in it."""
        last = np.maximum(first, (end - 1) // self._width)
        crossed = last - first
        bins, lengths = first, np.minimum(end, (first + 1) * self._width) - start
        sources: npt.NDArray[np.intp] | slice = slice(None)
        if crossed.any():
            extra = np.repeat(np.arange(len(rows)), crossed)
            nth = np.arange(len(extra)) - np.repeat(np.cumsum(crossed) - crossed, crossed)
            further = first[extra] + 1 + nth
            bins = np.concatenate((first, further))
            rest = np.minimum(end[extra], (further + 1) * self._width) - further * self._width
            lengths = np.concatenate((lengths, rest))
            sources = np.concatenate((np.arange(len(rows)), extra))
        for name in _MEANS:
            values = rows[:, _AT[name]][sources]
            self._sums[name] += np.bincount(bins, values * lengths.astype(np.float64), self._bins)


# The same traffic on the same memory, cut into blocks of other sizes.


def same_memory(settings: EngineLimits, block_size: int) -> EngineLimits | None:
    """Returns settings for the same cache in blocks of another size, plus the null block; None where not one block fits."""
    tokens = (settings.num_blocks - 1) * settings.block_size
    blocks = tokens // block_size
    return settings._replace(block_size=block_size, num_blocks=blocks + 1) if blocks else None


def at_block_sizes(
    trace: Trace,
    settings: EngineLimits,
    step_time: StepTime,
    sizes: Sequence[int],
    *,
    speedup: float = 1.0,
    on_progress: OnProgress | None = None,
) -> list[AtBlockSize]:
    """Runs the traffic at each size that the memory holds and the traffic can run in."""
    rows = []
    for number, size in enumerate(sizes):
        if on_progress is not None:
            on_progress(number, len(sizes))
        other = same_memory(settings, size)
        if other is None:
            continue
        try:
            found = replay(trace, other, step_time, speedup)
        except BadInput:  # traffic that runs at one size may be stuck at another: that size is left out
            continue
        summary, totals = summarise(found), found.totals
        entries = totals.table_block_ns / totals.busy_ns if totals.busy_ns else 0.0
        rows.append(AtBlockSize(size, summary.waste.mean_percent, summary.prefix.hit_rate, totals.preemptions, entries))
    return rows
