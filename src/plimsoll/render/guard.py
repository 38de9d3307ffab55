"""Guard's output: one sentence for each event, the same as JSON, the API's objects and Alertmanager's alerts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from plimsoll.doctor.rules.trend_growth import Forecast, duration
from plimsoll.findings import Finding
from plimsoll.guard.judge.findings import code_of, severity_of
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.policy import GRADES
from plimsoll.redaction import clean, plain
from plimsoll.render.doctor import finding_json
from plimsoll.render.journal import SCHEMA
from plimsoll.unknown import Condition, Status, Unknown

LONGEST = 400  # letters of a message: an engine's may be long


class EventKind(StrEnum):
    """The kind of an event."""

    BEGINS = "begins"
    OVER = "over"
    UNKNOWN = "unknown"  # it was active, and is now unknown
    UNREACHABLE = "unreachable"
    REACHED = "reached"
    LISTED = "listed"
    UNLISTED = "unlisted"
    TROUBLE = "trouble"  # the engine answers, but something else of it does not
    MENDED = "mended"
    ACTED = "acted"  # guard acted, or says why it does not act
    NEEDS = "needs-a-person"  # guard can do no more: it needs attention


class Event(NamedTuple):
    """A change that is worth a sentence."""

    unix_s: float
    engine: str
    what: EventKind
    message: str
    condition: Condition | None = None
    finding: Finding | None = None
    lasted_s: float | None = None
    became: str = ""  # the graver condition that took its place
    incident: str = ""  # one id for all records of an incident: events, alerts, Events of a pod, entries of the journal


class Trouble(NamedTuple):
    """Something wrong with guard itself."""

    what: str
    text: str
    since_s: float  # on guard's own clock


class EngineView(NamedTuple):
    """An engine as of now."""

    name: str
    url: str
    look: Look | None
    look_age_s: float | None
    look_s: float | None  # how long the last one took
    looks: int
    failures: Mapping[str, int]  # looks without figures, by result
    conditions: tuple[Condition, ...]
    findings: tuple[Finding, ...]
    since_s: float  # the first look, on guard's own clock
    vllm: str | None = None  # as last reported
    forecasts: Mapping[str, Forecast | Unknown] = {}
    unreachable_since_s: float | None = None  # when it became unreachable, once that is reported
    has_answered: bool = True  # since guard started
    note: str = ""  # the figures it does not give, and why
    needs: str = ""  # why it needs attention

    @property
    def holding(self) -> tuple[Condition, ...]:
        """The active conditions."""
        return tuple(one for one in self.conditions if one.is_true)


class Clock(NamedTuple):
    """Guard's monotonic clock and wall-clock time at one moment: times are kept on the first and shown on the second."""

    now_s: float
    unix_s: float

    def unix(self, at_s: float) -> float:
        """Returns a monotonic time in wall-clock time."""
        return round(self.unix_s - (self.now_s - at_s), 3)


@lru_cache(2048)  # the same few sentences for hundreds of engines, and cleaning is the slow part of an answer
def short(text: str) -> str:
    """A message without secrets and control characters, of bounded length."""
    return clean(text[: 4 * LONGEST])[:LONGEST]


def grade_of(kind: str) -> str:
    """The strongest action that a condition of this kind may lead to."""
    return str(GRADES.get(kind, "advice"))


def sentence(event: Event) -> str:
    """An event in words."""
    name, message = clean(event.engine), short(event.message)
    if event.condition is None:
        return f"{name or 'guard'}: {message}"
    what = str(code_of(event.condition.kind))
    if event.what is EventKind.BEGINS:
        title = f"{event.finding.title} ({what})" if event.finding is not None else f"{what} is active"
        return f"{name}: {title}: {message}"
    if event.what is EventKind.UNKNOWN:
        return f"{name}: {what} was active and is now unknown: {message}"
    if event.became:
        worse = code_of(event.became)
        return f"{name}: {what} became {worse}" if worse != what else f"{name}: {what} goes on, now as {event.became}"
    after = "" if event.lasted_s is None else f" after {duration(event.lasted_s)}"
    return f"{name}: recovered: {what} cleared{after}: {message}"


def event_json(event: Event) -> dict[str, object]:
    """An event as JSON."""
    condition = event.condition
    return {
        "at": round(event.unix_s, 3), "engine": clean(event.engine), "what": str(event.what),
        "kind": condition.kind if condition is not None else None,
        "code": str(code_of(condition.kind)) if condition is not None else None,
        "grade": grade_of(condition.kind) if condition is not None else None,
        "reason": condition.reason if condition is not None else None, "sentence": sentence(event),
        "incident": event.incident or None,
        "finding": None if event.finding is None else finding_json(event.finding),
    }  # fmt: skip


def line_json(event: Event) -> str:
    """One line of `plimsoll guard --json`."""
    return json.dumps({"schema": SCHEMA, **event_json(event)}, ensure_ascii=False)


def condition_json(view: EngineView, condition: Condition, clock: Clock) -> dict[str, object]:
    """One condition of one engine."""
    is_seen = condition.reason != "NotLookedAt"
    since_s = max(condition.since_s, view.since_s)
    return {
        "engine": short(view.name), "kind": condition.kind, "code": str(code_of(condition.kind)),
        "severity": str(severity_of(condition.kind)), "grade": grade_of(condition.kind), "status": str(condition.status),
        "reason": condition.reason, "message": short(condition.message), "since": clock.unix(since_s) if is_seen else None,
        "for_s": round(max(0.0, clock.now_s - since_s), 3) if is_seen else None,
        "evidence": [{"source": short(one.source), "text": short(one.text)} for one in condition.evidence],
    }  # fmt: skip


def engine_json(view: EngineView) -> dict[str, object]:
    """One engine in a list."""
    look = view.look
    return {
        "name": clean(view.name), "url": clean(view.url), "reach": None if look is None else str(look.reach),
        "why": "" if look is None else short(look.why), "vllm": None if view.vllm is None else clean(view.vllm),
        "look_age_s": None if view.look_age_s is None else round(view.look_age_s, 3), "looks": view.looks,
        "failures": sum(view.failures.values()), "unreachable": view.unreachable_since_s is not None,
        "has_answered": view.has_answered, "note": short(view.note), "needs": short(view.needs),
        "holds": [one.kind for one in view.holding],
        "unknown": [one.kind for one in view.conditions if one.status is Status.UNKNOWN],
    }  # fmt: skip


def engine_detail_json(view: EngineView, clock: Clock) -> dict[str, object]:
    """One engine with everything known of it."""
    look = view.look
    return {
        **engine_json(view),
        "unreachable_since": None if view.unreachable_since_s is None else clock.unix(view.unreachable_since_s),
        "figures": {} if look is None else plain(look.figures),
        "gate": None if look is None or look.gate is None else plain(look.gate),
        "workers": [] if look is None else plain(look.workers), "cards": [] if look is None else plain(look.cards),
        "canary": None if look is None else canary_json(look, clock),
        "conditions": [condition_json(view, one, clock) for one in view.conditions],
        "findings": [finding_json(one) for one in view.findings],
        "forecasts": {name: forecast_json(one) for name, one in view.forecasts.items()},
    }  # fmt: skip


def canary_json(look: Look, clock: Clock) -> dict[str, object] | None:
    """The last canary request; None if none was sent."""
    canary = look.canary
    if canary is None:
        return None
    return {
        "at": clock.unix(canary.at_s), "age_s": round(max(0.0, clock.now_s - canary.at_s), 3),
        "is_answered": canary.is_answered, "seconds": None if canary.seconds is None else round(canary.seconds, 4),
        "is_garbage": canary.is_garbage, "why": short(canary.why),
    }  # fmt: skip


def trouble_json(trouble: Trouble, clock: Clock) -> dict[str, object]:
    """A trouble of guard itself."""
    return {"what": short(trouble.what), "text": short(trouble.text), "since": clock.unix(trouble.since_s)}


def forecast_json(one: Forecast | Unknown) -> dict[str, object]:
    """A forecast in seconds with its band, or why there is none."""
    if isinstance(one, Unknown):
        return {"unknown": short(one.reason), "soonest_s": None, "likely_s": None, "latest_s": None}
    return {"unknown": None, "soonest_s": one.soonest_s, "likely_s": one.likely_s, "latest_s": one.latest_s}


def _is_known_well(view: EngineView) -> bool:
    """True if it is known whether the engine is dead and whether it is stuck."""
    found = {one.kind: one for one in view.conditions}
    return all(found[kind].is_known for kind in ("dead", "stalled") if kind in found)


def status_line(views: Sequence[EngineView], troubles: Sequence[Trouble] = ()) -> str:
    """The whole fleet in one line."""
    unseen = [view for view in views if view.look is None or view.look.reach != "answers"]
    never = sum(1 for view in unseen if not view.has_answered)
    held = [f"{clean(view.name)} needs attention" for view in views if view.needs]
    held += [f"{clean(view.name)} {code_of(one.kind)}" for view in views for one in view.holding]
    said = f"{len(views)} engine{'s' if len(views) != 1 else ''}"
    if unseen:
        said += f", {len(unseen)} unreachable" + (f" ({never} never reached)" if never else "")
    after = f"; guard itself: {', '.join(short(one.what) for one in troubles[:3])}" if troubles else ""
    if not held:
        blind = sum(1 for view in views if view not in unseen and not _is_known_well(view))
        state = "nothing is watched" if not views else "all healthy"
        if blind:
            who = "it is" if len(views) == 1 else f"{blind} of them {'is' if blind == 1 else 'are'}"
            state = f"no problem known, but unknown whether {who} stuck"
        return f"{said}; {'no other problem known' if unseen else state}{after}"
    return f"{said}; {', '.join(held[:5])}" + (f" and {len(held) - 5} more" if len(held) > 5 else "") + after


def alert(event: Event, *, starts_unix_s: float, lasts_s: float) -> dict[str, object] | None:
    """The event as an alert of Alertmanager's API v2; None if it is no alert. `lasts_s`: until it is sent again."""
    if (
        event.what in (EventKind.LISTED, EventKind.UNLISTED, EventKind.TROUBLE, EventKind.MENDED, EventKind.ACTED)
        and event.condition is None
    ):
        return None
    if event.what is EventKind.NEEDS:
        name, severity, is_over = "guard.needs-a-person", "critical", False
    elif event.condition is None:
        name, severity, is_over = "guard.unreachable", "warning", event.what is not EventKind.UNREACHABLE
    else:
        name = str(code_of(event.condition.kind))
        severity, is_over = str(severity_of(event.condition.kind)), event.what is EventKind.OVER
    labels = {"alertname": name, "engine": clean(event.engine), "severity": severity}
    labels |= {"condition": event.condition.kind} if event.condition is not None else {}
    notes = {"summary": sentence(event)} | ({"incident": event.incident} if event.incident else {})
    if event.finding is not None:
        notes["description"] = short(event.finding.because)
        notes["remedy"] = "; ".join(f"{clean(one.do)}: {clean(one.why)}" for one in event.finding.remedy[:3])
        notes["explain"] = f"plimsoll doctor --explain {event.finding.code}"
    ends = event.unix_s if is_over else event.unix_s + lasts_s
    return {"labels": labels, "annotations": notes, "startsAt": rfc3339(starts_unix_s), "endsAt": rfc3339(ends)}


def rfc3339(unix_s: float) -> str:
    """A moment in UTC as Alertmanager writes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
