"""An engine's contained failures as its page shows them: how many, what they cost, and the shape of the newest one."""

from __future__ import annotations

from typing import Any

from plimsoll.dashboard.texts import shown
from plimsoll.domain.look import Look
from plimsoll.domain.survive import Survival, last_words

NO_GATE = "unknown: the gate tells this (docs/inside.md)"
TOO_OLD = "unknown: the plimsoll inside this engine does not know of containment"
OFF = "a step that runs out of memory ends the engine"
ARMED = "armed: requests of a step that runs out of memory are computed again in smaller steps"
STORM = "a storm: steps run out of memory again and again, and this engine should be drained and restarted"
LIMPS = "it limps: far slower than before its steps ran out of memory"
_FIGURES = (
    ("contained", "contained failures", "count"), ("aborted", "requests aborted", "count"),
    ("recomputed_tokens", "tokens computed again", "count"), ("stalled_s", "streams stood still", "seconds"),
    ("tokens_now", "tokens of a step, at most", "count"), ("tokens_start", "at its start", "count"),
)  # fmt: skip


def survival_of(look: Look | None) -> dict[str, Any]:
    """The card; without figures where nobody tells of any."""
    found = None if look is None or look.gate is None else look.gate.survival
    if look is None or found is None:
        return {"says": TOO_OLD if look is not None and look.gate is not None else NO_GATE, "figures": [], "last": None}
    figures = [
        {"name": name, "says": says, "unit": unit, "value": value, "why": "" if value is not None else "unknown"}
        for name, says, unit in _FIGURES
        for value in (getattr(found, name),)
    ]
    is_quiet = not found.armed and not found.contained
    return {"says": shown(_says(found)), "figures": [] if is_quiet else figures, "last": _last(look, found)}


def _says(found: Survival) -> str:
    if found.storm:
        return STORM
    if found.limping:
        return LIMPS
    if found.armed:
        return ARMED
    return f"{'off' if found.armed is None else 'not armed'}, {OFF}: {found.why or 'the gate does not say why'}"


def _last(look: Look, found: Survival) -> dict[str, Any] | None:
    """The newest, with the moment it happened: an age would be another one at every look."""
    if found.last is None or not found.contained:
        return None
    at = None if found.last.age_s is None else round(look.unix_s - found.last.age_s)
    return {"at": at, "says": shown(last_words(found.last))}
