"""The admission rules: the drain lease, the expected wait for shedding, and readiness. Pure; times are arguments.

A drain has two phases. `leaving`: not ready, so that a balancer stops sending, but everything is still admitted. `refusing`:
new work is refused. The second phase begins when no request has arrived for a while (so the balancer has stopped sending),
when a time limit has passed, or when the caller asks for it. A lease that nobody renews ends the drain: a guard that died must
not keep a server out of service. Epochs only grow: a caller with an older epoch has been replaced and is refused.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

SERVING = "serving"
LEAVING = "leaving"
REFUSING = "refusing"

LEASE_S = 60.0
LONGEST_LEASE_S = 3600.0
QUIET_S = 5.0
BOUND_S = 30.0
RETRY_AFTER_S = 5


class Drain(NamedTuple):
    """One drain, running or over; times are seconds of the monotonic clock, which all processes of a machine share."""

    epoch: int = 0
    since: float = 0.0
    until: float = 0.0  # the lease ends here; 0 when there is none
    quiet_s: float = QUIET_S
    bound_s: float = BOUND_S
    is_refusing: bool = False  # phase two was asked for
    retry_after_s: int = RETRY_AFTER_S

    def is_on(self, now: float) -> bool:
        return self.until > now

    def phase(self, now: float, last_admitted: float) -> str:
        """Returns SERVING, LEAVING or REFUSING; `last_admitted`: when any API server last admitted a request, 0 if none did."""
        if not self.is_on(now):
            return SERVING
        quiet_since = max(self.since, last_admitted)
        if self.is_refusing or now - self.since >= self.bound_s or now - quiet_since >= self.quiet_s:
            return REFUSING
        return LEAVING


class StaleEpoch(Exception):
    """The caller's epoch is older than one already seen."""


def begin(
    current: Drain,
    now: float,
    last_admitted: float = 0.0,
    *,
    epoch: int | None = None,
    lease_s: float = LEASE_S,
    refuse: bool = False,
    **bounds: Any,
) -> Drain:
    """Returns a new drain, or the running one prolonged; a bound that is None stays as it is. Raises StaleEpoch."""
    base = current if current.is_on(now) else Drain(since=now)
    return base._replace(
        epoch=_newer(current, epoch),
        until=now + lease_s,
        # Phase two is final, whatever brought it about: neither a renewal nor longer bounds undo it.
        is_refusing=refuse or current.phase(now, last_admitted) == REFUSING,
        **{name: value for name, value in bounds.items() if value is not None},
    )


def end(current: Drain, epoch: int | None) -> Drain:
    return current._replace(epoch=_newer(current, epoch), until=0.0, is_refusing=False)


def _newer(current: Drain, epoch: int | None) -> int:
    if epoch is not None and epoch < current.epoch:
        raise StaleEpoch(f"epoch {epoch} is older than {current.epoch}: another one has taken over")
    return current.epoch if epoch is None else epoch


# Shedding: would a new request have to wait too long, and when should it come again? Pure arithmetic, no clock.
#
# The wait is the tokens that are queued ahead of the request, divided by the engine's recent tokens per second. An unknown
# wait never refuses a request, and neither does an engine with a free place.

PRIORITIES = {"low": 0.5, "normal": 1.0, "high": 2.0}  # times the bound
PRIORITY_HEADER = b"x-plimsoll-priority"
LONGEST_RETRY_S = 120


class Queue(NamedTuple):
    """The work ahead of a new request, over all API servers of this engine."""

    waiting: int | None  # requests the engine says it has not begun
    running: int | None
    places: int | None  # requests the engine runs at once at most
    queued_tokens: float  # prompt tokens of the waiting requests, with the output expected of each
    coming: int  # requests that a gate let in and the engine does not have yet: being read, tokenised, their images decoded
    tokens_each: float | None  # prompt and output tokens of a usual request
    tokens_per_s: float | None  # the engine's recent rate


class Wait(NamedTuple):
    """The expected wait, or why it is unknown."""

    seconds: float | None
    because: str


def expected_wait(queue: Queue) -> Wait:
    """Returns the seconds until a request that comes now would begin; 0 where a place is free."""
    waiting = queue.waiting or 0
    coming = queue.coming
    if waiting == 0 and queue.places is not None:
        # Nothing waits, so the coming requests take the free places first: an idle server refuses nobody.
        coming = max(0, coming - max(0, queue.places - (queue.running or 0)))
    if waiting == 0 and coming == 0:
        return Wait(0.0, "nothing waits")
    if waiting == 0 and queue.places is None:
        return Wait(None, "how many requests run at once is unknown")
    if not queue.tokens_per_s:
        return Wait(None, "the engine's rate is not known yet")
    if coming and queue.tokens_each is None:
        return Wait(None, "no request has finished yet, so their usual length is unknown")
    tokens = queue.queued_tokens + coming * (queue.tokens_each or 0.0)
    return Wait(tokens / queue.tokens_per_s, f"{tokens:.0f} tokens wait, {queue.tokens_per_s:.0f} are done in a second")


def retry_after(wait_s: float, bound_s: float) -> int:
    """Returns the whole seconds until the wait should be back within the bound."""
    return max(1, min(LONGEST_RETRY_S, math.ceil(wait_s - bound_s)))


# Readiness, and why a server is not ready. A full or shedding server stays ready: else its load would fall on the others.

REASONS = STARTING, DEAD, WEDGED, ASLEEP, DRAINING = "starting", "dead", "wedged", "asleep", "draining"  # gravest first


class Readiness(NamedTuple):
    """The answer of /plimsoll/ready."""

    reason: str
    detail: str

    @property
    def is_ready(self) -> bool:
        return self.reason == "ready"


def judge(*, has_engine: bool, is_dead: bool, is_wedged: bool, asleep: str, is_stopping: bool, drain_phase: str) -> Readiness:
    """Returns the gravest reason that is true. `asleep` says how the engine sleeps; `is_stopping`: vLLM was told to end."""
    reasons = (
        (not has_engine, STARTING, "the engine is not there yet"),
        (is_dead, DEAD, "vLLM says that its engine is dead; only a restart helps"),
        (is_wedged, WEDGED, "no step for too long with work waiting, and a request of one token was not answered"),
        (asleep, ASLEEP, asleep),
        (is_stopping, DRAINING, "vLLM was told to end and finishes what it has"),
        (drain_phase != SERVING, DRAINING, f"draining, {drain_phase}"),
    )
    return next((Readiness(reason, detail) for holds, reason, detail in reasons if holds), Readiness("ready", ""))
