"""Every number of the alerts. What the plan knows replaces a general figure; the others are those that guard judges by.

`tests/assets/test_thresholds.py` holds them against guard's own (docs/guard.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.assets.settings import Settings
from plimsoll.domain.units import GIB, MIB

LONGEST_WAIT_S = 600.0
OUTAGE_S = 180  # nobody of the whole job answers: a warm start takes less (55 to 141 s were measured)


@dataclass(frozen=True)
class Thresholds:
    """Seconds, bytes, shares and counts."""

    outage_s: int = OUTAGE_S
    start_s: int = 600  # how long a start may take: one of several engines may be away for as long
    still_s: int = 120  # without a step, with work there
    wait_s: float = 2.0  # that a new request may be expected to wait: what users were promised for the first token
    ttft_s: float = 2.0
    queue_least: int = 4
    queue_share: float = 0.10
    rises: float = 0.10
    storm_share: float = 0.05
    storm_least: int = 10
    full: float = 0.95
    kv_tokens: int | None = None
    retries_least: int = 3
    thin_bytes: int = 256 * MIB
    came_bytes: int = 256 * MIB
    free_bytes: int = 512 * MIB
    releasable_bytes: int = GIB
    contained_s: int = 900  # in which a contained failure is news
    growth_bytes: int = 256 * MIB
    host_growth_bytes: int = 512 * MIB
    prefix_share: float = 0.02
    prefix_least: int = 1_000_000
    loop_starts: int = 3
    errors_share: float = 0.05
    errors_least: int = 5
    look_age_s: int = 120

    @property
    def full_tokens(self) -> int | None:
        """Fewer free tokens than these is a full cache: of the tokens that the plan gives this model."""
        return None if self.kv_tokens is None else round((1 - self.full) * self.kv_tokens)


def thresholds_of(settings: Settings) -> Thresholds:
    """With what the plan, the promise to users and the timers say."""
    plan = settings.plan
    # Where the plan itself leaves less than guard's general bound, half of what it leaves is thin.
    thin = Thresholds.thin_bytes if plan is None else max(0, min(Thresholds.thin_bytes, plan.slack_bytes // 2))
    return Thresholds(
        start_s=settings.timers.start_s,
        wait_s=min(settings.slo.ttft_s, LONGEST_WAIT_S),
        ttft_s=settings.slo.ttft_s,
        kv_tokens=None if plan is None or plan.kv_tokens <= 0 else plan.kv_tokens,
        thin_bytes=thin,
    )
