"""What an engine did over time: a full cache with a queue, work done twice, a queue that grows, no step at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.doctor.metrics_queues import SEVERE_STORM, STORM, is_full, share_done_twice
from plimsoll.doctor.metrics_remedies import kv_not_remedies, kv_remedies, saturated_remedies, wedge_remedies
from plimsoll.doctor.trend_growth import median
from plimsoll.doctor.trend_moments import Moment, Stretch, overrun, saturated
from plimsoll.doctor.trend_words import duration
from plimsoll.domain.finding import Code, Evidence, Finding, Severity

PREEMPTIONS_LEAST = 10.0
STUCK_LOG_S = 60.0
STUCK_RANGE_S = 120.0
_LONG_S = 180.0
_SWAPPED_LEAST = 6


def judge_queue(moments: Sequence[Moment], source: str, who: str) -> Finding | None:
    """kv.saturated or engine.saturated, if a queue lasted; None for a busy server with a short queue."""
    full = saturated(moments)
    if full is not None:
        return _full_finding(full, moments, source, who)
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
    return Finding(
        Code.ENGINE_SATURATED, Severity.WARNING, 0.6, "More requests arrive than the engine serves, with room in the KV cache",
        because, _ends(grown, source), saturated_remedies(running, usage), ("more KV cache: it is not full",),
    )  # fmt: skip


def _full_finding(full: Stretch, moments: Sequence[Moment], source: str, who: str) -> Finding:
    share = sum(is_full(m.kv, m.running, m.most_running) for m in moments) / len(moments)
    most = max(full.moments, key=lambda m: m.waiting)
    running = median(m.running for m in full.moments)
    # The hit rate often falls with it, and then more is computed again: worth a word, no finding of its own.
    before = [m.hit_rate for m in moments if m.hit_rate is not None and m.at_s < full.moments[0].at_s]
    during = [m.hit_rate for m in full.moments if m.hit_rate is not None]
    fell = before and during and max(before) >= 0.2 and median(during) < max(before) / 4
    because = (
        f"For {duration(full.seconds)} the KV cache of {who} was full ({full.full:.0%} of that time) while requests waited: "
        f"up to {most.waiting:.0f}, with {running:.0f} running. Over all that was seen it was full {share:.0%} of the time."
        + (f" The prefix cache's hit rate fell from {max(before):.0%} to {median(during):.0%} with it." if fell else "")
        + " No forecast: it is at its limit already."
    )
    return Finding(
        Code.KV_SATURATED, Severity.WARNING, 0.85 if full.seconds >= _LONG_S else 0.7,
        "The KV cache is full and requests queue for it", because,
        (*_ends(full, source), *_line(most, source)), kv_remedies({}, {"running": running}), kv_not_remedies(),
    )  # fmt: skip


def judge_twice(
    preemptions: float, tokens_done: float, length: float | None, seconds: float, source: str, who: str,
    evidence: tuple[Evidence, ...], figures: Mapping[str, float],
) -> Finding | None:  # fmt: skip
    """kv.preemption-storm by the share of work done twice."""
    share = share_done_twice(preemptions, tokens_done, length)
    if share is None or share < STORM or preemptions < PREEMPTIONS_LEAST:
        return None
    because = (
        f"{preemptions:.0f} preemptions on {who} in {duration(seconds)}: up to {share:.0%} of all computed tokens were "
        "computed a second time. No forecast: it is at its limit already."
    )
    return Finding(
        Code.KV_PREEMPTION_STORM, Severity.CRITICAL if share >= SEVERE_STORM else Severity.WARNING, 0.85,
        "Requests are thrown out of the KV cache and computed again", because,
        evidence or (Evidence(source, f"{preemptions:.0f} preemptions"),), kv_remedies({}, figures), kv_not_remedies(),
    )  # fmt: skip


def judge_log_preemption(moments: Sequence[Moment], kv_tokens: float | None, source: str, who: str) -> Finding | None:
    """The same from periodic lines: some count preemptions in them, the first engine shows what it swapped out."""
    hit = [m for m in moments if (m.preempted or 0.0) > 0]
    if hit:
        busy = [m for m in moments if m.at_s >= hit[0].at_s and m.at_s <= hit[-1].at_s]
        seconds = max(10.0, hit[-1].at_s - hit[0].at_s)
        preempted = sum(m.preempted or 0.0 for m in hit)
        every = seconds / max(1, len(busy) - 1) if len(busy) > 1 else 10.0
        done = sum((m.prompt_per_s or 0.0) + (m.generation_per_s or 0.0) for m in busy) * every
        lengths = [kv_tokens * m.kv / m.running for m in busy if kv_tokens and m.kv and m.running]
        running = median(m.running for m in hit)
        if lengths:
            evidence = tuple(one for m in (hit[0], hit[-1]) for one in _line(m, source))
            return judge_twice(preempted, done, median(lengths), seconds, source, who, evidence, {"running": running})
        return _counted(hit, preempted, running, source, who) if preempted >= PREEMPTIONS_LEAST else None
    swapped = [m for m in moments if (m.swapped or 0.0) > 0]
    if len(swapped) < _SWAPPED_LEAST:
        return None
    return _counted(swapped, max(m.swapped or 0.0 for m in swapped), median(m.running for m in swapped), source, who)


def _counted(hit: Sequence[Moment], count: float, running: float, source: str, who: str) -> Finding | None:
    if len(hit) < _SWAPPED_LEAST and count < running:
        return None
    because = (
        f"{len(hit)} periodic lines of {who} show requests thrown out of the KV cache ({count:.0f} with {running:.0f} running)."
        " How much was computed twice cannot be known from this log. No forecast: it is at its limit already."
    )
    return Finding(
        Code.KV_PREEMPTION_STORM, Severity.WARNING, 0.55, "Requests are thrown out of the KV cache and computed again", because,
        tuple(one for m in (hit[0], hit[-1]) for one in _line(m, source)),
        kv_remedies({}, {"running": running}), kv_not_remedies(),
    )  # fmt: skip


def stuck_finding(seconds: float, work: float, who: str, evidence: tuple[Evidence, ...], confidence: float) -> Finding:
    """engine.wedged: work, and no step to the end of what was seen."""
    because = (
        f"{who.capitalize()} has {work:.0f} requests and made no token in the last {duration(seconds)} that were seen. "
        "A paused engine and one very long prompt look the same. No forecast: a stuck step does not return."
    )
    return Finding(
        Code.ENGINE_WEDGED, Severity.CRITICAL, confidence, "The engine has work and makes no step", because, evidence,
        wedge_remedies(), ("more memory: nothing here says that memory is the cause",),
    )  # fmt: skip


def judge_stuck_log(moments: Sequence[Moment], last_at_s: float | None, source: str, who: str) -> Finding | None:
    """A wedge in a log: running requests and no token, for a minute and to the end of the log.

    Newer releases print one such line and fall silent. Then the end of the log counts, two minutes later or more.
    """
    still: list[Moment] = []
    for moment in reversed(moments):
        if moment.running <= 0 or moment.prompt_per_s != 0 or moment.generation_per_s != 0:
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
    evidence = tuple(one for m in (still[-1], still[0]) for one in _line(m, source))
    return stuck_finding(seconds, still[0].running + still[0].waiting, who, evidence, 0.7 if lasted else 0.5)


def _ends(stretch: Stretch, source: str) -> tuple[Evidence, ...]:
    return tuple(one for m in (stretch.moments[0], stretch.moments[-1]) for one in _line(m, source))


def _line(moment: Moment, source: str) -> tuple[Evidence, ...]:
    text = moment.text or (
        f"running {moment.running:.0f}, waiting {moment.waiting:.0f}, KV cache {moment.kv or 0:.1%} @{moment.at_s:.0f}"
    )
    return (Evidence(source, text, moment.number),)
