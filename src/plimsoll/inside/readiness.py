"""Ready or not, and why not. Being full or shedding never is a reason: it would push the load onto the other servers."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.inside.drain import SERVING

READY = "ready"
STARTING = "starting"
DRAINING = "draining"
ASLEEP = "asleep"
DEAD = "dead"
WEDGED = "wedged"
REASONS = (STARTING, DEAD, WEDGED, ASLEEP, DRAINING)  # the worst that holds is named


class Standing(NamedTuple):
    """What is known of the server at one moment."""

    has_engine: bool
    is_dead: bool
    is_proven_wedged: bool
    asleep: str  # how, in words; empty when awake
    drain_phase: str
    is_stopping: bool = False  # vLLM was told to end


class Readiness(NamedTuple):
    """The answer of /plimsoll/ready."""

    reason: str
    detail: str

    @property
    def is_ready(self) -> bool:
        """Whether a balancer may send work here."""
        return self.reason == READY


def judge(standing: Standing) -> Readiness:
    """The first reason that holds, the gravest first."""
    if not standing.has_engine:
        return Readiness(STARTING, "the engine is not there yet")
    if standing.is_dead:
        return Readiness(DEAD, "vLLM says that its engine is dead; only a restart helps")
    if standing.is_proven_wedged:
        return Readiness(WEDGED, "no step for too long with work waiting, and a request of one token was not answered")
    if standing.asleep:
        return Readiness(ASLEEP, standing.asleep)
    if standing.is_stopping:
        return Readiness(DRAINING, "vLLM was told to end and finishes what it has")
    if standing.drain_phase != SERVING:
        return Readiness(DRAINING, f"draining, {standing.drain_phase}")
    return Readiness(READY, "")
