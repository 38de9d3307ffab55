"""Judges a page of vLLM's metrics, or two looks at it a few seconds apart. A healthy busy server gives no finding.

One look knows totals since the start and gauges of this moment; two looks know what happens now. Each engine of a
data-parallel server is judged by itself; of several with the same trouble the worst is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.doctor.contained_state import finding_of_page
from plimsoll.doctor.metrics_facts import EngineFacts, MetricsFacts, facts_of
from plimsoll.doctor.metrics_queues import FULL, ROOM, SEVERE_STORM, STORM, matters, share_done_twice
from plimsoll.doctor.metrics_remedies import kv_not_remedies, kv_remedies, saturated_remedies, wedge_remedies
from plimsoll.domain.finding import Code, Evidence, Finding, Severity
from plimsoll.domain.metrics_page import Page

_FEWEST = 10.0  # preemptions since the start below which nothing is said
_FEWEST_NOW = 3.0  # the same within a few seconds
_HINT_S, _WEDGED_S = 60.0, 120.0
_LOW_HITS = 0.10
_LOOKED_UP = 100_000.0


class MetricsVerdict(NamedTuple):
    """What is wrong, and what the page says."""

    findings: tuple[Finding, ...]
    facts: MetricsFacts


class _Judged(NamedTuple):
    weight: float  # how bad, to pick the worst engine
    engine: EngineFacts
    finding: Finding


def judge_pages(first: Page, second: Page | None = None, source: str = "", *, health: int | None = None) -> MetricsVerdict:
    """Findings and facts of one page, or of two looks at it in their order; `health` is the status of the server's /health."""
    source = source or first.source
    facts = facts_of(first, second)
    judged: list[_Judged] = []
    for engine in facts.engines:
        storm = _storm(engine, source)
        full = _kv_full(engine, source) if storm is None else None
        pressed = storm or full
        judged += [one for one in (storm, full, _wedged(engine, facts, source), _saturated(engine, source)) if one is not None]
        if pressed is not None and (low := _low_hits(engine, source)) is not None:
            judged.append(low)
    findings = [_worst(code, judged, len(facts.engines)) for code in dict.fromkeys(one.finding.code for one in judged)]
    contained = finding_of_page(first if second is None else second, None if second is None else first, source)
    findings += [] if contained is None else [contained]
    if health == 503:
        findings.insert(0, _dead(source))
    return MetricsVerdict(tuple(findings), facts)


def _worst(code: Code, judged: list[_Judged], engines: int) -> Finding:
    same = sorted((one for one in judged if one.finding.code == code), key=lambda one: -one.weight)
    worst = same[0].finding
    if engines < 2:
        return worst
    among = f" {len(same)} of {engines} engines show it; the worst is {same[0].engine.label}."
    return worst._replace(because=worst.because + among)


def _evidence(engine: EngineFacts, source: str, *figures: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(source, engine.lines[f][1], engine.lines[f][0]) for f in figures if f in engine.lines)


def _queue(engine: EngineFacts) -> float | None:
    """Those that wait for room; where the page does not say why they wait, all of them."""
    return engine.figures.get("waiting_for_room", engine.figures.get("waiting"))


def _kv_full(engine: EngineFacts, source: str) -> _Judged | None:
    usage, running, waiting = engine.figures.get("kv_cache_usage"), engine.figures.get("running"), _queue(engine)
    if usage is None or running is None or waiting is None or usage < FULL or not matters(waiting, running):
        return None
    twice_seen = engine.first.get("kv_cache_usage", 0.0) >= FULL and matters(engine.first.get("waiting", 0.0), running)
    because = (
        f"The KV cache of {engine.label} is {usage:.0%} full with {running:.0f} requests running, and {waiting:.0f} wait"
        + (
            ", at both looks."
            if twice_seen
            else " at this moment; a second look or a range of time would show whether it lasts."
        )
    )
    finding = Finding(
        Code.KV_SATURATED, Severity.WARNING, 0.75 if twice_seen else 0.55, "The KV cache is full and requests queue for it",
        because, _evidence(engine, source, "kv_cache_usage", "running", "waiting_for_room", "waiting"),
        kv_remedies(engine.cache, engine.figures), kv_not_remedies(),
    )  # fmt: skip
    return _Judged(waiting / max(1.0, running), engine, finding)


def _storm(engine: EngineFacts, source: str) -> _Judged | None:
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
        f"{engine.label.capitalize()}: {said}. Up to {share:.0%} of all computed tokens were computed a second time"
        + (f" ({per_request:.2f} preemptions for each finished request)" if per_request is not None else "")
        + (f"; {often:.0%} of requests were thrown out more than once." if often else ".")
    )
    severity = Severity.CRITICAL if goes_on and share >= SEVERE_STORM else Severity.WARNING
    severity = severity if goes_on or not engine.change else Severity.INFO
    finding = Finding(
        Code.KV_PREEMPTION_STORM, severity, confidence, "Requests are thrown out of the KV cache and computed again",
        because, _evidence(engine, source, "preemptions", "success", "kv_cache_usage"),
        kv_remedies(engine.cache, {**engine.figures, "running": 0.0}), kv_not_remedies(),
    )  # fmt: skip
    return _Judged(share, engine, finding)


def _twice(engine: EngineFacts, counts: Mapping[str, float]) -> float | None:
    done = counts.get("prompt_tokens", 0.0) + counts.get("generation_tokens", 0.0) - counts.get("prompt_tokens_cached", 0.0)
    return share_done_twice(counts.get("preemptions"), done, _length_at_preemption(engine))


def _length_at_preemption(engine: EngineFacts) -> float | None:
    """The tokens a victim had in the cache, roughly: its prompt and half of its answer."""
    prompt, output = engine.figures.get("prompt_length_mean"), engine.figures.get("output_length_mean")
    finished = engine.figures.get("success")
    if (prompt is None or output is None) and finished:
        prompt = engine.figures.get("prompt_tokens", 0.0) / finished
        output = engine.figures.get("generation_tokens", 0.0) / finished
    return None if prompt is None or output is None else prompt + output / 2


def _wedged(engine: EngineFacts, facts: MetricsFacts, source: str) -> _Judged | None:
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
    confidence = 0.7 if long else 0.5 if facts.gap_s >= _HINT_S else 0.3
    finding = Finding(
        Code.ENGINE_WEDGED, Severity.CRITICAL if long else Severity.WARNING, confidence,
        "The engine has work and makes no step" if long else "The engine may be stuck: it has work and made no step",
        because, _evidence(engine, source, "steps", "generation_tokens", "running", "waiting"), wedge_remedies(), (),
    )  # fmt: skip
    return _Judged(work, engine, finding)


def _saturated(engine: EngineFacts, source: str) -> _Judged | None:
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
    finding = Finding(
        Code.ENGINE_SATURATED, Severity.WARNING, 0.5, "More requests arrive than the engine serves, with room in the KV cache",
        because, _evidence(engine, source, "waiting", "running", "kv_cache_usage"), saturated_remedies(running, usage),
        ("more KV cache: it is not full",),
    )  # fmt: skip
    return _Judged(waiting, engine, finding)


def _low_hits(engine: EngineFacts, source: str) -> _Judged | None:
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
    finding = Finding(
        Code.PREFIX_CACHE_LOW_HIT_RATE, Severity.INFO, 0.3, "The prefix cache seldom helps", because,
        _evidence(engine, source, "prompt_tokens_cached", "prefix_hits"), (),
        ("resetting or turning off the prefix cache: cached blocks that nobody uses count as free",),
    )  # fmt: skip
    return _Judged(1 - hits / looked, engine, finding)


def _dead(source: str) -> Finding:
    return Finding(
        Code.ENGINE_DEAD, Severity.CRITICAL, 0.9, "The engine is dead; only the web server still answers",
        "/health answers 503: the engine's process has failed. The page's gauges are those of its last step.",
        (Evidence(source, "/health answers 503"),), wedge_remedies(), (),
    )  # fmt: skip
