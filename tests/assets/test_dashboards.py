"""The dashboards: Grafana's own types read them, every expression parses, and every metric in them is one that exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from plimsoll.assets.monitoring import monitoring_files
from plimsoll.assets.settings import AssetSettings
from tests.assets.watched import PLANNED, VERSIONS, metrics_known, metrics_of
from tests.each import each

OF_THE_PLUGIN = ("step", "titleFormat", "textFormat")
"""Keys of an annotation that Grafana's Prometheus plugin reads and the SDK, which knows the dashboard's own, drops."""
EVERY = [*(AssetSettings(version) for version in VERSIONS), PLANNED]


def pages(settings: AssetSettings) -> dict[str, Any]:
    files = monitoring_files(settings)
    return {name: json.loads(text) for name, text in files.items() if "/dashboards/" in name}


def expressions(page: Any) -> Iterator[str]:
    """All of them, with something in the place of Grafana's variables."""
    found = [target["expr"] for panel in page["panels"] for target in panel.get("targets", ())]
    found += [note["expr"] for note in page["annotations"]["list"]]
    for expr in found:
        yield re.sub(r"\$__rate_interval", "5m", expr).replace("$job", "vllm").replace("$instance", ".+").replace("$rank", ".+")


@each("settings", EVERY, ids=lambda settings: f"{settings.vllm} {settings.name}")
def test_grafanas_own_types_lose_nothing_and_every_expression_asks_for_what_exists(settings: AssetSettings) -> None:
    """No key is unknown to the SDK for Grafana 11.6; the metrics are those of that release, the probe, the gate or guard."""
    register_default_plugins()
    known = metrics_known(settings)
    for name, page in pages(settings).items():
        assert list(_lost(page, json.loads(json.dumps(Dashboard.from_json(page), cls=JSONEncoder)), name)) == []
        for expr in expressions(page):
            promql_parser.parse(expr)
            unknown = metrics_of(expr) - known
            assert not unknown, f"{name}: {unknown} in {expr}"


def _lost(ours: Any, theirs: Any, place: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if ".annotations.list[" in place and key in OF_THE_PLUGIN:
                continue
            if key not in theirs:
                yield f"{place}.{key}"
            else:
                yield from _lost(value, theirs[key], f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _lost(one, other, f"{place}[{number}]")
    elif ours != theirs:
        yield f"{place}: {ours!r} became {theirs!r}"


def test_a_key_that_grafana_does_not_know_would_be_found() -> None:
    """The comparison is sharp: a misspelt key of a panel, a target and a field is reported."""
    register_default_plugins()
    page = pages(AssetSettings("0.32.0"))["monitoring/dashboards/plimsoll-engine.json"]
    panel = next(panel for panel in page["panels"] if panel["type"] == "timeseries")
    panel["tittle"], panel["targets"][0]["expression"] = "x", "up"
    panel["fieldConfig"]["defaults"]["custom"]["drawstyle"] = "line"
    lost = list(_lost(page, json.loads(json.dumps(Dashboard.from_json(page), cls=JSONEncoder)), ""))
    assert [one.rpartition(".")[2] for one in lost] == ["expression", "drawstyle", "tittle"]


def test_panels_lie_beside_one_another_and_none_on_another() -> None:
    """No two panels share a place, none stands out of the page, and each says what a reader may take from it."""
    for page in pages(PLANNED).values():
        taken: set[tuple[int, int]] = set()
        for panel in page["panels"]:
            at = panel["gridPos"]
            mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not mine & taken, panel["title"]
            taken |= mine
        assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])


def test_the_engines_page_shows_what_limits_it() -> None:
    """The engine's page has the memory ledger, KV cache in tokens, queue, recomputed share, heat maps and prefix cache."""
    page = pages(PLANNED)["monitoring/dashboards/plimsoll-engine.json"]
    titles = " | ".join(panel["title"] for panel in page["panels"])
    wanted = ("Where the card's memory is", "Free tokens", "new request waits", "Recomputed share", "prefix cache", "Guard's")
    assert all(title in titles for title in wanted)
    assert sum(panel["type"] == "heatmap" for panel in page["panels"]) == 4
    assert [one["name"] for one in page["templating"]["list"]] == ["datasource", "job", "instance", "rank"]
    assert {"drained", "restarted", "compacted", "sheds"} <= {one["name"] for one in page["annotations"]["list"]}
