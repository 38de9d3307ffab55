"""docs/monitoring.md says of each alert what the rules say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab import write_monitoring_page
from plimsoll.assets.alerts import groups_of
from plimsoll.assets.monitoring import alerts_of
from plimsoll.assets.settings import AssetSettings

if TYPE_CHECKING:
    import pytest


def test_the_lists_are_those_of_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m lab.write_monitoring_page --check` has nothing to say; every alert has its paragraph, the counts are true."""
    assert write_monitoring_page.main(["--check"]) == 0, capsys.readouterr().out
    text = write_monitoring_page.PAGE.read_text(encoding="utf-8")
    alerts = alerts_of(groups_of(AssetSettings("0.32.0")))
    assert [name for name in (alert.name for alert in alerts) if f"### {name}\n" not in text] == []
    assert "twenty-two alerts, of which six" in text
    assert (len(alerts), sum(alert.severity == "page" for alert in alerts)) == (22, 6)
