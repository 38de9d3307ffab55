"""The lives of one engine: when each process began that answered at its address, whoever started it."""

from __future__ import annotations

import math
from collections import deque

from plimsoll.domain.look import Look

KEPT = 32
SHARED_S = 600.0
SAME_S = 1.0  # two start times that are this near are one


class Lives:
    """What tells one process from the next. Times are guard's own clock: an engine's may be hours off."""

    def __init__(self) -> None:
        self._shared_at_s = -math.inf
        self.total = 0
        """How often another process was seen to answer."""
        self._seen: deque[float] = deque(maxlen=KEPT)  # when each later life was first seen
        self._counted: deque[float] = deque(maxlen=KEPT)  # when its cluster was seen to have counted one more
        self._started: float | None = None
        self._before: deque[float] = deque(maxlen=KEPT)
        self._containers: int | None = None

    def begins(self, look: Look, *, has_fallen: bool) -> bool:
        """Take a look that was answered: whether another process answers than before. `has_fallen`: totals fell together."""
        started, before = look.started_unix_s, self._started
        self._started = before if started is None else started
        if started is None or before is None:
            is_another = has_fallen
            if has_fallen:
                self._started = started  # the next start time that is read is this process's
        else:
            is_another = abs(started - before) > SAME_S
            if is_another:
                if any(abs(started - earlier) <= SAME_S for earlier in self._before):
                    self._shared_at_s = look.at_s
                self._before.append(before)
        if is_another:
            self._seen.append(look.at_s)
            self.total += 1
        return is_another

    def count(self, look: Look) -> None:
        """Take any look: its cluster also counts starts that were over before anybody could look."""
        count, before = look.container_restarts, self._containers
        if count is None:
            return
        self._containers = count
        if before is not None:
            self._counted += [look.at_s] * min(KEPT, max(0, count - before))

    def is_shared(self, now_s: float) -> bool:
        """A start time came back that had been replaced: several servers answer at this address, in turn.

        A rollout behind one address looks the same while it lasts; when one has answered alone for a while it is over.
        """
        return now_s - self._shared_at_s < SHARED_S

    def since(self, from_s: float) -> int:
        """How often it began anew since then."""
        return max(sum(at_s >= from_s for at_s in times) for times in (self._seen, self._counted))
