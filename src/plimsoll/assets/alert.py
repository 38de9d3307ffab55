"""One alert as data: what it asks, how long, how bad it is, what it says, and the cases that prove it.

Everything about an alert stands in one place; `rules.py` writes both files from it, and docs/monitoring.md its list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """Who hears of it."""

    PAGE = "page"  # somebody is woken up
    TICKET = "ticket"  # it can wait for the day


class Needs(StrEnum):
    """What must be scraped for an alert to be able to fire."""

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

    says: str
    fires: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    shape: str = ""
    """A recorded shape (`data/shapes.json`) that the engine has."""
    series: Mapping[str, str] = field(default_factory=dict)
    """Further series, or others than the shape's: `name{labels}` to values in promtool's notation."""
    every_s: float = 15.0
    labels: tuple[Mapping[str, str], ...] = ()
    """Of each alert that must fire, besides its name and severity; what the rule itself adds is put in."""


@dataclass(frozen=True)
class Alert:
    """One alert and all that is known of it."""

    name: str
    severity: Severity
    code: str
    """The finding it leads to, a page under docs/findings; empty for those about the watching itself."""
    expr: str
    for_s: int
    summary: str
    """One line, with the labels that say where."""
    description: str
    """What was seen, with its number."""
    means: str
    """For the person who was just woken up: what it means and what to do first."""
    needs: tuple[Needs, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Group:
    """Rules that are asked one after the other, at the same moment."""

    name: str
    records: tuple[Record, ...]
    alerts: tuple[Alert, ...]
