"""Steps that ran out of memory and did not end the engine: that it happens, that it happens too often, and what it excuses.

A contained failure alone is told and never acted on. A server that limps, or fails again and again, is drained and restarted.
"""

from __future__ import annotations

from plimsoll.domain.finding import Evidence
from plimsoll.domain.look import Reach
from plimsoll.domain.survive import Survival, cost_words, last_words
from plimsoll.guard.history import History
from plimsoll.guard.policy import Policy
from plimsoll.guard.tracker import Seen, no, unknown, yes

SOURCE = "plimsoll_survive_contained_total"
OFF = "a step that runs out of memory ends the engine"


def contained(history: History, policy: Policy, now_s: float) -> Seen:
    """A step ran out of memory lately and was contained. One run of them is told once: until none has come for a while."""
    del now_s
    found = _survival(history)
    if isinstance(found, Seen):
        return found
    if found.contained is None:
        return unknown("NoCount", "the gate does not say how many failures were contained")
    over_s = policy.number("contained", "over")
    rose = history.rise_within("contained", over_s)
    age_s = None if found.last is None else found.last.age_s
    if rose > 0:
        first = f"{_steps(rose)} ran out of memory in the last {over_s / 60:.0f} min and the engine lives"
    elif found.contained > 0 and age_s is not None and age_s <= over_s:  # before guard's first look at this process
        first = f"{_steps(found.contained)} ran out of memory since it began, the last {age_s:.0f} s ago, and the engine lives"
    elif not found.armed:
        state = "off" if found.armed is None else "not armed"
        return unknown("NotArmed", f"containment is {state}, {OFF}: {found.why or 'the gate does not say why'}")
    else:
        return no("NoneLately", f"no step ran out of memory in the last {over_s / 60:.0f} min")
    last = last_words(found.last)
    text = "; ".join([first, *([f"the last: {last}"] if last else []), *cost_words(found)])
    return yes("Contained", text, Evidence(SOURCE, f"{found.contained:.0f} since the start"))


def _steps(count: float) -> str:
    return "1 step" if count == 1 else f"{count:.0f} steps"


def limping(history: History, policy: Policy, now_s: float) -> Seen:
    """The server says itself that it is far slower than it was, or that it fails too often: only a restart mends that."""
    del policy, now_s
    found = _survival(history)
    if isinstance(found, Seen):
        return found
    if found.storm is None or found.limping is None:
        return unknown("NotTold", "the gate does not say whether it limps")
    if found.storm:
        count = "" if found.contained is None else f": {found.contained:.0f} in all"
        return yes("Storm", f"steps run out of memory again and again{count}", Evidence("gate", "storm"))
    if found.limping:
        text = "; ".join(["it is far slower than before its steps ran out of memory", *cost_words(found)])
        return yes("Limps", text, Evidence("gate", "limping"))
    return no("AtSpeed", "it neither limps nor fails again and again")


def recomputes(history: History, policy: Policy) -> Seen | None:
    """Says that it is not stuck while a step was contained lately: its loop lives, and computes again; else None."""
    last = history.last
    if last is None or last.reach is not Reach.ANSWERS:
        return None
    still_s = policy.number("wedged", "still")
    found = None if last.gate is None else last.gate.survival
    newest = None if found is None or not found.contained else found.last
    is_young = newest is not None and newest.age_s is not None and newest.age_s < still_s
    if not is_young and history.rise_within("contained", still_s) <= 0:
        return None
    return no("Recomputes", f"a step ran out of memory less than {still_s:.0f} s ago, and its requests are computed again")


def _survival(history: History) -> Survival | Seen:
    last = history.last
    if last is None or last.reach is not Reach.ANSWERS:
        return unknown("Unreachable", "it could not be asked")
    if last.gate is None:
        return unknown("NoGate", "only the gate's state tells this (docs/inside.md)")
    if last.gate.survival is None:
        return unknown("TooOld", "the plimsoll inside it does not know of containment")
    return last.gate.survival
