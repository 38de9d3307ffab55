"""What the fleet's locks have in common: the frame of those that a service keeps, a clock that also counts sleep, fit words.

A lock is for the guards of one fleet: at most one of them acts. Each time that it changes hands its epoch grows, and every deed
carries the epoch; a gate refuses an epoch older than one it has seen. So it does no harm there if a guard that was stopped in
mid-thought wakes up and believes that it still holds the lock. What does not look at the epoch (a balancer, a process that is
stopped or started) is not protected in that way: there a guard asks `renew` right before, and the time between that answer and
the deed is what no lock can cover.
"""

from __future__ import annotations

import abc
import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.net.client import Lost, Reply
from plimsoll.redaction import printable, redact

EPOCH_MAX = 2**62  # what a gate takes
OWNER_MAX = 200
TTL_S = 30
TIMEOUT_S = 5.0


def ttl_key() -> Any:
    """The key of the time for which a service grants the lock."""
    text = "of etcd's key and the Lease: so long after a guard died another may act"
    return key.duration(TTL_S, 15.0, 300.0, text, convert=int)


def now_s() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine sleeps: a lease does too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def shown(text: object) -> str:
    """What may be shown of a name that came from outside: short, printable, nothing secret."""
    words = printable(str(text)[:4096])
    return redact(" ".join(words.split()))[:OWNER_MAX] or "somebody without a name"


def is_epoch(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < EPOCH_MAX


def count(value: object) -> int | None:
    """A whole number, also where JSON carries it as a text; None if it is none."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


class Grant(NamedTuple):
    """A lock that is held for a time."""

    epoch: int
    until_s: float  # by now_s; when it was not renewed until then, somebody else may have it

    @property
    def left_s(self) -> float:
        """How long it is ours without asking again."""
        return round(max(0.0, self.until_s - now_s()), 3)


def ours(held: Grant) -> Outcome:
    """It was granted; unsure if the answer was read so late that its time is over (we were stopped in between)."""
    if held.left_s <= 0:
        return unsure("the answer came too late to tell whether the lock is ours", epoch=held.epoch, left_s=0.0)
    return done(f"the lock is ours (epoch {held.epoch}) for {held.left_s:.0f} s", epoch=held.epoch, left_s=held.left_s)


def not_renewed(held: Grant, why: str) -> Outcome:
    """The lock's service could not be asked: not known, as long as the time that was granted lasts; then it is lost."""
    if held.left_s > 0:
        return unsure(f"{why}; the lock is ours for {held.left_s:.1f} s more", epoch=held.epoch, left_s=held.left_s)
    return failed(f"{why}, and the time for which the lock was granted is over: it is lost", lost=True)


class Unanswered(Exception):
    """There is no answer to be believed; its words go on from the service's name. It may have done what was asked."""


def believed(told: Reply | Lost) -> tuple[int, Mapping[str, Any]]:
    """The status, and the JSON object that came with it; Unanswered where none came, or a good status without an object."""
    if isinstance(told, Lost):
        raise Unanswered(told.why)
    found = told.table()
    if 200 <= told.status < 300 and not found:
        raise Unanswered("answers something that is not JSON")
    return told.status, found


class ServiceLock(abc.ABC):
    """One guard's hand on a lock. Its methods end within `timeout_s`, and never raise for what the service does."""

    def __init__(self, service: str, label: str, ttl_s: int, timeout_s: float) -> None:
        """`service` is how sentences call it, `label` how they call the lock."""
        self._service, self.label = service, label
        self._ttl_s, self._timeout_s = ttl_s, timeout_s
        self._mark = secrets.token_hex(8)  # tells us from a guard with the same name, also from one that we were before
        self._held: Grant | None = None
        self._one_at_a_time = asyncio.Lock()

    async def acquire(self, owner: str) -> Outcome:
        """Take the lock: done with its epoch, failed if somebody else has it, unsure if the service cannot be asked."""
        async with self._one_at_a_time:
            deadline = now_s() + self._timeout_s
            if self._held is not None:
                again = await self._renew(self._held, deadline)
                if again.is_done is not False:
                    return again
            try:
                return await self._acquire(owner, deadline)
            except Unanswered as problem:
                return unsure(f"the lock cannot be taken: {self._service} {problem}")

    async def renew(self) -> Outcome:
        """Prolong it: failed as soon as it is not ours any more; unsure while nobody can be asked and its time still runs."""
        async with self._one_at_a_time:
            if self._held is None:
                return failed("the lock is not ours")
            return await self._renew(self._held, now_s() + self._timeout_s)

    async def release(self) -> Outcome:
        """Give it up. Unsure means: it ends when its time is over, or with another try."""
        async with self._one_at_a_time:
            if self._held is None:
                return done("the lock was not ours")
            try:
                await self._free(self._held, now_s() + self._timeout_s)
            except Unanswered as problem:
                return unsure(f"the lock ends by itself, in {self._held.left_s:.0f} s at most: {self._service} {problem}")
            epoch, self._held = self._held.epoch, None
            return done("the lock is given up", epoch=epoch)

    async def _renew(self, held: Grant, deadline: float) -> Outcome:
        began = now_s()
        try:
            found = await self._prolong(held, deadline)
        except Unanswered as problem:
            outcome = not_renewed(held, f"{self._service} {problem}")
            self._held = held if outcome.is_done is None else None
            return outcome
        if isinstance(found, str):
            self._held = None
            return failed(f"the lock is not ours any more{found}", lost=True)
        self._held = Grant(held.epoch, began + found)
        return ours(self._held)

    @abc.abstractmethod
    async def _acquire(self, owner: str, deadline: float) -> Outcome:
        """Take the lock, which is not held so far as we know; what is taken goes into `_held`."""

    @abc.abstractmethod
    async def _prolong(self, held: Grant, deadline: float) -> int | str:
        """For how many seconds it is ours from when this was asked; where it is lost, what more is known of that."""

    @abc.abstractmethod
    async def _free(self, held: Grant, deadline: float) -> None:
        """Give it up; all is well if it was lost already."""
