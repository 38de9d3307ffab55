"""Grafana's panels as plain JSON: the few kinds that the dashboards need.

Written without grafana-foundation-sdk, so that the files depend on no version of it and the core needs no more than it has;
the tests read every dashboard with the SDK's own types and get the same back (`tests/assets/test_dashboards.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 41
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Ask:
    """One expression and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture. `says` is what a reader may take from it."""

    title: str
    says: str
    asks: tuple[Ask, ...]
    kind: str = "timeseries"  # or stat, heatmap, state-timeline, table
    unit: str = "short"
    width: int = 12
    height: int = 8
    is_stacked: bool = False
    limit: float | None = None  # A line beyond which it is trouble; thresholds of a stat
    fine: str = "0"  # The state that is green in a state timeline; the other is red


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Note:
    """Something that happened, as a mark over every panel."""

    name: str
    expr: str
    colour: str
    text: str


@dataclass(frozen=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    says: str
    rows: tuple[Row, ...]
    variables: tuple[tuple[str, str, str], ...]  # Name, what it is called, and the query for its values
    notes: tuple[Note, ...] = ()
    tags: tuple[str, ...] = field(default=("plimsoll", "vllm"))


def text_of(dashboard: Dashboard, made_by: Sequence[str] = ()) -> str:
    """The file that Grafana imports."""
    return json.dumps(_dashboard(dashboard, made_by), indent=2, ensure_ascii=False) + "\n"


def _dashboard(dashboard: Dashboard, made_by: Sequence[str]) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": "\n".join([dashboard.says, *made_by]),
        "tags": list(dashboard.tags),
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source_variable(), *(_variable(*one) for one in dashboard.variables)]},
        "annotations": {"list": [_note(one) for one in dashboard.notes]},
        "panels": list(_laid_out(dashboard.rows)),
    }


def _source_variable() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query", "name": name, "label": label, "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1,
        "multi": True, "includeAll": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _note(note: Note) -> dict[str, Any]:
    return {
        "name": note.name, "datasource": SOURCE, "enable": True, "iconColor": note.colour, "expr": note.expr,
        "step": "15s", "titleFormat": note.name, "textFormat": note.text,
    }  # fmt: skip


def _laid_out(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    """From left to right, and on to the next line where one is full."""
    number = top = 0
    for row in rows:
        number += 1
        at = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {"type": "row", "id": number, "title": row.title, "collapsed": False, "gridPos": at, "panels": []}
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            at = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": at, **_panel(panel)}
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind in ("timeseries", "stat"):
        defaults["min"] = 0
    if panel.limit is not None:
        steps = [{"value": None, "color": "green"}, {"value": panel.limit, "color": "red"}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        defaults["custom"] = _drawn(panel)
    if panel.kind == "state-timeline":
        states = (("0", "no"), ("1", "yes"))
        defaults["mappings"] = [_state(value, text, "green" if value == panel.fine else "red") for value, text in states]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "targets": [_target(panel, ask, place) for place, ask in enumerate(panel.asks)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **({"options": _OPTIONS[panel.kind]} if panel.kind in _OPTIONS else {}),
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area", "justifyMode": "auto",
        "textMode": "auto", "wideLayout": True, "showPercentChange": False, "percentChangeColorMode": "standard",
        "orientation": "auto",
    },
}  # fmt: skip


def _drawn(panel: Panel) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if panel.is_stacked else 10,
        "showPoints": "never",
    }
    if panel.is_stacked:
        drawn["stacking"] = {"mode": "normal", "group": "A"}
    if panel.limit is not None:
        drawn["thresholdsStyle"] = {"mode": "line"}
    return drawn


def _state(value: str, text: str, colour: str) -> dict[str, Any]:
    return {"type": "value", "options": {value: {"text": text, "color": colour}}}


def _target(panel: Panel, ask: Ask, place: int) -> dict[str, Any]:
    found: dict[str, Any] = {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": ask.expr}
    if ask.legend:
        found["legendFormat"] = ask.legend
    if panel.kind == "heatmap":
        found["format"] = "heatmap"
    elif panel.kind == "table":
        found |= {"format": "table", "instant": True, "range": False}
    return found
