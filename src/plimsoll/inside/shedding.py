"""Whether a new request would have to wait too long, and when it should come again. Pure arithmetic, no clock.

The wait is the tokens that are queued ahead of it, divided by what the engine has lately done in a second. Unknown is
never a reason to refuse, and neither is a request that a free place waits for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

PRIORITIES = {"low": 0.5, "normal": 1.0, "high": 2.0}  # times the bound
PRIORITY_HEADER = b"x-plimsoll-priority"
LONGEST_RETRY_S = 120


class Queue(NamedTuple):
    """What waits ahead of a new request, over all API servers of this engine."""

    waiting: int | None  # requests the engine says it has not begun
    running: int | None
    places: int | None  # requests the engine runs at once at most
    queued_tokens: float  # prompt tokens of those that wait, with the output expected of each
    coming: int  # let in by a gate and not yet with the engine: being read, tokenised, decoded from images
    tokens_each: float | None  # prompt and output tokens of a usual request
    coming_item_tokens: float  # for the images and sounds among those
    tokens_per_s: float | None  # what the engine has lately done


class Wait(NamedTuple):
    """The expected wait, or why it is unknown."""

    seconds: float | None
    because: str


def expected_wait(queue: Queue) -> Wait:
    """Seconds until a request that comes now would begin; 0 where a place is free."""
    waiting = queue.waiting or 0
    coming = queue.coming
    if waiting == 0 and queue.places is not None:
        # Nothing waits, so those that come take the free places first: an idle server refuses nobody.
        coming = max(0, coming - max(0, queue.places - (queue.running or 0)))
    if waiting == 0 and coming == 0:
        return Wait(0.0, "nothing waits")
    if waiting == 0 and queue.places is None:
        return Wait(None, "how many requests run at once is unknown")
    if not queue.tokens_per_s:
        return Wait(None, "the engine's rate is not known yet")
    if coming and queue.tokens_each is None:
        return Wait(None, "no request has finished yet, so their usual length is unknown")
    share = coming / queue.coming if queue.coming else 0.0
    tokens = queue.queued_tokens + coming * (queue.tokens_each or 0.0) + share * queue.coming_item_tokens
    return Wait(tokens / queue.tokens_per_s, f"{tokens:.0f} tokens wait, {queue.tokens_per_s:.0f} are done in a second")


def bound_for(bound_s: float, priority: bytes) -> float:
    """The bound for a request with this header; an unknown word is `normal`."""
    return bound_s * PRIORITIES.get(priority.decode("latin-1").strip().lower(), 1.0)


def retry_after(wait_s: float, bound_s: float) -> int:
    """Whole seconds until the wait should be back within the bound."""
    return max(1, min(LONGEST_RETRY_S, math.ceil(wait_s - bound_s)))
