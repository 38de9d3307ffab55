"""The generated alert rules under the real promtool: they pass their own tests, and no change to one goes unnoticed."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plimsoll.assets.alerts import groups_of
from plimsoll.assets.monitoring import rules_text
from plimsoll.assets.settings import AlertSlo, AssetSettings, PlanFacts, timers_of
from tests.real.rule_mutants import Mutant, alone, case_files, is_noticed, mutants, passes
from tests.real.small_farm import need

VERSIONS = ("0.10.2", "0.12.0", "0.20.0", "0.25.1", "0.32.0")
PLAN = PlanFacts(
    model="meta-llama/Llama-3.1-8B-Instruct", fits=True, gpu="L4", gpus=1,
    requested_bytes=21_720_717_067, weights_bytes=16_060_522_496, kv_bytes=3_521_642_496, slack_bytes=400_000_000,
    kv_tokens=26_880,
)  # fmt: skip
PLANNED = AssetSettings("0.32.0", PLAN, slo=AlertSlo(0.4, 0.03), timers=timers_of(120, PLAN.weights_bytes), name="llama")


def _promtool() -> str:
    return need("promtool", "prometheus")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "settings", [*(AssetSettings(version) for version in VERSIONS), PLANNED], ids=[*VERSIONS, "0.32.0 with a plan"]
)
def test_rules_are_good_and_pass_their_tests(settings: AssetSettings, tmp_path: Path) -> None:
    """promtool checks the rules of each release and finds every alert to fire and to be silent where it should."""
    groups = groups_of(settings)
    (tmp_path / "rules.yml").write_text(rules_text(groups, settings.job), encoding="utf-8")
    checked = subprocess.run(
        [_promtool(), "check", "rules", "--lint=all", "--lint-fatal", "rules.yml"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for name, text in case_files(settings, *groups):
        assert passes(_promtool(), tmp_path, name, text), (tmp_path / f"{name}.said").read_text(encoding="utf-8")


@pytest.mark.timeout(300)
def test_no_change_to_an_alert_goes_unnoticed(tmp_path: Path) -> None:
    """A comparison turned round, a matcher dropped, another wait: for each of them at least one test of that alert fails."""
    promtool, settings = _promtool(), AssetSettings("0.32.0")
    jobs = [
        (mutant, alone(group, alert), f"{alert.name}: {mutant.says}")
        for group in groups_of(settings) for alert in group.alerts for mutant in mutants(group, alert)
    ]  # fmt: skip
    assert len(jobs) > 100

    def asked(numbered: tuple[int, tuple[Mutant, object, str]]) -> str | None:
        number, (mutant, _, says) = numbered
        original = jobs[number][1]
        return None if is_noticed(promtool, tmp_path / str(number), settings, mutant.group, original) else says

    with ThreadPoolExecutor(2) as pool:
        unnoticed = [says for says in pool.map(asked, enumerate(jobs)) if says]
    assert not unnoticed, "\n".join(unnoticed)
