"""What one or two looks at a page of vLLM's metrics say of each engine, before anything is judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from plimsoll.domain.histogram import Histogram
from plimsoll.domain.metrics_page import Page, Sample
from plimsoll.domain.version import Version
from plimsoll.engine import tables
from plimsoll.engine.metrics import figure, on_page

ENGINES_MAX = 256
_SAMPLES_MAX, _BUCKETS_MAX = 4096, 32768
"""Of one name, over all engines: a page with more is made to keep us busy."""
_OF_ITS_OWN = frozenset({"reason", "sleep_state", "finished_reason", "source", "le"})
_GAUGES = ("kv_cache_usage", "running", "waiting", "swapped")
TOTALS = (
    "preemptions", "success", "prompt_tokens", "generation_tokens", "prompt_tokens_cached", "prefix_queries", "prefix_hits",
    "admission_rejections",
)  # fmt: skip
_CACHE_LABELS = (
    "num_gpu_blocks", "block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks_override", "sliding_window",
    "kv_offloading_size", "swap_space_bytes", "num_cpu_blocks",
)  # fmt: skip


class EngineFacts(NamedTuple):
    """One engine. `figures` by our names: gauges now, totals since its start; what the page does not show is not in it."""

    engine: str  # the rank among data-parallel engines; "" where the page has no such label
    model: str | None
    figures: Mapping[str, float]
    change: Mapping[str, float]  # of totals and of `steps` between the two looks; empty with one look, or after a restart
    first: Mapping[str, float]  # the gauges at the first of two looks
    cache: Mapping[str, str]  # the cache's configuration as the page shows it
    lines: Mapping[str, tuple[int, str]]  # figure to line and text, for evidence
    preempted_often: float | None = None  # share of finished requests that were thrown out more than once
    asleep: bool | None = None
    restarted: bool = False

    @property
    def label(self) -> str:
        """How a sentence names it."""
        return f"engine {self.engine}" if self.engine else "the engine"


class MetricsFacts(NamedTuple):
    """All of a page. `release_from` and `release_to` are guessed by the names it shows, and None where they tell nothing."""

    engines: tuple[EngineFacts, ...]
    gap_s: float | None = None
    release_from: str | None = None
    release_to: str | None = None
    skipped_lines: int = 0
    notes: tuple[str, ...] = ()


class _Look(NamedTuple):
    page: Page
    names: frozenset[str]

    def shown(self, name: str) -> str | None:
        return on_page(name, self.names)


def facts_of(first: Page, second: Page | None = None) -> MetricsFacts:
    """The facts of the newest look, and how the totals moved since the one before."""
    now = second or first
    gap_s = None
    if second is not None and first.at_s is not None and second.at_s is not None and second.at_s > first.at_s:
        gap_s = second.at_s - first.at_s
    looks = [_Look(page, page.names) for page in ((first, second) if second is not None else (first,))]
    engines = tuple(_engine(looks[-1], looks[0] if second is not None else None, key) for key in _engines(looks[-1]))
    notes = []
    if not engines:
        notes.append("the page shows no metric of vLLM: --disable-log-stats hides them all, or it is another program's page")
    notes += _not_seen(engines, looked_twice=second is not None)
    if now.skipped:
        notes.append(f"{now.skipped} lines of the page could not be read")
    low, high = _releases(looks[-1].names)
    return MetricsFacts(engines, gap_s, low, high, now.skipped, tuple(notes))


def _not_seen(engines: Sequence[EngineFacts], *, looked_twice: bool) -> list[str]:
    """What a page without anything wrong on it leaves open."""
    busy = any(engine.figures.get("running") or engine.figures.get("waiting") for engine in engines)
    if engines and not looked_twice and busy:
        return ["one look shows a moment: whether its requests move is not known (http://HOST:PORT is looked at twice)"]
    still = all(engine.change.get("steps", 0.0) == 0 for engine in engines)
    if engines and looked_twice and not busy and still:
        asks = "plimsoll guard --engine URL --canary sends one"
        return [f"it has nothing to do, and doctor sends it no request: whether it would answer one is not known ({asks})"]
    return []


def _engines(look: _Look) -> list[dict[str, str]]:
    """The label sets that tell engines apart: of the requests that run, or of whatever else is shown of each."""
    for name in ("running", "kv_cache_usage", "waiting", "generation_tokens"):
        shown = look.shown(name)
        if shown is None:
            continue
        keys: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
        for sample in look.page.of(shown):
            key = {k: v for k, v in sample.labels.items() if k not in _OF_ITS_OWN}
            keys.setdefault(tuple(sorted(key.items())), key)
        if keys:
            return list(keys.values())[:ENGINES_MAX]
    return []


def _engine(now: _Look, before: _Look | None, key: Mapping[str, str]) -> EngineFacts:
    lines: dict[str, tuple[int, str]] = {}
    figures = _figures(now, key, lines)
    change: dict[str, float] = {}
    first: dict[str, float] = {}
    restarted = False
    if before is not None:
        old = _figures(before, key, {})
        first = {name: old[name] for name in _GAUGES if name in old}
        change = {n: figures[n] - old[n] for n in (*TOTALS, "steps") if n in figures and n in old}
        if any(moved < 0 for moved in change.values()):
            change, restarted = {}, True
    per_request = _histogram(now, "request_preemptions", key)
    often = None
    if per_request is not None and per_request.size:
        often = 1 - sum(c for b, c in zip(per_request.bounds, per_request.counts, strict=False) if b <= 1) / per_request.size
    config = next(iter(_samples(now, "vllm:cache_config_info", key)), None)
    cache = {k: v for k in _CACHE_LABELS if config is not None and (v := config.labels.get(k, "None")) != "None"}
    return EngineFacts(
        key.get("engine", ""), key.get("model_name"), figures, change, first, cache, lines, often, _asleep(now, key), restarted
    )


def _figures(look: _Look, key: Mapping[str, str], lines: dict[str, tuple[int, str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in (*_GAUGES, *TOTALS):
        shown = look.shown(name)
        if shown is not None:
            _put(found, lines, name, _samples(look, shown, key))
    shown = look.shown("waiting_by_reason")
    if shown is not None:
        room = (s for s in _samples(look, shown, key) if s.labels.get("reason") == "capacity")
        _put(found, lines, "waiting_for_room", room)
    _put(found, lines, "steps", _samples(look, "vllm:iteration_tokens_total_count", key))
    for name in ("prompt_length", "output_length"):
        lengths = _histogram(look, name, key)
        if lengths is not None and lengths.mean is not None:
            found[f"{name}_mean"] = lengths.mean
    return found


def _put(found: dict[str, float], lines: dict[str, tuple[int, str]], name: str, samples: Iterable[Sample]) -> None:
    finite = [s for s in samples if math.isfinite(s.value)]
    if finite:
        found[name] = math.fsum(s.value for s in finite)
        largest = max(finite, key=lambda s: s.value)
        lines[name] = (largest.line, f"{largest.name} {largest.value:.10g}")


def _samples(look: _Look, name: str, key: Mapping[str, str]) -> list[Sample]:
    """Those that do not belong to another engine: a label that a sample lacks says nothing against it."""
    return [s for s in look.page.of(name)[:_SAMPLES_MAX] if all(s.labels.get(k, v) == v for k, v in key.items())]


def _histogram(look: _Look, name: str, key: Mapping[str, str]) -> Histogram | None:
    shown = look.shown(name)
    if shown is None or len(look.page.of(f"{shown}_bucket")) > _BUCKETS_MAX:
        return None
    return look.page.histogram(shown, key)


def _asleep(look: _Look, key: Mapping[str, str]) -> bool | None:
    awake = [s for s in _samples(look, figure("sleep_state").names[0], key) if s.labels.get("sleep_state") == "awake"]
    return awake[0].value == 0 if awake else None


def _releases(names: Iterable[str]) -> tuple[str | None, str | None]:
    """The oldest and the newest release that export all of these names; None where nothing bounds it."""
    shown = {name for name in names if name.startswith("vllm:")}
    low: Version | None = None
    high: Version | None = None
    newest = list(tables.wheels())[-1]
    spans: dict[str, list[tuple[Version, Version]]] = {}
    for key, stretches in tables.rows("metrics").items():
        name = key.rsplit(" ", 1)[0]
        if name in shown:
            spans.setdefault(name, []).extend((Version(row["from"]), Version(row["to"])) for row in stretches)
    for stretch in spans.values():
        first, last = min(one for one, _ in stretch), max(two for _, two in stretch)
        low = first if low is None or first > low else low
        high = last if high is None or last < high else high
    if low is None or high is None or high < low:
        return None, None
    return low.text, None if high.text == newest else high.text
