"""Turns a true condition into a finding: the code, the cause in one line, the remedies and what is no remedy.

The texts are in `conditions.yaml`; this module has the remedies that depend on the engine's own figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from plimsoll.doctor.remedies.runtime import cache_tokens, kv_remedies, saturated_remedies, wedge_remedies
from plimsoll.doctor.rules.contained import remedies_of
from plimsoll.doctor.words import fields, words
from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.tracker import Assessment, no, unknown, yes
from plimsoll.unknown import Condition

PLAN = "plan"  # the condition that a start differs from its plan; judged only where there is a plan
_ORDER = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)


def _cache(look: Look | None) -> tuple[Remedy, ...]:
    figures = {} if look is None else dict(look.figures)
    ended = figures.get("success", 0.0)
    if ended > 0:  # the mean lengths of requests since the engine's start
        for mean, total in (("prompt_length_mean", "prompt_tokens"), ("output_length_mean", "generation_tokens")):
            if total in figures:
                figures[mean] = figures[total] / ended
    return kv_remedies({} if look is None else look.config, figures)


def _queue(look: Look | None) -> tuple[Remedy, ...]:
    running, usage = (0.0 if look is None else look.figures.get(name, 0.0) for name in ("running", "kv_cache_usage"))
    return saturated_remedies(running, usage)


def _survived(look: Look | None) -> tuple[Remedy, ...]:
    return remedies_of(None if look is None or look.gate is None else look.gate.survival)


def _wedged(_: Look | None) -> tuple[Remedy, ...]:
    return wedge_remedies()


_BY_FIGURES: dict[str, Callable[[Look | None], tuple[Remedy, ...]]] = {
    "wedged": _wedged, "hung": _wedged, "stalled": _wedged, "slow": _queue, "saturated": _queue, "storm": _cache,
    "backlog": _cache, "contained": _survived, "limping": _survived,
}  # fmt: skip
# The row of doctor's findings that lists what is no remedy for each.
_DOCTORS_ROW = {"storm": "preemption-storm", "backlog": "kv-saturated", "contained": "contained", "limping": "contained"}


@cache
def _kinds() -> dict[str, dict[str, Any]]:
    return {kind: fields(row) for kind, row in words("conditions", "guard/judge").items()}


def finding(condition: Condition, look: Look | None = None) -> Finding | None:
    """Returns the finding of a true condition; None if it is not true."""
    if not condition.is_true:
        return None
    row = _kinds()[condition.kind]
    more = _BY_FIGURES.get(condition.kind)
    remedy = (*row.get("remedy", ()), *(() if more is None else more(look)))
    not_a_remedy = row.get("not_a_remedy") or tuple(words("findings")[_DOCTORS_ROW[condition.kind]]["not_a_remedy"])
    return Finding(
        row["code"], row["severity"], row["confidence"], row["title"], condition.message, condition.evidence, remedy,
        not_a_remedy,
    )  # fmt: skip


def findings(conditions: Iterable[Condition], look: Look | None = None) -> tuple[Finding, ...]:
    """Returns each code once, by its most severe condition; the worst first."""
    found = [one for one in (finding(condition, look) for condition in conditions) if one is not None]
    found.sort(key=lambda one: (_ORDER.index(one.severity), -one.confidence))
    worst: dict[Code, Finding] = {}
    for one in found:
        worst.setdefault(one.code, one)
    return tuple(worst.values())


def code_of(kind: str) -> Code:
    """Returns the finding code of a condition."""
    code: Code = _kinds()[kind]["code"]
    return code


def severity_of(kind: str) -> Severity:
    severity: Severity = _kinds()[kind]["severity"]
    return severity


class PlannedTokens(NamedTuple):
    """The KV cache of an engine's plan, in tokens, with the plan's own band."""

    tokens: float
    low: float
    high: float


def as_planned(planned: PlannedTokens, look: Look | None) -> Assessment:
    """Judges whether the KV cache that the engine reports lies outside the band of its plan."""
    tokens = cache_tokens(look.config) if look is not None else None
    if tokens is None:
        return unknown("NotOnThePage", "the engine does not report its KV cache size")
    text = f"{tokens:,.0f} tokens of KV cache; planned were {planned.tokens:,.0f} ({planned.low:,.0f} to {planned.high:,.0f})"
    if planned.low <= tokens <= planned.high:
        return no("AsPlanned", text)
    return yes("DiffersFromPlan", text, Evidence("vllm:cache_config_info", text))
