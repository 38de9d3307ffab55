"""[act]: what guard may do, how often and when; every number of acting, declared once with its bounds."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from plimsoll.guard import config_fields as key
from plimsoll.guard.judge.tracker import Grade

HOUR_S = 3_600.0
DAY_S = 86_400.0
MOST_HOURS = 24
_RUNGS = (Grade.SHED, Grade.COMPACT, Grade.RESTART)
_NOT_LESS = (
    ("backoff_s", "longest_backoff_s"), ("start_still_s", "start_within_s"), ("restarts_per_hour", "restarts_per_day"),
    ("fleet_restarts_per_hour", "fleet_restarts_per_day"),
)  # fmt: skip


class Hours(NamedTuple):
    """A time of day, from and to, in minutes after midnight; past midnight where it ends before it begins."""

    begin: int
    end: int

    def holds(self, minute: int) -> bool:
        """True if this minute of the day lies within the hours."""
        if self.begin <= self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


def _hours(texts: tuple[str, ...]) -> tuple[Hours, ...]:
    if len(texts) > MOST_HOURS:
        raise ValueError(f"at most {MOST_HOURS} times of day")
    windows = []
    for text in texts:
        parts = re.fullmatch(r"([0-9]{1,2}):([0-5][0-9])-([0-9]{1,2}):([0-5][0-9])", text.replace(" ", ""))
        begin, end = (int(parts[1]) * 60 + int(parts[2]), int(parts[3]) * 60 + int(parts[4])) if parts else (0, 0)
        if begin == end or begin >= 1_440 or end > 1_440:
            raise ValueError(f'{text[:40]!r} is no time of day from and to; write "22:00-06:00"')
        windows.append(Hours(begin, end))
    return tuple(windows)


def _rungs(default: tuple[Grade, ...], text: str) -> Any:
    return key.words(default, text, choices=tuple(map(str, _RUNGS)), convert=lambda texts: tuple(map(Grade, texts)))


@dataclass(frozen=True, slots=True)
class ActPolicy(key.ConfigTable):
    """[act], for the whole fleet. Times are seconds; a path is None if it was not named."""

    rungs: tuple[Grade, ...] = _rungs(_RUNGS, "what guard may do at all")
    restarts_per_hour: int = key.count(2, 0, 20, "of one engine, whoever made them")
    restarts_per_day: int = key.count(6, 0, 100, "of one engine, whoever made them")
    fleet_restarts_per_hour: int = key.count(4, 0, 100, "of all engines together")
    fleet_restarts_per_day: int = key.count(20, 0, 500, "of all engines together")
    backoff_s: float = key.duration(300.0, 30.0, DAY_S, "between two restarts of an engine, doubled with each of the same day")
    longest_backoff_s: float = key.duration(14_400.0, 60.0, DAY_S, "what that grows to at most")
    most_away: int = key.count(1, 1, 100, "engines of a group that are out of service at a time, for whatever reason")
    carries: float = key.share(0.8, 0.1, 1.0, "of the others' KV cache, that their load with this engine's may fill")
    hours: tuple[Hours, ...] = key.words(
        (), 'when engines may be restarted, such as "22:00-06:00"; none: at any time', convert=_hours
    )
    timezone: str = key.other("timezone", "whose hours those are, such as Europe/Berlin", "UTC")
    broken_any_time: bool = key.switch("the hours do not hold for an engine that serves nobody")
    may_be_last: bool = key.switch("the only engine of a group may be restarted, too")
    rollout_s: float = key.duration(900.0, 0.0, DAY_S, "after an engine's version or flags changed, its group is left alone")
    drain_within_s: float = key.duration(300.0, 10.0, 7_200.0, "until it must be idle")
    lease_s: float = key.duration(60.0, 15.0, 600.0, "of a drain; should guard be gone, the gate ends the drain after it")
    stragglers: str = key.choice(
        "undo", ("undo", "stop"), "what becomes of one that is not idle in time: it serves on, or is stopped"
    )
    stop_within_s: float = key.duration(120.0, 5.0, 1_800.0, "from SIGTERM until SIGKILL")
    gone_within_s: float = key.duration(120.0, 5.0, 1_800.0, "until the device's memory must be back")
    start_still_s: float = key.duration(600.0, 30.0, 7_200.0, "a start that shows no progress for so long has failed")
    start_within_s: float = key.duration(7_200.0, 60.0, DAY_S, "until it must be ready at all")
    probation_s: float = key.duration(600.0, 10.0, DAY_S, "how long it is watched before its restart counts as a success")
    shed_wait_s: float = key.duration(20.0, 1.0, 3_600.0, "new work that would wait longer is refused while it sheds")
    shed_lease_s: float = key.duration(120.0, 15.0, 3_600.0, "should guard be gone, the gate sheds no longer after it")
    approve: tuple[Grade, ...] = _rungs((), "what guard only does after a person has approved it")
    approve_within_s: float = key.duration(3_600.0, 60.0, DAY_S, "how long guard waits for that")
    journal: str | None = key.path("default: guard.journal in $STATE_DIRECTORY, else in $XDG_STATE_HOME/plimsoll")
    evidence: str | None = key.path("a folder; default: evidence beside the journal")

    def checked(self, given: Collection[str]) -> Self:
        """Returns itself; raises WrongKey where a limit's maximum is less than the limit."""
        for less, more in _NOT_LESS:
            if getattr(self, less) > getattr(self, more):
                few, many = less.removesuffix("_s"), more.removesuffix("_s")
                raise key.WrongKey(many if many in given else few, f"{many} must not be less than {few}")
        return self
