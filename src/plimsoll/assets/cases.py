"""The series of the test cases: one engine's page, a second engine, guard's page; and what recorded figures are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from plimsoll.assets.names import GUARD_JOB, Names, select

INSTANCE, OTHER_INSTANCE, GUARD_INSTANCE = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.9:9790"
MODEL = "a-model"
GUARD_AT = {"job": GUARD_JOB, "instance": GUARD_INSTANCE}
_OWN = {"engine": "0", "model_name": MODEL, "worker": "0", "reason": "draining"}
_WORKER = ("engine", "worker")
# Figures on the page that are not vLLM's own.
_PLAIN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "up": ("up", ()),
    "start_time": ("process_start_time_seconds", ()),
    "resident": ("process_resident_memory_bytes", ()),
    "wedged": ("plimsoll_engine_wedged", ()),
    "ready": ("plimsoll_ready", ()),
    "not_ready": ("plimsoll_not_ready", ("reason",)),
    "expected_wait": ("plimsoll_expected_wait_seconds", ()),
    "allocated": ("plimsoll_torch_allocated_bytes", _WORKER),
    "reserved": ("plimsoll_torch_reserved_bytes", _WORKER),
    "releasable": ("plimsoll_torch_releasable_bytes", _WORKER),
    "unreleasable": ("plimsoll_torch_unreleasable_bytes", _WORKER),
    "retries": ("plimsoll_torch_num_alloc_retries_total", _WORKER),
    "device_free": ("plimsoll_device_free_bytes", _WORKER),
    "device_total": ("plimsoll_device_total_bytes", _WORKER),
    "by_others": ("plimsoll_device_used_by_others_bytes", _WORKER),
    "worker_resident": ("plimsoll_worker_resident_bytes", _WORKER),
    "contained": ("plimsoll_survive_contained_total", ()),
    "limping": ("plimsoll_survive_limping", ()),
    "storm": ("plimsoll_survive_storm", ()),
}
_BY_ENGINE = {"age": "plimsoll_guard_look_age_seconds", "held": "plimsoll_guard_needs_a_person"}
_VLLM = {"steps": "step_tokens", "awake": "sleep_state", "weights_offloaded": "sleep_state"}


def here(names: Names, *labels: str) -> dict[str, str]:
    """The labels of the engine that the cases are about."""
    return {"job": names.job, "instance": INSTANCE} | {label: _OWN[label] for label in labels}


def page_of(names: Names, **values: str) -> dict[str, str]:
    """Series of that engine, by figure."""
    return {series: text for figure, text in values.items() if (series := series_of(names, figure, here(names)))}


def of_rank(rank: str, series: Mapping[str, str]) -> dict[str, str]:
    """The same series of another rank of the same engine (data parallelism)."""
    return {name.replace('engine="0"', f'engine="{rank}"'): values for name, values in series.items()}


def other_engine(names: Names, figure: str) -> str:
    """The same figure of a second engine of the same job."""
    return series_of(names, figure, {"job": names.job, "instance": OTHER_INSTANCE})


def series_of(names: Names, figure: str, where: Mapping[str, str]) -> str:
    """What a figure is called on an engine's page; empty if this release does not have it."""
    if figure in _PLAIN:
        name, labels = _PLAIN[figure]
        return select(name, **where, **{label: _OWN[label] for label in labels})
    if figure.startswith("http_"):
        return select("http_requests_total", **where, handler="/v1/completions", status=figure.removeprefix("http_"))
    own = {**where, "engine": _OWN["engine"], "model_name": MODEL}
    ours, suffix = _VLLM.get(figure, figure), ""
    if figure == "success":
        own["finished_reason"] = "stop"
    elif ours == "sleep_state":
        own["sleep_state"] = figure
    elif figure == "steps":
        suffix = "_count"
    elif figure.startswith("ttft_"):
        ours, suffix = "ttft", "_count" if figure == "ttft_count" else "_bucket"
        if suffix == "_bucket":
            own["le"] = figure.removeprefix("ttft_le_")
    return select(names.exposition(ours) + suffix, **own) if names.has(ours) else ""


def guard_page(at: str = "", **values: str) -> dict[str, str]:
    """Series of guard's page: `up`, `trouble`, `age_ENGINE`, `held_ENGINE`, or `ENGINE_CONDITION`; `at` is another job."""
    job = at or GUARD_JOB
    found: dict[str, str] = {}
    for figure, text in values.items():
        first, _, second = figure.partition("_")
        where = {"job": job, "instance": GUARD_INSTANCE}
        if figure == "up":
            found[select("up", **where)] = text
        elif figure == "trouble":
            found[select("plimsoll_guard_trouble", **where, what="webhook")] = text
        elif first in _BY_ENGINE:
            found[select(_BY_ENGINE[first], **where, engine=second)] = text
        else:
            found[select("plimsoll_guard_condition", **where, engine=first, condition=second)] = text
    return found


@cache
def _recorded() -> Mapping[str, Mapping[str, object]]:
    text = files("plimsoll.assets").joinpath("data/shapes.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, object]] = json.loads(text)
    return found


def about(shape: str) -> str:
    """What happened in a recording."""
    return str(_recorded()[shape]["about"])


def recorded(names: Names, shape: str, where: Mapping[str, str]) -> dict[str, str]:
    """All series of a recording, as this release names them."""
    series = _recorded()[shape]["series"]
    assert isinstance(series, dict)
    return {name: values for figure, values in series.items() if (name := series_of(names, figure, where))}
