"""All files of `monitoring/`: rules and their tests, dashboards, and what Prometheus and Alertmanager need to use them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from plimsoll.assets.alert import Alert, Case, Group, Record, Thresholds, thresholds_of
from plimsoll.assets.alerts_life import guard_alerts, life_alerts
from plimsoll.assets.alerts_load import load_alerts, memory_alerts
from plimsoll.assets.dashboards import dashboard_text, dashboards_of
from plimsoll.assets.names import GUARD_JOB, Names, about, span
from plimsoll.assets.settings import DOCS_URL, Settings
from plimsoll.assets.texts import quoted, yaml_of
from plimsoll.errors import BadInput
from plimsoll.vllm.versions import Behaviour, engine_named

EVALUATED_EVERY_S = 30
SLOW_EVERY_S = 300
"""Cases that last for hours are looked at every five minutes, in a file of their own: promtool has one interval a file."""
ANOTHER_JOB = "another-job"  # Every case that fires has a twin under this job, which is none of this file's business


def groups_of(settings: Settings, bounds: Thresholds | None = None) -> tuple[Group, ...]:
    """All rules for one plan and one release."""
    names, numbers = Names(settings), bounds or thresholds_of(settings)
    return tuple(make(names, numbers) for make in (life_alerts, load_alerts, memory_alerts, guard_alerts))


def alerts_of(groups: Iterable[Group]) -> list[Alert]:
    """Every alert, pages first."""
    return sorted((alert for group in groups for alert in group.alerts), key=lambda alert: alert.severity)


def runbook(alert: Alert) -> str:
    """The page to read: of its finding, else its paragraph in docs/monitoring.md."""
    return f"{DOCS_URL}/findings/{alert.code}.md" if alert.code else f"{DOCS_URL}/monitoring.md#{alert.name.lower()}"


def rules_text(groups: Sequence[Group]) -> str:
    """`rules.yml`."""
    return "\n".join(["groups:", *(line for group in groups for line in _group(group))]) + "\n"


def _group(group: Group) -> Iterator[str]:
    yield f"  - name: {group.name}"
    yield "    rules:"
    for record in group.records:
        yield f"      - record: {record.name}"
        yield from _block("        expr", record.expr)
    for alert in group.alerts:
        yield f"      - alert: {alert.name}"
        yield from _block("        expr", alert.expr)
        yield f"        for: {span(alert.for_s)}"
        yield "        labels:"
        for label, value in own_labels(alert).items():
            yield f"          {label}: {value}"
        yield "        annotations:"
        notes = {"summary": alert.summary, "description": alert.description, "means": alert.means}
        for name, text in {**notes, "runbook_url": runbook(alert)}.items():
            yield f"          {name}: {quoted(text)}"


def _block(key: str, text: str) -> Iterator[str]:
    yield f"{key}: |-"
    indent = " " * (len(key) - len(key.lstrip()) + 2)
    yield from (indent + line for line in text.splitlines())


def own_labels(alert: Alert) -> dict[str, str]:
    """Labels that the rule adds: severity and finding."""
    return {"severity": str(alert.severity)} | ({"code": alert.code} if alert.code else {})


def cases_text(settings: Settings, groups: Sequence[Group], every_s: float = EVALUATED_EVERY_S) -> str:
    """`rules_test.yml`, or with another interval the cases of hours."""
    groups = [_with_cases(group, is_slow=every_s == SLOW_EVERY_S) for group in groups]
    names = Names(settings)
    records = {record.name: record for group in groups for record in group.records}
    lines = ["rule_files: [rules.yml]", f"evaluation_interval: {span(every_s)}", "tests:"]
    for shape, asked in _quiet(groups).items():
        needed = " ".join(_asked(alert, records) for alert, _ in asked)
        series = _only(names.recorded(shape, names.here()), needed)
        lines += _test(f"{shape}: {about(shape)}", asked[0][1].every_s, series)
        lines += [line for alert, case in asked for line in _silent(alert, case)]
    for group in groups:
        for alert in group.alerts:
            for case in alert.cases:
                if case.fires or not case.shape or case.series:
                    lines += _own_test(names, alert, case, _asked(alert, records))
    return "\n".join(lines) + "\n"


def _with_cases(group: Group, *, is_slow: bool) -> Group:
    alerts = (
        replace(alert, cases=tuple(c for c in alert.cases if (c.every_s >= SLOW_EVERY_S) is is_slow)) for alert in group.alerts
    )
    return replace(group, alerts=tuple(alerts))


def _quiet(groups: Sequence[Group]) -> dict[str, list[tuple[Alert, Case]]]:
    """The recordings that nothing is added to, and who must be silent there: each is written once."""
    found: dict[str, list[tuple[Alert, Case]]] = {}
    for alert in (alert for group in groups for alert in group.alerts):
        for case in alert.cases:
            if case.shape and not case.series and not case.fires:
                found.setdefault(case.shape, []).append((alert, case))
    return found


def _asked(alert: Alert, records: Mapping[str, Record]) -> str:
    return " ".join([alert.expr, *(record.expr for name, record in records.items() if name in alert.expr)])


def _only(series: Mapping[str, str], expressions: str) -> dict[str, str]:
    names = set(re.findall(r"[a-zA-Z_:][\w:]*(?=\{)", expressions))
    return {name: values for name, values in series.items() if name.partition("{")[0] in names}


def _own_test(names: Names, alert: Alert, case: Case, expressions: str) -> Iterator[str]:
    series = names.recorded(case.shape, names.here()) if case.shape else {}
    series = _only({**series, **case.series}, expressions)
    if case.fires:
        series |= {re.sub(r'job="[^"]*"', f'job="{ANOTHER_JOB}"', name): values for name, values in series.items()}
    shape = f" ({case.shape}: {about(case.shape)})" if case.shape else ""
    yield from _test(f"{alert.name}: {case.about}{shape}", case.every_s, series)
    yield from _silent(alert, case)
    if case.fires:
        yield "    promql_expr_test:"
    for moment in case.fires.split():
        firing = f'ALERTS{{alertname="{alert.name}", alertstate="firing"}}'
        yield f"      - eval_time: {moment}"
        yield f"        expr: {quoted(firing)}"
        yield "        exp_samples:"
        for labels in case.labels or (names.here(*alert.by),):
            whole = {"alertname": alert.name, "alertstate": "firing", **own_labels(alert), **labels}
            inner = ", ".join(f"{label}={quoted(value)}" for label, value in whole.items())
            yield f"          - {{labels: {quoted(f'ALERTS{{{inner}}}')}, value: 1}}"


def _test(name: str, every_s: float, series: Mapping[str, str]) -> Iterator[str]:
    yield f"  - name: {quoted(name)}"
    yield f"    interval: {span(every_s)}"
    yield "    input_series:"
    for one, values in series.items():
        yield f"      - series: {quoted(one)}"
        yield f"        values: {quoted(values)}"
    yield "    alert_rule_test:"


def _silent(alert: Alert, case: Case) -> Iterator[str]:
    for moment in case.silent.split():
        yield f"      - {{eval_time: {moment}, alertname: {alert.name}, exp_alerts: []}}"


# `prometheus.yml` and `alertmanager.yml`: enough to try it, and to copy from into a team's own.

PAGER, TICKETS = "http://pager.invalid/page", "http://pager.invalid/ticket"  # Nobody's: to be replaced
BECAUSE_OF = (
    ("VllmEngineDown", "Vllm.*"),  # one that is away is nothing else besides
    ("VllmEngineWedged", "VllmSaturated|VllmCacheFull|VllmFirstTokenLate|VllmAnswersBadly"),
    ("VllmSaturated", "VllmFirstTokenLate|VllmCacheFull"),
)
"""Who is told of, and who need not be told of then for the same engine."""


def prometheus_text(settings: Settings, alertmanager: str = "127.0.0.1:9093") -> str:
    """Scrapes every engine and guard, asks the rules, and tells Alertmanager."""
    return yaml_of(
        {
            "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
            "rule_files": ["rules.yml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": [
                {
                    "job_name": settings.job,
                    "# Each engine at its own address, never through a balancer: one's counters would pass for another's.": 0,
                    "static_configs": [{"targets": list(settings.targets)}],
                },
                {
                    "job_name": GUARD_JOB,
                    "authorization": {"credentials_file": "/etc/plimsoll/guard-read.token"},
                    "static_configs": [{"targets": [settings.guard_target]}],
                },
            ],
        }
    )


def alertmanager_text(pager: str = PAGER, tickets: str = TICKETS) -> str:
    """Pages go to one place and tickets to another; what follows from another alert is not told beside it."""
    return yaml_of(
        {
            "route": {
                "receiver": "tickets",
                "group_by": ["alertname", "job"],
                "group_wait": "10s",
                "group_interval": "5m",
                "repeat_interval": "12h",
                "routes": [{"matchers": ["severity=page"], "receiver": "pager", "group_wait": "5s", "repeat_interval": "1h"}],
            },
            "receivers": [
                {"name": "pager", "# Put your own in place of these two.": 0, "webhook_configs": [{"url": pager}]},
                {"name": "tickets", "webhook_configs": [{"url": tickets}]},
            ],
            "inhibit_rules": [
                {
                    "source_matchers": [f"alertname={cause}"],
                    "target_matchers": [f"alertname=~{others}", f"alertname!={cause}"],
                    "equal": ["job", "instance"],
                }
                for cause, others in BECAUSE_OF
            ],
        }
    )


FOLDER = "monitoring"


# Under another job's name in Prometheus the rules would be silent for ever.
JOBS_NOTE = """\
# The rules ask for job="{job}" (the engines) and job="{guard}" (guard): your Prometheus must scrape them under
# these names. For another name of the engines' job: plimsoll assets OUT_DIR --job NAME

"""


def monitoring_files(settings: Settings) -> dict[str, str]:
    """Names and texts; BadInput for a release whose figures do not answer what the alerts ask."""
    if not Behaviour.V1_ENGINE.is_in(engine_named(settings.vllm).release):
        raise BadInput(
            f"monitoring is made for vLLM {Behaviour.V1_ENGINE.since} and newer: {settings.vllm} counts neither steps nor hits"
        )
    bounds = thresholds_of(settings)
    groups = groups_of(settings, bounds)
    pages = {f"dashboards/{page.uid}.json": dashboard_text(page, settings.made_by) for page in dashboards_of(settings, bounds)}
    files = {
        "rules.yml": JOBS_NOTE.format(job=settings.job, guard=GUARD_JOB) + rules_text(groups),
        "rules_test.yml": cases_text(settings, groups),
        "rules_test_hours.yml": cases_text(settings, groups, SLOW_EVERY_S),
        "prometheus.yml": prometheus_text(settings),
        "alertmanager.yml": alertmanager_text(),
        **pages,
    }
    return {f"{FOLDER}/{name}": text for name, text in files.items()}
