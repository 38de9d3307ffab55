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


def thresholds_of(settings: AssetSettings, **changed: float) -> dict[str, Any]:
    """Returns every number of the alerts by its name: those of alerts.yaml, and in place of general ones those of a plan."""
    usual = {name: _number(text) for name, text in read_data("alerts.yaml")["numbers"].items()} | changed
    plan, start_s = settings.plan, settings.timers.start_s
    tokens = None if plan is None or plan.kv_tokens <= 0 else plan.kv_tokens
    return {
        **usual,
        "start_s": start_s,  # one of several engines may be away for as long
        "away_s": max(start_s - int(usual["outage_s"]), 60),  # one of several engines does not answer
        "kept_out_s": max(1_800, start_s),
        "wait_s": min(settings.ttft_s, LONGEST_WAIT_S),
        "ttft_s": settings.ttft_s,
        # A cache with fewer free tokens is full: a share of the tokens that the plan gives this model.
        "full_tokens": None if tokens is None else round((1 - usual["full"]) * tokens),
        "kv_tokens": tokens,
        # If the plan itself leaves less than guard's general bound, half of that counts as thin.
        "thin_bytes": usual["thin_bytes"] if plan is None else max(0, min(usual["thin_bytes"], plan.slack_bytes // 2)),
    }


def _number(text: str) -> float:
    """Returns a number, or that of guard's own policy where it is named by KIND.NAME."""
    number = float(text) if text[0].isdigit() else Policy().number(*text.split("."))
    return int(number) if number.is_integer() else number


def groups_of(settings: AssetSettings, bounds: Mapping[str, Any] | None = None) -> tuple[RuleGroup, ...]:
    """All rules for one plan and one release."""
    names, bounds = Names(settings), bounds or thresholds_of(settings)
    context = {
        **bounds, "vllm": names.vllm, "of": names.of, "guard": names.guard, "select": select, "has": names.has,
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


def _case(case: Mapping[str, Any], names: Names, bounds: Mapping[str, Any]) -> Case:
    series = names.page(**case.get("series", {}))
    series |= {names.other(metric): values for metric, values in case.get("other_engine", {}).items()}
    series |= of_rank("1", names.page(**case.get("rank_1", {})))
    series |= guard_page(**case.get("guard", {})) | guard_page(at="other", **case.get("other_guard", {}))
    if "first_tokens" in case:  # within the promise and later ones, so many every 15 s
        in_time, late, ttft_s = float(case["first_tokens"]["in_time"]), float(case["first_tokens"]["late"]), bounds["ttft_s"]
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
