"""Judges what changed over time: a Prometheus range, or the periodic lines of a log.

Every finding says its slope or duration, how sure it is, and the time to the limit or why there is no forecast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from plimsoll.doctor.remedies.runtime import kv_remedies, saturated_remedies, wedge_remedies
from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.doctor.rules.timeline import is_servers
from plimsoll.doctor.rules.trend_growth import (
    SEVERE_STORM,
    STORM,
    EngineSample,
    Growth,
    MetricSeries,
    ahead,
    duration,
    forecast,
    growth,
    is_full,
    median,
    overrun,
    rate,
    recomputed_share,
    saturated,
)
from plimsoll.doctor.words import finding
from plimsoll.findings import Code, Evidence, Finding, Severity
from plimsoll.units import GIB, MIB, format_gib
from plimsoll.vllm.log_lines import KV_SIZE, PERIODIC_STATS

EVERY_S = 10.0
"""Between two periodic lines, where the lines have no time of their own."""
TEXT_MAX = 1000
_MARK, _PREEMPTED = "Avg prompt throughput", "is preempted by"


class EngineId(NamedTuple):
    """The engine a line speaks of: the container it ran in, the process that said it, and its rank where the line has one."""

    server: str
    process: str
    engine: str


# The smallest --max-num-seqs that vLLM takes where none is given.
_LEAST_DEFAULT = 128.0


def moments_of_log(log: Log) -> Mapping[EngineId, Sequence[EngineSample]]:
    """The periodic lines of each engine in their order; without times of their own they count ten seconds each."""
    found: dict[EngineId, list[EngineSample]] = {}
    most = None
    for line in log.lines:
        if _MARK not in line.text:
            if "non-default args: " in line.text:
                given = re.search(r"'max_num_seqs': (\d{1,9})", line.text)
                most = float(given[1]) if given else _LEAST_DEFAULT
            continue
        text = line.text[:TEXT_MAX]
        said, engine = re.search(PERIODIC_STATS, text), re.search(r"Engine (\d{1,6}): Avg prompt", text)
        names = ("running", "waiting", "kv_percent", "prompt_per_s", "generation_per_s")
        running, waiting, percent, prompt, generation = (_number(said[name]) if said else None for name in names)
        if running is None or waiting is None:
            continue
        counted = re.search(r"Preemptions: (\d{1,9})", text)
        of_it = found.setdefault(EngineId(line.server, line.process, str(int(engine[1])) if engine else ""), [])
        at = line.at if line.at is not None else of_it[-1].at_s + EVERY_S if of_it else 0.0
        of_it.append(EngineSample(
            at, running, waiting, percent / 100 if percent is not None else None, prompt, generation,
            _number(counted[1]) if counted else None, line.number, text, most,
        ))  # fmt: skip
    return found


def _number(text: str) -> float | None:
    try:
        return float(text[:24])
    except ValueError:
        return None


PREEMPTIONS_LEAST = 10.0
STUCK_LOG_S = 60.0
STUCK_RANGE_S = 120.0
_LONG_S = 180.0
_LINES_LEAST = 6


def judge_queue(moments: Sequence[EngineSample], source: str, who: str) -> Finding | None:
    """kv.saturated or engine.saturated, if a queue lasted; None for a busy server with a short queue."""
    full = saturated(moments)
    if full is not None:
        share = sum(is_full(m.kv, m.running, m.most_running) for m in moments) / len(moments)
        most = max(full.moments, key=lambda m: m.waiting)
        running = median(m.running for m in full.moments)
        because = (
            f"For {duration(full.seconds)} the KV cache of {who} was full ({full.full:.0%} of that time) while requests "
            f"waited: up to {most.waiting:.0f}, with {running:.0f} running. Over all that was seen it was full {share:.0%} of "
            f"the time. No forecast: it is at its limit already."
        )
        return finding(
            "kv-saturated", _lines(source, full.moments[0], full.moments[-1], most), because,
            confidence=0.85 if full.seconds >= _LONG_S else 0.7, first=kv_remedies({}, {"running": running}),
        )  # fmt: skip
    grown = overrun(moments)
    if grown is None:
        return None
    first, last = grown.moments[0], grown.moments[-1]
    running, usage = median(m.running for m in grown.moments), median(m.kv or 0.0 for m in grown.moments)
    because = (
        f"The queue of {who} grew from {first.waiting:.0f} to {last.waiting:.0f} in {duration(grown.seconds)} with "
        f"{running:.0f} running and the KV cache {usage:.0%} full: --max-num-seqs or the GPU's speed is the limit, not memory. "
        "No forecast: a queue has no limit."
    )
    offers = saturated_remedies(running, usage)
    return finding("engine-saturated", _lines(source, first, last), because, confidence=0.6, first=offers)


def judge_recompute(
    preemptions: float, tokens_done: float, length: float | None, seconds: float, source: str, who: str,
    evidence: tuple[Evidence, ...], figures: Mapping[str, float],
) -> Finding | None:  # fmt: skip
    """kv.preemption-storm by the recompute share."""
    share = recomputed_share(preemptions, tokens_done, length)
    if share is None or share < STORM or preemptions < PREEMPTIONS_LEAST:
        return None
    because = (
        f"{preemptions:.0f} preemptions on {who} in {duration(seconds)}: up to {share:.0%} of all computed tokens were "
        "recomputed. No forecast: it is at its limit already."
    )
    return finding(
        "preemption-storm", evidence or (Evidence(source, f"{preemptions:.0f} preemptions"),), because,
        severity=Severity.CRITICAL if share >= SEVERE_STORM else None, first=kv_remedies({}, figures),
    )  # fmt: skip


def judge_log_preemption(moments: Sequence[EngineSample], kv_tokens: float | None, source: str, who: str) -> Finding | None:
    """The same from periodic lines, where they count preemptions."""
    hit = [m for m in moments if (m.preempted or 0.0) > 0]
    count = sum(m.preempted or 0.0 for m in hit)
    if hit:
        busy = [m for m in moments if m.at_s >= hit[0].at_s and m.at_s <= hit[-1].at_s]
        seconds = max(10.0, hit[-1].at_s - hit[0].at_s)
        every = seconds / max(1, len(busy) - 1) if len(busy) > 1 else 10.0
        done = sum((m.prompt_per_s or 0.0) + (m.generation_per_s or 0.0) for m in busy) * every
        lengths = [kv_tokens * m.kv / m.running for m in busy if kv_tokens and m.kv and m.running]
        if lengths:
            evidence, figures = _lines(source, hit[0], hit[-1]), {"running": median(m.running for m in hit)}
            return judge_recompute(count, done, median(lengths), seconds, source, who, evidence, figures)
    if count < PREEMPTIONS_LEAST:
        return None
    running = median(m.running for m in hit)
    if len(hit) < _LINES_LEAST and count < running:
        return None
    because = (
        f"{len(hit)} periodic lines of {who} show preempted requests ({count:.0f} with {running:.0f} running)."
        " The recompute share cannot be known from this log. No forecast: it is at its limit already."
    )
    return finding(
        "preemption-storm", _lines(source, hit[0], hit[-1]), because, confidence=0.55,
        first=kv_remedies({}, {"running": running}),
    )  # fmt: skip


def stuck_finding(seconds: float, work: float, who: str, evidence: tuple[Evidence, ...], confidence: float) -> Finding:
    """engine.wedged: work, and no step to the end of what was seen."""
    because = (
        f"{who.capitalize()} has {work:.0f} requests and made no token in the last {duration(seconds)} that were seen. "
        "A paused engine and one very long prompt look the same. No forecast: a stuck step does not return."
    )
    return finding("wedged-for-long", evidence, because, confidence=confidence, first=wedge_remedies())


def judge_stuck_log(moments: Sequence[EngineSample], last_at_s: float | None, source: str, who: str) -> Finding | None:
    """A wedge in a log: requests and no token, for a minute and to the end of the log; less sure where all of them wait.

    Newer releases print one such line and fall silent. Then the end of the log counts, two minutes later or more.
    """
    still: list[EngineSample] = []
    for moment in reversed(moments):
        if moment.running + moment.waiting <= 0 or moment.prompt_per_s != 0 or moment.generation_per_s != 0:
            break
        still.append(moment)
    if not still:
        return None
    said_s = still[0].at_s - still[-1].at_s
    silent_s = last_at_s - still[0].at_s if last_at_s is not None and still[0].number is not None else 0.0
    seconds = said_s + max(0.0, silent_s)
    lasted = said_s >= STUCK_LOG_S or len(still) >= 7
    if not lasted and seconds < 2 * STUCK_LOG_S:
        return None
    evidence = _lines(source, still[-1], still[0])
    sure = 0.5 if not lasted else 0.7 if any(moment.running for moment in still) else 0.6
    return stuck_finding(seconds, still[0].running + still[0].waiting, who, evidence, sure)


def _lines(source: str, *moments: EngineSample) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(source, m.text or f"running {m.running:.0f}, waiting {m.waiting:.0f}, KV cache {m.kv or 0:.1%} @{m.at_s:.0f}",
                 m.number)
        for m in moments
    )  # fmt: skip


GPU_LEAST = 64.0 * MIB
HOST_LEAST = 128.0 * MIB
DAY_S = 86400.0
_NO_LIMIT = float(1 << 60)  # how cgroups say that there is none
_SURE = 0.6  # from here on a limit within a day is critical
# Labels that tell one GPU, process or container from another; the rest may differ between exporters.
_WHERE = ("instance", "pod", "exported_pod", "container", "job", "gpu", "UUID", "device", "worker", "rank", "engine")


def judge_memory(series: Sequence[MetricSeries], source: str) -> list[Finding]:
    """Growth of what torch cannot give back, and of the host's memory; of less telling figures only where nothing better is."""

    def grown_finding(
        row: str, what: str, one: MetricSeries, grown: Growth, limit: float | None, level: float | None, caveat: str,
        confidence: float,
    ) -> Finding:  # fmt: skip
        coming = forecast(grown, limit, level)
        is_short = grown.span_s < DAY_S and _load(series, one) is None
        caution = " Less than a day was seen, and no load beside it: a daily rhythm would look the same." if is_short else ""
        because = (
            f"{what} {_who(one)} grew by {format_gib(round(grown.rise))} in {duration(grown.span_s)}, {rate(grown)}, "
            f"and goes on (chance {max(grown.chance, 1e-9):.0e}). {ahead(coming, limit)}{caveat}{caution}"
        )
        is_soon = coming is not None and coming.likely_s < DAY_S and confidence >= _SURE
        return finding(
            row, _shown(one, source), because, severity=Severity.CRITICAL if is_soon else None,
            confidence=min(confidence, 0.5) if caution else confidence,
        )  # fmt: skip

    found, own = [], list(_held(series))
    for one, grown in _growing(own or [one for one in series if one.figure == "gpu_used"], series, GPU_LEAST):
        total, shown, free = (_last(_partner(series, one, f"gpu_{name}")) for name in ("total", "used", "free"))
        if not total and shown is not None and free is not None and shown + free > GIB:
            total = shown + free
        if own:
            what = "What torch cannot give back on"
            found.append(grown_finding("torch-growth", what, one, grown, total, shown, "", 0.85))
        else:
            caveat = " What torch could give back is in this figure: plimsoll's allocator metrics would tell."
            found.append(grown_finding("gpu-growth", "The memory in use on", one, grown, total, grown.level, caveat, 0.6))
    resident = [one for one in series if one.figure in ("host_resident", "container_resident")]
    watched = resident or [one for one in series if one.figure == "container_working_set"]
    for one, grown in _growing(watched, series, HOST_LEAST):
        limit = _last(_partner(series, one, "container_limit"))
        limit = limit if limit is not None and 0 < limit < _NO_LIMIT else None
        files = "" if resident else " The working set holds cached files too, which the kernel drops when it must."
        sure = 0.8 if resident else 0.4
        found.append(grown_finding("host-growth", "The host memory of", one, grown, limit, None, files, sure))
    return found


def _growing(
    watched: Iterable[MetricSeries], series: Sequence[MetricSeries], least: float
) -> Iterator[tuple[MetricSeries, Growth]]:
    for one in watched:
        started = _partner(series, one, "started_at", needs=("instance",))
        restarts = [v for v in started.values if math.isfinite(v)] if started is not None else []
        grown = growth(one.times, one.values, least=least, restarts=restarts, load=_load(series, one))
        if grown is not None:
            yield one, grown


def _held(series: Sequence[MetricSeries]) -> Iterator[MetricSeries]:
    """Memory that torch cannot give back, GPU by GPU: live tensors and the unused parts of their blocks."""
    for one in series:
        if one.figure != "torch_allocated":
            continue
        other = _partner(series, one, "torch_inactive_split")
        more = dict(zip(other.times, other.values, strict=True)) if other is not None else {}
        values = tuple(v + more.get(t, 0.0 if other is None else math.nan) for t, v in zip(one.times, one.values, strict=True))
        yield one._replace(values=values)


def _increase(one: MetricSeries) -> float:
    """By how much a counter rose, also over restarts."""
    return sum(b - a if b >= a else b for a, b in pairwise(v for v in one.values if math.isfinite(v)))


def _load(series: Sequence[MetricSeries], one: MetricSeries) -> tuple[Sequence[float], Sequence[float]] | None:
    """The number of running requests beside it, if there is one such series for it or only one at all."""
    running = [s for s in series if s.figure == "running"]
    found = _partner(series, one, "running", needs=("instance",)) or (running[0] if len(running) == 1 else None)
    return (found.times, found.values) if found is not None else None


def _partner(series: Sequence[MetricSeries], one: MetricSeries, figure: str, needs: Iterable[str] = ()) -> MetricSeries | None:
    """The series of another figure about the same thing: no label of those that tell things apart differs."""
    found = [
        s
        for s in series
        if s.figure == figure and all(s.labels[k] == one.labels[k] for k in _WHERE if k in s.labels and k in one.labels)
    ]
    found = [s for s in found if all(n in s.labels and n in one.labels for n in needs)]
    return max(found, key=lambda s: sum(s.labels.get(k) == v for k, v in one.labels.items()), default=None)


def _last(one: MetricSeries | None) -> float | None:
    values = [v for v in one.values if math.isfinite(v)] if one is not None else []
    return values[-1] if values else None


def _who(one: MetricSeries) -> str:
    named = [f"{k} {one.labels[k]}" for k in _WHERE if k in one.labels and k != "job"]
    return ", ".join(named[:3]) or one.name


def _shown(one: MetricSeries, source: str) -> tuple[Evidence, ...]:
    finite = [(t, v) for t, v in zip(one.times, one.values, strict=True) if math.isfinite(v)]
    labels = ",".join(f'{k}="{v}"' for k, v in sorted(one.labels.items()) if k in _WHERE)
    ends = [finite[0], finite[-1]] if finite else []
    return tuple(Evidence(source, f"{one.name}{{{labels}}} {value:.10g} @{at:.0f}") for at, value in ends)


_OF_ITS_OWN = frozenset({"reason", "sleep_state", "finished_reason", "le", "__name__"})
_TOTALS = ("preemptions", "success", "prompt_tokens", "generation_tokens", "steps")
_OFTEN = 51  # the first engine warns at its 1st, 51st, 101st ... preemption
_A_MINUTE = 1.0

_Engine = Mapping[str, Sequence[MetricSeries]]


def judge_trends(series: Sequence[MetricSeries], source: str) -> tuple[Finding, ...]:
    """The findings of a time range; of several series with the same trouble the worst stands for all."""
    found = judge_memory(series, source)
    end_s = max((s.times[-1] for s in series if s.times), default=0.0)
    for key, engine in _engines(series).items():
        labels = dict(key)
        words = [f"{name} {labels[name]}" for name in ("engine", "pod", "instance") if labels.get(name)]
        found += _judge_engine(engine, " of ".join(words) or "the engine", end_s, source)
    return _worst_of_each(found)


def judge_log_trends(log: Log) -> tuple[Finding, ...]:
    """The findings of a log's periodic lines and preemption warnings."""
    warnings: dict[EngineId, list[tuple[LogLine, int]]] = {}
    heard: dict[str, float] = {}  # when each server was last: a wedged engine's web server may still speak
    timed: set[tuple[str, str]] = set()
    tokens = None
    for line in log.lines:
        if line.at is not None and (is_servers(line) or not line.level):
            heard[line.server] = line.at
            timed.add((line.server, line.process))
        if _PREEMPTED in line.text and "KV cache" in line.text:
            counted = re.search(r"total_num_cumulative_preemption=(\d{1,12})", line.text)
            whose = EngineId(line.server, line.process, "")
            warnings.setdefault(whose, []).append((line, int(counted[1]) if counted else 1))
        elif "KV cache size: " in line.text and (said := re.search(KV_SIZE, line.text[:TEXT_MAX])) is not None:
            size = said["tokens"].replace(",", "")
            tokens = float(size) if size and len(size) < 16 else tokens  # the last word counts
    found = list(_worst_of_each(_warned(lines, log.source) for lines in warnings.values()))
    warned = any(one.severity is not Severity.INFO for one in found)
    for whose, moments in moments_of_log(log).items():
        who = f"engine {whose.engine}" if whose.engine else "the engine"
        storm = judge_log_preemption(moments, tokens, log.source, who)
        queue = judge_queue(moments, log.source, who)
        if queue is not None and queue.code is Code.KV_SATURATED and (storm is not None or warned):
            queue = None  # the same trouble, and the storm says more
        end = heard.get(whose.server) if (whose.server, whose.process) in timed else None
        stuck = judge_stuck_log(moments, end, log.source, who)
        found += [one for one in (storm, queue, stuck) if one is not None]
    return _worst_of_each(found)


def _warned(lines: Sequence[tuple[LogLine, int]], source: str) -> Finding:
    """The first engine's own warnings: a storm if it threw out many in a short time, otherwise no more than a word."""
    shown, before = 0, 0
    for _, total in lines:  # the count begins anew at each restart; one that a log begins in the middle of counts from there
        shown += total - before if total > before > 0 else 1
        before = total
    # The count goes back to the server's start, also where the log does not.
    total = max(shown, *(count for _, count in lines))
    first, last = lines[0][0], lines[-1][0]
    seconds = last.at - first.at if last.at is not None and first.at is not None and last.at > first.at else None
    often = total >= _OFTEN
    per_minute = (shown - 1) / (seconds / 60) if seconds else None
    slow = per_minute is not None and per_minute < _A_MINUTE
    severity, confidence = Severity.WARNING, 0.85 if total > 2 * _OFTEN else 0.75
    if slow or not often:
        severity, confidence = Severity.INFO, 0.4 if often else 0.35
    because = (
        f"The scheduler counted {total} preemptions or more"
        + (f" since its start, {shown} of them" if total > shown else "")
        + (f" in {duration(seconds)} ({per_minute:.1f} a minute)" if seconds and per_minute is not None else "")
        + ": requests lost their KV blocks and were computed or swapped in again. It warns only at every fiftieth. "
        + ("" if often and not slow else "That few cost little. ")
        + "No forecast: it is at its limit already."
    )
    ends = [first] if first is last else [first, last]
    return finding(
        "preemption-storm" if often else "preempted-once",
        [Evidence(source, line.text[:1000], line.number) for line in ends], because, severity=severity, confidence=confidence,
        first=kv_remedies({}, {}),
    )  # fmt: skip


def _engines(series: Iterable[MetricSeries]) -> dict[tuple[tuple[str, str], ...], dict[str, list[MetricSeries]]]:
    """The series of vLLM and of logs by engine, then by figure."""
    found: dict[tuple[tuple[str, str], ...], dict[str, list[MetricSeries]]] = {}
    kept = {"running", "waiting", "waiting_by_reason", "kv_cache_usage", "sleep_state", *_TOTALS}
    for one in series:
        if one.figure in kept and one.times:
            key = tuple(sorted((k, v) for k, v in one.labels.items() if k not in _OF_ITS_OWN))
            found.setdefault(key, {}).setdefault(one.figure, []).append(one)
    return {key: figures for key, figures in found.items() if "running" in figures}


def _judge_engine(engine: _Engine, who: str, end_s: float, source: str) -> list[Finding]:
    room = [s for s in engine.get("waiting_by_reason", ()) if s.labels.get("reason") == "capacity"]
    waiting, kv = _at(room or engine.get("waiting", ())), _at(engine.get("kv_cache_usage", ()))
    moments = [
        EngineSample(t, running, waiting.get(t, 0.0), kv.get(t))
        for t, running in sorted(_at(engine["running"]).items())
        if t in waiting or not waiting
    ]
    if not moments:
        return []
    totals = {name: sum(_increase(s) for s in engine.get(name, ())) for name in _TOTALS}
    prompt, generation, finished = totals["prompt_tokens"], totals["generation_tokens"], totals["success"]
    length = (prompt + generation / 2) / finished if finished > 0 else None
    shown = tuple(
        Evidence(source, f"{s.name} {s.values[0]:.10g} @{s.times[0]:.0f} to {s.values[-1]:.10g} @{s.times[-1]:.0f}")
        for s in engine.get("preemptions", ())
    )
    seconds = moments[-1].at_s - moments[0].at_s
    storm = judge_recompute(totals["preemptions"], prompt + generation, length, seconds, source, who, shown, {})
    queue = judge_queue(moments, source, who)
    if storm is not None and queue is not None and queue.code is Code.KV_SATURATED:
        queue = None
    return [one for one in (storm, queue, _stuck(engine, moments, end_s, source, who)) if one is not None]


def _at(series: Sequence[MetricSeries]) -> dict[float, float]:
    """Values by time; a figure under its old and its new name is one figure."""
    return {t: v for one in series for t, v in zip(one.times, one.values, strict=True) if math.isfinite(v)}


def _stuck(engine: _Engine, moments: Sequence[EngineSample], end_s: float, source: str, who: str) -> Finding | None:
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
