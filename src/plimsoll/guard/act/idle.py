"""Decides whether an engine is idle, so that stopping it harms nobody: two samples, a while apart, that show no work.

Gate and engine must agree: at the gate nothing in flight, nothing in the background and no request with the engine; on the
engine's page nothing running or waiting in any rank; the engine answers. All of it twice, with no request let in and no step
made between the two. One missing figure makes the result unknown.

It holds at the moment of the later sample. Only a gate that refuses new work keeps it so: refuse new work, then stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.judge.look import Look, Reach

APART_S = 2.0  # the gate looks for work in the background once a second, and vLLM's page follows its steps
STALE_S = 15.0  # a sample that is older than the other by more than this is not compared with it
HEALTHY = 200

Fact = str | int | float | bool


class IdleSample(NamedTuple):
    """One look at the engine, and the facts of the gate's `state()` at that time; None if the gate did not answer.

    The look's own gate state is not used: it lacks the background work, and leaves out guard's canary requests.
    """

    look: Look
    gate: Mapping[str, Fact] | None


def idleness(samples: Sequence[IdleSample]) -> Outcome:
    """Returns done if it is idle, by the last sample and one at least APART_S earlier; unknown is no reason to stop it.

    Work in the last sample alone means that it is not idle.
    """
    if not samples:
        return unsure("no look yet")
    last = samples[-1]
    now = _in_sample(last)
    if now.is_done is not True:
        return now
    for earlier in reversed(samples[:-1]):
        apart = last.look.at_s - earlier.look.at_s
        if apart < 0:
            return unsure("the samples are not in order")
        if apart > STALE_S:
            break
        before = _in_sample(earlier)
        # Whatever lies between the two witnesses counts too: work or silence there begins the count anew.
        if before.is_done is not True:
            return Outcome(before.is_done, f"{apart:.1f} s ago: {before.message}")
        between = _between(earlier, last)
        if between.is_done is not True:
            return between
        if apart >= APART_S:
            return done(f"no work in two samples, {apart:.1f} s apart, and none between them")
    return unsure(f"no work, but only seen once in the last {STALE_S:g} s")


def _in_sample(sample: IdleSample) -> Outcome:
    """Returns the verdict of one sample; work seen anywhere outweighs a figure missing elsewhere."""
    look, gate = sample.look, sample.gate or {}
    counts: list[tuple[str, object]] = [
        ("in flight at the gate", gate.get("in_flight")),
        ("in the background", gate.get("background")),
        ("that the gate has with the engine", gate.get("engine_requests")),
        ("running", look.figures.get("running")),
        ("waiting", look.figures.get("waiting")),
    ]
    for rank in look.ranks:
        counts += [(f"running in rank {rank.name}", rank.running), (f"waiting in rank {rank.name}", rank.waiting)]
    read = [(name, _count(value)) for name, value in counts]
    busy = [f"{value:g} {name}" for name, value in read if value]
    if busy:
        return failed(f"there is work: {', '.join(busy[:3])}")
    if look.reach is not Reach.ANSWERS or look.health != HEALTHY:
        why = look.why or f"/health says {look.health or 'nothing'}"
        return unsure(f"the engine does not answer: {why}")
    if not sample.gate:
        return unsure("the gate does not answer")
    missing = [name for name, value in read if value is None]
    if missing:
        return unsure(f"not known: how many are {missing[0]}")
    # The gate's own verdict also waits until it has looked for background work that an ended request left behind.
    idle, is_dead, is_wedged = (gate.get(name) for name in ("idle", "is_dead", "is_wedged"))
    if is_dead is not False or is_wedged is not False:
        how = "dead" if is_dead is True else "stuck" if is_wedged is True else "perhaps dead or stuck"
        return unsure(f"the gate says that the engine is {how}: what it has is not known")
    if not isinstance(idle, bool):
        return unsure("the gate does not say whether it is idle")
    return done("no work") if idle else failed("the gate is not sure yet that nothing was left in the background")


def _between(earlier: IdleSample, later: IdleSample) -> Outcome:
    """Returns a verdict that is idle if no request came, no step ran and no process was replaced between the two samples."""
    before, after = earlier.gate or {}, later.gate or {}
    same: dict[str, tuple[Fact | None, Fact | None]] = {
        name: (before.get(fact), after.get(fact))
        for name, fact in (
            ("requests that the gate let in", "begun"), ("the engine's steps", "steps"), ("the drain's epoch", "epoch"),
            ("API servers", "api_servers"),
        )
    }  # fmt: skip
    same["steps on the page"] = earlier.look.figures.get("steps"), later.look.figures.get("steps")
    ranks = [{rank.name: rank.steps for rank in sample.look.ranks} for sample in (earlier, later)]
    same |= {
        f"steps of rank {name}": (ranks[0].get(name), ranks[1].get(name)) for name in sorted(ranks[0].keys() | ranks[1].keys())
    }
    if missing := [name for name, pair in same.items() if _count(pair[0]) is None or _count(pair[1]) is None]:
        return unsure(f"not known in both samples: {missing[0]}")
    if changed := [name for name, (one, two) in same.items() if one != two]:
        return failed(f"something happened between the samples: {changed[0]}")
    return done("nothing happened")


def _count(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return None
    return float(value)
