"""Rules with one thing wrong in them, and promtool's verdict: what its tests do not notice, nobody would."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from plimsoll.assets.alerts import Alert, RuleGroup
from plimsoll.assets.monitoring import SLOW_EVERY_S, cases_text, rules_text
from plimsoll.assets.settings import AssetSettings

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
    asked = {record.name: record.expr for record in group.records if record.name in alert.expr}
    exprs = {"": alert.expr, **asked}
    for name, expr in exprs.items():
        for found in _COMPARED.finditer(expr):
            turned = expr[: found.start()] + _FLIPPED[found[0]] + expr[found.end() :]
            yield Mutant(f"{name}: {found[0]} at {found.start()} turned round", _with(group, alert, {**exprs, name: turned}))
    for matcher in sorted({found[0] for expr in exprs.values() for found in _MATCHER.finditer(expr)}):
        dropped = {name: _without(expr, matcher) for name, expr in exprs.items()}
        yield Mutant(f"{matcher} dropped", _with(group, alert, dropped))
    for seconds in {2 * alert.for_s or 600, 0} - {alert.for_s}:
        yield Mutant(f"for {seconds} s", alone(group, replace(alert, for_s=seconds)))


def _with(group: RuleGroup, alert: Alert, exprs: Mapping[str, str]) -> RuleGroup:
    records = tuple(replace(record, expr=exprs.get(record.name, record.expr)) for record in group.records)
    return replace(group, records=records, alerts=(replace(alert, expr=exprs[""]),))


def _without(expr: str, matcher: str) -> str:
    return expr.replace(f", {matcher}", "").replace(f"{matcher}, ", "").replace(matcher, "")


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
