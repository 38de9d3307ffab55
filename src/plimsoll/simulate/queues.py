"""The waiting requests: a ring for first come, first served, a heap for priorities. Both live in one array."""

from __future__ import annotations

from plimsoll.simulate.compiled import hot, part, wide
from plimsoll.simulate.layout import ARRIVAL, BY_PRIORITY, PRIORITY, TIE, WAITING_COUNT, WAITING_HEAD, RunState


@part
def goes_before(s: RunState, left: int, right: int) -> bool:
    """True if `left` comes first in vLLM's order: priority, then arrival, then the request's id."""
    if s.requests[left, PRIORITY] != s.requests[right, PRIORITY]:
        return bool(s.requests[left, PRIORITY] < s.requests[right, PRIORITY])
    if s.stamps[left, ARRIVAL] != s.stamps[right, ARRIVAL]:
        return bool(s.stamps[left, ARRIVAL] < s.stamps[right, ARRIVAL])
    return bool(s.requests[left, TIE] < s.requests[right, TIE])


@part
def _sift_up(s: RunState, at: int) -> None:
    heap = s.waiting
    request = wide(heap[at])
    while at > 0:
        parent = (at - 1) // 2
        if not goes_before(s, request, wide(heap[parent])):
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = request


@part
def _sift_down(s: RunState, at: int) -> None:
    heap, count = s.waiting, s.counts[WAITING_COUNT]
    request = wide(heap[at])
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and goes_before(s, wide(heap[child + 1]), wide(heap[child])):
            child += 1
        if not goes_before(s, wide(heap[child]), request):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = request


@part
def enqueue(s: RunState, request: int) -> None:
    """Adds a new request to the queue."""
    count = s.counts[WAITING_COUNT]
    s.counts[WAITING_COUNT] = count + 1
    if s.limits[BY_PRIORITY]:
        s.waiting[count] = request
        _sift_up(s, count)
    else:
        s.waiting[(s.counts[WAITING_HEAD] + count) % len(s.waiting)] = request


@part
def put_back(s: RunState, request: int) -> None:
    """Puts a preempted or skipped request first in line; with priorities, in its own place."""
    if s.limits[BY_PRIORITY]:
        enqueue(s, request)
        return
    head = (s.counts[WAITING_HEAD] + len(s.waiting) - 1) % len(s.waiting)
    s.waiting[head] = request
    s.counts[WAITING_HEAD] = head
    s.counts[WAITING_COUNT] += 1


@hot
def first(s: RunState) -> int:
    """Returns the next request. The caller has checked that one waits."""
    return wide(s.waiting[0 if s.limits[BY_PRIORITY] else s.counts[WAITING_HEAD]])


@part
def waiting_at(s: RunState, place: int) -> int:
    """Returns the request at this place of the queue: in its order for first come, first served, else in any."""
    head = 0 if s.limits[BY_PRIORITY] else s.counts[WAITING_HEAD]
    return wide(s.waiting[(head + place) % len(s.waiting)])


@part
def drop_first(s: RunState) -> None:
    """Removes the next request from the queue."""
    count = s.counts[WAITING_COUNT] - 1
    s.counts[WAITING_COUNT] = count
    if s.limits[BY_PRIORITY]:
        s.waiting[0] = s.waiting[count]
        if count > 0:
            _sift_down(s, wide(0))
    else:
        s.counts[WAITING_HEAD] = (s.counts[WAITING_HEAD] + 1) % len(s.waiting)


@part
def drop(s: RunState, request: int) -> None:
    """Removes a request anywhere in the queue: it finished with a token that was under way when it was preempted."""
    count, size = s.counts[WAITING_COUNT], len(s.waiting)
    head = 0 if s.limits[BY_PRIORITY] else s.counts[WAITING_HEAD]
    at = 0
    while s.waiting[(head + at) % size] != request:
        at += 1
    if s.limits[BY_PRIORITY]:
        s.counts[WAITING_COUNT] = count - 1
        moved = s.waiting[count - 1]
        s.waiting[at] = moved
        if at < count - 1:
            _sift_up(s, at)
            if s.waiting[at] == moved:
                _sift_down(s, at)
        return
    # It went to the front not long ago: close the gap from that side.
    for index in range(at, 0, -1):
        s.waiting[(head + index) % size] = s.waiting[(head + index - 1) % size]
    s.counts[WAITING_HEAD] = (head + 1) % size
    s.counts[WAITING_COUNT] = count - 1
