"""A live 0.32.0 engine's /metrics page against our metric table."""

from __future__ import annotations

import re

import pytest

from lab.engine.server import EngineServer
from plimsoll.redaction import redact
from plimsoll.vllm.metrics import FIGURES, metrics_of, on_page, resolve
from plimsoll.vllm.versions import engine_named

RELEASE = "0.32.0"


@pytest.fixture(scope="module")
def page(engine: EngineServer) -> str:
    """The page of an engine that has served something."""
    assert engine.complete("one two three", max_tokens=4).status == 200
    return engine.metrics()


@pytest.fixture(scope="module")
def types(page: str) -> dict[str, str]:
    """Family name to type, for vLLM's own metrics, without the _created companions."""
    found = dict(re.findall(r"^# TYPE (vllm:\S+) (\w+)$", page, re.MULTILINE))
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}


def test_every_metric_on_the_page_is_in_the_table(types: dict[str, str]) -> None:
    """What is new on a live page would be listed here by name; for the release we read there is nothing new."""
    new = sorted(set(types) - set(metrics_of(RELEASE)))
    assert new == []


def test_every_metric_the_table_promises_is_on_the_page(types: dict[str, str]) -> None:
    """What the table says is always shown, a default engine shows."""
    promised = {name for name, row in metrics_of(RELEASE).items() if row["shown"] == "always"}
    # Labelled counters appear with their first sample: nothing was refused on this engine.
    missing = promised - set(types) - {"vllm:admission_rejections_total"}
    assert not missing


def test_types_agree(types: dict[str, str]) -> None:
    """Gauge, counter or histogram as the table says."""
    table = metrics_of(RELEASE)
    assert {name: kind for name, kind in types.items() if table[name]["type"] not in (kind, "unknown")} == {}


def test_labels_agree(page: str) -> None:
    """Every label the table states is on the page's samples."""
    for name, row in metrics_of(RELEASE).items():
        sample = re.search(rf"^{re.escape(name)}(?:_bucket|_count)?{{([^}}]*)}}", page, re.MULTILINE)
        if sample is None or "labels" not in row:
            continue
        labels = set(re.findall(r"(\w+)=", sample.group(1))) - {"le"}
        assert labels == set(row["labels"]), name  # type: ignore[call-overload]


def test_our_figures_are_found_by_version_and_by_page(types: dict[str, str]) -> None:
    """Asking by version and asking by what the page shows give the same name."""
    engine = engine_named(RELEASE)
    for figure in FIGURES:
        by_version = resolve(figure.name, engine)
        by_page = on_page(figure.name, types)
        if by_page is not None:
            assert by_version is not None
            assert by_version.exposition == by_page


def test_redaction_leaves_the_page_alone(page: str) -> None:
    """No token count is mistaken for a token."""
    assert redact(page) == page


def test_the_page_is_served_without_a_key(engine: EngineServer) -> None:
    """/version and /metrics answer anybody: what guard relies on."""
    assert engine.get("/version").json()["version"].startswith(RELEASE)
