"""All files of `monitoring/`: rules and their tests, dashboards, and what Prometheus and Alertmanager need to use them."""

from __future__ import annotations

from plimsoll.assets.dashboards import dashboards_of
from plimsoll.assets.names import GUARD_JOB
from plimsoll.assets.panels import text_of
from plimsoll.assets.rules import SLOW_EVERY_S, cases_text, groups_of, rules_text
from plimsoll.assets.scrape import alertmanager_text, prometheus_text
from plimsoll.assets.settings import Settings
from plimsoll.assets.thresholds import thresholds_of
from plimsoll.engine.flags import is_before
from plimsoll.engine.metrics import V1_DEFAULT_SINCE
from plimsoll.engine.versions import engine_named
from plimsoll.errors import BadInput

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
