"""The alert rules as data: how many, how loud, where they lead, and what they ask for. promtool's part is in tests/real."""

from __future__ import annotations

import json
import re
from pathlib import Path

import promql_parser
import pytest

from plimsoll.assets.alerts import Alert, groups_of
from plimsoll.assets.monitoring import alerts_of, monitoring_files, runbook
from plimsoll.assets.settings import DOCS_URL, AssetSettings
from plimsoll.errors import BadInput
from plimsoll.vllm import versions
from plimsoll.vllm.versions import is_before
from tests.assets.watched import PLANNED, VERSIONS, metrics_known, metrics_of
from tests.each import each

ROOT = Path(__file__).parents[2]
EVERY = [*(AssetSettings(version) for version in VERSIONS), PLANNED]
SHAPES = set(json.loads((ROOT / "src/plimsoll/assets/data/shapes.json").read_text(encoding="utf-8")))
ALERTS = alerts_of(groups_of(AssetSettings("0.32.0")))


@each("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_has_its_cases_its_words_and_its_page(alert: Alert) -> None:
    """One case at least where it fires and two where it must not; a sentence for the woken; a page that is there."""
    assert sum(bool(case.fires) for case in alert.cases) >= 1
    assert sum(bool(case.silent) and not case.fires for case in alert.cases) >= 2
    for case in alert.cases:
        assert bool(case.fires) or not case.labels, f"{alert.name}: {case.about}"
        assert not case.shape or case.shape in SHAPES
    assert len(alert.means) > 80
    page, _, anchor = runbook(alert).removeprefix(DOCS_URL + "/").partition("#")
    assert (ROOT / "docs" / page).is_file()
    if anchor:
        assert f"### {alert.name}\n" in (ROOT / "docs" / page).read_text(encoding="utf-8")
    known = {
        "engine", "job", "instance", *alert.by, *(name for case in alert.cases for labels in case.labels for name in labels),
    }  # fmt: skip
    assert set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description)) <= known


def test_few_of_them_wake_anybody_up_and_every_recorded_shape_is_used() -> None:
    """12 to 22 alerts under names of their own, six at most that page; a recording that no case looks at proves nothing."""
    assert 12 <= len({alert.name for alert in ALERTS}) == len(ALERTS) <= 22
    assert sum(alert.severity == "page" for alert in ALERTS) <= 6
    assert {case.shape for alert in ALERTS for case in alert.cases} - {""} == SHAPES


@each("settings", EVERY, ids=lambda settings: f"{settings.vllm} {settings.name}")
def test_rules_ask_for_what_the_release_shows_and_leave_other_jobs_alone(settings: AssetSettings) -> None:
    """Every expression parses, each metric exists in that release, on the gate's and probe's list or at guard, by its job."""
    known = metrics_known(settings)
    for group in groups_of(settings):
        for expr in [*(record.expr for record in group.records), *(alert.expr for alert in group.alerts)]:
            promql_parser.parse(expr)
            assert metrics_of(expr) <= known, metrics_of(expr) - known
            for selector in re.findall(r"\{([^}]*)\}", expr):
                assert f'job="{settings.job}"' in selector or 'job="plimsoll-guard"' in selector, expr


def test_names_follow_the_release() -> None:
    """Before 0.9.2 the cache was called otherwise, and before 0.11.1 nobody said whether an engine sleeps."""
    old, new = (monitoring_files(AssetSettings(version))["monitoring/rules.yml"] for version in ("0.8.5", "0.32.0"))
    assert "vllm:gpu_cache_usage_perc" in old
    assert "vllm:kv_cache_usage_perc" not in old
    assert "vllm:kv_cache_usage_perc" in new
    assert "engine_sleep_state" not in old
    assert "engine_sleep_state" in new


def test_every_release_since_0_8_has_its_rules_and_older_ones_are_refused() -> None:
    """Whatever release is asked for, there are files or one clear line."""
    for release in versions.wheels():
        if is_before(release, "0.8.0"):
            with pytest.raises(BadInput, match=r"0\.8\.0 and newer"):
                monitoring_files(AssetSettings(release))
        else:
            assert "VllmSaturated" in {alert.name for alert in alerts_of(groups_of(AssetSettings(release)))}


def test_a_plan_sets_the_bounds() -> None:
    """Tokens and bytes of this model and the promise to its users, where a general file has general figures."""
    rules = monitoring_files(PLANNED)["monitoring/rules.yml"]
    assert "* 26880" in rules
    assert "<= 1344" in rules  # a twentieth of its tokens
    assert "< 200000000" in rules  # half of the slack that the plan leaves, which is less than 256 MiB twice
    assert "> 0.4\n" in rules
    assert ">= 0.95" in monitoring_files(AssetSettings("0.32.0"))["monitoring/rules.yml"]
