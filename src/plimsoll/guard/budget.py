"""Whether one more restart is allowed, everybody's counted in: a guard that restarts for ever is the worse fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.guard.act_policy import DAY_S, HOUR_S, ActPolicy


class Restart(NamedTuple):
    """One that was: when, by wall clock, of which engine, and whether guard made it."""

    at: float
    engine: str
    is_own: bool = True


class Spent(NamedTuple):
    """Why there is none left, and when there will be; "" where there is."""

    says: str
    until: float = 0.0


def spent(restarts: Sequence[Restart], engine: str, policy: ActPolicy, now: float) -> Spent:
    """The tightest of the budgets, and the pause after the last restart.

    What is dated later than now was written by a clock that was wrong: it counts, as of now.
    """
    times = sorted(min(one.at, now) for one in restarts if one.at > now - DAY_S)
    own = sorted(min(one.at, now) for one in restarts if one.at > now - DAY_S and one.engine == engine)
    limits = (
        (own, policy.engine_hour, HOUR_S, "of this engine in an hour"),
        (own, policy.engine_day, DAY_S, "of this engine in a day"),
        (times, policy.fleet_hour, HOUR_S, "of the fleet in an hour"),
        (times, policy.fleet_day, DAY_S, "of the fleet in a day"),
    )
    for when, most, span_s, words in limits:
        recent = [at for at in when if at > now - span_s]
        if len(recent) >= most:
            until = recent[-most] + span_s if most > 0 else now + span_s
            return Spent(f"{len(recent)} restarts {words}, {most} are allowed", until)
    if own:
        pause_s = min(policy.longest_backoff_s, policy.backoff_s * 2.0 ** (len(own) - 1))
        if now - own[-1] < pause_s:
            says = f"its last restart was {now - own[-1]:.0f} s ago; after {len(own)} in a day guard waits {pause_s:.0f} s"
            return Spent(says, own[-1] + pause_s)
    return Spent("")
