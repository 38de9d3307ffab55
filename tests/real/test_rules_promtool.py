"""The generated alert rules under the real promtool: they pass their own tests, and no change to one goes unnoticed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from plimsoll.assets.alerts import Alert, RuleGroup, groups_of
from plimsoll.assets.monitoring import SLOW_EVERY_S, cases_text, rules_text
from plimsoll.assets.settings import AssetSettings
from tests.assets.watched import PLANNED, VERSIONS
from tests.real.small_farm import need, ran


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
    checked = ran(_promtool(), "check", "rules", "--lint=all", "--lint-fatal", "rules.yml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for name, text in case_files(settings, *groups):
        assert passes(_promtool(), tmp_path, name, text), (tmp_path / f"{name}.said").read_text(encoding="utf-8")


@pytest.mark.timeout(300)
def test_no_change_to_an_alert_goes_unnoticed(tmp_path: Path) -> None:
    """A comparison turned round, a matcher dropped, another wait: for each of them at least one test of that alert fails."""
    promtool, settings = _promtool(), AssetSettings("0.32.0")
    jobs = [
        (mutant, group, alert)
        for group in groups_of(settings) for alert in group.alerts for mutant in mutants(group, alert)
    ]  # fmt: skip
    assert len(jobs) > 100

    def asked(number: int) -> str:
        mutant, group, alert = jobs[number]
        is_seen = is_noticed(promtool, tmp_path / str(number), settings, mutant.group, alone(group, alert))
        return "" if is_seen else f"{alert.name}: {mutant.says}"

    with ThreadPoolExecutor(2) as pool:
        unnoticed = [says for says in pool.map(asked, range(len(jobs))) if says]
    assert not unnoticed, "\n".join(unnoticed)


_FLIPPED = {"==": "!=", ">": "<=", "<": ">=", ">=": "<", "<=": ">"}
_COMPARED = re.compile(r"(?<=\s)(==|>=|<=|>|<)(?=\s)")
_MATCHER = re.compile(r'[a-z_]+(?:=~|!=|=)"[^"]*"')


class Mutant(NamedTuple):
    """One alert with one thing changed, by itself."""

    says: str
    group: RuleGroup


def alone(group: RuleGroup, alert: Alert) -> RuleGroup:
    """This alert with the recording rules of its group."""
    return replace(group, alerts=(alert,))


def mutants(group: RuleGroup, alert: Alert) -> Iterator[Mutant]:
    """Each comparison turned round, each matcher dropped, the wait doubled and taken away; also in the recording rules it asks.

    A matcher is dropped wherever it stands: `a{job="x"} and b{job="x"}` asks the same with one of the two.
    """
    exprs = {"": alert.expr, **{record.name: record.expr for record in group.records if record.name in alert.expr}}
    for name, expr in exprs.items():
        for found in _COMPARED.finditer(expr):
            turned = expr[: found.start()] + _FLIPPED[found[0]] + expr[found.end() :]
            yield Mutant(f"{name}: {found[0]} at {found.start()} turned round", _with(group, alert, {**exprs, name: turned}))
    for matcher in sorted({found[0] for expr in exprs.values() for found in _MATCHER.finditer(expr)}):
        dropped = {
            name: expr.replace(f", {matcher}", "").replace(f"{matcher}, ", "").replace(matcher, "")
            for name, expr in exprs.items()
        }  # fmt: skip
        yield Mutant(f"{matcher} dropped", _with(group, alert, dropped))
    for seconds in {2 * alert.for_s or 600, 0} - {alert.for_s}:
        yield Mutant(f"for {seconds} s", alone(group, replace(alert, for_s=seconds)))


def _with(group: RuleGroup, alert: Alert, exprs: Mapping[str, str]) -> RuleGroup:
    records = tuple(replace(record, expr=exprs.get(record.name, record.expr)) for record in group.records)
    return replace(group, records=records, alerts=(replace(alert, expr=exprs[""]),))


def is_noticed(promtool: str, folder: Path, settings: AssetSettings, changed: RuleGroup, original: RuleGroup) -> bool:
    """Whether the tests of the original fail with it."""
    folder.mkdir()
    (folder / "rules.yml").write_text(rules_text([changed], settings.job), encoding="utf-8")
    return not all(passes(promtool, folder, name, text) for name, text in case_files(settings, original))


def case_files(settings: AssetSettings, *groups: RuleGroup) -> Iterator[tuple[str, str]]:
    """The files of cases that are not empty."""
    for name, every_s in (("rules_test.yml", 30), ("rules_test_hours.yml", SLOW_EVERY_S)):
        text = cases_text(settings, groups, every_s)
        if "- name:" in text:
            yield name, text


def passes(promtool: str, folder: Path, name: str, text: str) -> bool:
    """Whether promtool is content with these tests."""
    (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run([promtool, "test", "rules", name], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    (folder / f"{name}.said").write_text(done.stdout + done.stderr, encoding="utf-8")
    assert "parse error" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode == 0
