"""True if an amount of memory grows and goes on growing: not noise, not a daily rhythm, not a staircase that has ended.

The smallest value of each of up to 36 equal stretches of time stands for that stretch: what memory was never given back.
Growth must pass all of these, over the time since the last restart:

- Kendall's test over these minima, with its variance widened by their autocorrelation, one chance in 1,000;
- new ground: the last quarter lies above all of the first half, by more than the noise and more than `least`;
- it goes on: in the last third several steps rise, none of them alone carries most of it, and the slope there is at
  least half of what it was before (an allocator's staircase to its plateau fails here);
- the load does not explain it: it rises and falls otherwise than the requests do, where their number is known.

The slope is the median of all pairwise slopes (Theil and Sen) of the last half, with its 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from plimsoll.doctor.words import words
from plimsoll.units import format_gib

FULL = 0.95
"""Share of KV blocks in use from which the cache is full: what is left does not take another request of usual length."""
ROOM = 0.90
"""Share below which the cache is plainly not what limits."""
STORM, SEVERE_STORM = 0.05, 0.20
"""Share of all computed tokens that are recomputed, from which preemption is a storm, and a severe one."""
_SHORT = 4.0


def matters(waiting: float, running: float) -> bool:
    """True if a queue is more than the few that every busy server has at its door."""
    return waiting > max(_SHORT, 0.10 * running)


def is_full(usage: float | None, running: float, most_running: float | None = None) -> bool:
    """True if the cache takes no further request: by its share in use, or because one as large as those running does not fit.

    The second is said only where it is known that --max-num-seqs would have let another one run.
    """
    if usage is None or usage >= FULL:
        return usage is not None
    return most_running is not None and 1 <= running < most_running and usage * (1 + 1 / running) > 1


def recomputed_share(preemptions: float | None, tokens_done: float, length: float | None) -> float | None:
    """The most that was computed again, as a share of all that was computed; None if it cannot be known.

    A victim loses all of its `length` tokens; part of them may still be found in the prefix cache, hence the most.
    """
    if preemptions is None or length is None or tokens_done <= 0:
        return None
    again = preemptions * length
    return again / (again + tokens_done)


POINTS_LEAST = 48
SPAN_LEAST_S = 1200.0
_STRETCHES, _STRETCHES_LEAST = 36, 12
_FILLED = 0.75  # share of the stretches that must hold a value: holes hide what happened in them
_CHANCE = 0.001
_STILL = 1.28  # the last half by itself: one chance in ten, for it has half of the values and the first test is strict
_INFLATION_MAX = 4.0
_GOES_ON = 0.5
_SANE = 1e18  # bytes: more is a broken exporter, and NaN is not less either
_RESTART = 0.35  # a fall below this share of what it was: the process is another one
_WITH_LOAD = 0.4  # Kendall's tau between memory and load from which the load explains it
_FAR = 10.0  # times the span seen: no forecast beyond
_VAGUE = 5.0  # highest over lowest time to the limit: no forecast either


class Growth(NamedTuple):
    """Memory that grows: bytes a second with a 95 % interval, where it stands now, and over what time that was seen."""

    slope: float
    low: float
    high: float
    chance: float  # of seeing this if nothing grew
    level: float
    rise: float
    start_s: float
    end_s: float

    @property
    def span_s(self) -> float:
        """How long it was watched."""
        return self.end_s - self.start_s


class Forecast(NamedTuple):
    """Seconds until the limit is reached, with a 95 % interval."""

    soonest_s: float
    likely_s: float
    latest_s: float


class _TrendLine(NamedTuple):
    slope: float
    low: float
    high: float
    z: float


def growth(
    times: Sequence[float], values: Sequence[float], *, least: float, restarts: Sequence[float] = (),
    load: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Growth | None:  # fmt: skip
    """The growth of an amount since its last restart, or None: it does not grow, or too little was seen to say so."""
    points = _since_restart(_clean(times, values), restarts)
    if len(points) < POINTS_LEAST or points[-1][0] - points[0][0] < SPAN_LEAST_S:
        return None
    # The smallest value of each stretch; the first is left out: a server that starts fills its memory there.
    wanted = max(_STRETCHES_LEAST, min(_STRETCHES, len(points) // 4))
    first, length = points[0][0], (points[-1][0] - points[0][0]) / wanted
    found: dict[int, float] = {}
    for t, v in points:
        index = min(wanted - 1, int((t - first) / length))
        found[index] = min(v, found.get(index, math.inf))
    minima = [(first + (i + 0.5) * length, found[i]) for i in sorted(found) if i > 0]
    if len(minima) < _FILLED * (wanted - 1) or len(minima) < _STRETCHES_LEAST - 2:
        return None
    at, low = [m[0] for m in minima], [m[1] for m in minima]
    count = len(low)
    whole, half = _line(at, low), _line(at[count // 2 :], low[count // 2 :])
    chance = math.erfc(whole.z / math.sqrt(2)) / 2
    if chance > _CHANCE or half.z < _STILL:
        return None
    rise = median(low[-count // 4 :]) - max(low[: count // 2])
    rest = [v - whole.slope * t for t, v in zip(at, low, strict=True)]
    noise = 1.5 * median(abs(v - median(rest)) for v in rest)
    if rise <= noise or half.slope * (at[-1] - at[0]) < least:
        return None
    # What later never fell below only rises, and where it stands still for long the growth is over.
    cut, kept = count - count // 3, low[:]
    for i in range(count - 2, -1, -1):
        kept[i] = min(kept[i], kept[i + 1])
    steps = [b - a for a, b in zip(kept[cut - 1 :], kept[cut:], strict=False)]
    rises = [step for step in steps if step > 0]
    if len(rises) < max(3, len(steps) // 3) or max(rises) > 0.5 * sum(rises):
        return None
    before, last = _line(at[:cut], low[:cut]).slope, _line(at[cut - 1 :], low[cut - 1 :]).slope
    if last <= 0 or last < _GOES_ON * before:
        return None
    if load is not None:  # it may have risen with the load, stretch by stretch, over the whole time
        amounts = _clean(*load)
        near = [(v, [amount for moment, amount in amounts if abs(moment - t) <= (at[1] - at[0]) / 2]) for t, v in minima]
        pairs = [(v, median(some)) for v, some in near if some]
        if len(pairs) >= count // 2:
            moves = [(b[0] - a[0], b[1] - a[1]) for i, a in enumerate(pairs) for b in pairs[i + 1 :]]
            score = sum(((x > 0) - (x < 0)) * ((y > 0) - (y < 0)) for x, y in moves)
            if score / (len(pairs) * (len(pairs) - 1) / 2) >= _WITH_LOAD:
                return None
    total = whole.slope * (at[-1] - at[0])
    return Growth(half.slope, half.low, half.high, chance, median(low[-3:]), total, points[0][0], points[-1][0])


def _since_restart(points: list[tuple[float, float]], restarts: Sequence[float]) -> list[tuple[float, float]]:
    start, highest = 0, 0.0
    for i in range(1, len(points)):
        highest = max(highest, points[i - 1][1])
        if points[i][1] >= _RESTART * highest:
            continue
        # A single low reading is a hiccup of the exporter: two of them, against what was usual before.
        before = median(v for _, v in points[max(start, i - 5) : i])
        if before > 0 and max(v for _, v in points[i : i + 2]) < _RESTART * before:
            start, highest = i, 0.0
    known = max((t for t in restarts if math.isfinite(t)), default=-math.inf)
    return [pair for pair in points[start:] if pair[0] >= known]


def forecast(grown: Growth, limit: float | None, now: float | None = None) -> Forecast | None:
    """When the limit is reached if it goes on so; None if there is no limit, or the answer would be a guess."""
    left = limit - (grown.level if now is None else now) if limit is not None else math.nan
    if not left > 0 or grown.low <= 0:
        return None
    soonest, likely, latest = left / grown.high, left / grown.slope, left / grown.low
    return None if likely > _FAR * grown.span_s or latest > _VAGUE * soonest else Forecast(soonest, likely, latest)


def _clean(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    pairs = sorted((t, v) for t, v in zip(times, values, strict=False) if math.isfinite(t) and abs(v) < _SANE)
    return [pair for i, pair in enumerate(pairs) if i == 0 or pair[0] > pairs[i - 1][0]]


def _line(at: list[float], low: list[float]) -> _TrendLine:
    """Theil and Sen's slope with the interval that follows from Kendall's variance, widened by autocorrelation."""
    n = len(low)
    slopes = sorted((low[j] - low[i]) / (at[j] - at[i]) for i in range(n) for j in range(i + 1, n))
    slope = median(slopes)
    score = sum((b > a) - (b < a) for i, a in enumerate(low) for b in low[i + 1 :])
    ties = {v: low.count(v) for v in set(low)}.values()
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if variance <= 0:
        return _TrendLine(slope, slope, slope, 0.0)
    # How much less the values say than as many independent ones: from the correlation of neighbours, without the trend.
    rest = [v - slope * t for t, v in zip(at, low, strict=True)]
    off = [v - sum(rest) / n for v in rest]
    power = sum(v * v for v in off)
    near = sum(a * b for a, b in pairwise(off)) / power if power > 0 else 0.0
    spread = math.sqrt(variance * min(_INFLATION_MAX, max(1.0, (1 + near) / max(1e-9, 1 - near))))
    z = (score - (score > 0) + (score < 0)) / spread
    half = 1.96 * spread
    lower = slopes[max(0, int((len(slopes) - half) / 2))]
    upper = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + half) / 2))]
    return _TrendLine(slope, lower, upper, z)


def median(values: Iterable[float]) -> float:
    """The middle value (statistics.median would bring random and decimal along, which take longer to load than we run)."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class MetricSeries(NamedTuple):
    """The values of one metric of one target; times in seconds, rising; a value may be NaN where the target said so."""

    name: str  # as the page, the server or the log names it
    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]  # in the figure's own unit: bytes, ratios from 0 to 1, totals of counters
    figure: str = ""  # our name: one of vllm/metrics.py, of OUTSIDE, or of a log's periodic lines; "" where it has none


# Metrics that vLLM does not export itself, by the exporter's name: our name for it, and what one of its units is in ours.
EXTERNAL_METRICS: Mapping[str, tuple[str, float]] = {name: tuple(row) for name, row in words("names")["metrics"].items()}


LASTS_S = 60.0
"""How long a queue before a full cache must last to be told."""
GROWS_S = 120.0
"""The same for a queue that grows with room in the cache: bursts pass within it."""
_FEWEST = 3
_BREAK_S = 60.0
_COARSE_S = 900.0  # a week in 720 points; moments further apart than that are not one stretch


class EngineSample(NamedTuple):
    """One engine at one time; None for what is unknown."""

    at_s: float
    running: float
    waiting: float
    kv: float | None  # share of the KV cache in use
    prompt_per_s: float | None = None
    generation_per_s: float | None = None
    preempted: float | None = None  # since the moment before
    number: int | None = None  # the line it was read from
    text: str = ""
    most_running: float | None = None  # --max-num-seqs, where it is known


class QueueSpan(NamedTuple):
    """Moments in a row with a queue that matters."""

    moments: tuple[EngineSample, ...]

    @property
    def seconds(self) -> float:
        """From its first to its last moment."""
        return self.moments[-1].at_s - self.moments[0].at_s

    @property
    def full(self) -> float:
        """Share of its moments at which the cache was full."""
        return sum(is_full(m.kv, m.running, m.most_running) for m in self.moments) / len(self.moments)

    @property
    def grows(self) -> bool:
        """True if its queue grew, by half or more, and did not drain again."""
        queue = [m.waiting for m in self.moments]
        third = max(1, len(queue) // 3)
        first, last = median(queue[:third]), median(queue[-third:])
        score = sum((b > a) - (b < a) for i, a in enumerate(queue) for b in queue[i + 1 :])
        return last >= 1.5 * first and queue[-1] >= 0.8 * max(queue) and score >= 0.5 * len(queue) * (len(queue) - 1) / 2

    @property
    def drains(self) -> bool:
        """True if its queue went down to a quarter or less, without growing on the way: a burst being served."""
        queue = [m.waiting for m in self.moments]
        return queue[-1] <= 0.25 * queue[0] and max(queue) <= 1.1 * queue[0]


def queued(moments: Sequence[EngineSample]) -> list[QueueSpan]:
    """The stretches with a queue that matters, in their order; a gap without any word ends one."""
    gaps = [b.at_s - a.at_s for a, b in pairwise(moments[:500]) if b.at_s > a.at_s]
    usual = median(gaps) if gaps else 10.0
    longest = max(_BREAK_S, 3 * usual) if usual <= _COARSE_S else _BREAK_S
    found: list[list[EngineSample]] = []
    before: EngineSample | None = None
    for moment in moments:
        if not matters(moment.waiting, moment.running):
            before = None
            continue
        if before is not None and 0 <= moment.at_s - before.at_s <= longest:
            found[-1].append(moment)
        else:
            found.append([moment])
        before = moment
    return [QueueSpan(tuple(one)) for one in found]


def saturated(moments: Sequence[EngineSample]) -> QueueSpan | None:
    """The longest queue before a full cache, if one lasted."""
    lasting = [s for s in queued(moments) if s.seconds >= LASTS_S - 15 and len(s.moments) >= _FEWEST and s.full >= 0.6]
    # A line every ten seconds: six of them are a minute, from first to last 50 s, and clocks round.
    lasting = [s for s in lasting if s.seconds >= LASTS_S or len(s.moments) >= 6]
    lasting = [s for s in lasting if s.seconds >= GROWS_S or not s.drains]
    return max(lasting, key=lambda s: s.seconds, default=None)


def overrun(moments: Sequence[EngineSample]) -> QueueSpan | None:
    """The longest queue that grew although the cache had room."""
    lasting = [s for s in queued(moments) if s.seconds >= GROWS_S and len(s.moments) >= 6]
    lasting = [s for s in lasting if sum(m.kv is not None and m.kv < ROOM for m in s.moments) >= 0.8 * len(s.moments)]
    # At most 300 of its moments, evenly, with both ends: pairs of them are compared.
    thinned = [QueueSpan((*s.moments[: -1 : len(s.moments) // 300 + 1], s.moments[-1])) for s in lasting]
    return max((s for s in thinned if s.grows), key=lambda s: s.seconds, default=None)


def duration(seconds: float) -> str:
    """40 s, 12 min, 5.5 h, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def rate(grown: Growth) -> str:
    """The slope an hour, with its interval."""
    amounts = [format_gib(round(value * 3600)) for value in (grown.slope, grown.low, grown.high)]
    return f"{amounts[0]} an hour (95 %: {amounts[1]} to {amounts[2]})"


def ahead(coming: Forecast | None, limit: float | None) -> str:
    """When the limit is reached, or that there is no forecast and why."""
    if coming is not None:
        return (
            f"If it goes on, the limit is reached in {duration(coming.likely_s)} "
            f"(95 %: {duration(coming.soonest_s)} to {duration(coming.latest_s)})."
        )
    return (
        "No forecast: the limit is not known."
        if limit is None
        else "No forecast: the limit is too far off, or the slope too vague."
    )
