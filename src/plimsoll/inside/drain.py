"""The drain as a lease: what may begin it, prolong it and end it, and which of its two phases it is in. No clock of its own.

Phase one, `leaving`: not ready, so that a balancer stops sending, but everything is still admitted. Phase two, `refusing`:
new work is refused. Phase two comes when no request has arrived for a while (the balancer is seen to have stopped), or when a
bound has passed, or when it is asked for. A lease that nobody renews ends the drain: a guard that died must not keep a
server out of service. Epochs only grow: whoever comes with an older one has been replaced and is refused.
"""

from __future__ import annotations

from typing import NamedTuple

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
        """Whether the lease still runs."""
        return self.until > now

    def phase(self, now: float, last_admitted: float) -> str:
        """Serving, leaving or refusing; `last_admitted` is when any API server last took a request in, 0 if none did."""
        if not self.is_on(now):
            return SERVING
        quiet_since = max(self.since, last_admitted)
        if self.is_refusing or now - self.since >= self.bound_s or now - quiet_since >= self.quiet_s:
            return REFUSING
        return LEAVING


class Wish(NamedTuple):
    """What a caller of drain asked for; None where it did not say."""

    epoch: int | None = None
    lease_s: float = LEASE_S
    quiet_s: float | None = None
    bound_s: float | None = None
    refuse: bool = False
    retry_after_s: int | None = None


class Stale(NamedTuple):
    """The caller's epoch is older than one already seen."""

    asked: int
    current: int


def begin(current: Drain, wish: Wish, now: float, last_admitted: float = 0.0) -> Drain | Stale:
    """The drain after this wish: a new one, or the running one prolonged. Phase two is never taken back by a renewal."""
    epoch = current.epoch if wish.epoch is None else wish.epoch
    if epoch < current.epoch:
        return Stale(epoch, current.epoch)
    goes_on = current.is_on(now)
    base = current if goes_on else Drain(since=now)
    return Drain(
        epoch=epoch,
        since=base.since,
        until=now + wish.lease_s,
        quiet_s=base.quiet_s if wish.quiet_s is None else wish.quiet_s,
        bound_s=base.bound_s if wish.bound_s is None else wish.bound_s,
        # Whatever brought phase two about: longer bounds in a renewal do not undo it.
        is_refusing=wish.refuse or current.phase(now, last_admitted) == REFUSING,
        retry_after_s=base.retry_after_s if wish.retry_after_s is None else wish.retry_after_s,
    )


def end(current: Drain, epoch: int | None) -> Drain | Stale:
    """The drain ended by its holder or by a newer one."""
    if epoch is not None and epoch < current.epoch:
        return Stale(epoch, current.epoch)
    return current._replace(epoch=current.epoch if epoch is None else epoch, until=0.0, is_refusing=False)
