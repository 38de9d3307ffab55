"""Series of memory as servers make them, healthy and growing, out of a seed: for the tests of trends."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

GIB = float(1 << 30)
MIB = float(1 << 20)
HOUR_S, DAY_S = 3600.0, 86400.0
LEVEL = 60 * GIB


class Made(NamedTuple):
    """Times, values, and the load of that time where the maker knows one."""

    kind: str
    times: list[float]
    values: list[float]
    load: tuple[list[float], list[float]] | None = None


def _times(random: Random, least_s: float = HOUR_S, most_s: float = 7 * DAY_S) -> list[float]:
    span = math.exp(random.uniform(math.log(least_s), math.log(most_s)))
    count = random.randint(80, 720)
    return [1.79e9 + span * i / (count - 1) for i in range(count)]


def _part(times: list[float], t: float) -> float:
    return (t - times[0]) / (times[-1] - times[0])


def flat(random: Random) -> Made:
    """A level with white noise, in whole MiB as DCGM reports it."""
    times, noise = _times(random), random.choice((0.0, 2.0, 50.0, 500.0))
    return Made("flat", times, [LEVEL + round(random.gauss(0, noise)) * MIB for _ in times])


def wandering(random: Random) -> Made:
    """Noise that remembers: neighbours are alike, for up to a tenth of the time seen."""
    times = _times(random)
    keep = math.exp(-1 / (len(times) * random.uniform(0.005, 0.1)))
    value, values = 0.0, []
    for _ in times:
        value = keep * value + random.gauss(0, 1)
        values.append(LEVEL + value * 40 * MIB)
    return Made("wandering", times, values)


def daily(random: Random) -> Made:
    """A rhythm of a day, seen for a day or longer."""
    times, phase = _times(random, DAY_S), random.uniform(0, 2 * math.pi)
    high = random.uniform(0.1, 3) * GIB
    return Made(
        "daily", times, [LEVEL + high * math.sin(2 * math.pi * t / DAY_S + phase) + random.gauss(0, 30) * MIB for t in times]
    )


def with_load(random: Random) -> Made:
    """Less than a day of a rhythm that the number of requests has too."""
    times, phase = _times(random, HOUR_S, DAY_S), random.uniform(0, 2 * math.pi)
    wave = [math.sin(2 * math.pi * t / DAY_S + phase) for t in times]
    load = [max(0.0, 60 + 50 * w + random.gauss(0, 3)) for w in wave]
    return Made("with load", times, [LEVEL + GIB * w + random.gauss(0, 10) * MIB for w in wave], (times, load))


def longest_prompt(random: Random) -> Made:
    """An allocator that grew to the longest prompt seen so far: steps that become rarer."""
    times, tail = _times(random), random.uniform(0.05, 0.5)
    top, values = 0.0, []
    for _ in times:
        for _ in range(random.randint(1, 4)):
            top = max(top, random.lognormvariate(0, tail))
        values.append(LEVEL + top * 2 * GIB + random.gauss(0, 5) * MIB)
    return Made("longest prompt", times, values)


def staircase(random: Random) -> Made:
    """A few steps, all in the first six tenths, then a plateau."""
    times = _times(random)
    steps = [(random.uniform(0, 0.6), random.uniform(0.1, 1.5) * GIB) for _ in range(random.randint(2, 9))]
    values = [LEVEL + sum(size for at, size in steps if _part(times, t) >= at) + random.gauss(0, 10) * MIB for t in times]
    return Made("staircase", times, values)


def filling(random: Random) -> Made:
    """A cache that fills up to its size."""
    times, slow = _times(random), random.uniform(0.02, 0.3)
    return Made(
        "filling", times, [LEVEL + 4 * GIB * (1 - math.exp(-_part(times, t) / slow)) + random.gauss(0, 10) * MIB for t in times]
    )


def sawtooth(random: Random) -> Made:
    """Memory that is collected now and then."""
    times, teeth, phase = _times(random), random.uniform(3, 30), random.random()
    return Made(
        "sawtooth",
        times,
        [LEVEL + 2 * GIB * ((_part(times, t) * teeth + phase) % 1) + random.gauss(0, 20) * MIB for t in times],
    )


def restarted(random: Random) -> Made:
    """A server that stops and starts again: nothing for a while, then weights, cache, graphs, and a few steps."""
    times, at = _times(random), random.uniform(0.1, 0.8)
    steps = [(random.uniform(0, 0.15), random.uniform(0.05, 0.5) * GIB) for _ in range(4)]
    values = []
    for t in times:
        since = _part(times, t) - at
        level = LEVEL if since < 0 or since > 0.03 else 0.02 * LEVEL
        level += sum(size for after, size in steps if since < 0 or since >= 0.03 + after)
        values.append(level + random.gauss(0, 10) * MIB)
    return Made("restarted", times, values)


def bursts(random: Random) -> Made:
    """Peaks upward, more of them towards the end."""
    times = _times(random)
    values = [
        LEVEL + (random.expovariate(1) * GIB if random.random() < 0.6 * _part(times, t) else random.gauss(0, 5) * MIB)
        for t in times
    ]
    return Made("bursts", times, values)


HEALTHY: tuple[Callable[[Random], Made], ...] = (
    flat, wandering, daily, with_load, longest_prompt, staircase, filling, sawtooth, restarted, bursts,
)  # fmt: skip


def _leak(random: Random, times: list[float]) -> list[float]:
    size = random.uniform(0.5, 8) * GIB
    return [size * _part(times, t) for t in times]


def leak(random: Random) -> Made:
    """A steady leak under noise."""
    times = _times(random)
    noise = random.choice((5.0, 50.0, 200.0))
    return Made("leak", times, [LEVEL + more + random.gauss(0, noise) * MIB for more in _leak(random, times)])


def leak_in_steps(random: Random) -> Made:
    """A leak that the allocator turns into steps of 20 MiB or more."""
    times, step = _times(random), random.choice((20, 64, 128)) * MIB
    return Made(
        "leak in steps", times, [LEVEL + more // step * step + random.gauss(0, 2) * MIB for more in _leak(random, times)]
    )


def leak_after_restart(random: Random) -> Made:
    """A leak that began anew with a restart in the first third."""
    times, at = _times(random), random.uniform(0.1, 0.33)
    values = []
    for t, more in zip(times, _leak(random, times), strict=True):
        since = _part(times, t) - at
        values.append((0.01 * LEVEL if 0 <= since < 0.02 else LEVEL + (more if since >= 0 else 0)) + random.gauss(0, 20) * MIB)
    return Made("leak after restart", times, values)


def leak_under_rhythm(random: Random) -> Made:
    """A leak of several GiB below a smaller daily rhythm."""
    times, phase = _times(random, 2 * DAY_S), random.uniform(0, 2 * math.pi)
    size = random.uniform(3, 10) * GIB
    values = [
        LEVEL + size * _part(times, t) + 0.15 * size * math.sin(2 * math.pi * t / DAY_S + phase) + random.gauss(0, 20) * MIB
        for t in times
    ]
    return Made("leak under rhythm", times, values)


GROWING: tuple[Callable[[Random], Made], ...] = (leak, leak_in_steps, leak_after_restart, leak_under_rhythm)


def damaged(random: Random, made: Made) -> Made:
    """The same with holes, lost points and NaN, as scrapes that fail leave it."""
    keep = [True] * len(made.times)
    for _ in range(random.choice((0, 0, 1, 2))):
        begin = random.randrange(len(keep))
        for i in range(begin, min(len(keep), begin + random.randint(1, len(keep) // 20 + 1))):
            keep[i] = False
    kept = [i for i, ok in enumerate(keep) if ok and random.random() > 0.02]
    values = [math.nan if random.random() < 0.01 else made.values[i] for i in kept]
    return Made(made.kind, [made.times[i] for i in kept], values, made.load)
