"""Turns the dashboards of dashboards.yaml into the JSON that Grafana imports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from string import ascii_uppercase
from typing import Any

from plimsoll.assets.names import Names, select, span
from plimsoll.assets.rendering import fill, read_data
from plimsoll.assets.settings import AssetSettings
from plimsoll.vllm.versions import table

WIDTH = 24
_GRAFANA = table("dashboard", "assets")  # Grafana's required fields of every variable and of each kind of panel
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_files(settings: AssetSettings, bounds: Mapping[str, Any]) -> dict[str, str]:
    """Returns the path and the text of every dashboard."""
    names, data = Names(settings), read_data("dashboards.yaml")
    context = {
        **bounds, "guard": names.guard, "has": names.has, "metric": names.exposition, "name": settings.name,
        "plan": settings.plan, "select": select, "span": span,
    }  # fmt: skip
    files = {}
    for dashboard in data["dashboards"]:
        # Grafana's variables in place of a job, an engine and its rank.
        variables = [variable["name"] for variable in dashboard["variables"]]
        engine = {name: f"~${name}" for name in variables if name != "rank"}
        rank = {"engine": "~$rank"} if "rank" in variables else {}
        selectors = {"of": partial(select, **engine), "vllm": partial(_vllm, names, {**engine, **rank})}
        page, notes = (fill(part, context | selectors) for part in (dashboard, data["notes"]))
        body = {
            "uid": page["uid"],
            "title": page["title"],
            "description": "\n".join([page["description"], *settings.made_by]),
            **_GRAFANA["dashboard"],
            "templating": {"list": [_GRAFANA["source"], *({**_GRAFANA["variable"], **each} for each in page["variables"])]},
            "annotations": {"list": [_note(**note) for note in notes]},
            "panels": list(_lay_out(page["rows"], bounds)),
        }
        files[f"dashboards/{page['uid']}.json"] = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
    return files


def _vllm(names: Names, labels: Mapping[str, str], metric: str, suffix: str = "") -> str:
    return select(names.exposition(metric) + suffix, **labels)


def _note(name: str, colour: str, text: str, expr: str) -> dict[str, Any]:
    return {
        "name": name, "datasource": SOURCE, "enable": True, "iconColor": colour, "expr": expr, "step": "15s",
        "titleFormat": name, "textFormat": text,
    }  # fmt: skip


def _lay_out(rows: Sequence[Mapping[str, Any]], bounds: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    number = top = 0
    for row in rows:
        number += 1
        at = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {"type": "row", "id": number, "title": row["title"], "collapsed": False, "gridPos": at, "panels": []}
        top, left, tallest = top + 1, 0, 0
        for panel in row["panels"]:
            usual = (4, 4) if panel.get("kind") == "stat" else (12, 8)
            width, height = int(panel.get("width", usual[0])), int(panel.get("height", usual[1]))
            if left + width > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            yield {"id": number, "gridPos": {"h": height, "w": width, "x": left, "y": top}, **_panel(panel, bounds)}
            left, tallest = left + width, max(tallest, height)
        top += tallest


def _panel(panel: Mapping[str, Any], bounds: Mapping[str, Any]) -> dict[str, Any]:
    kind, has_limit = panel.get("kind", "timeseries"), "limit" in panel
    defaults: dict[str, Any] = {"unit": panel.get("unit", "short")}
    if kind in ("timeseries", "stat"):
        defaults["min"] = 0
    if has_limit:
        steps = [{"value": None, "color": "green"}, {"value": bounds[panel["limit"]], "color": "red"}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if kind == "timeseries":
        stacked = {"fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}} if "stacked" in panel else {}
        defaults["custom"] = _GRAFANA["line"] | stacked | ({"thresholdsStyle": {"mode": "line"}} if has_limit else {})
    if kind == "state-timeline":
        fine = panel.get("fine", "0")
        defaults["mappings"] = [
            {"type": "value", "options": {value: {"text": text, "color": "green" if value == fine else "red"}}}
            for value, text in (("0", "no"), ("1", "yes"))
        ]
    queries = panel["queries"] if "queries" in panel else {"": panel["query"]}
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel.get("description", ""),
        "datasource": SOURCE,
        "targets": [
            {"refId": letter, "datasource": SOURCE, "expr": expr}
            | ({"legendFormat": legend} if legend else {})
            | _GRAFANA["query"].get(kind, {})
            for letter, (legend, expr) in zip(ascii_uppercase, queries.items(), strict=False)
            if expr
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **({"options": _GRAFANA[kind]} if kind in _GRAFANA else {}),
    }
