"""Judges what changed over time: a Prometheus range, or the periodic lines of a log.

Every finding says its slope or duration, how sure it is, and the time to the limit or why there is no forecast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from plimsoll.doctor.metrics_remedies import kv_not_remedies, kv_remedies
from plimsoll.doctor.trend_engine import (
    STUCK_RANGE_S,
    judge_log_preemption,
    judge_queue,
    judge_stuck_log,
    judge_twice,
    stuck_finding,
)
from plimsoll.doctor.trend_log import Preempted, kv_tokens_of_log, moments_of_log, preemptions_of_log
from plimsoll.doctor.trend_memory import judge_gpu, judge_host
from plimsoll.doctor.trend_moments import Moment
from plimsoll.doctor.trend_words import duration
from plimsoll.domain.finding import Code, Evidence, Finding, Severity
from plimsoll.domain.log import Log
from plimsoll.domain.series import Series

__all__ = ["judge_log_trends", "judge_preemption_lines", "judge_trends"]

_OF_ITS_OWN = frozenset({"reason", "sleep_state", "finished_reason", "le", "__name__"})
_TOTALS = ("preemptions", "success", "prompt_tokens", "generation_tokens", "steps")
_OFTEN = 51  # the first engine warns at its 1st, 51st, 101st ... preemption
_A_MINUTE = 1.0

_Engine = Mapping[str, Sequence[Series]]


def judge_trends(series: Sequence[Series], source: str) -> tuple[Finding, ...]:
    """What a range of time shows: of several series with the same trouble the worst stands for all."""
    found = judge_gpu(series, source) + judge_host(series, source)
    end_s = max((s.times[-1] for s in series if s.times), default=0.0)
    for key, engine in _engines(series).items():
        found += _judge_engine(engine, _named(dict(key)), end_s, source)
    return _worst_of_each(found)


def judge_log_trends(log: Log) -> tuple[Finding, ...]:
    """What a log's periodic lines and preemption warnings show."""
    found = list(judge_preemption_lines(log))
    warned = bool([f for f in found if f.severity is not Severity.INFO])
    tokens = kv_tokens_of_log(log)
    ends = _ends(log)
    for whose, moments in moments_of_log(log).items():
        who = f"engine {whose.engine}" if whose.engine else "the engine"
        storm = judge_log_preemption(moments, tokens, log.source, who)
        queue = judge_queue(moments, log.source, who)
        if queue is not None and queue.code is Code.KV_SATURATED and (storm is not None or warned):
            queue = None  # the same trouble, and the storm says more
        stuck = judge_stuck_log(moments, ends.get((whose.server, whose.process)), log.source, who)
        found += [one for one in (storm, queue, stuck) if one is not None]
    return _worst_of_each(found)


def judge_preemption_lines(log: Log) -> tuple[Finding, ...]:
    """The first engine's own warnings: a storm if it threw out many in a short time, otherwise no more than a word."""
    found = [_warned(lines, log.source) for lines in preemptions_of_log(log).values()]
    return _worst_of_each(found)


def _warned(lines: Sequence[Preempted], source: str) -> Finding:
    shown = sum(_part(part) for part in _parts(lines))
    # The count goes back to the server's start, also where the log does not.
    total = max(shown, *(line.total for line in lines))
    first, last = lines[0].line, lines[-1].line
    seconds = last.at - first.at if last.at is not None and first.at is not None and last.at > first.at else None
    often = total >= _OFTEN
    per_minute = (shown - 1) / (seconds / 60) if seconds else None
    slow = per_minute is not None and per_minute < _A_MINUTE
    if not often:
        severity, confidence = Severity.INFO, 0.35
    elif slow:
        severity, confidence = Severity.INFO, 0.4
    else:
        severity, confidence = Severity.WARNING, 0.85 if total > 2 * _OFTEN else 0.75
    because = (
        f"The scheduler counted {total} preemptions or more"
        + (f" since its start, {shown} of them" if total > shown else "")
        + (f" in {duration(seconds)} ({per_minute:.1f} a minute)" if seconds and per_minute is not None else "")
        + ": requests lost their KV blocks and were computed or swapped in again. It warns only at every fiftieth. "
        + ("" if often and not slow else "That few cost little. ")
        + "No forecast: it is at its limit already."
    )
    ends = [first] if first is last else [first, last]
    return Finding(
        Code.KV_PREEMPTION_STORM, severity, confidence,
        "Requests are thrown out of the KV cache and computed again" if often else "A request was thrown out of the KV cache",
        because, tuple(Evidence(source, line.text[:1000], line.number) for line in ends),
        kv_remedies({}, {}), kv_not_remedies(),
    )  # fmt: skip


def _parts(lines: Sequence[Preempted]) -> list[list[Preempted]]:
    """Apart at each restart, where the count begins anew."""
    parts: list[list[Preempted]] = []
    for one in lines:
        if parts and one.total > parts[-1][-1].total:
            parts[-1].append(one)
        else:
            parts.append([one])
    return parts


def _part(part: Sequence[Preempted]) -> int:
    # A log that was cut at its head begins in the middle of the count: only what it shows is counted.
    return part[-1].total if part[0].total == 1 else part[-1].total - part[0].total + 1


def _ends(log: Log) -> dict[tuple[str, str], float]:
    """When each process was last heard of, and its server: a wedged engine's web server may still speak."""
    found: dict[tuple[str, str], float] = {}
    newest: dict[str, float] = {}
    for line in log.lines:
        if line.at is not None:
            newest[line.server] = line.at
            found[(line.server, line.process)] = line.at
    return {key: newest[key[0]] for key in found}


def _engines(series: Iterable[Series]) -> dict[tuple[tuple[str, str], ...], dict[str, list[Series]]]:
    """The series of vLLM and of logs by engine, then by figure."""
    found: dict[tuple[tuple[str, str], ...], dict[str, list[Series]]] = {}
    kept = {"running", "waiting", "waiting_by_reason", "kv_cache_usage", "sleep_state", *_TOTALS}
    for one in series:
        if one.figure in kept and one.times:
            key = tuple(sorted((k, v) for k, v in one.labels.items() if k not in _OF_ITS_OWN))
            found.setdefault(key, {}).setdefault(one.figure, []).append(one)
    return {key: figures for key, figures in found.items() if "running" in figures}


def _judge_engine(engine: _Engine, who: str, end_s: float, source: str) -> list[Finding]:
    moments = _moments(engine)
    if not moments:
        return []
    totals = {name: sum(_increase(s) for s in engine.get(name, ())) for name in _TOTALS if name in engine}
    finished = totals.get("success", 0.0)
    tokens = totals.get("prompt_tokens", 0.0) + totals.get("generation_tokens", 0.0)
    length = None
    if finished > 0:
        length = (totals.get("prompt_tokens", 0.0) + totals.get("generation_tokens", 0.0) / 2) / finished
    shown = tuple(
        Evidence(source, f"{s.name} {s.values[0]:.10g} @{s.times[0]:.0f} to {s.values[-1]:.10g} @{s.times[-1]:.0f}")
        for s in engine.get("preemptions", ())
    )
    seconds = moments[-1].at_s - moments[0].at_s
    storm = judge_twice(totals.get("preemptions", 0.0), tokens, length, seconds, source, who, shown, {})
    queue = judge_queue(moments, source, who)
    if storm is not None and queue is not None and queue.code is Code.KV_SATURATED:
        queue = None
    return [one for one in (storm, queue, _stuck(engine, moments, end_s, source, who)) if one is not None]


def _moments(engine: _Engine) -> list[Moment]:
    room = [s for s in engine.get("waiting_by_reason", ()) if s.labels.get("reason") == "capacity"]
    waiting, kv = _at(room or engine.get("waiting", ())), _at(engine.get("kv_cache_usage", ()))
    return [
        Moment(t, running, waiting.get(t, 0.0), kv.get(t))
        for t, running in sorted(_at(engine["running"]).items())
        if t in waiting or not waiting
    ]


def _at(series: Sequence[Series]) -> dict[float, float]:
    """Values by time; a figure under its old and its new name is one figure."""
    return {t: v for one in series for t, v in zip(one.times, one.values, strict=True) if math.isfinite(v)}


def _stuck(engine: _Engine, moments: Sequence[Moment], end_s: float, source: str, who: str) -> Finding | None:
    counters = [s for name in ("steps", "generation_tokens", "prompt_tokens") for s in engine.get(name, ())]
    asleep = any(s.values[-1] == 0 for s in engine.get("sleep_state", ()) if s.labels.get("sleep_state") == "awake")
    last = moments[-1].at_s
    # A target that is no longer scraped is down or gone, which is another matter.
    if asleep or not counters or last < end_s - 60:
        return None
    moved = max(
        (t for s in counters for (_, a), (t, b) in pairwise(zip(s.times, s.values, strict=True)) if a != b), default=None
    )
    since = moved if moved is not None else max(s.times[0] for s in counters)
    idle = [m.at_s for m in moments if m.at_s >= since and m.running + m.waiting <= 0]
    since = max([since, *idle])
    if last - since < STUCK_RANGE_S or sum(m.at_s > since for m in moments) < 3:
        return None
    shown = tuple(Evidence(source, f"{s.name} {s.values[-1]:.10g} since @{since:.0f}") for s in counters[:2])
    return stuck_finding(last - since, moments[-1].running + moments[-1].waiting, who, shown, 0.75)


def _increase(one: Series) -> float:
    """What a counter counted, also over restarts, where it begins at nothing again."""
    values = [v for v in one.values if math.isfinite(v)]
    return sum(b - a if b >= a else b for a, b in pairwise(values))


def _named(labels: Mapping[str, str]) -> str:
    words = [f"{name} {labels[name]}" for name in ("engine", "pod", "instance") if labels.get(name)]
    return " of ".join(words) or "the engine"


def _worst_of_each(found: Iterable[Finding]) -> tuple[Finding, ...]:
    rank = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
    worst: dict[Code, Finding] = {}
    count: dict[Code, int] = {}
    for one in found:
        count[one.code] = count.get(one.code, 0) + 1
        best = worst.get(one.code)
        if best is None or (rank[one.severity], one.confidence) > (rank[best.severity], best.confidence):
            worst[one.code] = one
    ordered = sorted(worst.values(), key=lambda f: (-rank[f.severity], -f.confidence))
    return tuple(
        f._replace(because=f"{f.because} {count[f.code] - 1} more show the same.") if count[f.code] > 1 else f for f in ordered
    )
