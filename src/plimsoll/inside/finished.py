"""From what vLLM knows of a request that is over to what a recording says of it.

vLLM's own objects differ from release to release: each figure is looked for, and one that was not measured is None.
Arrival, first token and end are when the API server had them, which is what clients see; the engine's stamps are on its own
clock, so only differences of them are used. Where the API server lags behind its engine, the two are not the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from plimsoll.inside.prefixes import Mark

SCHEMA = "plimsoll.request/1"
SLACK_S = 0.5  # clocks and rounding may put a stamp so far before the arrival; what lies further off was never measured
MOST_TOKENS = 10**9
LATEST_S = 3.9e9  # seconds since 1970: the year 2093
ON_REQUEST = "plimsoll_seen"
"""The attribute of vLLM's own objects under which we leave a `Seen`."""


class Seen(NamedTuple):
    """What is known of a request when it comes in, and only then."""

    priority: int | None
    token_ids: Sequence[int] | None
    """Referred to until the line is written; never written."""
    seed: str
    marks: tuple[Mark, ...]
    first_token_s: float | None = None
    """From its arrival to its first token at the API server; known when it is over."""


class Finished(NamedTuple):
    """One request that is over; times are seconds since 1970."""

    arrival: float
    finished: float
    prompt_tokens: int
    output_tokens: int
    reason: str
    scheduled: float | None = None
    first_token: float | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    max_tokens: int | None = None
    engine: int | None = None
    seen: Seen | None = None

    @property
    def is_cut_off(self) -> bool:
        """Whether it would have gone on."""
        return self.reason not in ("stop", "length", "repetition")


def from_stats(stats: Any, at: float, engine: int) -> Finished:
    """A request that vLLM counts as finished; `at` is when its last output reached the API server."""
    arrival = at - max(float(stats.e2e_latency), 0.0)
    output = _count(stats.num_generation_tokens) or 0
    scheduled = _after(at - float(stats.inference_time), arrival, at)
    first = _after(at - float(stats.decode_time), arrival, at) if output and scheduled is not None else None
    seen = getattr(stats, ON_REQUEST, None)
    if first is not None and seen is not None and seen.first_token_s:
        # Counted back from the end, a lag of the API server at the end would stand before the first token.
        shown = _after(arrival + seen.first_token_s, arrival, at)
        if shown is not None:
            scheduled = _after(shown - (float(stats.inference_time) - float(stats.decode_time)), arrival, shown)
            first = shown
    return Finished(
        arrival,
        at,
        _count(stats.num_prompt_tokens) or 0,
        output,
        str(stats.finish_reason),
        scheduled,
        _not_before(first, scheduled),
        _count(getattr(stats, "num_cached_tokens", None)) if first is not None else None,
        _count(getattr(stats, "num_preemptions", None)),
        _count(getattr(stats, "max_tokens_param", None)),
        engine,
        seen,
    )


def from_state(state: Any, at: float) -> Finished | None:
    """A request that its client gave up, which vLLM counts nowhere; None where vLLM keeps no figures of requests."""
    stats = state.stats
    if stats is None or not stats.arrival_time:
        return None
    arrival = min(float(stats.arrival_time), at)
    output = _count(stats.num_generation_tokens) or 0
    scheduled = first = None
    latency_s = getattr(stats, "first_token_latency", 0.0)
    if output and latency_s > 0:
        first = _after(arrival + latency_s, arrival, at)
        if first is not None and stats.scheduled_ts > 0:
            scheduled = _after(first - (stats.first_token_ts - stats.scheduled_ts), arrival, first)
    return Finished(
        arrival,
        at,
        _count(state.prompt_len) or 0,
        output,
        "abort",
        scheduled,
        _not_before(first, scheduled),
        _count(getattr(state, "num_cached_tokens", None)) if output else None,
        _count(getattr(stats, "num_preemptions", None)) if output else None,
        _count(getattr(state, "max_tokens_param", None)),
        None,
        getattr(state, ON_REQUEST, None),
    )


def as_row(request: Finished) -> dict[str, Any]:
    """The line of a recording as docs/traces.md describes it, without hashes; what is not known is not in it.

    ValueError for a clock that no reader would believe: one such line would spoil the whole file.
    """
    if not 0 <= request.arrival <= request.finished <= LATEST_S:
        raise ValueError("a time out of range")
    row: dict[str, Any] = {
        "schema": SCHEMA,
        "arrival": round(request.arrival, 6),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "finish_reason": request.reason[:32],
    }
    more: dict[str, float | None] = {
        "cached_tokens": request.cached_tokens,
        "preemptions": request.preemptions,
        "max_tokens": request.max_tokens,
        "engine": request.engine,
        "priority": request.seen.priority if request.seen else None,
        "scheduled": _rounded(request.scheduled),
        "first_token": _rounded(request.first_token),
        "finished": _rounded(request.finished),
    }
    row.update((name, value) for name, value in more.items() if value is not None)
    return row


def _rounded(stamp: float | None) -> float | None:
    return None if stamp is None else round(stamp, 6)


def _after(stamp: float, earliest: float, latest: float) -> float | None:
    """The stamp, moved into its bounds; None if it lies so far off that it stands for nothing."""
    if not math.isfinite(stamp) or stamp < earliest - SLACK_S or stamp > latest + SLACK_S:
        return None
    return min(max(stamp, earliest), latest)


def _not_before(stamp: float | None, earlier: float | None) -> float | None:
    return max(stamp, earlier) if stamp is not None and earlier is not None else stamp


def _count(number: Any) -> int | None:
    """A whole number that a recording may hold, or None."""
    return number if type(number) is int and 0 <= number <= MOST_TOKENS else None
