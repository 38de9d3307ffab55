"""When a queue matters, and how much work was done twice: the same rules for a page, a range of time and a log."""

from __future__ import annotations

FULL = 0.95
"""Share of KV blocks in use from which the cache is full: what is left does not take another request of usual length."""
ROOM = 0.90
"""Share below which the cache is plainly not what limits."""
STORM, SEVERE_STORM = 0.05, 0.20
"""Share of all computed tokens, computed a second time, from which preemption is a storm, and a severe one."""
_SHORT = 4.0


def matters(waiting: float, running: float) -> bool:
    """Whether a queue is more than the few that every busy server has at its door."""
    return waiting > max(_SHORT, 0.10 * running)


def is_full(usage: float | None, running: float, most_running: float | None = None) -> bool:
    """Whether the cache takes no further request: by its share in use, or because one as large as those running does not fit.

    The second is said only where it is known that --max-num-seqs would have let another one run.
    """
    if usage is None or usage >= FULL:
        return usage is not None
    return most_running is not None and 1 <= running < most_running and usage * (1 + 1 / running) > 1


def share_done_twice(preemptions: float | None, tokens_done: float, length: float | None) -> float | None:
    """The most that was computed again, as a share of all that was computed; None if it cannot be known.

    A victim loses all of its `length` tokens; part of them may still be found in the prefix cache, hence the most.
    """
    if preemptions is None or length is None or tokens_done <= 0:
        return None
    again = preemptions * length
    return again / (again + tokens_done)
