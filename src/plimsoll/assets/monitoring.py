"""All files of `monitoring/`: rules and their tests, dashboards, and configurations of Prometheus and Alertmanager."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from plimsoll.assets.alerts import Alert, Case, RuleGroup, groups_of, thresholds_of
from plimsoll.assets.dashboards import dashboard_files
from plimsoll.assets.names import GUARD_JOB, Names, about, select
from plimsoll.assets.rendering import render
from plimsoll.assets.settings import DOCS_URL, AssetSettings
from plimsoll.errors import BadInput
from plimsoll.vllm.versions import Behaviour, engine_named

EVALUATED_EVERY_S = 30
SLOW_EVERY_S = 300
"""Cases that last for hours are looked at every five minutes, in a file of their own: promtool has one interval a file."""
ANOTHER_JOB = "another-job"  # Every firing case has a twin under this job, which must stay silent
PAGER, TICKETS = "http://pager.invalid/page", "http://pager.invalid/ticket"  # Placeholders


def monitoring_files(settings: AssetSettings) -> dict[str, str]:
    """Returns names and texts of the files; BadInput for a release without the figures that the alerts need."""
    if not Behaviour.V1_ENGINE.is_in(engine_named(settings.vllm).release):
        raise BadInput(
            f"monitoring is made for vLLM {Behaviour.V1_ENGINE.since} and newer: {settings.vllm} counts neither steps nor hits"
        )
    bounds = thresholds_of(settings)
    groups = groups_of(settings, bounds)
    files = {
        "rules.yml": rules_text(groups, settings.job),
        "rules_test.yml": cases_text(settings, groups),
        "rules_test_hours.yml": cases_text(settings, groups, SLOW_EVERY_S),
        "prometheus.yml": prometheus_text(settings),
        "alertmanager.yml": alertmanager_text(),
        **dashboard_files(settings, bounds),
    }
    return {f"monitoring/{name}": text for name, text in files.items()}


def alerts_of(groups: Iterable[RuleGroup]) -> list[Alert]:
    return sorted((alert for group in groups for alert in group.alerts), key=lambda alert: alert.severity)


def runbook(alert: Alert) -> str:
    """Returns the address of its finding's page, else of its paragraph in docs/monitoring.md."""
    return f"{DOCS_URL}/findings/{alert.code}.md" if alert.code else f"{DOCS_URL}/monitoring.md#{alert.name.lower()}"


def rules_text(groups: Sequence[RuleGroup], job: str) -> str:
    return render("rules.yml", groups=groups, job=job, guard_job=GUARD_JOB, runbook=runbook)


def cases_text(settings: AssetSettings, groups: Sequence[RuleGroup], every_s: float = EVALUATED_EVERY_S) -> str:
    """Returns `rules_test.yml`, or with another interval the cases that last hours."""
    names = Names(settings)
    records = {record.name: record.expr for group in groups for record in group.records}
    asked = {
        alert.name: " ".join([alert.expr, *(expr for name, expr in records.items() if name in alert.expr)])
        for group in groups
        for alert in group.alerts
    }
    pairs = [
        (alert, case)
        for group in groups
        for alert in group.alerts
        for case in alert.cases
        if (case.every_s >= SLOW_EVERY_S) is (every_s == SLOW_EVERY_S)
    ]
    # A recording without additions is written once, with all alerts that must be silent there.
    quiet: dict[str, list[tuple[Alert, Case]]] = {}
    tests: list[dict[str, object]] = []
    for alert, case in pairs:
        if case.shape and not case.series and not case.fires:
            quiet.setdefault(case.shape, []).append((alert, case))
            continue
        series = names.recorded(case.shape, names.here()) if case.shape else {}
        series = _only({**series, **case.series}, asked[alert.name])
        if case.fires:
            series |= {re.sub(r'job="[^"]*"', f'job="{ANOTHER_JOB}"', name): values for name, values in series.items()}
        shape = f" ({case.shape}: {about(case.shape)})" if case.shape else ""
        tests.append({
            "name": f"{alert.name}: {case.about}{shape}",
            "every_s": case.every_s,
            "series": series,
            "silent": [(alert, case)],
            "fires": case.fires.split(),
            "firing_expr": select("ALERTS", alertname=alert.name, alertstate="firing"),
            "firing": [
                select("ALERTS", alertname=alert.name, alertstate="firing", **alert.labels, **labels)
                for labels in case.labels or (names.here(*alert.by),)
            ],
        })  # fmt: skip
    for shape, silent in reversed(quiet.items()):
        series = _only(names.recorded(shape, names.here()), " ".join(asked[alert.name] for alert, _ in silent))
        title = f"{shape}: {about(shape)}"
        tests.insert(0, {"name": title, "every_s": silent[0][1].every_s, "series": series, "silent": silent})
    return render("rules_test.yml", tests=tests, every_s=every_s)


def _only(series: Mapping[str, str], expressions: str) -> dict[str, str]:
    names = set(re.findall(r"[a-zA-Z_:][\w:]*(?=\{)", expressions))
    return {name: values for name, values in series.items() if name.partition("{")[0] in names}


def prometheus_text(settings: AssetSettings, alertmanager: str = "127.0.0.1:9093") -> str:
    """Returns a configuration that scrapes every engine and guard and evaluates the rules: enough to try, and to copy from."""
    return render("prometheus.yml", settings=settings, guard_job=GUARD_JOB, alertmanager=alertmanager)


def alertmanager_text(pager: str = PAGER, tickets: str = TICKETS) -> str:
    """Returns a configuration that sends pages to one place and tickets to another, and inhibits consequential alerts."""
    return render("alertmanager.yml", pager=pager, tickets=tickets)
