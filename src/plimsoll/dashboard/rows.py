"""One line of the fleet: how an engine is, in a word and a few figures."""

from __future__ import annotations

from typing import Any

from plimsoll.dashboard.facts import EngineFacts, id_of
from plimsoll.dashboard.texts import shown
from plimsoll.domain.look import Reach
from plimsoll.domain.unknown import Reading, Unknown
from plimsoll.report.guard import grade_of, label

RUNGS = ("advice", "shed", "compact", "restart")
SAYS = {
    Reach.REFUSED: "nobody listens there", Reach.SILENT: "does not answer", Reach.NONSENSE: "answers nonsense",
}  # fmt: skip
# The worst first: so are they listed.
PERSON, CRITICAL, GONE, WARNING, INFO, UNKNOWN, WELL = range(7)
STATES = ("person", "critical", "gone", "warning", "info", "unknown", "well")
_BY_SEVERITY = {"critical": CRITICAL, "warning": WARNING, "info": INFO}


def row(facts: EngineFacts) -> dict[str, Any]:
    """The line; None for what is not known."""
    view = facts.view
    rank, says = _state(facts)
    doing = facts.guarding.doing
    return {
        "id": id_of(view.name), "name": shown(view.name), "rank": rank, "state": STATES[rank], "says": shown(says),
        "model": None if view.look is None or view.look.model is None else shown(view.look.model),
        "vllm": None if view.vllm is None else shown(view.vllm),
        "kv": _rounded(facts.reading("kv_cache_usage"), 3), "running": _rounded(facts.reading("running"), 0),
        "waiting": _rounded(facts.reading("waiting"), 0), "in_flight": _rounded(facts.reading("in_flight"), 0),
        "twice": _rounded(facts.reading("twice"), 3), "rung": rung_of(facts),
        "doing": None if doing is None else f"{doing.grade}: {doing.step}", "paused": facts.guarding.is_paused,
    }  # fmt: skip


def rung_of(facts: EngineFacts) -> str | None:
    """The highest rung that what holds calls for; None while nothing holds."""
    held = [grade_of(one.kind) for one in facts.view.holding]
    return max(held, key=RUNGS.index, default=None)


def _state(facts: EngineFacts) -> tuple[int, str]:
    view = facts.view
    if view.needs:
        return PERSON, view.needs
    held = sorted((_BY_SEVERITY.get(str(one.severity), WARNING), str(one.code)) for one in view.findings)
    rules = [label(one) for one in view.holding]
    said = ", ".join(dict.fromkeys([code for _, code in held] + [name for name in rules if name.startswith("rule ")]))
    worst = min([rank for rank, _ in held] + ([WARNING] if rules and not held else []), default=WELL)
    if worst == CRITICAL:
        return CRITICAL, said
    if view.look is None:
        return UNKNOWN, "not looked at yet"
    if view.unreachable_since_s is not None or (view.look.reach is not Reach.ANSWERS and not view.has_answered):
        never = "" if view.has_answered else ", and never did since guard began"
        return GONE, SAYS.get(view.look.reach, "does not answer") + never
    if worst < WELL:
        return worst, said
    if view.look.reach is not Reach.ANSWERS:
        return UNKNOWN, f"the last look brought nothing: {view.look.why}"
    return WELL, "well"


def _rounded(reading: Reading, digits: int) -> float | int | None:
    if isinstance(reading, Unknown) or reading != reading or abs(reading) == float("inf"):
        return None
    return round(reading, digits) if digits else round(reading)
