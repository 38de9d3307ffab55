"""Finds the step-time constants that make a replay run like a measured run did.

The simulator is inside the search: it tries constants, replays the traffic, and compares the outcome with the stamps.
Scheduling, queueing and preemption therefore need no model of their own. Nothing is random: the same run gives the same
constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.simulate.replay import NEVER, STEP_COLUMNS, Replay, replay
from plimsoll.simulate.settings import EngineLimits, Experts, StepTime, graph_sizes, padded, step_table
from plimsoll.simulate.trace import ABSENT, Flags, Floats, Integers, MeasuredRun, Trace, pick

# Least squares without derivatives, inside bounds: damped Gauss-Newton steps from a few starts, the best one wins.

NUDGE = 0.06  # For slopes, as a share of a number's starting value: large enough to see through the steps of a scheduler
MOST_STEPS = 25
MOST_TRIES = 6  # For one step, each shorter than the one before
FURTHEST = 1.0
ENOUGH = 1e-3  # A step that gains less, as a share of the rest, is the last
TYPICAL = 0.03  # A kind of deviations that remains as large as this has weight 1
MOST_WEIGHT = 3.0
DESCENTS = 2

Off = Callable[[Floats], list[Floats]]
Bounds = tuple[Floats, Floats]  # the lowest and the highest that each number may be


def search(off: Off, starts: Sequence[Floats], bounds: Bounds, trust: Floats) -> Floats:
    """The numbers that make the deviations small; `trust` pulls each towards the first start's.

    The search begins at the most promising starts. `off` gives a list of deviations for each kind. At first all kinds weigh the
    same, then each by how well it can be matched at all.
    """

    def weighted(weights: Sequence[float]) -> Callable[[Floats], Floats]:
        def parts_at(values: Floats) -> Floats:
            kinds = [weight * kind / np.sqrt(len(kind)) for weight, kind in zip(weights, off(values), strict=True)]
            return np.concatenate((*kinds, trust * (values - starts[0])))

        return parts_at

    alike = weighted([1.0] * len(off(starts[0])))
    left = [_squared(alike(values)) for values in starts]
    ended = [_descend(alike, starts[place], bounds) for place in np.argsort(left, kind="stable")[:DESCENTS]]
    values, _ = min(ended, key=lambda one: one[1])
    remaining = [float(np.sqrt(np.mean(kind**2))) for kind in off(values)]
    weights = [float(np.clip(TYPICAL / one, 1 / MOST_WEIGHT, MOST_WEIGHT)) if one else MOST_WEIGHT for one in remaining]
    best, _ = _descend(weighted(weights), values, bounds)
    return best


def _descend(parts_at: Callable[[Floats], Floats], values: Floats, bounds: Bounds) -> tuple[Floats, float]:
    parts = parts_at(values)
    left, damping = _squared(parts), 1e-2
    for _ in range(MOST_STEPS):
        columns = []
        for nudge in NUDGE * np.eye(len(values)):
            above, below = np.clip(values + nudge, *bounds), np.clip(values - nudge, *bounds)
            columns.append((parts_at(above) - parts_at(below)) / (above - below).sum())
        slopes = np.column_stack(columns)
        normal, pull = slopes.T @ slopes, slopes.T @ parts
        for _ in range(MOST_TRIES):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -pull)
            tried = np.clip(values + np.clip(move, -FURTHEST, FURTHEST), *bounds)
            tried_parts = parts_at(tried)
            if _squared(tried_parts) < left:
                break
            damping *= 4
        else:
            break
        gain = 1 - _squared(tried_parts) / left
        values, parts, left, damping = tried, tried_parts, _squared(tried_parts), max(damping / 8, 1e-5)
        if gain < ENOUGH:
            break
    return values, left


def _squared(parts: Floats) -> float:
    return float(parts @ parts)


# How far a replay is from a measured run, over the requests whose outcome was stamped.

POOR, POOR_FIRST = 0.2, 0.5
"""A first token may be further off: with little to do it comes within a few steps, and whether it catches one is chance."""


class FitError(NamedTuple):
    """Relative errors, 0.05 is 5 %; None where no request had both stamps."""

    requests: int  # With a stamp that counted
    ttft: float | None  # Of a single request: the mean of absolute errors over the measured mean
    tpot: float | None
    e2e: float | None
    mean_ttft: float | None  # Of the mean, with its sign: above 0 the replay is slower
    mean_tpot: float | None
    mean_e2e: float | None

    @property
    def is_poor(self) -> bool:
        """True if the replay is so far from the run that its server or its traffic was another one."""
        return (self.ttft or 0.0) > POOR_FIRST or max(self.tpot or 0.0, self.e2e or 0.0) > POOR


def error_of(measured: MeasuredRun, replay: Replay, *, from_ns: int = ABSENT) -> FitError:
    """The error over the stamps later than `from_ns`."""
    arrival = measured.trace.arrival_ns
    first = (measured.first_token_ns > from_ns) & (replay.first_token_ns != NEVER)
    finish = (measured.finish_ns > from_ns) & (replay.finish_ns != NEVER)
    several = finish & (measured.first_token_ns != ABSENT) & (replay.first_token_ns != NEVER) & (measured.trace.output > 1)
    further = np.maximum(1, measured.trace.output - 1)
    ttft = _compare(first, measured.first_token_ns - arrival, replay.first_token_ns - replay.arrival_ns)
    tpot = _compare(
        several, (measured.finish_ns - measured.first_token_ns) / further, (replay.finish_ns - replay.first_token_ns) / further
    )
    e2e = _compare(finish, measured.finish_ns - arrival, replay.finish_ns - replay.arrival_ns)
    return FitError(int((first | finish).sum()), ttft[0], tpot[0], e2e[0], ttft[1], tpot[1], e2e[1])


def _compare(which: Flags, measured: Floats | Integers, replayed: Floats | Integers) -> tuple[float | None, float | None]:
    if not which.any():
        return None, None
    mean = float(measured[which].mean())
    if mean <= 0:
        return None, None
    single = float(np.abs(replayed[which] - measured[which]).mean()) / mean
    return single, float(replayed[which].mean()) / mean - 1


# The parts of a measured run that a fit looks at, and how far a replay is from them.
#
# Single requests are no good yardstick: whether one just catches a step or just misses it is chance. Means over a few
# neighbours are, and so is how many tokens came out in a few seconds.

NEIGHBOURS = 16  # Requests in a group
ROWS = 2  # Rows of the series in a group: seconds
MOST_GROUPS = 200
ROUGHLY = 0.1  # Deviations beyond this count by their size, not by its square: one odd stretch must not decide
SHIFTS_S = np.arange(-1.0, 1.005, 0.01)
_END, _REQUESTS, _TOKENS = (STEP_COLUMNS.index(name) for name in ("t_end_ns", "sched_reqs", "sched_tokens"))


class Groups(NamedTuple):
    """Requests in groups of neighbours: `of[i]` is the group of `members[i]`."""

    members: Integers
    of: Integers
    mean_ns: Floats  # As measured, of each group


class Comparison(NamedTuple):
    """The groups to compare; empty where the run has no figures for them."""

    first: Groups  # Time to the first token
    between: Groups  # Time for each further token
    whole: Groups  # Time to the last token, of requests that have no stamp of the first
    at_ns: Integers  # Ends of the series' groups of rows
    generated: Floats  # Tokens that came out in each


def needed(measured: MeasuredRun, most: int) -> tuple[Trace, Integers]:
    """The part of the traffic that came before the last stamp, at most `most` requests, and their indices."""
    last = max(int(measured.first_token_ns.max(initial=ABSENT)), int(measured.finish_ns.max(initial=ABSENT)))
    if measured.series is not None and len(measured.series.at_s):
        last = max(last, int(measured.series.at_s[-1] * 1e9))
    rows = np.flatnonzero(measured.trace.arrival_ns <= last)[:most]
    return pick(measured.trace, rows), rows


def look_at(measured: MeasuredRun, usable: Flags) -> Comparison:
    """Returns the groups to compare, from the requests that are `usable`."""
    arrival, output = measured.trace.arrival_ns, measured.trace.output
    has_first = usable & (measured.first_token_ns != ABSENT)
    has_finish = usable & (measured.finish_ns != ABSENT)
    several = has_first & has_finish & (output > 1)
    series, at_ns, generated = measured.series, np.zeros(0, dtype=np.int64), np.zeros(0)
    if series is not None and len(series.at_s) >= 2 * ROWS:
        groups = min(len(series.at_s) // ROWS, MOST_GROUPS)
        ends = np.linspace(0, len(series.at_s), groups + 1).astype(np.int64)[1:] - 1
        so_far = np.cumsum(series.output_tokens_per_s * np.diff(series.at_s, prepend=0.0))[ends]
        at_ns = np.rint((series.at_s[ends] + series_shift_s(measured)) * 1e9).astype(np.int64)
        generated = np.diff(so_far, prepend=0.0)
    return Comparison(
        _groups(has_first, measured.first_token_ns, (measured.first_token_ns - arrival).astype(np.float64)),
        _groups(several, measured.finish_ns, (measured.finish_ns - measured.first_token_ns) / np.maximum(1, output - 1)),
        _groups(has_finish & ~has_first, measured.finish_ns, (measured.finish_ns - arrival).astype(np.float64)),
        at_ns,
        generated,
    )


def deviations(compared: Comparison, replay: Replay, steps: Integers, *, front_ns: float = 0.0) -> list[Floats]:
    """The replay's deviations, as logarithms of ratios; a list for each kind that the run allows.

    `front_ns` is the time between the stamp of an arrival and the arrival in the replay.
    """
    further = np.maximum(1, replay.trace.output - 1)
    rates = np.zeros(0)
    if len(compared.at_ns):
        # A full step may end in the middle of a prompt, which then gives no token yet.
        tokens = steps[:, _REQUESTS] - (steps[:, _TOKENS] >= replay.settings.max_num_batched_tokens)
        so_far = np.concatenate(([0], np.cumsum(tokens)))[np.searchsorted(steps[:, _END], compared.at_ns, side="right")]
        least = 0.02 * compared.generated.max() + 1
        rates = np.log((np.diff(so_far, prepend=0) + least) / (compared.generated + least))
    parts = [
        _ratio(compared.first, (replay.first_token_ns - replay.arrival_ns).astype(np.float64) + front_ns),
        _ratio(compared.between, (replay.finish_ns - replay.first_token_ns) / further),
        _ratio(compared.whole, (replay.finish_ns - replay.arrival_ns).astype(np.float64) + front_ns),
        rates,
    ]
    tame = [2 * ROUGHLY**2 * (np.sqrt(1 + (part / ROUGHLY) ** 2) - 1) for part in parts]
    return [np.sign(part) * np.sqrt(squared) for part, squared in zip(parts, tame, strict=True) if len(part)]


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


def series_shift_s(measured: MeasuredRun) -> float:
    """Returns the offset of the series' clock: its count of prompt tokens must agree with the stamps of first tokens."""
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


# The numbers a fit looks for, and how they become a step time.
#
# values   0 base  1 token  2 request  3 context  4 step up | 5 experts' share        | 6 front
# each as a multiple of its start                     of the base, 0 to 0.95    in steps, -1 to 1
#
# The front is not part of a step: engines stamp an arrival when they look for one, between two steps, or after work of
# their own. In a replay a request comes at any moment.

GUESS = StepTime(12_000_000, 40_000, 10_000, 60_000)  # The start of a search without a given one
STEP_UP = 0.3  # The extra cost of a step beyond the largest graph, as a share of the base, at the start of a search
EXPERTS_SHARE = 0.5  # The share of the base that reading all experts takes, at the start of a search
CONTEXT, UP, SHARE, FRONT = 3, 4, 5, 6
BOUNDS = (np.array([0.02, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]), np.array([50.0, 50.0, 50.0, 50.0, 50.0, 0.95, 1.0]))


class Model(NamedTuple):
    """The fixed part of a fit: the start, the engine's limits, the captured graphs and the experts."""

    start: StepTime
    settings: EngineLimits
    sizes: tuple[int, ...]
    experts: Experts | None

    def values(self, scale: float) -> Floats:
        """The start scaled as a whole."""
        return np.array([scale, scale, scale, scale, scale * STEP_UP, EXPERTS_SHARE if self.experts else 0.0, 0.0])

    def step_time(self, values: Floats) -> StepTime:
        """Returns the step time of these numbers."""
        base, token, seq, ctx = (values[:UP] * np.array(self.start[:UP])).tolist()
        most = self.settings.max_num_batched_tokens
        table = step_table(base, token, most, self.sizes, values[UP] * self.start.base_ns)
        if self.experts is not None:
            unread = 1 - self.experts.hit(padded(self.sizes, most).astype(np.float64))
            table = table - np.rint(base * values[SHARE] * unread).astype(np.int64)
        return StepTime(round(base), round(token), round(seq), round(ctx), table)


def replayed(trace: Trace, settings: EngineLimits, step_time: StepTime) -> tuple[Replay, Integers]:
    """A run and its step rows."""
    steps: list[Integers] = []
    done = replay(trace, settings, step_time, on_steps=lambda rows: steps.append(rows.copy()))
    return done, np.concatenate(steps) if steps else np.zeros((0, len(STEP_COLUMNS)), dtype=np.int64)


SCALES = (1.0, 0.5, 2.0, 0.25, 4.0, 8.0)
SCALES_OF_A_START = (1.0, 0.5, 2.0)
TRUST = 0.004  # Weight of the start against the data: a constant twice too large costs as much as a deviation of 0.4 %
TRUST_CONTEXT = 0.05
"""Bytes over bandwidth is sure knowledge, and a run that only fills up cannot tell it from the cost of a request."""
SPREAD = 3  # Replays for each try, with arrivals that differ by less than a step: catching a step or just missing it evens out
SPREAD_NS = 20_000_000
MOST_REQUESTS = 4000  # More would not make the constants better, only the search slower


class Fit(NamedTuple):
    """Constants, their error, and a sentence about it for people."""

    step_time: StepTime
    error: FitError  # On the stamps that the fit saw
    sentence: str
    most_running: int  # Requests at once: the run measured no step with more


def fit(
    measured: MeasuredRun,
    settings: EngineLimits,
    *,
    start: StepTime | None = None,
    sizes: Sequence[int] | None = None,
    experts: Experts | None = None,
    on_try: Callable[[int], None] | None = None,
) -> Fit:
    """The step times of a measured run.

    `start` is a first guess, best the roofline's: it decides what the run leaves open. `sizes` are the captured graphs, if they
    are not vLLM's own choice; `experts` are those of a mixture, of which small steps read only some.
    `on_try` gets the number of replays so far.
    """
    trace, rows = needed(measured, MOST_REQUESTS)
    if not trace.size:
        raise BadInput("nothing to fit: the run has no stamp of a first or a last token")
    known = MeasuredRun._make((trace, *(column[rows] for column in measured[1:5]), measured.series))
    model = Model(start or GUESS, settings, graph_sizes(settings.max_num_seqs) if sizes is None else tuple(sizes), experts)
    compared = look_at(known, ~replay(trace, settings, model.start).is_rejected)
    if not (len(compared.first.members) or len(compared.between.members) or len(compared.whole.members)):
        raise BadInput("nothing to fit: the run has no stamp of a first or a last token")
    traces = _spread(trace)

    tries = itertools.count(1)

    def off(values: Floats) -> list[Floats]:
        if on_try is not None:
            on_try(next(tries))
        step_time = model.step_time(values)
        front_ns = values[FRONT] * step_time.base_ns
        each = [deviations(compared, *replayed(one, settings, step_time), front_ns=front_ns) for one in traces]
        return [np.mean(parts, axis=0) for parts in zip(*each, strict=True)]

    trust = np.full(len(BOUNDS[0]), TRUST)
    if start is not None:
        trust[CONTEXT] = TRUST_CONTEXT
    starts = [model.values(scale) for scale in (SCALES if start is None else SCALES_OF_A_START)]
    step_time = model.step_time(search(off, starts, BOUNDS, trust))
    whole = replay(measured.trace, settings, step_time)
    error = error_of(measured, whole)
    which = f"the first {trace.size:,} of {error.requests:,}" if trace.size < error.requests else f"{error.requests:,}"
    named = (("TTFT", error.ttft), ("TPOT", error.tpot), ("end to end", error.e2e))
    off_by = ", ".join(f"{name} {value:.1%}" for name, value in named if value is not None)
    sentence = f"fitted to {which} measured requests; a single one is off by {off_by} on average"
    return Fit(step_time, error, sentence, whole.totals.peak_running)


def _spread(trace: Trace) -> list[Trace]:
    """Copies of the traffic; in all but the first each request is up to SPREAD_NS later, by a different part of it."""
    turns = np.arange(trace.size) * 0.6180339887
    late = [np.zeros(trace.size), *((turns * (-1) ** nth + nth / SPREAD) % 1 for nth in range(1, SPREAD))]
    arrivals = [trace.arrival_ns + (one * SPREAD_NS).astype(np.int64) for one in late]
    return [trace._replace(arrival_ns=np.maximum.accumulate(one)) for one in arrivals]
