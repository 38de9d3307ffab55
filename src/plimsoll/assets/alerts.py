"""Reads alerts.yaml for one plan and one release: each alert with its query, its texts and the cases that prove it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll.assets.names import GUARD_AT, Names, guard_page, of_rank, select, span
from plimsoll.assets.rendering import fill, read_data
from plimsoll.assets.settings import AssetSettings
from plimsoll.guard.judge.policy import Policy
from plimsoll.units import GIB, MIB


@dataclass(frozen=True)
class RecordingRule:
    """A recording rule: a query that several alerts use, or that a dashboard draws."""

    name: str
    expr: str


@dataclass(frozen=True)
class Case:
    """Some series, and the moments at which the alert must fire or be silent, written by hand in promtool's form."""

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
    name: str
    severity: str  # page: somebody is woken up; ticket: it can wait for the day
    code: str  # its finding, a page under docs/findings; empty for alerts about the monitoring itself
    needs: str  # what must be scraped for it to fire
    for_s: int
    expr: str
    summary: str  # one line, with the labels that say where
    description: str  # what was measured
    means: str  # for a person who was just woken up: the meaning and the first step
    cases: tuple[Case, ...]
    by: tuple[str, ...] = ()  # labels of its series beside job and instance

    @property
    def labels(self) -> dict[str, str]:
        return {"severity": self.severity} | ({"code": self.code} if self.code else {})


@dataclass(frozen=True)
class RuleGroup:
    """Rules that are evaluated one after the other, at the same moment."""

    name: str
    records: tuple[RecordingRule, ...]
    alerts: tuple[Alert, ...]


LONGEST_WAIT_S = 600.0
_GUARD = Policy().number


@dataclass(frozen=True)
class Thresholds:
    """Every number of the alerts. The plan's figures replace general ones; the others are guard's own thresholds."""

    outage_s: int = 180  # no engine of the job answers: a warm start takes less (55 to 141 s were measured)
    start_s: int = 600  # how long a start may take: one of several engines may be away for as long
    still_s: int = int(_GUARD("wedged", "still"))  # without a step, with work there
    wait_s: float = 2.0  # the expected wait of a new request: the promise for the first token
    ttft_s: float = 2.0
    queue_least: int = 4
    queue_share: float = 0.10
    rises: float = 0.10
    storm_share: float = _GUARD("storm", "share")
    storm_least: int = int(_GUARD("storm", "least"))
    full: float = _GUARD("backlog", "full")
    kv_tokens: int | None = None
    retries_least: int = int(_GUARD("retries", "least"))
    thin_bytes: int = int(_GUARD("slack", "least"))
    came_bytes: int = int(_GUARD("neighbour", "came"))
    free_bytes: int = int(_GUARD("neighbour", "free"))
    releasable_bytes: int = int(_GUARD("neighbour", "releasable"))
    contained_s: int = int(_GUARD("contained", "over"))  # in which a contained failure is news
    growth_bytes: int = int(_GUARD("growth", "least"))
    host_growth_bytes: int = int(_GUARD("host", "least"))
    prefix_share: float = _GUARD("prefix", "share")
    prefix_least: int = int(_GUARD("prefix", "least"))
    loop_starts: int = int(_GUARD("loop", "starts"))
    errors_share: float = 0.05
    errors_least: int = 5
    look_age_s: int = 120

    @property
    def context(self) -> dict[str, object]:
        """Every number by its name, for the texts of alerts.yaml and dashboards.yaml."""
        return {
            **vars(self),
            "away_s": max(self.start_s - self.outage_s, 60),  # one of several engines does not answer
            "kept_out_s": max(1_800, self.start_s),
            # A cache with fewer free tokens is full: a share of the tokens that the plan gives this model.
            "full_tokens": None if self.kv_tokens is None else round((1 - self.full) * self.kv_tokens),
        }


def thresholds_of(settings: AssetSettings) -> Thresholds:
    """Thresholds for a plan, its promise to users and its timers."""
    plan = settings.plan
    # If the plan itself leaves less than guard's general bound, half of that counts as thin.
    thin = Thresholds.thin_bytes if plan is None else max(0, min(Thresholds.thin_bytes, plan.slack_bytes // 2))
    return Thresholds(
        start_s=settings.timers.start_s,
        wait_s=min(settings.slo.ttft_s, LONGEST_WAIT_S),
        ttft_s=settings.slo.ttft_s,
        kv_tokens=None if plan is None or plan.kv_tokens <= 0 else plan.kv_tokens,
        thin_bytes=thin,
    )


def groups_of(settings: AssetSettings, bounds: Thresholds | None = None) -> tuple[RuleGroup, ...]:
    """All rules for one plan and one release."""
    names, bounds = Names(settings), bounds or thresholds_of(settings)
    context = {
        **bounds.context, "vllm": names.vllm, "of": names.of, "guard": names.guard, "select": select, "has": names.has,
        "span": span, "counter": lambda each: " ".join(f"{n * each:.3f}" for n in range(120)), "max": max, "GIB": GIB,
        "MIB": MIB,
    }  # fmt: skip
    groups = []
    for group in read_data("alerts.yaml")["groups"]:
        rules = fill(group["rules"], context)
        records = tuple(RecordingRule(rule["record"], rule["expr"]) for rule in rules if "record" in rule)
        alerts = tuple(
            Alert(
                rule["alert"], rule["severity"], rule.get("code", ""), rule["needs"], int(rule.get("for", 0)), rule["expr"],
                rule["summary"], rule["description"], rule["means"],
                tuple(_case(case, names, bounds) for case in rule["cases"]), tuple(rule.get("by", ())),
            )
            for rule in rules
            if "alert" in rule
        )  # fmt: skip
        groups.append(RuleGroup(group["group"], records, alerts))
    return tuple(groups)


def _case(case: Mapping[str, Any], names: Names, bounds: Thresholds) -> Case:
    series = names.page(**case.get("series", {}))
    series |= {names.other(metric): values for metric, values in case.get("other_engine", {}).items()}
    series |= of_rank("1", names.page(**case.get("rank_1", {})))
    series |= guard_page(**case.get("guard", {})) | guard_page(at="other", **case.get("other_guard", {}))
    if "first_tokens" in case:  # within the promise and later ones, so many every 15 s
        in_time, late, ttft_s = float(case["first_tokens"]["in_time"]), float(case["first_tokens"]["late"]), bounds.ttft_s
        buckets = {ttft_s / 2: in_time, ttft_s: in_time, ttft_s * 4: in_time + late}
        each = {f"ttft_le_{edge:g}": count for edge, count in buckets.items()}
        each |= {"ttft_le_+Inf": in_time + late, "ttft_count": in_time + late}
        series |= names.page(**{name: " ".join(f"{int(n * count)}" for n in range(120)) for name, count in each.items()})
    target = GUARD_AT if "guard" in case else names.here()
    return Case(
        **{name: case[name] for name in ("about", "fires", "silent", "shape") if name in case},
        series=series,
        every_s=float(case.get("every", Case.every_s)),
        labels=tuple({**target, **labels} for labels in case.get("labels", ())),
    )
