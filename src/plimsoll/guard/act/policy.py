"""What guard may do, how often and when: every number of acting, with what it may be set to."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.guard.judge.tracker import Grade

HOUR_S = 3_600.0
DAY_S = 86_400.0


class Hours(NamedTuple):
    """A time of day, from and to, in minutes after midnight; past midnight where it ends before it begins."""

    begin: int
    end: int

    def holds(self, minute: int) -> bool:
        """Whether this minute of the day is in it."""
        if self.begin <= self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


class ActPolicy(NamedTuple):
    """Of the whole fleet. Times are seconds."""

    rungs: frozenset[Grade] = frozenset({Grade.SHED, Grade.COMPACT, Grade.RESTART})
    engine_hour: int = 2  # restarts of one engine, whoever made them
    engine_day: int = 6
    fleet_hour: int = 4
    fleet_day: int = 20
    backoff_s: float = 300.0  # after a restart, doubled with each of the same day
    longest_backoff_s: float = 4 * HOUR_S
    most_away: int = 1  # engines of a group that are out of service at the same time, for whatever reason
    carries: float = 0.8  # of the others' KV cache, that their load with this engine's may fill
    hours: tuple[Hours, ...] = ()  # when engines may be restarted; none: at any time
    broken_any_time: bool = False  # the hours do not hold for an engine that serves nobody
    may_be_last: bool = False  # the only engine that serves may be restarted, too
    rollout_s: float = 900.0  # after a version or a flag of an engine changed, nothing else of its group is touched
    drain_within_s: float = 300.0
    lease_s: float = 60.0
    stragglers: str = "undo"  # what becomes of an engine that is not idle in time: "undo", or "stop" it all the same
    stop_within_s: float = 120.0
    gone_within_s: float = 120.0
    start_still_s: float = 600.0  # a start that shows no progress for so long has failed
    start_within_s: float = 2 * HOUR_S
    probation_s: float = 600.0
    shed_wait_s: float = 20.0
    shed_lease_s: float = 120.0
