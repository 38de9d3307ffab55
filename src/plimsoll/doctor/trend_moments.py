"""An engine from moment to moment: queues that last, whatever the moments were read from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from plimsoll.doctor.metrics_queues import ROOM, is_full, matters
from plimsoll.doctor.trend_growth import median

LASTS_S = 60.0
"""How long a queue before a full cache must last to be told."""
GROWS_S = 120.0
"""The same for a queue that grows with room in the cache: bursts pass within it."""
_FEWEST = 3
_BREAK_S = 60.0
_COARSE_S = 900.0  # a week in 720 points; moments further apart than that are not one stretch


class Moment(NamedTuple):
    """What is known of one engine at one time; None where it was not said."""

    at_s: float
    running: float
    waiting: float
    kv: float | None  # share of the KV cache in use
    prompt_per_s: float | None = None
    generation_per_s: float | None = None
    swapped: float | None = None
    preempted: float | None = None  # since the moment before
    hit_rate: float | None = None
    number: int | None = None  # the line it was read from
    text: str = ""
    most_running: float | None = None  # --max-num-seqs, where it is known


class Stretch(NamedTuple):
    """Moments in a row with a queue that matters."""

    moments: tuple[Moment, ...]

    @property
    def seconds(self) -> float:
        """From its first to its last moment."""
        return self.moments[-1].at_s - self.moments[0].at_s

    @property
    def full(self) -> float:
        """Share of its moments at which the cache was full."""
        return sum(is_full(m.kv, m.running, m.most_running) for m in self.moments) / len(self.moments)

    @property
    def roomy(self) -> float:
        """Share of its moments at which the cache plainly had room."""
        return sum(m.kv is not None and m.kv < ROOM for m in self.moments) / len(self.moments)

    @property
    def grows(self) -> bool:
        """Whether its queue grew, by half or more, and did not drain again."""
        queue = [m.waiting for m in self.moments]
        third = max(1, len(queue) // 3)
        first, last = median(queue[:third]), median(queue[-third:])
        score = sum((b > a) - (b < a) for i, a in enumerate(queue) for b in queue[i + 1 :])
        return last >= 1.5 * first and queue[-1] >= 0.8 * max(queue) and score >= 0.5 * len(queue) * (len(queue) - 1) / 2

    @property
    def drains(self) -> bool:
        """Whether its queue went down to a quarter or less, without growing on the way: a burst being served."""
        queue = [m.waiting for m in self.moments]
        return queue[-1] <= 0.25 * queue[0] and max(queue) <= 1.1 * queue[0]


def queued(moments: Sequence[Moment]) -> list[Stretch]:
    """The stretches with a queue that matters, in their order; a gap without any word ends one."""
    usual = _usual_gap(moments)
    longest = max(_BREAK_S, 3 * usual) if usual <= _COARSE_S else _BREAK_S
    found: list[list[Moment]] = []
    before: Moment | None = None
    for moment in moments:
        if not matters(moment.waiting, moment.running):
            before = None
            continue
        if before is not None and 0 <= moment.at_s - before.at_s <= longest:
            found[-1].append(moment)
        else:
            found.append([moment])
        before = moment
    return [Stretch(tuple(one)) for one in found]


def saturated(moments: Sequence[Moment]) -> Stretch | None:
    """The longest queue before a full cache, if one lasted."""
    lasting = [s for s in queued(moments) if s.seconds >= LASTS_S - 15 and len(s.moments) >= _FEWEST and s.full >= 0.6]
    # A line every ten seconds: six of them are a minute, from first to last 50 s, and clocks round.
    lasting = [s for s in lasting if s.seconds >= LASTS_S or len(s.moments) >= 6]
    lasting = [s for s in lasting if s.seconds >= GROWS_S or not s.drains]
    return max(lasting, key=lambda s: s.seconds, default=None)


def overrun(moments: Sequence[Moment]) -> Stretch | None:
    """The longest queue that grew although the cache had room."""
    lasting = [s for s in queued(moments) if s.seconds >= GROWS_S and len(s.moments) >= 6 and s.roomy >= 0.8]
    return max((s for s in (_thinned(s) for s in lasting) if s.grows), key=lambda s: s.seconds, default=None)


def _thinned(stretch: Stretch) -> Stretch:
    """At most 300 of its moments, evenly, with both ends: pairs of them are compared."""
    every = len(stretch.moments) // 300 + 1
    return Stretch((*stretch.moments[:-1:every], stretch.moments[-1]))


def _usual_gap(moments: Sequence[Moment]) -> float:
    gaps = [b.at_s - a.at_s for a, b in pairwise(moments[:500]) if b.at_s > a.at_s]
    return median(gaps) if gaps else 10.0
