"""Whether an amount of memory grows and goes on growing: not noise, not a daily rhythm, not a staircase that has ended.

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
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

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


class _Line(NamedTuple):
    slope: float
    low: float
    high: float
    z: float


def growth(
    times: Sequence[float],
    values: Sequence[float],
    *,
    least: float,
    restarts: Sequence[float] = (),
    load: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Growth | None:
    """The growth of an amount since its last restart, or None: it does not grow, or too little was seen to say so."""
    points = _since_restart(_clean(times, values), restarts)
    if len(points) < POINTS_LEAST or points[-1][0] - points[0][0] < SPAN_LEAST_S:
        return None
    minima = _minima(points)
    if minima is None:
        return None
    at, low = [m[0] for m in minima], [m[1] for m in minima]
    count = len(low)
    whole, half = _line(at, low), _line(at[count // 2 :], low[count // 2 :])
    chance = math.erfc(whole.z / math.sqrt(2)) / 2
    if chance > _CHANCE or half.z < _STILL:
        return None
    rise = median(low[-count // 4 :]) - max(low[: count // 2])
    if rise <= _noise(at, low, whole.slope) or half.slope * (at[-1] - at[0]) < least:
        return None
    if not _goes_on(at, low) or (load is not None and _follows(minima, _clean(*load))):
        return None
    total = whole.slope * (at[-1] - at[0])
    return Growth(half.slope, half.low, half.high, chance, median(low[-3:]), total, points[0][0], points[-1][0])


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


def _minima(points: list[tuple[float, float]]) -> list[tuple[float, float]] | None:
    wanted = max(_STRETCHES_LEAST, min(_STRETCHES, len(points) // 4))
    first, length = points[0][0], (points[-1][0] - points[0][0]) / wanted
    found: dict[int, float] = {}
    for t, v in points:
        index = min(wanted - 1, int((t - first) / length))
        found[index] = min(v, found.get(index, math.inf))
    # The first stretch is left out: a server that starts fills its memory there.
    kept = [(first + (i + 0.5) * length, found[i]) for i in sorted(found) if i > 0]
    return kept if len(kept) >= _FILLED * (wanted - 1) and len(kept) >= _STRETCHES_LEAST - 2 else None


def _line(at: list[float], low: list[float]) -> _Line:
    """Theil and Sen's slope with the interval that follows from Kendall's variance, widened by autocorrelation."""
    n = len(low)
    slopes = sorted((low[j] - low[i]) / (at[j] - at[i]) for i in range(n) for j in range(i + 1, n))
    slope = median(slopes)
    score = sum((b > a) - (b < a) for i, a in enumerate(low) for b in low[i + 1 :])
    ties = {v: low.count(v) for v in set(low)}.values()
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if variance <= 0:
        return _Line(slope, slope, slope, 0.0)
    spread = math.sqrt(variance * _inflation([v - slope * t for t, v in zip(at, low, strict=True)]))
    z = (score - (score > 0) + (score < 0)) / spread
    half = 1.96 * spread
    lower = slopes[max(0, int((len(slopes) - half) / 2))]
    upper = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + half) / 2))]
    return _Line(slope, lower, upper, z)


def _inflation(rest: list[float]) -> float:
    """How much less the values say than as many independent ones: from the correlation of neighbours, without the trend."""
    middle = sum(rest) / len(rest)
    off = [v - middle for v in rest]
    power = sum(v * v for v in off)
    if power <= 0:
        return 1.0
    near = sum(a * b for a, b in pairwise(off)) / power
    return min(_INFLATION_MAX, max(1.0, (1 + near) / max(1e-9, 1 - near)))


def _noise(at: list[float], low: list[float], slope: float) -> float:
    """What the minima scatter about their own line."""
    rest = [v - slope * t for t, v in zip(at, low, strict=True)]
    middle = median(rest)
    return 1.5 * median(abs(v - middle) for v in rest)


def _goes_on(at: list[float], low: list[float]) -> bool:
    count = len(low)
    cut = count - count // 3
    # What later never fell below: it only rises, and where it stands still for long the growth is over.
    kept = low[:]
    for i in range(count - 2, -1, -1):
        kept[i] = min(kept[i], kept[i + 1])
    steps = [b - a for a, b in zip(kept[cut - 1 :], kept[cut:], strict=False)]
    rises = [step for step in steps if step > 0]
    total = sum(rises)
    if len(rises) < max(3, len(steps) // 3) or max(rises) > 0.5 * total:
        return False
    before, last = _line(at[:cut], low[:cut]).slope, _line(at[cut - 1 :], low[cut - 1 :]).slope
    return last > 0 and last >= _GOES_ON * before


def _follows(minima: list[tuple[float, float]], load: list[tuple[float, float]]) -> bool:
    """Whether the load rose with it, stretch by stretch, over the whole time."""
    length = minima[1][0] - minima[0][0]
    pairs: list[tuple[float, float]] = []
    for t, v in minima:
        near = [amount for at, amount in load if abs(at - t) <= length / 2]
        if near:
            pairs.append((v, median(near)))
    if len(pairs) < len(minima) // 2:
        return False
    score = sum(_sign(b[0] - a[0]) * _sign(b[1] - a[1]) for i, a in enumerate(pairs) for b in pairs[i + 1 :])
    return score / (len(pairs) * (len(pairs) - 1) / 2) >= _WITH_LOAD


def median(values: Iterable[float]) -> float:
    """The middle value (statistics.median would bring random and decimal along, which take longer to load than we run)."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
