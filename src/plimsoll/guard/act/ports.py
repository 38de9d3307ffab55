"""Ports through which guard acts on the world; adapters implement them. None of them raises when the world fails.

Every call ends within its own deadline with an outcome: done, not done, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from plimsoll.guard.act.journal_entry import Entry
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.judge.look import Look
from plimsoll.unknown import Condition


class Outcome(NamedTuple):
    """Result of one call. Callers treat unknown as neither done nor failed: they look again, or do nothing."""

    is_done: bool | None  # None: unknown whether it took effect
    message: str  # one sentence, with nothing secret in it
    facts: Mapping[str, str | int | float | bool] = {}

    def __str__(self) -> str:
        return self.message


def done(message: str, **facts: str | float | bool) -> Outcome:
    return Outcome(is_done=True, message=message, facts=facts)


def failed(message: str, **facts: str | float | bool) -> Outcome:
    return Outcome(is_done=False, message=message, facts=facts)


def unsure(message: str, **facts: str | float | bool) -> Outcome:
    return Outcome(is_done=None, message=message, facts=facts)


class GateClient(Protocol):
    """The gate of one engine."""

    async def drain(self, epoch: int, lease_s: float, *, refuse: bool = False) -> Outcome:
        """Begin a drain or renew its lease."""

    async def undrain(self, epoch: int) -> Outcome: ...  # end it
    async def shed(self, max_wait_s: float, lease_s: float) -> Outcome: ...  # refuse new work that would wait longer
    async def unshed(self) -> Outcome: ...  # take everything again
    async def compact(self) -> Outcome: ...  # give back what torch does not use
    async def state(self) -> Outcome: ...  # what the gate reports of itself, as facts


@runtime_checkable
class TurnsKnobs(Protocol):
    """A gate that turns knobs of its engine's scheduler."""

    async def set_knobs(self, values: Mapping[str, float], lease_s: float, epoch: int) -> Outcome: ...  # for a time
    async def knobs(self) -> Outcome: ...  # the knobs as the engine tells them


class Balancer(Protocol):
    """The load balancer's control of one engine: in or out of rotation."""

    label: str

    async def take_out(self) -> Outcome: ...  # send it nothing new
    async def put_back(self) -> Outcome: ...  # send it work again
    async def is_out(self) -> bool | None: ...  # read back; None where that is not known
    async def connections(self) -> int | None: ...  # how many are still with it


class ServerHealth(NamedTuple):
    """A balancer's own health check and traffic counts of one engine; None where it does not report one."""

    is_down: bool | None  # by its own check
    total: int | None  # bytes of answers ever
    is_maintained: bool = False  # an operator has put it into maintenance
    busy: int = 0  # requests that are with it now
    ended: int | None = None  # requests that have ended, ever


@runtime_checkable
class SeesTraffic(Protocol):
    """A balancer that checks the engine's health by itself and counts its answers."""

    async def health(self) -> ServerHealth | None: ...  # None where it cannot be asked


@runtime_checkable
class TakesEpoch(Protocol):
    """A balancer that passes the lock's epoch on, so that its receiver can refuse an older guard."""

    epoch: int


class Restarter(Protocol):
    """Stops and starts one engine."""

    label: str
    # Its supervisor starts another engine by itself: `start` waits for it and names it in `facts["replacement"]`, or says
    # in `facts["no_replacement"]` why there is none; PodEviction of adapters/kubernetes.py is one.
    replaces: bool

    async def stop(self, deadline_s: float) -> Outcome:
        """SIGTERM to the server alone, and after the deadline SIGKILL to all of it."""

    async def start(self) -> Outcome: ...  # start it; refused while the old one lives
    async def is_running(self) -> bool | None: ...  # whether it lives
    async def pids(self) -> tuple[int, ...]: ...  # its processes, the server first


class Lock(Protocol):
    """The fleet's lock: its holder may act, under an epoch number that only grows."""

    label: str

    async def acquire(self, owner: str) -> Outcome: ...  # take it; `facts["epoch"]` is its number
    async def renew(self) -> Outcome: ...  # keep it
    async def release(self) -> Outcome: ...  # give it back


class JournalWriter(Protocol):
    """The journal."""

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry: ...  # write one entry; WorldFailed where it is not surely on the disk, and then nothing may be done
    def kept(self) -> list[Entry]: ...  # the written entries that are still needed


class EngineObserver(Protocol):
    """Gives fresh looks at the engines, and their judged conditions."""

    async def look(self, engine: str) -> Look | None: ...  # a fresh look; None where the engine is no longer watched
    def conditions(self, engine: str) -> Mapping[str, Condition]: ...  # as of the last look
    def unproved(self, engine: str, *, is_asked: bool = False) -> str: ...  # why it may serve somebody; "" where it does not
    def engines(self) -> Sequence[str]: ...  # all that are watched
    def suffering(self, engine: str, policy: ActPolicy) -> str: ...  # why the others cannot carry its load; "" if they can


# Optional abilities of a restarter beyond `Restarter`; guard tests for each by its methods.


@runtime_checkable
class RemembersStop(Protocol):
    """A restarter that must remember after a stop what it stopped."""

    async def learn(self) -> Outcome: ...  # returns as facts what it would stop
    def recall(self, facts: Mapping[str, Any]) -> None: ...  # takes over the facts that an earlier guard learned


@runtime_checkable
class KnowsExit(Protocol):
    """A restarter that knows how an engine ended."""

    async def last_exit(self) -> Outcome:
        """Done if the engine has ended, with `by_hand` if an operator stopped it and `asked` if guard did."""
