"""The metrics that rules and panels ask for, as this vLLM release, plimsoll.inside and guard call them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from plimsoll.assets.settings import Settings
from plimsoll.vllm.metrics import resolve
from plimsoll.vllm.versions import engine_named

GUARD_JOB = "plimsoll-guard"
ENGINE_LABELS = ("job", "instance", "engine", "model_name")
"""What tells one engine from another: `engine` is the rank under data parallelism."""

CONDITIONAL: Mapping[str, str] = {
    "plimsoll_torch_": "a GPU, and the probe",
    "plimsoll_device_": "a GPU whose driver answers, and the probe",
    "plimsoll_worker_resident_bytes": "the probe",
    "plimsoll_refused_total": "once the gate has refused a request",
    "plimsoll_guard_trouble": "while guard has trouble of its own",
    "plimsoll_guard_actions_total": "guard with --act",
    "plimsoll_guard_look_failures_total": "once a look has brought nothing",
    "plimsoll_guard_": "guard",
    "plimsoll_": "the gate",
    "process_": "one API server: with several, vLLM shows no figures of a process",
    "http_requests_total": "once a request of that outcome was answered",
    "ALERTS": "while an alert is pending or fires",
}
"""What is not on every page, by the beginning of its name, and what it takes; the first that fits counts."""


class Names:
    """Selectors for one job and one release."""

    def __init__(self, settings: Settings) -> None:
        self.job = settings.job
        self.engine = engine_named(settings.vllm)

    def has(self, figure: str) -> bool:
        """Whether this release shows it without being asked."""
        found = resolve(figure, self.engine)
        return found is not None and found.is_exact and found.shown == "always"

    def vllm(self, figure: str, suffix: str = "", **matchers: str) -> str:
        """One of vLLM's figures by our name (vllm/metrics.py)."""
        found = resolve(figure, self.engine)
        assert found is not None, f"vLLM {self.engine} has no {figure}"
        assert found.is_exact, f"vLLM {self.engine} has only a relative of {figure}"
        return self.of(found.exposition + suffix, **matchers)

    def exposition(self, figure: str) -> str:
        """The bare name of one of vLLM's figures."""
        return self.vllm(figure).partition("{")[0]

    def of(self, name: str, **matchers: str) -> str:
        """Any metric on the engine's page."""
        return select(name, job=self.job, **matchers)

    def guard(self, name: str, **matchers: str) -> str:
        """One of guard's own."""
        return select(f"plimsoll_guard_{name}", job=GUARD_JOB, **matchers)


def select(name: str, **matchers: str) -> str:
    """A selector; a value that begins with ~ is a pattern, one that begins with ! must not be."""
    return f"{name}{{{', '.join(_matcher(label, value) for label, value in matchers.items())}}}"


def _matcher(label: str, value: str) -> str:
    sign, text = "=", value
    if value[:1] in ("~", "!"):
        sign, text = {"~": "=~", "!": "!="}[value[0]], value[1:]
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'{label}{sign}"{escaped}"'


def span(seconds: float) -> str:
    """A time as Prometheus writes it: 90s, 3m, 6h."""
    whole = math.ceil(seconds)
    for unit, size in (("h", 3600), ("m", 60)):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole}s"
