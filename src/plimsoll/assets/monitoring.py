"""All files of `monitoring/`: rules and their tests, dashboards, and what Prometheus and Alertmanager need to use them."""

from __future__ import annotations

from plimsoll.assets.alert import thresholds_of
from plimsoll.assets.dashboards import dashboards_of
from plimsoll.assets.names import GUARD_JOB
from plimsoll.assets.panels import text_of
from plimsoll.assets.rules import SLOW_EVERY_S, cases_text, groups_of, rules_text
from plimsoll.assets.settings import Settings
from plimsoll.assets.texts import yaml_of
from plimsoll.errors import BadInput
from plimsoll.vllm.flags import is_before
from plimsoll.vllm.metrics import V1_DEFAULT_SINCE
from plimsoll.vllm.versions import engine_named

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


def _heard(job: str) -> str:
    """Whom the rules hear: under another name in Prometheus they would be silent for ever."""
    return (
        f'# The rules ask for job="{job}" (the engines) and job="{GUARD_JOB}" (guard): your Prometheus must scrape them under\n'
        "# these names. For another name of the engines' job: plimsoll assets OUT_DIR --job NAME\n\n"
    )


def monitoring_files(settings: Settings) -> dict[str, str]:
    """Names and texts; BadInput for a release whose figures do not answer what the alerts ask."""
    if is_before(engine_named(settings.vllm).release, V1_DEFAULT_SINCE):
        raise BadInput(
            f"monitoring is made for vLLM {V1_DEFAULT_SINCE} and newer: {settings.vllm} counts neither steps nor hits"
        )
    bounds = thresholds_of(settings)
    groups = groups_of(settings, bounds)
    pages = {f"dashboards/{page.uid}.json": text_of(page, settings.made_by) for page in dashboards_of(settings, bounds)}
    files = {
        "rules.yml": f"{_heard(settings.job)}{rules_text(groups)}",
        "rules_test.yml": cases_text(settings, groups),
        "rules_test_hours.yml": cases_text(settings, groups, SLOW_EVERY_S),
        "prometheus.yml": prometheus_text(settings),
        "alertmanager.yml": alertmanager_text(),
        **pages,
    }
    return {f"{FOLDER}/{name}": text for name, text in files.items()}
