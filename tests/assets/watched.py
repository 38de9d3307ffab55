"""What can be watched: the metrics that a release, plimsoll.inside and guard show, for tests of rules and dashboards."""

from __future__ import annotations

import re
from collections.abc import Mapping

from plimsoll.assets.alerts import groups_of
from plimsoll.assets.settings import AssetSettings, PlanFacts, timers_of
from plimsoll.inside.meters import METERS
from plimsoll.vllm.metrics import metrics_of as metrics_of_release

VERSIONS = ("0.10.2", "0.12.0", "0.20.0", "0.25.1", "0.32.0")
PLAN = PlanFacts(
    model="meta-llama/Llama-3.1-8B-Instruct", fits=True, gpu="L4", gpus=1,
    requested_bytes=21_720_717_067, weights_bytes=16_060_522_496, kv_bytes=3_521_642_496, slack_bytes=400_000_000,
    kv_tokens=26_880,
)  # fmt: skip
PLANNED = AssetSettings("0.32.0", PLAN, ttft_s=0.4, timers=timers_of(120, PLAN.weights_bytes), name="llama")
GENERAL = {"up", "ALERTS", "process_start_time_seconds", "process_resident_memory_bytes", "http_requests_total"}
"""Prometheus's own, and what every vLLM server shows beside its engine's figures."""
GUARDS = (
    "looks_total look_failures_total look_age_seconds unreachable condition notifications_total trouble needs_a_person "
    "actions_total".split()
)
_SUFFIXES = ("", "_total", "_count", "_sum", "_bucket")


def metrics_of(expr: str) -> set[str]:
    """The names of the metrics in an expression."""
    return set(re.findall(r"[a-zA-Z_:][\w:]*(?=\{)", expr))


def metrics_known(settings: AssetSettings) -> set[str]:
    """Everything that may be asked for."""
    shown: Mapping[str, object] = metrics_of_release(settings.vllm)
    vllm = {name + suffix for name in shown for suffix in _SUFFIXES}
    inside = {meter.name + ("_total" if meter.kind == "counter" else "") for meter in METERS}
    records = {record.name for group in groups_of(settings) for record in group.records}
    return GENERAL | vllm | inside | records | {"plimsoll_armed", *(f"plimsoll_guard_{name}" for name in GUARDS)}
