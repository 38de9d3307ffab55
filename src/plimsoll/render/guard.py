"""What guard says: one sentence a change, the same as a line of JSON, and what its API answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from plimsoll.doctor.rules.trend_growth import Forecast, duration
from plimsoll.findings import Finding
from plimsoll.guard.act.journal_entry import BEGUN, CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SEEN, SWITCH, Entry
from plimsoll.guard.judge.findings import code_of, severity_of
from plimsoll.guard.judge.look import Look
from plimsoll.guard.judge.policy import GRADES
from plimsoll.render.doctor import clean, finding_json, plain
from plimsoll.unknown import Condition, Status, Unknown

SCHEMA = "plimsoll.guard/1"
LONGEST = 400  # letters of a message: what an engine sends may be long


class EventKind(StrEnum):
    """What a change is."""

    BEGINS = "begins"
    OVER = "over"
    UNKNOWN = "unknown"  # it held, and whether it still does cannot be told
    UNREACHABLE = "unreachable"
    REACHED = "reached"
    LISTED = "listed"
    UNLISTED = "unlisted"
    TROUBLE = "trouble"  # the engine is there, and something that it could tell cannot be had
    MENDED = "mended"
    ACTED = "acted"  # guard did something, or says why it does not
    NEEDS = "needs-a-person"  # guard can do no more


class Event(NamedTuple):
    """One change that was worth a sentence."""

    unix_s: float
    engine: str
    what: EventKind
    message: str
    condition: Condition | None = None
    finding: Finding | None = None
    lasted_s: float | None = None


class Trouble(NamedTuple):
    """Something that goes wrong with guard itself."""

    what: str
    text: str
    since_s: float  # on guard's own clock


class EngineView(NamedTuple):
    """One engine as of now."""

    name: str
    url: str
    look: Look | None
    look_age_s: float | None
    look_s: float | None  # how long the last one took
    looks: int
    failures: Mapping[str, int]  # looks that brought no figures, by what became of them
    conditions: tuple[Condition, ...]
    findings: tuple[Finding, ...]
    since_s: float  # when it was first looked at, on guard's own clock
    vllm: str | None = None  # as it last said
    forecasts: Mapping[str, Forecast | Unknown] = {}
    unreachable_since_s: float | None = None  # when it stopped to answer; it was told to be gone since
    has_answered: bool = True  # since guard began
    note: str = ""  # what cannot be had of it, and why
    needs: str = ""  # guard can do no more about it, and why: a person is needed

    @property
    def holding(self) -> tuple[Condition, ...]:
        """The conditions that hold."""
        return tuple(one for one in self.conditions if one.is_true)


class Clock(NamedTuple):
    """Guard's own clock and the wall's at one moment: times are kept on the first and shown on the second."""

    now_s: float
    unix_s: float

    def unix(self, at_s: float) -> float:
        """That moment on the wall."""
        return round(self.unix_s - (self.now_s - at_s), 3)


@lru_cache(2048)  # the same few sentences for hundreds of engines, and cleaning is the slow part of an answer
def short(text: str) -> str:
    """A message without secrets and control characters, of bounded length."""
    return clean(text[: 4 * LONGEST])[:LONGEST]


def label(condition: Condition) -> str:
    """What a condition is called in a sentence: its code, or the rule's own name."""
    code = code_of(condition.kind)
    return f"rule {condition.kind}" if code is None else str(code)


def grade_of(kind: str) -> str:
    """The most that a condition of this kind may lead to."""
    return str(GRADES.get(kind, "advice"))


def sentence(told: Event) -> str:
    """One change in words."""
    name, message = clean(told.engine), short(told.message)
    if told.condition is None:
        return f"{name or 'guard'}: {message}"
    what = label(told.condition)
    if told.what is EventKind.BEGINS:
        title = f"{told.finding.title} ({what})" if told.finding is not None else f"{what} holds"
        return f"{name}: {title}: {message}"
    if told.what is EventKind.UNKNOWN:
        return f"{name}: {what} held, and whether it still does is not known: {message}"
    after = "" if told.lasted_s is None else f" after {duration(told.lasted_s)}"
    return f"{name}: {what} is over{after}: {message}"


def event_json(told: Event) -> dict[str, object]:
    """The same for a program."""
    condition = told.condition
    return {
        "at": round(told.unix_s, 3),
        "engine": clean(told.engine),
        "what": str(told.what),
        "kind": condition.kind if condition is not None else None,
        "code": _text(code_of(condition.kind)) if condition is not None else None,
        "grade": grade_of(condition.kind) if condition is not None else None,
        "reason": condition.reason if condition is not None else None,
        "sentence": sentence(told),
        "finding": None if told.finding is None else finding_json(told.finding),
    }


def line_json(told: Event) -> str:
    """One line of `plimsoll guard --json`."""
    import json

    return json.dumps({"schema": SCHEMA, **event_json(told)}, ensure_ascii=False)


def condition_json(view: EngineView, condition: Condition, clock: Clock) -> dict[str, object]:
    """One condition of one engine."""
    is_seen = condition.reason != "NotLookedAt"
    since_s = max(condition.since_s, view.since_s)
    return {
        "engine": short(view.name),
        "kind": condition.kind,
        "code": _text(code_of(condition.kind)),
        "severity": str(severity_of(condition.kind)),
        "grade": grade_of(condition.kind),
        "status": str(condition.status),
        "reason": condition.reason,
        "message": short(condition.message),
        "since": clock.unix(since_s) if is_seen else None,
        "for_s": round(max(0.0, clock.now_s - since_s), 3) if is_seen else None,
        "evidence": [{"source": short(one.source), "text": short(one.text)} for one in condition.evidence],
    }


def engine_json(view: EngineView) -> dict[str, object]:
    """One engine in a list."""
    look = view.look
    return {
        "name": clean(view.name),
        "url": clean(view.url),
        "reach": None if look is None else str(look.reach),
        "why": "" if look is None else short(look.why),
        "vllm": None if view.vllm is None else clean(view.vllm),
        "look_age_s": None if view.look_age_s is None else round(view.look_age_s, 3),
        "looks": view.looks,
        "failures": sum(view.failures.values()),
        "unreachable": view.unreachable_since_s is not None,
        "has_answered": view.has_answered,
        "note": short(view.note),
        "needs": short(view.needs),
        "holds": [one.kind for one in view.holding],
        "unknown": [one.kind for one in view.conditions if one.status is Status.UNKNOWN],
    }


def engine_detail_json(view: EngineView, clock: Clock) -> dict[str, object]:
    """One engine with all that is known of it."""
    look = view.look
    return {
        **engine_json(view),
        "unreachable_since": None if view.unreachable_since_s is None else clock.unix(view.unreachable_since_s),
        "figures": {} if look is None else plain(look.figures),
        "gate": None if look is None or look.gate is None else plain(look.gate),
        "workers": [] if look is None else plain(look.workers),
        "cards": [] if look is None else plain(look.cards),
        "canary": None if look is None else canary_json(look, clock),
        "conditions": [condition_json(view, one, clock) for one in view.conditions],
        "findings": [finding_json(one) for one in view.findings],
        "forecasts": {name: forecast_json(one) for name, one in view.forecasts.items()},
    }


def canary_json(look: Look, clock: Clock) -> dict[str, object] | None:
    """The last test request; None where none was made."""
    canary = look.canary
    if canary is None:
        return None
    return {
        "at": clock.unix(canary.at_s),
        "age_s": round(max(0.0, clock.now_s - canary.at_s), 3),
        "is_answered": canary.is_answered,
        "seconds": None if canary.seconds is None else round(canary.seconds, 4),
        "is_garbage": canary.is_garbage,
        "why": short(canary.why),
    }


def trouble_json(trouble: Trouble, clock: Clock) -> dict[str, object]:
    """One trouble of guard's own."""
    return {"what": short(trouble.what), "text": short(trouble.text), "since": clock.unix(trouble.since_s)}


def forecast_json(one: Forecast | Unknown) -> dict[str, object]:
    """Seconds with a band, or why there is no forecast."""
    if isinstance(one, Unknown):
        return {"unknown": short(one.reason), "soonest_s": None, "likely_s": None, "latest_s": None}
    return {"unknown": None, "soonest_s": one.soonest_s, "likely_s": one.likely_s, "latest_s": one.latest_s}


def _is_known_well(view: EngineView) -> bool:
    """Whether it is known that it is neither dead nor stuck: proved not to be, or at least not looking like it."""
    found = {one.kind: one for one in view.conditions}
    return all(found[kind].is_known for kind in ("dead", "stalled") if kind in found)


def status_line(views: Sequence[EngineView], troubles: Sequence[Trouble] = ()) -> str:
    """All of it in one line."""
    unseen = [view for view in views if view.look is None or view.look.reach != "answers"]
    never = sum(1 for view in unseen if not view.has_answered)
    held = [f"{clean(view.name)} needs a person" for view in views if view.needs]
    held += [f"{clean(view.name)} {label(one)}" for view in views for one in view.holding]
    said = f"{len(views)} engine{'s' if len(views) != 1 else ''}"
    if unseen:
        said += f", {len(unseen)} not answering" + (f" ({never} never did)" if never else "")
    after = f"; guard itself: {', '.join(short(one.what) for one in troubles[:3])}" if troubles else ""
    if not held:
        blind = sum(1 for view in views if view not in unseen and not _is_known_well(view))
        well = "nothing is watched" if not views else "all well"
        if blind:
            who = "it is" if len(views) == 1 else f"{blind} of them {'is' if blind == 1 else 'are'}"
            well = f"no trouble is known, but not whether {who} stuck"
        return f"{said}; {'no other trouble is known' if unseen else well}{after}"
    return f"{said}; {', '.join(held[:5])}" + (f" and {len(held) - 5} more" if len(held) > 5 else "") + after


def alert(told: Event, *, starts_unix_s: float, lasts_s: float) -> dict[str, object] | None:
    """The change as Alertmanager's API v2 takes an alert; None for one that is no alert. `lasts_s`: until it is sent again."""
    if (
        told.what in (EventKind.LISTED, EventKind.UNLISTED, EventKind.TROUBLE, EventKind.MENDED, EventKind.ACTED)
        and told.condition is None
    ):
        return None
    if told.what is EventKind.NEEDS:
        name, severity, is_over = "guard.needs-a-person", "critical", False
    elif told.condition is None:
        name, severity, is_over = "guard.unreachable", "warning", told.what is not EventKind.UNREACHABLE
    else:
        code = code_of(told.condition.kind)
        name = f"rule.{told.condition.kind}" if code is None else str(code)
        severity, is_over = str(severity_of(told.condition.kind)), told.what is EventKind.OVER
    labels = {"alertname": name, "engine": clean(told.engine), "severity": severity}
    labels |= {"condition": told.condition.kind} if told.condition is not None else {}
    notes = {"summary": sentence(told)}
    if told.finding is not None:
        notes["description"] = short(told.finding.because)
        notes["remedy"] = "; ".join(f"{clean(one.do)}: {clean(one.why)}" for one in told.finding.remedy[:3])
        notes["explain"] = f"plimsoll doctor --explain {told.finding.code}"
    ends = told.unix_s if is_over else told.unix_s + lasts_s
    return {"labels": labels, "annotations": notes, "startsAt": rfc3339(starts_unix_s), "endsAt": rfc3339(ends)}


def rfc3339(unix_s: float) -> str:
    """A moment as Alertmanager writes it, in UTC; by hand, since a report asks no clock and knows no zone."""
    days, rest = divmod(int(unix_s), 86_400)
    year, month, day = _date(days)
    hour, minute, second = rest // 3600, rest // 60 % 60, rest % 60
    return f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{int(unix_s % 1 * 1000):03}Z"


def _date(days: int) -> tuple[int, int, int]:
    """The civil date so many days after 1970-01-01 (the algorithm of eras of 400 years, which begin in March)."""
    era, of_era = divmod(days + 719_468, 146_097)
    year_of_era = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    day_of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return year_of_era + era * 400 + (month <= 2), month, day


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# What guard did, from its journal: an entry as JSON, and as a sentence.

LONGEST_HISTORY = 400
_BY_HAND = {"drain": "drain by hand", "undrain": "putting back by hand"}
"""The kinds of what a person asked for: in the journal each is a restart that turns back."""


def entry_json(entry: Entry) -> dict[str, Any]:
    """One entry as the API shows it. Secrets were taken out when it was written, and are once more."""
    return {
        "number": entry.first_number, "at": entry.at, "kind": clean(entry.kind), "engine": clean(entry.engine),
        "action": clean(entry.action), "step": clean(entry.step), "fields": plain(dict(entry.fields)),
    }  # fmt: skip


def entry_sentence(row: Mapping[str, Any]) -> str:
    """The same for people; empty for what only guard itself needs."""
    fields: Mapping[str, Any] = row["fields"] if isinstance(row["fields"], Mapping) else {}
    kind, engine = str(row["kind"]), str(row["engine"])
    before = f"{engine}: " if engine else ""
    action = f" [{row['action']}]" if row["action"] else ""
    said = _said(kind, str(row["step"]), fields)
    return clean(f"{before}{said}{action}")[:LONGEST_HISTORY] if said else ""


def _said(kind: str, step: str, fields: Mapping[str, Any]) -> str:
    if kind == OPENED:
        return f"{_what(fields)} begins: {fields.get('why', '')}"
    if kind in (INTENT, BEGUN, SEEN):
        return ""  # what became of it is said with its outcome
    if kind == OUTCOME:
        done = fields.get("done")
        mark = "" if done is True else " (not done)" if done is False else " (not known)"
        return f"{step}{mark}: {fields.get('says', '')}"
    if kind == CLOSED:
        why = f": {fields['why']}" if fields.get("why") else ""
        return f"{_what(fields)} is {fields.get('end', 'over')}{why}"
    if kind == RESTART:
        times = f" {fields['times']} times" if fields.get("times", 1) != 1 else ""
        return "is restarted" if fields.get("own", True) else f"somebody else restarted it{times}"
    if kind == SWITCH:
        what = "acting" if step == "pause" else f"{step.removeprefix('rung-')} of every engine"
        who = f" by {fields['who']}" if fields.get("who") else ""
        return f"{what} {'is paused' if fields.get('on') else 'is resumed'}{who}"
    if kind == NOTE:
        return "; ".join(f"{name}: {value}" for name, value in fields.items() if name != "done")
    return f"{kind} {step}".strip()


def _what(fields: Mapping[str, Any]) -> str:
    return _BY_HAND.get(str(fields.get("kind")), str(fields.get("grade", "an action")))
