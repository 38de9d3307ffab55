"""The text of vLLM's own metrics on GET /metrics as a release writes it, from the figures of one engine.

    page = EnginePage("0.32.0", "tiny", cache_labels={"block_size": "16"}, created=1.79e9)
    page.text(figures)

The constant part is made once, by prometheus_client as in vLLM, and shared by all pages of the same release, model and
context; a page only fills in numbers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple, cast

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from plimsoll.errors import BadInput
from plimsoll.standin.request import Figures
from plimsoll.vllm.metrics import metrics_of
from plimsoll.vllm.versions import Behaviour, Coverage, newest, wheels, yaml_table


class Row(NamedTuple):
    """One metric of `vllm/data/metrics_page.yaml`: either the value for a label or a histogram's name."""

    name: str
    meaning: str
    read: Callable[[Figures, str], float] | None = None  # takes the label's value; "" where no label tells samples apart
    histogram: str = ""
    by: tuple[str, ...] = ("",)  # the label's values, in their order


# The readers of metrics with a sample for each value of a label.
BY_LABEL: dict[str, Callable[[Figures, str], float]] = {
    "vllm:num_requests_waiting_by_reason": lambda f, reason: 0 if reason == "deferred" else f.waiting,
    "vllm:engine_sleep_state": lambda f, state: int(f.sleep_state == state),
    "vllm:prompt_tokens_by_source_total": lambda f, source: (
        f.prompt_computed if source == "local_compute" else f.prompt_cached if source == "local_cache_hit" else 0
    ),
    "vllm:prompt_tokens_cached_by_source_total": lambda f, tier: f.prefix_hits if tier == "device" else 0,
    "vllm:request_success_total": lambda f, end: f.success[end],
    "vllm:admission_rejections_total": lambda f, valve: f.rejected[valve],
}


def _row(name: str, help: str, figure: str = "", histogram: str = "", by: str = "") -> Row:  # noqa: A002  Prometheus' word
    read: Callable[[Figures, str], float] | None = BY_LABEL.get(name, lambda _figures, _label: 0)
    if figure:
        read = lambda figures, _label: getattr(figures, figure)  # noqa: E731
    return Row(name, help, None if histogram else read, histogram, tuple(by.split()) or ("",))


ROWS = tuple(_row(name, **row) for name, row in yaml_table("metrics_page")["metrics"].items())
# Label values that not every release knows.
LATER_VALUES = {"error": Behaviour.ERROR_REASON, "repetition": Behaviour.REPETITION_REASON}
# Registered with any flags; the flag only makes their values change.
ALWAYS_THERE = frozenset(row.name for row in ROWS if row.name.startswith("vllm:estimated_"))


class Families(Collector):
    """A collector of given metrics, for prometheus_client to write."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def text(self) -> str:
        return generate_latest(self).decode()


class Shown(NamedTuple):
    """A row of the table as one release shows it."""

    row: Row
    kind: str
    names_engine: bool
    by: str  # the label that tells samples apart, "" for none
    values: tuple[str, ...]  # and its values


class EnginePage:
    def __init__(
        self, release: str, model_name: str, engine: str = "0", *, cache_labels: Mapping[str, str], created: float
    ) -> None:
        """`cache_labels` are those of vllm:cache_config_info; `created`: when the engine's figures began, unix seconds."""
        self._static = (release, model_name, engine)
        self._metrics = metrics_shown(release)
        self._created = _number(created)
        cache = Metric("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        cache.add_sample(cache.name, {**cache_labels, "engine": engine}, 1)
        self._cache = Families([cache]).text()
        self._edges: tuple[tuple[float, ...], ...] | None = None
        self._template = ""

    def text(self, figures: Figures) -> str:
        edges = tuple(figures.histograms[metric.row.histogram].edges for metric in self._metrics if metric.row.histogram)
        if edges != self._edges:
            self._edges, self._template = edges, _template(*self._static, edges)
        numbers: list[str] = []
        for row, kind, _, _, values in self._metrics:
            if row.read is None:
                histogram = figures.histograms[row.histogram]
                rising = [_number(count) for count in accumulate(histogram.counts)]
                numbers += [*rising, rising[-1], _number(histogram.total), self._created]
                continue
            numbers += [_number(row.read(figures, value)) for value in values]
            if kind == "counter":
                numbers += [self._created] * len(values)
        return self._template % tuple(numbers) + self._cache


def _number(value: float) -> str:
    if type(value) is int and 0 <= value < 1_000_000:  # most of a page
        return f"{value}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


@functools.cache
def metrics_shown(release: str) -> tuple[Shown, ...]:
    """Returns vLLM's own metrics that a release shows with any flags, in the page's order, without vllm:cache_config_info."""
    if release not in wheels() or Coverage.CACHE_LABELS.begins_after(release):
        raise BadInput(f"no page of vLLM {release}: only those from {Coverage.CACHE_LABELS.first} to {newest()} are known")
    known = metrics_of(release)
    shown: list[Shown] = []
    for row in ROWS:
        entry = known.get(row.name)
        if entry is None or entry["engine"] != "V1" or (entry["shown"] != "always" and row.name not in ALWAYS_THERE):
            continue
        labels = cast("list[str]", entry["labels"])
        more = [label for label in labels if label not in ("model_name", "engine")]
        values = tuple(value for value in row.by if value not in LATER_VALUES or LATER_VALUES[value].is_in(release))
        shown.append(Shown(row, str(entry["type"]), "engine" in labels, more[0] if more else "", values))
    return tuple(shown)


@functools.lru_cache(maxsize=64)
def _template(release: str, model_name: str, engine: str, edges: tuple[tuple[float, ...], ...]) -> str:
    """Returns all lines of vLLM's own metrics with a place for each number; `edges` are the histograms', in their order."""
    metrics: list[Metric] = []
    left = iter(edges)
    for row, kind, names_engine, by, values in metrics_shown(release):
        labels = {"model_name": model_name, **({"engine": engine} if names_engine else {})}
        sets = [{**labels, by: value} if by else labels for value in values]
        metric = Metric(row.name.removesuffix("_total") if kind == "counter" else row.name, row.meaning, kind)
        if kind == "histogram":
            for edge in (*next(left), math.inf):
                metric.add_sample(f"{row.name}_bucket", {**labels, "le": _number(edge)}, 0)
            metric.add_sample(f"{row.name}_count", labels, 0)
            metric.add_sample(f"{row.name}_sum", labels, 0)
        for one in sets if kind != "histogram" else ():
            metric.add_sample(row.name, one, 0)
        for one in sets if kind != "gauge" else ():
            metric.add_sample(f"{metric.name}_created", one, 0)
        metrics.append(metric)
    return re.sub(r"(?m)^([^#].*) 0\.0$", r"\1 %s", Families(metrics).text().replace("%", "%%"))
