"""Collects what each witness says about an engine, and whether that proves that it serves nobody.

Guard's own connection is one witness of several: a firewall, a tunnel or a proxy may stand between. An engine is stopped only
on proof: its process is gone, or its own gate or a process on guard's own machine says dead or stuck, or the balancer sees it
down by its own check and has had no byte of an answer from it for a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plimsoll.guard.judge.look import BalancerHealth, Look, Reach

SAME_PROCESS_S = 2.0  # two statements of one process's start differ by no more
SILENT_S = 60.0  # an overloaded server times out guard and the balancer alike while its streams flow
FLOWING_S = 8.0  # bytes this recent show that the engine serves, whatever else is said


class Testimony(StrEnum):
    """A witness's statement about an engine."""

    SERVES = "serves"
    DOWN = "down"
    STUCK = "stuck"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Witness:
    """One witness. `is_local`: no network lies between it and the engine."""

    name: str
    says: Testimony
    text: str
    is_local: bool = False

    @property
    def is_proof(self) -> bool:
        return self.name != "connection" and self.says in (Testimony.DOWN, Testimony.STUCK)


@dataclass(frozen=True, slots=True)
class Proof:
    """The witness that proves that stopping an engine harms nobody, or the reason why none does."""

    by: Witness | None
    why_not: str = ""
    is_contradicted: bool = False  # a witness sees it serve

    @property
    def is_local(self) -> bool:
        return self.by is not None and self.by.is_local


def is_direct(look: Look) -> bool | None:
    """True if the page is the engine's own, by its gate's or its local process's start; None where no start is known."""
    starts = [start for start in (look.local_start, None if look.gate is None else look.gate.started) if start is not None]
    if not starts or look.started_unix_s is None:
        return None
    return all(abs(start - look.started_unix_s) <= SAME_PROCESS_S for start in starts)


def witnesses(look: Look, active: frozenset[str]) -> tuple[Witness, ...]:
    """Returns every witness at this look; `active` are the conditions dead, wedged and hung that are true."""
    said = [_connection(look)]
    if look.ended or look.gone:
        if look.reach is Reach.ANSWERS:
            said.append(Witness("process", Testimony.UNKNOWN, "its restarter names another process than the one that answers"))
        else:
            said.append(Witness("process", Testimony.DOWN, look.ended or look.gone, is_local=True))
    gate = look.gate
    if gate is not None and is_direct(look) is False:
        said.append(Witness("gate", Testimony.UNKNOWN, "the gate is of another process than the metrics page"))
    elif gate is not None and gate.is_wedged:
        said.append(Witness("gate", Testimony.STUCK, "its gate has proved it stuck", is_local=True))
    elif gate is not None and gate.reason == "dead":
        said.append(Witness("gate", Testimony.DOWN, "its gate reports a dead engine", is_local=True))
    elif gate is not None:
        says = Testimony.SERVES if gate.ready else Testimony.UNKNOWN
        said.append(Witness("gate", says, f"its gate says {gate.reason or 'ready'}"))
    if look.local_start is not None and is_direct(look) and active:
        stuck = active & {"wedged", "hung"}
        text = "the process on this machine makes no steps" if stuck else "the process on this machine reports a dead engine"
        said.append(Witness("local process", Testimony.STUCK if stuck else Testimony.DOWN, text, is_local=True))
    if look.reach is Reach.REFUSED and look.is_port_open is False:
        said.append(Witness("local process", Testimony.DOWN, "nobody listens at its port on this machine", is_local=True))
    if look.balancer is not None:
        said.append(_balancer(look.balancer))
    return tuple(said)


def _connection(look: Look) -> Witness:
    if look.reach is not Reach.ANSWERS:
        return Witness("connection", Testimony.UNKNOWN, look.why or str(look.reach))
    if look.health == 503:
        return Witness("connection", Testimony.DOWN, "/health returns 503")
    return Witness("connection", Testimony.SERVES, "it answers")


def _balancer(view: BalancerHealth) -> Witness:
    if view.silent_s is not None and view.silent_s < FLOWING_S:
        return Witness("balancer", Testimony.SERVES, f"the balancer got bytes of an answer {view.silent_s:.0f} s ago")
    if view.is_down is False:
        return Witness("balancer", Testimony.SERVES, "the balancer's own check passes")
    if view.is_down and view.silent_s is not None and view.silent_s >= SILENT_S:
        text = f"the balancer's own check fails, and no byte of an answer came for {view.silent_s:.0f} s"
        return Witness("balancer", Testimony.DOWN, text)
    if view.unseen:
        text = f"the balancer has {view.unseen} requests with it and counts their bytes only at their end (option contstats)"
        return Witness("balancer", Testimony.UNKNOWN, text)
    return Witness("balancer", Testimony.UNKNOWN, "the balancer does not tell yet")


def proof(look: Look | None, active: frozenset[str]) -> Proof:
    """Returns the witness that proves that it serves nobody, or why there is none.

    Flowing answers outweigh all; a passing check outweighs what is not local, and a restarter that does not say how it ended.
    """
    if look is None:
        return Proof(None, "not looked at yet")
    said = witnesses(look, active)
    proving = sorted((witness for witness in said if witness.is_proof), key=lambda witness: not witness.is_local)
    balancer = next((witness for witness in said if witness.name == "balancer" and witness.says is Testimony.SERVES), None)
    if balancer is not None and look.balancer is not None:
        is_flowing = look.balancer.silent_s is not None and look.balancer.silent_s < FLOWING_S
        if is_flowing or not any(one.is_local and (one.name != "process" or look.ended) for one in proving):
            return Proof(None, balancer.text, is_contradicted=True)
    if not proving:
        is_seen = any(witness.says is Testimony.SERVES and witness.name != "connection" for witness in said)
        why = "only guard's own connection says so: neither its process, its gate nor its balancer confirms it"
        if look.balancer is not None and look.balancer.unseen:
            why += f"; {_balancer(look.balancer).text}"
        return Proof(None, why, is_contradicted=is_seen)
    return Proof(proving[0])
