"""Decides whether the other engines can carry the load of one that leaves; where that is unknown, they cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.guard.judge.look import Look, Reach
from plimsoll.unknown import Unknown


class EngineLoad(NamedTuple):
    """Current load of one engine."""

    engine: str
    kv_usage: float | None
    running: float | None
    waiting: float | None
    is_well: bool = True  # it answers, and no condition that could lead to an action holds or is in doubt
    model: str | None = None  # what it serves, as it last said


def load_of(engine: str, look: Look | None, *, is_well: bool, model: str | None = None) -> EngineLoad:
    """Returns an engine's load by its last look; `model` may be known from an earlier one."""
    figures: Mapping[str, float] = look.figures if look is not None and look.reach is Reach.ANSWERS else {}
    return EngineLoad(
        engine, figures.get("kv_cache_usage"), figures.get("running"), figures.get("waiting"),
        is_well=is_well and bool(figures), model=model,
    )  # fmt: skip


def without(leaving: EngineLoad, others: Sequence[EngineLoad], most_full: float) -> str | Unknown:
    """Returns why the others cannot carry its load; "" if they can; Unknown where figures are missing.

    Only engines that are known to serve the same model can. All must be healthy: what one does not take goes to the rest.
    """
    if not others:
        return "no other engine of its group can carry its load"
    if leaving.model is None:
        return Unknown("its model is unknown")
    unwell = [one.engine for one in others if not one.is_well]
    if unwell:
        return f"{unwell[0]} is not well"
    same = [one for one in others if one.model == leaving.model]
    if not same:
        return "no other engine of its group is known to serve the same model"
    figures = [(one.kv_usage, one.running, one.waiting) for one in (leaving, *same)]
    if any(value is None or not 0.0 <= value < float("inf") for row in figures for value in row):
        return Unknown("the load of some of them is unknown")
    usage = sum(row[0] or 0.0 for row in figures)
    queued = [one.engine for one in same if (one.waiting or 0.0) > max(1.0, 0.1 * (one.running or 0.0))]
    if queued:
        return f"{queued[0]} has a queue of its own"
    full = usage / len(same)
    if full > most_full:
        return f"the KV cache of the others would be {full:.0%} full, {most_full:.0%} is allowed"
    return ""
