"""One alert as data: what it asks, how long, how bad it is, what it says, and the cases that prove it.

Everything about an alert stands in one place; `monitoring.py` writes both files from it, and docs/monitoring.md its list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from plimsoll.assets.settings import Settings
from plimsoll.units import GIB, MIB


class Severity(StrEnum):
    """Urgency of an alert."""

    PAGE = "page"  # somebody is woken up
    TICKET = "ticket"  # it can wait for the day


class Needs(StrEnum):
    """The target that must be scraped for an alert to fire."""

    VLLM = "vLLM"
    GATE = "the gate (plimsoll.inside)"
    PROBE = "the probe (plimsoll.inside)"
    GUARD = "guard"


@dataclass(frozen=True)
class Record:
    """A recording rule: a question that several ask, or that a dashboard draws."""

    name: str
    expr: str


@dataclass(frozen=True)
class Case:
    """Some series, and at which moments the alert must fire or be silent. Moments are written by hand, in promtool's form."""

    about: str
    fires: str = ""  # moments, separated by spaces
    silent: str = ""
    shape: str = ""  # A recorded shape (`data/shapes.json`) that the engine has
    series: Mapping[str, str] = field(default_factory=dict)
    """Further series, or others than the shape's: `name{labels}` to values in promtool's notation."""
    every_s: float = 15.0
    labels: tuple[Mapping[str, str], ...] = ()
    """Labels of each alert that must fire, without those that the rule adds; by default the engine's with the alert's `by`."""


@dataclass(frozen=True)
class Alert:
    """An alert with its texts and its test cases."""

    name: str
    severity: Severity
    code: str  # the finding it leads to, a page under docs/findings; empty for those about the watching itself
    needs: Needs
    for_s: int
    expr: str
    summary: str  # one line, with the labels that say where
    description: str  # what was measured
    means: str  # for the person who was just woken up: what it means and what to do first
    cases: tuple[Case, ...]
    by: tuple[str, ...] = ()  # labels of its series beside job and instance


@dataclass(frozen=True)
class Group:
    """Rules that are asked one after the other, at the same moment."""

    name: str
    records: tuple[Record, ...]
    alerts: tuple[Alert, ...]


# Every number of the alerts. What the plan knows replaces a general figure; the others are those that guard judges by.
#
# `tests/assets/test_thresholds.py` holds them against guard's own (docs/guard.md).

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
    """Thresholds for a plan, its promise to users and its timers."""
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
