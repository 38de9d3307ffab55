"""`prometheus.yml` and `alertmanager.yml`: enough to try it, and to copy from into a team's own."""

from __future__ import annotations

from plimsoll.assets.names import GUARD_JOB
from plimsoll.assets.settings import Settings
from plimsoll.assets.texts import yaml_of

PAGER, TICKETS = "http://pager.invalid/page", "http://pager.invalid/ticket"
"""Nobody's: to be replaced."""
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
                "routes": [
                    {"matchers": ["severity=page"], "receiver": "pager", "group_wait": "5s", "repeat_interval": "1h"},
                ],
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
