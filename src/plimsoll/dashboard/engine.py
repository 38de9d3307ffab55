"""One engine with all that is known of it, in sections that change each at its own pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plimsoll.dashboard.facts import EngineFacts, Series
from plimsoll.dashboard.ledger import ledgers
from plimsoll.dashboard.rows import RUNGS, row, rung_of
from plimsoll.dashboard.survival import survival_of
from plimsoll.dashboard.texts import shown, tidy
from plimsoll.domain.look import Look
from plimsoll.domain.unknown import Reading, Unknown
from plimsoll.report.doctor import finding_json
from plimsoll.report.guard import Clock, canary_json, condition_json, forecast_json, grade_of, told_json
from plimsoll.report.guard_journal import entry_sentence

RUNG_DOES = {
    "advice": "says what to change", "shed": "refuses new work that would wait too long",
    "compact": "gives back what torch does not use", "restart": "drains it, stops it, starts it",
}  # fmt: skip
MOST_CHANGES = 60
NO_GATE = "unknown: the gate counts them (docs/inside.md)"
NO_BLOCKS = "unknown: the engine does not say how many blocks its cache has"


def sections(facts: EngineFacts, clock: Clock) -> dict[str, Any]:
    """All of it. What changes with every second (an age, how long something holds) is told as the moment it began."""
    view, look = facts.view, facts.view.look
    return {
        "head": {
            **row(facts), "url": shown(view.url), "note": shown(view.note), "needs": shown(view.needs),
            "why": "" if look is None else shown(look.why), "looks": view.looks,
            "looked_at": None if look is None else round(look.unix_s, 1),
            "ready": None if look is None or look.gate is None else look.gate.ready,
            "drain": None if look is None or look.gate is None else shown(look.gate.drain),
            "canary": None if look is None else _canary(look, clock),
        },
        "figures": _figures(facts),
        "ledger": tidy(ledgers(look)),
        "survival": survival_of(look),
        "blocks": blocks(look, facts.series),
        "forecasts": {name: tidy(forecast_json(one)) for name, one in view.forecasts.items()},
        "ladder": ladder(facts),
        "findings": tidy([finding_json(one) for one in view.findings]),
        "conditions": [_condition(facts, one, clock) for one in view.conditions],
        "changes": [_change(told) for told in list(facts.changes)[-MOST_CHANGES:]],
        "series": {"t": [round(at, 1) for at in facts.series.times],
                   **{name: [_short(one) for one in values] for name, values in facts.series.values.items()}},
    }  # fmt: skip


def _figures(facts: EngineFacts) -> list[dict[str, Any]]:
    """Every figure with its name, and why it is not known where it is not."""
    names = (
        ("kv_cache_usage", "KV cache used", "share", ""), ("waiting", "waiting", "count", ""),
        ("running", "running", "count", ""),
        ("in_flight", "in flight at the gate", "count", NO_GATE), ("expected_wait", "a new request would wait", "seconds", ""),
        ("twice", "work done twice, at most", "share", ""),
    )  # fmt: skip
    return [_figure(name, says, unit, facts.reading(name), usual) for name, says, unit, usual in names]


def _figure(name: str, says: str, unit: str, reading: Reading, usual: str) -> dict[str, Any]:
    if isinstance(reading, Unknown):
        return {"name": name, "says": says, "unit": unit, "value": None, "why": shown(usual or f"unknown: {reading.reason}")}
    return {"name": name, "says": says, "unit": unit, "value": _short(reading), "why": ""}


def blocks(look: Look | None, series: Series) -> dict[str, Any]:
    """The pool: how many blocks there are, how many are in use, and the most of the last half hour."""
    config: Mapping[str, str] = {} if look is None else look.config
    total, size = _whole(config.get("num_gpu_blocks")), _whole(config.get("block_size"))
    usage = None if look is None else look.figures.get("kv_cache_usage")
    if total is None or usage is None or not 0 <= usage <= 1:
        return {"total": total, "used": None, "most": None, "size": size, "why": NO_BLOCKS if total is None else "unknown"}
    known = [one for one in series.values.get("kv", ()) if one is not None and 0 <= one <= 1]
    usable = max(1, total - 1)  # the first is never given out
    most = max([*known, usage])
    return {"total": usable, "used": round(usage * usable), "most": round(most * usable), "size": size, "why": ""}


def ladder(facts: EngineFacts) -> dict[str, Any]:
    """Every rung: what calls for it, what is being done on it, and what is switched off."""
    guarding, called = facts.guarding, rung_of(facts)
    doing = guarding.doing
    rungs = []
    for name in RUNGS:
        because = [one.kind for one in facts.view.holding if grade_of(one.kind) == name]
        is_off = name != "advice" and (not guarding.is_acting or guarding.is_paused or name in guarding.rungs_off)
        rungs.append({
            "rung": name, "does": RUNG_DOES[name], "because": [shown(one) for one in because],
            "here": name == called, "off": is_off, "doing": None if doing is None or doing.grade != name else doing.step,
            "undoing": doing is not None and doing.grade == name and doing.is_undoing,
        })  # fmt: skip
    return {"rungs": rungs, "acting": guarding.is_acting, "paused": guarding.is_paused, "called": called}


def _canary(look: Look, clock: Clock) -> object:
    found = canary_json(look, clock)
    return None if found is None else tidy({name: value for name, value in found.items() if name != "age_s"})


def _condition(facts: EngineFacts, condition: Any, clock: Clock) -> object:
    found = condition_json(facts.view, condition, clock)
    since = found["since"]
    kept = {name: value for name, value in found.items() if name not in ("engine", "for_s")}
    return tidy({**kept, "since": round(since) if isinstance(since, float) else None})


def _change(told: Any) -> object:
    found = told_json(told)
    finding = found["finding"]
    seen = told.condition.evidence if told.condition is not None else ()
    plain = [{"source": one.source, "line": one.line, "text": one.text} for one in seen]
    evidence = finding["evidence"] if isinstance(finding, dict) else plain
    return tidy({"at": found["at"], "what": found["what"], "sentence": found["sentence"], "evidence": evidence})


def journal(rows: Sequence[Mapping[str, Any]], engine: str | None) -> list[object]:
    """Entries as the journal holds them, each with its sentence; those that say nothing to a person are left out."""
    found = []
    for entry in rows:
        says = entry_sentence(entry)
        if says and (engine is None or entry["engine"] in (engine, "")):
            found.append(tidy({**entry, "sentence": says}))
    return found


def _short(value: float | None) -> float | None:
    if value is None or value != value or abs(value) == float("inf"):
        return None
    return float(f"{value:.5g}")


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 12 and int(text) > 0 else None
