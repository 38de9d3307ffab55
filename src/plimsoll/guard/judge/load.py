"""Judges load: a growing wait, recomputed tokens, a full cache with a queue, few prefix hits; and forecasts the first two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from plimsoll.doctor.rules.trend_growth import Forecast, is_full, matters, median, recomputed_share
from plimsoll.findings import Evidence
from plimsoll.guard.judge.history import SURELY_S, FigureSeries, History
from plimsoll.guard.judge.look import Look, is_resting
from plimsoll.guard.judge.policy import Policy
from plimsoll.guard.judge.tracker import Assessment, no, unknown, yes
from plimsoll.unknown import Reading, Unknown

RATE_S = 60.0
PIECES = 6
JUMP = 0.9  # share of the whole rise: more in one place is a burst, not a growing queue
WITH_HOLES = 1.3  # factor by which it must rise more clearly where looks are missing
RISES = 0.10  # share of the final queue by which each third must exceed the one before


def _missing(*readings: Reading) -> Assessment:
    return unknown("NoFigures", next(reading.reason for reading in readings if isinstance(reading, Unknown)))


def saturated(history: History, policy: Policy, look: Look) -> Assessment:
    """The expected wait of a new request is past the bound, and the queue has grown steadily."""
    bound_s = policy.number("saturated", "wait")
    if is_resting(look):
        return no("Paused", "paused or asleep: the queue is expected to wait")
    waiting, running = history.now("waiting"), history.now("running")
    if isinstance(waiting, Unknown) or isinstance(running, Unknown):
        return _missing(waiting, running)
    if not matters(waiting, running):
        return no("ShortQueue", f"{waiting:.0f} wait, {running:.0f} run")
    wait_s = expected_wait(history)
    if isinstance(wait_s, Unknown):
        return unknown("NoRate", wait_s.reason)
    if wait_s <= bound_s:
        return no("WaitIsShort", f"expected wait {wait_s:.0f} s")
    grew = _grew(history, policy.number("saturated", "grows"))
    if isinstance(grew, Unknown):
        return unknown("NotLongEnough", grew.reason)
    if grew is None:
        return no("DoesNotGrow", f"expected wait {wait_s:.0f} s, but the queue does not grow")
    seen = Evidence("waiting", f"{grew.values[0]:.0f} to {grew.values[-1]:.0f} in {grew.span_s:.0f} s; wait {wait_s:.0f} s")
    return yes("WaitGrows", f"expected wait {wait_s:.0f} s and the queue grows", seen)


def _grew(history: History, seconds: float) -> FigureSeries | Unknown | None:
    """Returns the shortest window over which the queue grew from third to third, not in one jump; None if there is none.

    A small overload shows only over a longer window; a large one would look small there.
    """
    for window_s in (seconds, 4.0 * seconds, 12.0 * seconds):
        if window_s > SURELY_S and window_s > seconds:
            break
        grew = history.over("waiting", window_s)
        if isinstance(grew, Unknown):
            return grew if window_s == seconds else None
        values = _against(grew, history.every_s)
        if _rises(values, 1.0 if len(values) == len(grew.values) else WITH_HOLES):
            return grew
    return None


def _against(window: FigureSeries, every_s: float) -> list[float]:
    """Returns the values at every look, with missing ones filled in so that they count against growth.

    In the first half the larger of both neighbours, in the second the smaller: missing looks must not look like growth.
    """
    values, half_s = [window.values[0]], (window.times[0] + window.times[-1]) / 2
    pairs = zip(pairwise(window.times), pairwise(window.values), strict=True)
    for (sooner_s, later_s), (sooner, later) in pairs:
        lost = round((later_s - sooner_s) / every_s) - 1
        if lost > 0:
            values += [max(sooner, later) if later_s < half_s else min(sooner, later)] * lost
        values.append(later)
    return values


def _rises(values: Sequence[float], clearly: float = 1.0) -> bool:
    """True if it rose from third to third, by `clearly` times the least rise, and not in one place alone."""
    if len(values) < PIECES:
        return False
    cuts = [len(values) * piece // PIECES for piece in range(PIECES + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(cuts)]
    steps = [later - sooner for sooner, later in pairwise(means)]
    first, middle, last = (means[place] + means[place + 1] for place in (0, 2, 4))
    if min(middle - first, last - middle) < clearly * RISES * last:
        return False
    # A jump lies in one piece, or across two steps.
    return max(one + other for one, other in pairwise(steps)) <= JUMP / clearly * sum(steps)


def expected_wait(history: History) -> float | Unknown:
    """Returns how long a new request waits: the gate's own figure if there is one, else the queue over the completion rate."""
    if history.has_lost_gate:
        return Unknown("the gate stopped reporting")
    if history.last is not None and history.last.gate is not None:
        return history.now("expected_wait")
    waiting, ended = history.now("waiting"), history.rise("success", RATE_S)
    if isinstance(waiting, Unknown):
        return waiting
    if isinstance(ended, Unknown):
        return ended
    return waiting * RATE_S / ended if ended > 0 else Unknown("no request has ended for a minute")


def mean_latency(history: History, name: str) -> Reading:
    """Returns the mean of a latency histogram over the last minute, in seconds."""
    seconds, count = history.rise(f"{name}_sum", RATE_S), history.rise(f"{name}_count", RATE_S)
    if isinstance(seconds, Unknown) or isinstance(count, Unknown):
        return seconds if isinstance(seconds, Unknown) else count
    return seconds / count if count > 0 else Unknown("no token came in the last minute")


NO_LENGTH = Unknown("no request has ended: the recompute share is unknown")


def recompute_share(history: History, over_s: float) -> Reading:
    """Returns the largest possible share of recomputed tokens in that time."""
    found = []
    for name in ("preemptions", "prompt_tokens", "generation_tokens", "success"):
        rose = history.rise(name, over_s)
        if isinstance(rose, Unknown):
            return rose
        found.append(rose)
    pushed, done, ended = found[0], found[1] + found[2], found[3]
    if pushed == 0:
        return 0.0
    share = recomputed_share(pushed, done, done / ended if ended > 0 else None)
    return NO_LENGTH if share is None else share


def storm(history: History, policy: Policy, _look: Look) -> Assessment:
    """Requests are preempted and recomputed: judged by the share of recomputed tokens."""
    over_s = policy.number("storm", "over")
    pushed = history.rise("preemptions", over_s)
    if isinstance(pushed, Unknown):
        return unknown("NoFigures", pushed.reason)
    if pushed < policy.number("storm", "least"):
        return no("Calm", f"{pushed:.0f} preemptions in {over_s / 60:.0f} min")
    share = recompute_share(history, over_s)
    if isinstance(share, Unknown):
        return unknown("NoLength" if share is NO_LENGTH else "NoFigures", share.reason)
    seen = Evidence(
        "vllm:num_preemptions_total", f"+{pushed:.0f} in {over_s:.0f} s, {share:.0%} of all computed tokens recomputed"
    )
    if share < policy.number("storm", "share"):
        return no("LittleLost", f"up to {share:.1%} of all computed tokens are recomputed", seen)
    return yes("DoneTwice", f"up to {share:.0%} of all computed tokens are recomputed", seen)


def backlog(history: History, policy: Policy, _look: Look) -> Assessment:
    """The KV cache is full and a queue waits for it. A full cache with a short queue is a busy, healthy server."""
    usage, running, waiting = (history.now(name) for name in ("kv_cache_usage", "running", "waiting"))
    if isinstance(usage, Unknown) or isinstance(running, Unknown) or isinstance(waiting, Unknown):
        return _missing(usage, running, waiting)
    text = f"KV cache {usage:.0%}, {running:.0f} run, {waiting:.0f} wait"
    if usage >= policy.number("backlog", "full") and matters(waiting, running) and is_full(usage, running):
        return yes("FullWithAQueue", f"the KV cache is full and requests queue for it: {text}", Evidence("page", text))
    return no("Room" if usage < policy.number("backlog", "full") else "ShortQueue", text)


def low_hits(history: History, policy: Policy, _look: Look) -> Assessment:
    """Many lookups in the prefix cache and hardly a hit: worth a hint, and no remedy for memory."""
    asked = history.rise("prefix_queries", SURELY_S)
    if isinstance(asked, Unknown):
        return unknown("NoFigures", asked.reason)
    if asked < policy.number("prefix", "least"):
        return no("TooFew", f"{asked:.0f} tokens looked up")
    found = history.rise("prefix_hits", SURELY_S)
    if isinstance(found, Unknown):
        return unknown("NoFigures", found.reason)
    share = found / asked
    seen = Evidence("vllm:prefix_cache_hits_total", f"{found:.0f} of {asked:.0f} tokens in {SURELY_S / 60:.0f} min")
    if share < policy.number("prefix", "share"):
        return yes("FewHits", f"{share:.1%} of the looked-up tokens were found", seen)
    return no("Hits", f"{share:.0%} of the looked-up tokens were found", seen)


# Forecasts, from the slopes of the last minutes.
WINDOW_S = 300.0
POINTS = 24
FAR_S = 3_600.0
VAGUE = 5.0
FULL = 0.98


def queue_forecast(history: History, policy: Policy) -> Forecast | Unknown:
    """Returns the seconds until the expected wait passes the bound of `saturated`."""
    wait_s, bound_s = expected_wait(history), policy.number("saturated", "wait")
    if isinstance(wait_s, Unknown):
        return wait_s
    if wait_s >= bound_s:
        return Unknown("already past the bound")
    window = history.since("waiting", WINDOW_S)
    now = window.values[-1] if window.values else 0.0
    # The wait grows with the queue, as long as requests end at the same rate.
    left = now * (bound_s / wait_s - 1) if wait_s > 0 else 0.0
    return _ahead(window, left, "queue", "the queue does not grow")


def kv_forecast(history: History) -> Forecast | Unknown:
    """Returns the seconds until the KV cache is full, which only makes new requests wait."""
    usage = history.now("kv_cache_usage")
    if isinstance(usage, Unknown):
        return usage
    if usage >= FULL:
        return Unknown("already full")
    return _ahead(history.since("kv_cache_usage", WINDOW_S), 1.0 - usage, "cache", "the cache does not fill")


def _ahead(window: FigureSeries, left: float, what: str, why_not: str) -> Forecast | Unknown:
    """Returns when the figure will have risen by `left`, if it goes on as in the window."""
    times, values = window.times, window.values
    if len(times) < POINTS:
        return Unknown(f"not enough samples of the {what}")
    # The slopes between stretches of the window: a figure that goes up and down has them on both sides of zero.
    size = max(1, len(times) // 8)
    starts = range(0, len(times) - size + 1, size)
    middles = [(sum(times[at : at + size]) / size, sum(values[at : at + size]) / size) for at in starts]
    slopes = sorted((later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in pairwise(middles))
    low, slope, high = slopes[len(slopes) // 10], median(slopes), slopes[-len(slopes) // 10]
    if low <= 0 or values[-1] <= 0:
        return Unknown(why_not)
    soonest, likely, latest = left / high, left / slope, left / low
    if likely > FAR_S or latest > VAGUE * soonest:
        return Unknown("too uncertain to forecast")
    return Forecast(soonest, likely, latest)
