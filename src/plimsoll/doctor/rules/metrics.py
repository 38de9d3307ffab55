"""Judges a page of vLLM's metrics, or two looks at it a few seconds apart. A healthy busy server gives no finding.

One look knows totals since the start and gauges of this moment; two looks know what happens now. Each engine of a
data-parallel server is judged by itself; of several with the same trouble the worst is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from plimsoll.doctor.remedies.runtime import kv_remedies, saturated_remedies, wedge_remedies
from plimsoll.doctor.rules.contained import finding_of_page
from plimsoll.doctor.rules.trend_growth import FULL, ROOM, SEVERE_STORM, STORM, matters, recomputed_share
from plimsoll.doctor.words import finding, words
from plimsoll.findings import Code, Evidence, Finding, Severity
from plimsoll.vllm.metrics import figure, on_page, releases_with
from plimsoll.vllm.metrics_page import Histogram, Page, Sample

ENGINES_MAX = 256
_SAMPLES_MAX, _BUCKETS_MAX = 4096, 32768
"""Of one name, over all engines: a page with more is made to keep us busy."""
_OF_ITS_OWN = frozenset({"reason", "sleep_state", "finished_reason", "source", "le"})
_GAUGES = ("kv_cache_usage", "running", "waiting", "swapped")
TOTALS, _CACHE_LABELS = words("names")["page"]["totals"], words("names")["page"]["cache"]


class EngineMetrics(NamedTuple):
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

    engines: tuple[EngineMetrics, ...]
    gap_s: float | None = None
    release_from: str | None = None
    release_to: str | None = None
    skipped_lines: int = 0
    notes: tuple[str, ...] = ()


class _Look(NamedTuple):
    page: Page
    names: frozenset[str]  # the page makes them anew at every call

    def shown(self, name: str) -> str | None:
        return on_page(name, self.names)


def facts_of(first: Page, second: Page | None = None) -> MetricsFacts:
    """The facts of the newest look, and how the totals moved since the one before."""
    now = second or first
    looks = [_Look(page, page.names) for page in ((first, second) if second is not None else (first,))]
    gap_s = None
    if second is not None and first.at_s is not None and second.at_s is not None and second.at_s > first.at_s:
        gap_s = second.at_s - first.at_s
    # The label sets that tell engines apart: of the requests that run, or of whatever else is shown of each.
    keys: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for name in ("running", "kv_cache_usage", "waiting", "generation_tokens"):
        for sample in now.of(looks[-1].shown(name) or "") if not keys else ():
            key = {k: v for k, v in sample.labels.items() if k not in _OF_ITS_OWN}
            keys.setdefault(tuple(sorted(key.items())), key)
    engines = tuple(
        _engine(looks[-1], looks[0] if second is not None else None, key) for key in list(keys.values())[:ENGINES_MAX]
    )
    notes = []
    busy = any(engine.figures.get("running") or engine.figures.get("waiting") for engine in engines)
    if not engines:
        notes.append("the page shows no metric of vLLM: --disable-log-stats hides them all, or it is another program's page")
    elif second is None and busy:
        notes.append("one look shows a moment: whether its requests move is not known (http://HOST:PORT is looked at twice)")
    elif second is not None and not busy and all(engine.change.get("steps", 0.0) == 0 for engine in engines):
        asks = "plimsoll guard --engine URL --canary sends one"
        unknown = "it has nothing to do, and doctor sends it no request: whether it would answer one is not known"
        notes.append(f"{unknown} ({asks})")
    if now.skipped:
        notes.append(f"{now.skipped} lines of the page could not be read")
    low, high = releases_with(name for name in looks[-1].names if name.startswith("vllm:"))
    return MetricsFacts(engines, gap_s, low, high, now.skipped, tuple(notes))


def _engine(now: _Look, before: _Look | None, key: Mapping[str, str]) -> EngineMetrics:
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
    awake = [s for s in _samples(now, figure("sleep_state").names[0], key) if s.labels.get("sleep_state") == "awake"]
    return EngineMetrics(
        key.get("engine", ""), key.get("model_name"), figures, change, first, cache, lines, often,
        awake[0].value == 0 if awake else None, restarted,
    )  # fmt: skip


def _figures(look: _Look, key: Mapping[str, str], lines: dict[str, tuple[int, str]]) -> dict[str, float]:
    samples = {name: _samples(look, metric, key) for name in (*_GAUGES, *TOTALS) if (metric := look.shown(name)) is not None}
    waiting = _samples(look, look.shown("waiting_by_reason") or "", key)
    samples["waiting_for_room"] = [s for s in waiting if s.labels.get("reason") == "capacity"]
    samples["steps"] = _samples(look, "vllm:iteration_tokens_total_count", key)
    found: dict[str, float] = {}
    for name, some in samples.items():
        if finite := [s for s in some if math.isfinite(s.value)]:
            found[name] = math.fsum(s.value for s in finite)
            largest = max(finite, key=lambda s: s.value)
            lines[name] = (largest.line, f"{largest.name} {largest.value:.10g}")
    for name in ("prompt_length", "output_length"):
        lengths = _histogram(look, name, key)
        if lengths is not None and lengths.mean is not None:
            found[f"{name}_mean"] = lengths.mean
    return found


def _samples(look: _Look, name: str, key: Mapping[str, str]) -> list[Sample]:
    """Those that do not belong to another engine: a label that a sample lacks says nothing against it."""
    return [s for s in look.page.of(name)[:_SAMPLES_MAX] if all(s.labels.get(k, v) == v for k, v in key.items())]


def _histogram(look: _Look, name: str, key: Mapping[str, str]) -> Histogram | None:
    shown = look.shown(name)
    is_sane = shown is not None and len(look.page.of(f"{shown}_bucket")) <= _BUCKETS_MAX
    return look.page.histogram(shown, key) if shown is not None and is_sane else None


_FEWEST = 10.0  # preemptions since the start below which nothing is said
_FEWEST_NOW = 3.0  # the same within a few seconds
_HINT_S, _WEDGED_S = 60.0, 120.0
_LOW_HITS = 0.10
_LOOKED_UP = 100_000.0


class MetricsVerdict(NamedTuple):
    """The findings and facts of a metrics page."""

    findings: tuple[Finding, ...]
    facts: MetricsFacts


class _EngineFinding(NamedTuple):
    weight: float  # how bad, to pick the worst engine
    engine: EngineMetrics
    finding: Finding


def judge_pages(first: Page, second: Page | None = None, source: str = "", *, health: int | None = None) -> MetricsVerdict:
    """Findings and facts of one page, or of two looks at it in their order; `health` is the status of the server's /health."""
    source = source or first.source
    facts = facts_of(first, second)
    judged: list[_EngineFinding] = []
    for engine in facts.engines:
        storm = _storm(engine, source)
        full = _kv_full(engine, source) if storm is None else None
        pressed = storm or full
        judged += [one for one in (storm, full, _wedged(engine, facts, source), _saturated(engine, source)) if one is not None]
        if pressed is not None and (low := _low_hits(engine, source)) is not None:
            judged.append(low)
    findings = []
    for code in dict.fromkeys(one.finding.code for one in judged):
        same = sorted((one for one in judged if one.finding.code == code), key=lambda one: -one.weight)
        worst, engines = same[0].finding, len(facts.engines)
        among = f" {len(same)} of {engines} engines show it; the worst is {same[0].engine.label}." if engines > 1 else ""
        findings.append(worst._replace(because=worst.because + among))
    contained = finding_of_page(first if second is None else second, None if second is None else first, source)
    findings += [] if contained is None else [contained]
    if health == 503:
        findings.insert(0, finding("health-503", [Evidence(source, "/health answers 503")], first=wedge_remedies()))
    return MetricsVerdict(tuple(findings), facts)


def _evidence(engine: EngineMetrics, source: str, *figures: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(source, engine.lines[f][1], engine.lines[f][0]) for f in figures if f in engine.lines)


def _kv_full(engine: EngineMetrics, source: str) -> _EngineFinding | None:
    usage, running = engine.figures.get("kv_cache_usage"), engine.figures.get("running")
    waiting = engine.figures.get("waiting_for_room", engine.figures.get("waiting"))
    if usage is None or running is None or waiting is None or usage < FULL or not matters(waiting, running):
        return None
    twice_seen = engine.first.get("kv_cache_usage", 0.0) >= FULL and matters(engine.first.get("waiting", 0.0), running)
    moment = " at this moment; a second look or a range of time would show whether it lasts."
    because = f"The KV cache of {engine.label} is {usage:.0%} full with {running:.0f} requests running, and {waiting:.0f} wait"
    told = finding(
        "kv-saturated", _evidence(engine, source, "kv_cache_usage", "running", "waiting_for_room", "waiting"),
        because + (", at both looks." if twice_seen else moment), confidence=0.75 if twice_seen else None,
        first=kv_remedies(engine.cache, engine.figures),
    )  # fmt: skip
    return _EngineFinding(waiting / max(1.0, running), engine, told)


def _storm(engine: EngineMetrics, source: str) -> _EngineFinding | None:
    since_start = _twice(engine, engine.figures)
    now = _twice(engine, engine.change) if engine.change else None
    preempted, lately = engine.figures.get("preemptions", 0.0), engine.change.get("preemptions", 0.0)
    goes_on = now is not None and now >= STORM and lately >= _FEWEST_NOW
    if not goes_on and (since_start is None or since_start < STORM or preempted < _FEWEST):
        return None
    share = now if goes_on and now is not None else since_start
    assert share is not None
    if goes_on:
        said, confidence = f"{lately:.0f} preemptions between the two looks", 0.85
    elif engine.change and lately == 0:
        said, confidence = f"{preempted:.0f} preemptions since the start, none of them between the two looks", 0.4
    else:
        full = engine.figures.get("kv_cache_usage", 0.0) >= FULL
        said = f"{preempted:.0f} preemptions since the start; one look cannot tell when they were"
        confidence = 0.65 if full else 0.5
    per_request = preempted / engine.figures["success"] if engine.figures.get("success") else None
    often = engine.preempted_often
    because = (
        f"{engine.label.capitalize()}: {said}. Up to {share:.0%} of all computed tokens were recomputed"
        + (f" ({per_request:.2f} preemptions for each finished request)" if per_request is not None else "")
        + (f"; {often:.0%} of requests were preempted more than once." if often else ".")
    )
    severity = Severity.CRITICAL if goes_on and share >= SEVERE_STORM else Severity.WARNING
    severity = severity if goes_on or not engine.change else Severity.INFO
    told = finding(
        "preemption-storm", _evidence(engine, source, "preemptions", "success", "kv_cache_usage"), because, severity=severity,
        confidence=confidence, first=kv_remedies(engine.cache, {**engine.figures, "running": 0.0}),
    )  # fmt: skip
    return _EngineFinding(share, engine, told)


def _twice(engine: EngineMetrics, counts: Mapping[str, float]) -> float | None:
    done = counts.get("prompt_tokens", 0.0) + counts.get("generation_tokens", 0.0) - counts.get("prompt_tokens_cached", 0.0)
    # The tokens a victim had in the cache, roughly: its prompt and half of its answer.
    prompt, output = engine.figures.get("prompt_length_mean"), engine.figures.get("output_length_mean")
    if (prompt is None or output is None) and (finished := engine.figures.get("success")):
        prompt = engine.figures.get("prompt_tokens", 0.0) / finished
        output = engine.figures.get("generation_tokens", 0.0) / finished
    length = None if prompt is None or output is None else prompt + output / 2
    return recomputed_share(counts.get("preemptions"), done, length)


def _wedged(engine: EngineMetrics, facts: MetricsFacts, source: str) -> _EngineFinding | None:
    work = engine.figures.get("running", 0.0) + engine.figures.get("waiting", 0.0)
    before = engine.first.get("running", 0.0) + engine.first.get("waiting", 0.0)
    moved = [engine.change[name] for name in ("steps", "generation_tokens", "prompt_tokens") if name in engine.change]
    if engine.asleep or not moved or any(moved) or min(work, before) <= 0 or facts.gap_s is None:
        return None
    long = facts.gap_s >= _WEDGED_S
    because = (
        f"{engine.label.capitalize()} has {work:.0f} requests and made no step in {facts.gap_s:.0f} s, between two looks. "
        "A paused engine and one long prompt being read look the same"
        + ("." if long else f": look again after {_WEDGED_S:.0f} s.")
    )
    told = finding(
        "engine-wedged" if long else "perhaps-wedged",
        _evidence(engine, source, "steps", "generation_tokens", "running", "waiting"), because,
        confidence=None if long else 0.5 if facts.gap_s >= _HINT_S else 0.3, first=wedge_remedies(),
    )  # fmt: skip
    return _EngineFinding(work, engine, told)


def _saturated(engine: EngineMetrics, source: str) -> _EngineFinding | None:
    usage, running, waiting = engine.figures.get("kv_cache_usage"), engine.figures.get("running"), engine.figures.get("waiting")
    before = engine.first.get("waiting")
    stepped = engine.change.get("steps", engine.change.get("generation_tokens", 0.0))
    if usage is None or running is None or waiting is None or before is None or usage >= ROOM or stepped <= 0:
        return None
    grows = waiting - before > max(2.0, 0.05 * before)
    if not (matters(waiting, running) and matters(before, running) and grows):
        return None
    refused = engine.change.get("admission_rejections", 0.0)
    because = (
        f"The queue of {engine.label} grew from {before:.0f} to {waiting:.0f} between two looks while {running:.0f} requests "
        f"run and the KV cache is only {usage:.0%} full: the limit is --max-num-seqs or the GPU's speed, not memory"
        + (f"; {refused:.0f} requests were refused meanwhile." if refused else ".")
    )
    shown = _evidence(engine, source, "waiting", "running", "kv_cache_usage")
    told = finding("engine-saturated", shown, because, first=saturated_remedies(running, usage))
    return _EngineFinding(waiting, engine, told)


def _low_hits(engine: EngineMetrics, source: str) -> _EngineFinding | None:
    """Told only beside a pressed cache: traffic without common beginnings has no hits and is healthy."""
    if engine.cache.get("enable_prefix_caching", "True") != "True":
        return None
    # Where the page shows served tokens these are better: a request that waits is looked up again and again.
    looked, hits = engine.figures.get("prompt_tokens"), engine.figures.get("prompt_tokens_cached")
    if hits is None:
        looked, hits = engine.figures.get("prefix_queries"), engine.figures.get("prefix_hits")
    if looked is None or hits is None or looked < _LOOKED_UP or hits / looked >= _LOW_HITS:
        return None
    because = (
        f"Of {looked:,.0f} prompt tokens of {engine.label} {hits / looked:.1%} came out of the prefix cache. "
        "Either the requests have no common beginning, or a full cache drops it before it is used again."
    )
    shown = _evidence(engine, source, "prompt_tokens_cached", "prefix_hits")
    return _EngineFinding(1 - hits / looked, engine, finding("low-hit-rate", shown, because))


# A page names its server by the start of its process or of its counters. Counters only rise, so they order the pages of one
# server. A page without such a moment is compared with no other: two replicas of one model look like one server that worked.
_STARTED = "process_start_time_seconds"
_USED = "process_cpu_seconds_total"

Identity = frozenset[tuple[str, float]]


def judge_saved(pages: Sequence[Page]) -> Iterator[tuple[Page, MetricsVerdict]]:
    """Each page with its verdict: as a second look wherever an earlier page of the same server is among them."""
    for chain in chains(pages):
        looks = [pages[place] for place in chain]
        if len(looks) == 1:
            yield looks[0], judge_pages(looks[0])
            continue
        later = [judge_pages(first, second, second.source) for first, second in pairwise(looks)]
        verdict = judge_pages(looks[0])
        pressed = any(one.code.startswith("kv.") and one.severity is not Severity.INFO for two in later for one in two.findings)
        found = () if pressed else tuple(one for one in verdict.findings if one.code is Code.KV_SATURATED)
        note = f"the first of {len(looks)} looks at one server, by the start that they name; the next is {looks[1].source}"
        yield looks[0], MetricsVerdict(found, verdict.facts._replace(notes=(note,)))
        yield from zip(looks[1:], later, strict=True)


def chains(pages: Sequence[Page]) -> list[list[int]]:
    """The places of the pages, those of one server together and the oldest first; a page alone is a chain of one."""
    found: dict[Identity | int, list[int]] = {}
    for place, page in enumerate(pages):
        shown = {(_STARTED, sample.value) for sample in page.of(_STARTED) if math.isfinite(sample.value)}
        if not shown:
            births = (name for name in page.by_name if name.startswith("vllm:") and name.endswith("_created"))
            shown = {(name, page.by_name[name][0].value) for name in births}
        found.setdefault(frozenset(shown) or place, []).append(place)

    def counted(place: int) -> tuple[float, float]:
        page = pages[place]
        names = (name for name in page.by_name if name.startswith("vllm:") and name.endswith(("_total", "_count")))
        return math.fsum(page.total(name) or 0.0 for name in names), page.total(_USED) or 0.0

    return [sorted(chain, key=counted) for chain in found.values()]
