"""Restarts that somebody else made: by the start time on an engine's page, and by the count of whoever runs it.

Neither tells all. The page knows nothing of a process that ended before it answered, nor how many came and went while nobody
looked; the count of systemd or a cluster knows only what that started again by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.guard.lives import SAME_S


class Seen(NamedTuple):
    """Which process of an engine answers; None where that is not known."""

    started: float | None = None  # as its page says
    restarts: int | None = None  # how often whoever runs it has started it again


class Known(NamedTuple):
    """The same as the journal has it, and what came after."""

    seen: Seen | None = None  # None: it was never seen
    own: int = 0  # restarts of our own since
    is_awaited: bool = False  # one was counted whose process has not answered yet


class Found(NamedTuple):
    """What is new."""

    times: int  # restarts of somebody else
    seen: Seen
    is_awaited: bool
    is_new: bool  # whether there is anything to write down


def foreign(known: Known, now: Seen, lives: int) -> Found:
    """How many restarts of somebody else there were. `lives`: how often another process was seen to answer since then."""
    before = known.seen or Seen()
    is_another = before.started is not None and now.started is not None and abs(now.started - before.started) > SAME_S
    answered = max(lives, int(is_another))
    # One of them may be the process that we started, or that was counted before it answered.
    theirs = max(0, answered - max(known.own, int(known.is_awaited)))
    # A count that fell was begun anew: it says nothing of what was before.
    counted = 0 if before.restarts is None or now.restarts is None else max(0, now.restarts - before.restarts)
    started = before.started if now.started is None else now.started
    seen = Seen(started, before.restarts if now.restarts is None else now.restarts)
    is_awaited = not answered and (known.is_awaited or counted > 0)
    is_first = seen.started is not None and before.started is None
    is_new = bool(theirs or counted or is_another or is_first or lives or seen.restarts != before.restarts)
    return Found(max(theirs, counted), seen, is_awaited, is_new)
