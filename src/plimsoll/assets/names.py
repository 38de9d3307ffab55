"""Metrics by their names in this vLLM release, plimsoll.inside and guard: selectors for rules and panels, series for tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from plimsoll.assets.settings import AssetSettings
from plimsoll.vllm.metrics import resolve
from plimsoll.vllm.versions import engine_named, table

GUARD_JOB = "plimsoll-guard"

# The engine, the second engine and the guard of the test cases.
INSTANCE, OTHER_INSTANCE, GUARD_INSTANCE = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.9:9790"
MODEL = "a-model"
GUARD_AT = {"job": GUARD_JOB, "instance": GUARD_INSTANCE}
_OWN = {"engine": "0", "model_name": MODEL, "worker": "0", "reason": "draining"}
_PLAIN: Mapping[str, tuple[str, Sequence[str]]] = table("other_metrics", "assets")  # on the page, and not vLLM's own
# Guard's own metrics, each with its further labels.
_GUARDS = {
    "up": "up", "trouble": "plimsoll_guard_trouble what", "age": "plimsoll_guard_look_age_seconds engine",
    "held": "plimsoll_guard_needs_a_person engine", "armed": "plimsoll_armed engine feature",
    "condition": "plimsoll_guard_condition engine condition",
}  # fmt: skip
_VLLM = {"steps": "step_tokens", "awake": "sleep_state", "weights_offloaded": "sleep_state"}


class Names:
    """Selectors for one job and one release."""

    def __init__(self, settings: AssetSettings) -> None:
        self.job = settings.job
        self.engine = engine_named(settings.vllm)

    def has(self, metric: str) -> bool:
        """True if this release always exports the metric, without a flag."""
        found = resolve(metric, self.engine)
        return found is not None and found.is_exact and found.shown == "always"

    def vllm(self, metric: str, suffix: str = "", **matchers: str) -> str:
        """Returns the selector of one of vLLM's metrics, by our name (vllm/metrics.py)."""
        found = resolve(metric, self.engine)
        assert found is not None, f"vLLM {self.engine} has no {metric}"
        assert found.is_exact, f"vLLM {self.engine} has only a relative of {metric}"
        return self.of(found.exposition + suffix, **matchers)

    def exposition(self, metric: str) -> str:
        return self.vllm(metric).partition("{")[0]

    def of(self, name: str, **matchers: str) -> str:
        return select(name, job=self.job, **matchers)

    def guard(self, name: str, **matchers: str) -> str:
        return select(f"plimsoll_guard_{name}", job=GUARD_JOB, **matchers)

    def here(self, *labels: str) -> dict[str, str]:
        """Returns the labels of the engine in the test cases."""
        return {"job": self.job, "instance": INSTANCE} | {label: _OWN[label] for label in labels}

    def page(self, **values: str) -> dict[str, str]:
        return {series: text for metric, text in values.items() if (series := self.series(metric, self.here()))}

    def other(self, metric: str) -> str:
        """Returns the series of a second engine of the same job."""
        return self.series(metric, {"job": self.job, "instance": OTHER_INSTANCE})

    def series(self, metric: str, where: Mapping[str, str]) -> str:
        """Returns the series of a metric on an engine's page; empty if this release does not have it."""
        if metric in _PLAIN:
            name, labels = _PLAIN[metric]
            return select(name, **where, **{label: _OWN[label] for label in labels})
        if metric.startswith("http_"):
            return select("http_requests_total", **where, handler="/v1/completions", status=metric.removeprefix("http_"))
        own = {**where, "engine": _OWN["engine"], "model_name": MODEL}
        name, suffix = _VLLM.get(metric, metric), ""
        if metric == "success":
            own["finished_reason"] = "stop"
        elif name == "sleep_state":
            own["sleep_state"] = metric
        elif metric == "steps":
            suffix = "_count"
        elif metric.startswith("ttft_"):
            name, suffix = "ttft", "_count" if metric == "ttft_count" else "_bucket"
            if suffix == "_bucket":
                own["le"] = metric.removeprefix("ttft_le_")
        return select(self.exposition(name) + suffix, **own) if self.has(name) else ""

    def recorded(self, shape: str, where: Mapping[str, str]) -> dict[str, str]:
        """Returns all series of a recording, by their names in this release."""
        series = table("shapes", "assets")[shape]["series"]
        return {name: values for metric, values in series.items() if (name := self.series(metric, where))}


def select(name: str, **matchers: str) -> str:
    """Returns a selector; a value with a leading ~ is a pattern, a leading ! excludes the value."""
    signs, parts = {"~": "=~", "!": "!="}, []
    for label, value in matchers.items():
        text = value[1:] if value[:1] in signs else value
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        parts.append(f'{label}{signs.get(value[:1], "=")}"{escaped}"')
    return f"{name}{{{', '.join(parts)}}}"


def span(seconds: float) -> str:
    """Returns a time as Prometheus writes it: 90s, 3m, 6h."""
    whole = math.ceil(seconds)
    for unit, size in (("h", 3600), ("m", 60)):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def of_rank(rank: str, series: Mapping[str, str]) -> dict[str, str]:
    """Returns the same series for another rank of the same engine (data parallelism)."""
    return {name.replace('engine="0"', f'engine="{rank}"'): values for name, values in series.items()}


def guard_page(at: str = "", **values: str) -> dict[str, str]:
    """Returns series of guard's page: `up`, `trouble`, `age_ENGINE`, `held_ENGINE`, `armed_ENGINE_FEATURE`, `ENGINE_CONDITION`.

    `at` is another job.
    """
    series: dict[str, str] = {}
    for metric, text in values.items():
        kind, *rest = metric.split("_")
        if kind not in _GUARDS:
            kind, rest = "condition", [kind, *rest]
        name, *labels = _GUARDS[kind].split()
        where = {"job": at or GUARD_JOB, "instance": GUARD_INSTANCE}
        series[select(name, **where, **dict(zip(labels, rest or ["webhook"], strict=False)))] = text
    return series


def about(shape: str) -> str:
    return str(table("shapes", "assets")[shape]["about"])
