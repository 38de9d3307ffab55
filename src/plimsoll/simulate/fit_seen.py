"""What of a measured run a fit looks at, and how far a replay is from it.

Single requests are no good yardstick: whether one just catches a step or just misses it is chance. Means over a few neighbours
are, and so is how many tokens came out in a few seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plimsoll.domain.measured_run import ABSENT, MeasuredRun, RunSeries
from plimsoll.domain.trace import Flags, Floats, Integers, Trace
from plimsoll.domain.trace_rows import pick
from plimsoll.simulate.result import STEP_COLUMNS, Replay

NEIGHBOURS = 16
"""Requests in a group."""
ROWS = 2
"""Rows of the series in a group: seconds."""
MOST_GROUPS = 200
ROUGHLY = 0.1
"""Deviations beyond this count by their size, not by its square: one odd stretch must not rule."""
SHIFTS_S = np.arange(-1.0, 1.005, 0.01)
_END, _REQUESTS, _TOKENS = (STEP_COLUMNS.index(name) for name in ("t_end_ns", "sched_reqs", "sched_tokens"))


class Groups(NamedTuple):
    """Requests in groups of neighbours: `of[i]` is the group of `members[i]`."""

    members: Integers
    of: Integers
    mean_ns: Floats
    """As measured, of each group."""


class Seen(NamedTuple):
    """What is compared; empty groups where the run does not say."""

    first: Groups
    """Time to the first token."""
    between: Groups
    """Time for each further token."""
    whole: Groups
    """Time to the last token, of requests that have no stamp of the first."""
    at_ns: Integers
    """Ends of the series' groups of rows."""
    generated: Floats
    """Tokens that came out in each."""


def before(measured: MeasuredRun, until_ns: int) -> MeasuredRun:
    """The run as it was known at `until_ns`: later stamps are absent, later rows of the series are gone."""
    series = measured.series
    if series is not None:
        keep = series.at_s * 1e9 <= until_ns
        series = RunSeries(
            at_s=series.at_s[keep],
            prompt_tokens_per_s=series.prompt_tokens_per_s[keep],
            output_tokens_per_s=series.output_tokens_per_s[keep],
            running=series.running[keep],
            waiting=series.waiting[keep],
            kv_used_ratio=series.kv_used_ratio[keep],
        )
    scheduled, first, finish = (
        np.where(stamps <= until_ns, stamps, ABSENT)
        for stamps in (measured.scheduled_ns, measured.first_token_ns, measured.finish_ns)
    )
    cached = np.where(scheduled != ABSENT, measured.cached_tokens, ABSENT)
    return measured._replace(
        scheduled_ns=scheduled, first_token_ns=first, finish_ns=finish, cached_tokens=cached, series=series
    )


def only_first(measured: MeasuredRun, requests: int) -> MeasuredRun:
    """The run with the stamps of its first requests alone; what the engine said of itself, it said of all, so it goes too."""
    late = np.arange(measured.trace.size) >= requests
    scheduled, first, finish, cached = (
        np.where(late, ABSENT, column)
        for column in (measured.scheduled_ns, measured.first_token_ns, measured.finish_ns, measured.cached_tokens)
    )
    return measured._replace(scheduled_ns=scheduled, first_token_ns=first, finish_ns=finish, cached_tokens=cached, series=None)


def needed(measured: MeasuredRun, most: int) -> tuple[Trace, Integers]:
    """The part of the traffic that came before the last stamp, at most so many requests; and which they are."""
    last = max(int(measured.first_token_ns.max(initial=ABSENT)), int(measured.finish_ns.max(initial=ABSENT)))
    if measured.series is not None and len(measured.series.at_s):
        last = max(last, int(measured.series.at_s[-1] * 1e9))
    rows = np.flatnonzero(measured.trace.arrival_ns <= last)[:most]
    return pick(measured.trace, rows), rows


def picked(measured: MeasuredRun, trace: Trace, rows: Integers) -> MeasuredRun:
    """The run of `trace`, which is its requests `rows`."""
    return MeasuredRun(
        trace,
        scheduled_ns=measured.scheduled_ns[rows],
        first_token_ns=measured.first_token_ns[rows],
        finish_ns=measured.finish_ns[rows],
        cached_tokens=measured.cached_tokens[rows],
        series=measured.series,
    )


def look_at(measured: MeasuredRun, usable: Flags) -> Seen:
    """What there is to compare, of the requests that are `usable`."""
    arrival, output = measured.trace.arrival_ns, measured.trace.output
    has_first = usable & (measured.first_token_ns != ABSENT)
    has_finish = usable & (measured.finish_ns != ABSENT)
    several = has_first & has_finish & (output > 1)
    at_ns, generated = _rates(measured)
    return Seen(
        _groups(has_first, measured.first_token_ns, (measured.first_token_ns - arrival).astype(np.float64)),
        _groups(several, measured.finish_ns, (measured.finish_ns - measured.first_token_ns) / np.maximum(1, output - 1)),
        _groups(has_finish & ~has_first, measured.finish_ns, (measured.finish_ns - arrival).astype(np.float64)),
        at_ns,
        generated,
    )


def deviations(seen: Seen, replay: Replay, steps: Integers, *, front_ns: float = 0.0) -> list[Floats]:
    """How far the replay is off, as logarithms of ratios; a list for each kind of look that the run allows.

    `front_ns` is what lies between the stamp of an arrival and the arrival in the replay.
    """
    further = np.maximum(1, replay.trace.output - 1)
    parts = [
        _ratio(seen.first, (replay.first_token_ns - replay.arrival_ns).astype(np.float64) + front_ns),
        _ratio(seen.between, (replay.finish_ns - replay.first_token_ns) / further),
        _ratio(seen.whole, (replay.finish_ns - replay.arrival_ns).astype(np.float64) + front_ns),
        _rate_ratio(seen, replay, steps),
    ]
    return [_tame(part) for part in parts if len(part)]


def _groups(which: Flags, order_by: Integers, took_ns: Floats) -> Groups:
    members = np.flatnonzero(which)
    members = members[np.argsort(order_by[members], kind="stable")]
    size = max(NEIGHBOURS, -(-len(members) // MOST_GROUPS))
    of = np.minimum(np.arange(len(members)) // size, max(0, len(members) // size - 1))
    return Groups(members, of, _means(of, took_ns[members]))


def _means(of: Integers, values: Floats) -> Floats:
    return np.bincount(of, values) / np.bincount(of) if len(of) else np.zeros(0)


def _ratio(groups: Groups, took_ns: Floats) -> Floats:
    return np.log(np.maximum(_means(groups.of, took_ns[groups.members]), 1) / np.maximum(groups.mean_ns, 1))


def _tame(values: Floats) -> Floats:
    squared = 2 * ROUGHLY**2 * (np.sqrt(1 + (values / ROUGHLY) ** 2) - 1)
    return np.sign(values) * np.sqrt(squared)


def _rates(measured: MeasuredRun) -> tuple[Integers, Floats]:
    series = measured.series
    if series is None or len(series.at_s) < 2 * ROWS:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    groups = min(len(series.at_s) // ROWS, MOST_GROUPS)
    ends = np.linspace(0, len(series.at_s), groups + 1).astype(np.int64)[1:] - 1
    seconds = np.diff(series.at_s, prepend=0.0)
    so_far = np.cumsum(series.output_tokens_per_s * seconds)[ends]
    at_s = series.at_s[ends] + series_shift_s(measured)
    return np.rint(at_s * 1e9).astype(np.int64), np.diff(so_far, prepend=0.0)


def series_shift_s(measured: MeasuredRun) -> float:
    """By how much the series' clock is off: its count of prompt tokens must agree with the stamps of first tokens."""
    series, stamped = measured.series, np.flatnonzero(measured.first_token_ns != ABSENT)
    if series is None or not len(stamped) or not series.prompt_tokens_per_s.any():
        return 0.0
    stamped = stamped[np.argsort(measured.first_token_ns[stamped], kind="stable")]
    at_s = measured.first_token_ns[stamped] / 1e9
    prompts = np.concatenate(([0], np.cumsum(measured.trace.prompt[stamped])))
    counted = np.cumsum(series.prompt_tokens_per_s * np.diff(series.at_s, prepend=0.0))
    inside = series.at_s <= at_s[-1]
    off = [
        np.abs(prompts[np.searchsorted(at_s, series.at_s[inside] + shift, side="right")] - counted[inside]).sum()
        for shift in SHIFTS_S
    ]
    return float(np.mean(SHIFTS_S[np.asarray(off) == np.min(off)]))


def _rate_ratio(seen: Seen, replay: Replay, steps: Integers) -> Floats:
    if not len(seen.at_ns):
        return np.zeros(0)
    # A full step may end in the middle of a prompt, which then gives no token yet.
    tokens = steps[:, _REQUESTS] - (steps[:, _TOKENS] >= replay.settings.max_num_batched_tokens)
    so_far = np.concatenate(([0], np.cumsum(tokens)))[np.searchsorted(steps[:, _END], seen.at_ns, side="right")]
    least = 0.02 * seen.generated.max() + 1
    return np.log((np.diff(so_far, prepend=0) + least) / (seen.generated + least))
