"""What the fleet's locks have in common: a clock that also counts sleep, and words that are fit to be shown.

A lock is for the guards of one fleet: at most one of them acts. Each time that it changes hands its epoch grows, and every deed
carries the epoch; a gate refuses an epoch older than one it has seen. So it does no harm there if a guard that was stopped in
mid-thought wakes up and believes that it still holds the lock. What does not look at the epoch (a balancer, a process that is
stopped or started) is not protected in that way: there a guard asks `renew` right before, and the time between that answer and
the deed is what no lock can cover.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.domain.redaction import redact

EPOCH_MAX = 2**62  # what a gate takes
OWNER_MAX = 200


def now_s() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine sleeps: a lease does too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def shown(text: object) -> str:
    """What may be shown of a name that came from outside: short, printable, nothing secret."""
    words = "".join(letter if letter.isprintable() else " " for letter in str(text)[:4096])
    return redact(" ".join(words.split()))[:OWNER_MAX] or "somebody without a name"


def is_epoch(value: object) -> bool:
    """Whether this can be one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < EPOCH_MAX


def count(value: object) -> int | None:
    """A whole number, also where JSON carries it as a text; None if it is none."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


class Held(NamedTuple):
    """A lock that is held for a time."""

    epoch: int
    until_s: float  # by now_s; when it was not renewed until then, somebody else may have it

    @property
    def left_s(self) -> float:
        """How long it is ours without asking again."""
        return round(max(0.0, self.until_s - now_s()), 3)


def ours(held: Held) -> Outcome:
    """It was granted; unsure if the answer was read so late that its time is over (we were stopped in between)."""
    if held.left_s <= 0:
        return unsure("the answer came too late to tell whether the lock is ours", epoch=held.epoch, left_s=0.0)
    return done(f"the lock is ours (epoch {held.epoch}) for {held.left_s:.0f} s", epoch=held.epoch, left_s=held.left_s)


def not_renewed(held: Held, why: str) -> Outcome:
    """The lock's service could not be asked: not known, as long as the time that was granted lasts; then it is lost."""
    if held.left_s > 0:
        return unsure(f"{why}; the lock is ours for {held.left_s:.1f} s more", epoch=held.epoch, left_s=held.left_s)
    return failed(f"{why}, and the time for which the lock was granted is over: it is lost", lost=True)
