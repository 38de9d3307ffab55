"""Pictures and sounds: the encoder's budget in a step, and the cache of its embeddings, as in vLLM's EncoderCacheManager.

    items      one row for each picture or sound of a request: its place in the prompt, its tokens, its entry
    entries    one row for each content: who needs it, and the list of those that nobody needs any more, oldest first

A step computes no token of an item that is not encoded. One that fits neither into the step's budget nor into the cache ends
the chunk before it.
"""

from __future__ import annotations

from plimsoll.simulate.compiled import part, wide

from plimsoll.simulate.layout import (  # isort: skip
    COMPUTED, ENCODED, ENCODER_BUDGET, ENCODER_FREE, ENCODER_FREEABLE, ENCODER_LOOKS, E_CACHED, E_HOLDERS, E_MARK, E_NEXT,
    E_PREV, E_TOKENS, ITEMS_BEGIN, ITEMS_END, I_ENTRY, I_HELD, I_MARK, I_START, I_TOKENS, LOOKS_AHEAD, PLACEHOLDERS, RunState,
)  # fmt: skip


@part
def _hold(s: RunState, request: int, item: int) -> bool:
    """Notes that a request needs an item that is in the cache; False if it is not there."""
    entry = s.items[item, I_ENTRY]
    if s.entries[entry, E_CACHED] == 0:
        return False
    if s.entries[entry, E_HOLDERS] == 0:
        before, after = s.entries[entry, E_PREV], s.entries[entry, E_NEXT]
        s.entries[before, E_NEXT] = after
        s.entries[after, E_PREV] = before
        s.counts[ENCODER_FREEABLE] -= s.entries[entry, E_TOKENS]
    _add_holder(s, request, item)
    return True


@part
def _holds(s: RunState, request: int, entry: int) -> bool:
    """True if an item of the request holds this entry: a request with the same picture twice is one holder."""
    found = False
    for item in range(s.stamps[request, ITEMS_BEGIN], s.stamps[request, ITEMS_END]):
        found = found or (s.items[item, I_HELD] > 0 and s.items[item, I_ENTRY] == entry)
    return found


@part
def _add_holder(s: RunState, request: int, item: int) -> None:
    entry = s.items[item, I_ENTRY]
    if not _holds(s, request, entry):
        s.entries[entry, E_HOLDERS] += 1
    s.items[item, I_HELD] = 1


@part
def _let_go(s: RunState, request: int, item: int) -> None:
    """The request needs this item no more; a content that nobody needs stays until its place is wanted."""
    entry = s.items[item, I_ENTRY]
    s.items[item, I_HELD] = 0
    if _holds(s, request, entry):
        return
    s.entries[entry, E_HOLDERS] -= 1
    if s.entries[entry, E_HOLDERS] == 0:
        end = len(s.entries) - 1
        before = s.entries[end, E_PREV]
        s.entries[before, E_NEXT], s.entries[entry, E_PREV] = entry, before
        s.entries[entry, E_NEXT], s.entries[end, E_PREV] = end, entry
        s.counts[ENCODER_FREEABLE] += s.entries[entry, E_TOKENS]


@part
def let_go_all(s: RunState, request: int) -> None:
    """The request ends, is preempted or is not admitted."""
    for item in range(s.stamps[request, ITEMS_BEGIN], s.stamps[request, ITEMS_END]):
        if s.items[item, I_HELD] > 0:
            _let_go(s, request, item)


@part
def let_go_passed(s: RunState, request: int) -> None:
    """A step is over: items that the computed tokens have passed are in the KV cache."""
    row = s.requests[request]
    passed = row[COMPUTED] - row[PLACEHOLDERS] - s.limits[LOOKS_AHEAD]
    for item in range(s.stamps[request, ITEMS_BEGIN], s.stamps[request, ITEMS_END]):
        if s.items[item, I_HELD] > 0 and s.items[item, I_START] + s.items[item, I_TOKENS] <= passed:
            _let_go(s, request, item)


@part
def _has_room(s: RunState, tokens: int, budget: int, wanted: int) -> bool:
    """True if an item can be encoded; makes room in the cache, the content that nobody needs for longest first."""
    if tokens > budget:
        return False
    needed = tokens + wanted
    if needed <= s.counts[ENCODER_FREE]:
        return True
    if needed > s.counts[ENCODER_FREEABLE]:
        return False
    head = len(s.entries) - 2
    while needed > s.counts[ENCODER_FREE]:
        entry = s.entries[head, E_NEXT]
        after = s.entries[entry, E_NEXT]
        s.entries[head, E_NEXT], s.entries[after, E_PREV] = after, head
        s.entries[entry, E_CACHED] = 0
        s.counts[ENCODER_FREE] += s.entries[entry, E_TOKENS]
    return True


@part
def look_at_items(s: RunState, request: int, computed: int, tokens: int) -> int:
    """Marks the items that a step of `tokens` tokens must encode; returns how many tokens it can compute.

    ENCODED is then the sum of their tokens.
    """
    begin, end = s.stamps[request, ITEMS_BEGIN], s.stamps[request, ITEMS_END]
    s.stamps[request, ENCODED] = 0
    if tokens <= 0 or begin == end:
        return tokens
    s.counts[ENCODER_LOOKS] += 1
    look, ahead, budget = s.counts[ENCODER_LOOKS], s.limits[LOOKS_AHEAD], s.counts[ENCODER_BUDGET]
    until, wanted = computed + tokens + ahead, wide(0)
    for item in range(begin, end):
        start, size, entry = s.items[item, I_START], s.items[item, I_TOKENS], s.items[item, I_ENTRY]
        if start + size <= computed or start >= until:
            continue
        if s.entries[entry, E_MARK] == look:
            s.items[item, I_MARK] = -look  # the same content a second time
            continue
        if _hold(s, request, item):
            continue
        if not _has_room(s, size, budget - wanted, wanted):
            tokens = start - computed - ahead if computed + ahead < start else wide(0)
            break
        wanted += size
        s.entries[entry, E_MARK] = look
        s.items[item, I_MARK] = look
    s.stamps[request, ENCODED] = wanted
    return tokens


@part
def encode(s: RunState, request: int, budget: int) -> int:
    """Gives the items that were marked their place in the cache; returns what is left of the step's budget.

    `budget` is what it was when they were marked.
    """
    wanted, look = s.stamps[request, ENCODED], s.counts[ENCODER_LOOKS]
    if wanted == 0:
        return s.counts[ENCODER_BUDGET]
    for item in range(s.stamps[request, ITEMS_BEGIN], s.stamps[request, ITEMS_END]):
        if s.items[item, I_MARK] == look:
            s.entries[s.items[item, I_ENTRY], E_CACHED] = 1
            _add_holder(s, request, item)
            s.counts[ENCODER_FREE] -= s.items[item, I_TOKENS]
            s.counts[ENCODER_FREEABLE] -= s.items[item, I_TOKENS]
        elif s.items[item, I_MARK] == -look:
            _hold(s, request, item)
    return budget - wanted
