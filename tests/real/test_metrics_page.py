"""A live 0.32.0 engine's /metrics page against our metric table."""

from __future__ import annotations

import re

from lab.engine.server import EngineServer
from plimsoll.redaction import redact
from plimsoll.vllm.metrics import FIGURES, metrics_of, on_page, resolve
from plimsoll.vllm.versions import engine_named

RELEASE = "0.32.0"


def test_page_and_table_agree(engine: EngineServer) -> None:
    """No metric is on one side alone, types and labels are the table's, and our figures are found by version and by page."""
    assert engine.get("/version").json()["version"].startswith(RELEASE)  # without a key: what guard relies on
    assert engine.complete("one two three", max_tokens=4).status == 200
    page, table = engine.metrics(), metrics_of(RELEASE)
    found = dict(re.findall(r"^# TYPE (vllm:\S+) (\w+)$", page, re.MULTILINE))
    types = {name: kind for name, kind in found.items() if not name.endswith("_created")}
    assert sorted(set(types) - set(table)) == []
    promised = {name for name, row in table.items() if row["shown"] == "always"}
    # Labelled counters appear with their first sample: nothing was refused on this engine.
    assert promised - set(types) <= {"vllm:admission_rejections_total"}
    assert {name: kind for name, kind in types.items() if table[name]["type"] not in (kind, "unknown")} == {}
    for name, row in table.items():
        sample = re.search(rf"^{re.escape(name)}(?:_bucket|_count)?{{([^}}]*)}}", page, re.MULTILINE)
        if sample is not None and "labels" in row:
            assert set(re.findall(r"(\w+)=", sample.group(1))) - {"le"} == set(row["labels"]), name  # type: ignore[call-overload]
    for figure in FIGURES:
        by_version, by_page = resolve(figure.name, engine_named(RELEASE)), on_page(figure.name, types)
        assert by_page is None or (by_version is not None and by_version.exposition == by_page), figure.name
    assert redact(page) == page, "a token count is mistaken for a token"
