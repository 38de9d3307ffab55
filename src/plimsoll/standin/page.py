"""The text of GET /metrics as a release of vLLM writes it, from the figures of one engine and of the server around it.

    page = Page("0.32.0", "tiny", cache_labels={"block_size": "16"}, created=1.79e9)
    page.text(figures, http, process)

What does not change is made once and shared by all pages of the same release, model and context; a page only fills in numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.engine.flags import is_before
from plimsoll.engine.metrics import V1_DEFAULT_SINCE, metrics_of
from plimsoll.engine.tables import wheels
from plimsoll.engine.versions import newest
from plimsoll.errors import BadInput
from plimsoll.standin import page_table
from plimsoll.standin.exposition import head, histogram_lines, histogram_numbers, labels_text, literal, number, value_line
from plimsoll.standin.figures import Figures
from plimsoll.standin.page_server import HttpFigures, ProcessFigures, http_text, process_text

__all__ = ["HttpFigures", "Page", "ProcessFigures"]

# Until then vllm:cache_config_info did not say which engine it is of.
_CACHE_NAMES_ENGINE_SINCE = "0.9.0"


class _Metric(NamedTuple):
    """A row of the table as one release shows it."""

    row: page_table.Row
    kind: str
    meaning: str
    names_engine: bool
    by: tuple[str, tuple[str, ...]]  # the label that tells samples apart, "" for none, and its values


class Page:
    """The metrics page of one engine."""

    def __init__(
        self,
        release: str,
        model_name: str,
        engine: str = "0",
        *,
        cache_labels: Mapping[str, str],
        created: float,
        process: bool = True,
    ) -> None:
        """`cache_labels` are those of vllm:cache_config_info; `created`: when the engine's figures began, unix seconds.

        Without `process` nothing is told of the server's process: so it is where several share one page.
        """
        self._static = (release, model_name, engine)
        self._metrics = metrics_shown(release)
        self._created = number(created)
        self._shows_process = process
        labels = dict(cache_labels) if is_before(release, _CACHE_NAMES_ENGINE_SINCE) else {**cache_labels, "engine": engine}
        config = page_table.CACHE_CONFIG
        self._cache = f"{head(config.name, 'gauge', config.meaning)}{config.name}{labels_text(labels)} {number(1)}\n"
        self._edges: tuple[tuple[float, ...], ...] | None = None
        self._template = ""

    def text(self, figures: Figures, http: HttpFigures, process: ProcessFigures) -> str:
        """The whole page now."""
        edges = tuple(figures.histograms[metric.row.histogram].edges for metric in self._metrics if metric.row.histogram)
        if edges != self._edges:
            self._edges, self._template = edges, _template(*self._static, edges)
        numbers: list[str] = []
        for row, kind, _, _, (_, values) in self._metrics:
            if row.read is None:
                numbers += histogram_numbers(figures.histograms[row.histogram])
                numbers.append(self._created)
                continue
            numbers += [number(row.read(figures, value)) for value in values]
            if kind == "counter":
                numbers += [self._created] * len(values)
        first = process_text(process) if self._shows_process else ""
        return "".join((first, self._template % tuple(numbers), self._cache, http_text(http)))


@functools.cache
def metrics_shown(release: str) -> tuple[_Metric, ...]:
    """vLLM's own metrics that a release shows whatever the flags, in the order of the page, the cache's configuration aside."""
    if release not in wheels() or is_before(release, V1_DEFAULT_SINCE):
        raise BadInput(f"no page of vLLM {release}: only those from {V1_DEFAULT_SINCE} to {newest()} are known")
    known = metrics_of(release)
    shown: list[_Metric] = []
    for row in page_table.ROWS:
        entry = known.get(row.name)
        if entry is None or entry["engine"] != "V1":
            continue
        if entry["shown"] != "always" and row.name not in page_table.ALWAYS_THERE:
            continue
        if is_before(release, page_table.LEFT_OUT_BEFORE.get(row.name, V1_DEFAULT_SINCE)):
            continue
        meaning = row.meaning
        for end, earlier in page_table.EARLIER.get(row.name, ()):
            meaning = earlier if is_before(release, end) else meaning
        labels = entry["labels"]
        assert isinstance(labels, list | tuple)
        more = [str(label) for label in labels if label not in ("model_name", "engine")]
        values = tuple(value for value in row.by if not is_before(release, page_table.SINCE.get(value, V1_DEFAULT_SINCE)))
        shown.append(_Metric(row, str(entry["type"]), meaning, "engine" in labels, (more[0] if more else "", values)))
    return tuple(shown)


@functools.lru_cache(maxsize=64)
def _template(release: str, model_name: str, engine: str, edges: tuple[tuple[float, ...], ...]) -> str:
    """All lines of vLLM's own with a place for each number; `edges` of the histograms in their order."""
    parts: list[str] = []
    left = iter(edges)
    for row, kind, meaning, names_engine, (label, values) in metrics_shown(release):
        labels = {"model_name": model_name, **({"engine": engine} if names_engine else {})}
        sets = [{**labels, label: value} if label else labels for value in values]
        parts.append(literal(head(row.name, kind, meaning)))
        if kind == "histogram":
            parts.append(histogram_lines(row.name, labels, next(left)))
        else:
            parts += [value_line(row.name, one) for one in sets]
        if kind != "gauge":
            created = f"{row.name if kind == 'histogram' else row.name.removesuffix('_total')}_created"
            parts.append(literal(head(created, "gauge", meaning)))
            parts += [value_line(created, one) for one in sets]
    return "".join(parts)
