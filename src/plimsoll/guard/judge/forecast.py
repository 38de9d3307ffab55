"""When a new request will have to wait too long, and when the KV cache is full, if both go on as they do; or why not said."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from plimsoll.doctor.rules.trend_growth import Forecast, median
from plimsoll.guard.judge.history import History, Window
from plimsoll.guard.judge.load import expected_wait
from plimsoll.guard.judge.policy import Policy
from plimsoll.unknown import Unknown

WINDOW_S = 300.0
POINTS = 24
FAR_S = 3_600.0
VAGUE = 5.0
FULL = 0.98


def queue_forecast(history: History, policy: Policy) -> Forecast | Unknown:
    """Seconds until the expected wait passes the bound of `saturated`."""
    wait_s, bound_s = expected_wait(history), policy.number("saturated", "wait")
    if isinstance(wait_s, Unknown):
        return wait_s
    if wait_s >= bound_s:
        return Unknown("it is past the bound already")
    window = history.since("waiting", WINDOW_S)
    if len(window.times) < POINTS:
        return Unknown("too little of the queue has been seen")
    now = window.values[-1]
    # The wait grows with the queue, as long as requests end at the same rate.
    left = now * (bound_s / wait_s - 1) if wait_s > 0 else 0.0
    return _ahead(window, left, "the queue does not grow") if now > 0 else Unknown("the queue does not grow")


def kv_forecast(history: History) -> Forecast | Unknown:
    """Seconds until the KV cache is full, which is no trouble by itself: what comes then has to wait."""
    usage = history.now("kv_cache_usage")
    if isinstance(usage, Unknown):
        return usage
    if usage >= FULL:
        return Unknown("it is full already")
    window = history.since("kv_cache_usage", WINDOW_S)
    if len(window.times) < POINTS:
        return Unknown("too little of the cache has been seen")
    return _ahead(window, 1.0 - usage, "the cache does not fill")


def _ahead(window: Window, left: float, why_not: str) -> Forecast | Unknown:
    """When so much more is there, if it goes on as it did in the window."""
    slopes = _slopes(window.times, window.values)
    low, slope, high = slopes[len(slopes) // 10], median(slopes), slopes[-len(slopes) // 10]
    if low <= 0:
        return Unknown(why_not)
    soonest, likely, latest = left / high, left / slope, left / low
    if likely > FAR_S or latest > VAGUE * soonest:
        return Unknown("it would be a guess")
    return Forecast(soonest, likely, latest)


def _slopes(times: Sequence[float], values: Sequence[float]) -> list[float]:
    """The slopes between stretches of the window, sorted: one that goes up and down has them on both sides of nothing."""
    size = max(1, len(times) // 8)
    middles = [
        (sum(times[at : at + size]) / size, sum(values[at : at + size]) / size) for at in range(0, len(times) - size + 1, size)
    ]
    return sorted((later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in pairwise(middles))
