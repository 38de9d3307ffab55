"""When an engine that does not step is suspected, and when it is proven stuck. No clock of its own.

Suspected: no step for longer than three times the longest step seen and than the bound, with work waiting, awake and not
dead. Proven: suspected, and a request of one token got no answer. One step disproves both.
"""

from __future__ import annotations

from typing import NamedTuple

LONGEST_STEPS = 3.0


class Progress(NamedTuple):
    """What is known of the engine's steps; times are seconds of the monotonic clock."""

    has_work: bool
    work_since: float  # when work was first seen waiting after the last time there was none
    last_step: float | None
    longest_step_s: float
    is_excused: bool  # asleep, paused, dead, starting, or busy with a call of ours


def is_suspect(progress: Progress, bound_s: float, now: float) -> bool:
    """Whether it is time for the test request."""
    if not progress.has_work or progress.is_excused:
        return False
    silent_since = max(progress.work_since, progress.last_step or 0.0)
    return now - silent_since > max(bound_s, LONGEST_STEPS * progress.longest_step_s)
