"""vLLM's V1 scheduler: who computes how many tokens in the next step, and who must give way.

    schedule()   running requests first, in order; then waiting ones, unless somebody was preempted in this step
    finish()     the step is over: tokens appear, ended requests leave

Words are vLLM's own. A request has COMPUTED tokens and catches up with its TOKENS; with async scheduling it also has
PLACEHOLDERS for tokens that are under way.
"""

from __future__ import annotations

from plimsoll.simulate.admission import schedule_waiting
from plimsoll.simulate.blocks import Hybrid, cache_blocks, extend, free_request, preempt
from plimsoll.simulate.compiled import part, wide
from plimsoll.simulate.groups import mamba_aligned
from plimsoll.simulate.layout import (
    ARRIVAL,
    ASYNC,
    B_CONTEXT,
    B_HOW_MANY,
    B_PREEMPTED,
    B_PRODUCES,
    B_REQUESTS,
    B_TOKENS,
    BATCH_FIELDS,
    BATCHES,
    BUDGET,
    BY_PRIORITY,
    COMPUTED,
    COMPUTED_RUNNING,
    FILLS,
    FINISH,
    FINISHED,
    FINISHED_COUNT,
    FIRST_TOKEN,
    HELD,
    IN_FLIGHT,
    MAMBA_ALIGN,
    MAX_LEN,
    OUTPUT,
    PASS,
    PLACEHOLDERS,
    PREEMPTION_COUNT,
    PRIORITY,
    PRODUCED,
    PROMPT,
    RUNNING,
    RUNNING_COUNT,
    SEAT_BATCH,
    SEAT_RUNNING,
    STALE,
    STATUS,
    THRESHOLD,
    TOKENS,
    WAITING_COUNT,
    State,
)
from plimsoll.simulate.queues import drop


@part
def _victim(s: State) -> int:
    """Where in line the running request stands that gives way: the last, or the least urgent."""
    count = s.counts[RUNNING_COUNT]
    if not s.limits[BY_PRIORITY]:
        return count - 1
    worst = 0
    for at in range(1, count):
        one, other = s.seats[at, SEAT_RUNNING], s.seats[worst, SEAT_RUNNING]
        by_priority = s.requests[one, PRIORITY] - s.requests[other, PRIORITY]
        if by_priority > 0 or (by_priority == 0 and s.stamps[one, ARRIVAL] > s.stamps[other, ARRIVAL]):
            worst = at
    return worst


@part
def _unschedule(s: State, batch: int, request: int) -> int:
    """Take a request out of the batch being made; the tokens it would have computed."""
    who = SEAT_BATCH + 3 * batch
    count = s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS]
    for at in range(count):
        if s.seats[at, who] == request:
            tokens = s.seats[at, who + B_HOW_MANY]
            for index in range(at, count - 1):
                s.seats[index, who] = s.seats[index + 1, who]
                s.seats[index, who + B_HOW_MANY] = s.seats[index + 1, who + B_HOW_MANY]
            s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS] = count - 1
            return tokens
    return 0


@part
def _push_out(s: State, batch: int) -> tuple[int, int, int]:
    """Preempt whoever gives way: who it was, where it stood, and how many tokens of this step it gives back."""
    where = _victim(s)
    victim = s.seats[where, SEAT_RUNNING]
    s.counts[RUNNING_COUNT] -= 1
    for index in range(where, s.counts[RUNNING_COUNT]):
        s.seats[index, SEAT_RUNNING] = s.seats[index + 1, SEAT_RUNNING]
    tokens = _unschedule(s, batch, victim) if s.limits[BY_PRIORITY] else 0
    preempt(s, victim)
    s.counts[BATCHES + batch * BATCH_FIELDS + B_PREEMPTED] += 1
    return victim, where, tokens


@part
def _schedule_running(s: State, hybrid: Hybrid, batch: int, threshold: int) -> int:
    """Running requests in their order; whoever cannot get blocks pushes others out. What is left of the budget."""
    who = SEAT_BATCH + 3 * batch
    scheduled = BATCHES + batch * BATCH_FIELDS + B_REQUESTS
    budget = s.limits[BUDGET]
    at = 0
    while at < s.counts[RUNNING_COUNT] and budget > 0:
        request = s.seats[at, SEAT_RUNNING]
        at += 1
        row = s.requests[request]
        computed, under_way = wide(row[COMPUTED]), row[PLACEHOLDERS]
        # Its last token is under way: nothing is left to compute.
        if under_way > 0 and computed + 2 - under_way >= row[PROMPT] + row[OUTPUT]:
            continue
        tokens = row[TOKENS] + under_way - computed
        if 0 < threshold < tokens:
            tokens = threshold
        tokens = min(tokens, budget, s.limits[MAX_LEN] - computed - 1)
        if s.limits[MAMBA_ALIGN] and tokens > 0:
            tokens = mamba_aligned(s, request, computed, tokens)
        if tokens <= 0:
            continue
        # Nearly always there is room in the request's last block, and nothing to do.
        if computed + tokens > row[HELD]:
            is_gone = False
            while not is_gone and not extend(s, hybrid, request, computed + tokens, max(0, computed - row[IN_FLIGHT])):
                victim, where, given_back = _push_out(s, batch)
                budget += given_back
                if where < at - 1:
                    at -= 1
                is_gone = victim == request
            if is_gone:
                break
        if computed + tokens >= row[FILLS]:
            cache_blocks(s, hybrid, request, min(computed + tokens, wide(row[TOKENS])))
        s.seats[s.counts[scheduled], who] = request
        s.seats[s.counts[scheduled], who + B_HOW_MANY] = tokens
        s.counts[scheduled] += 1
        budget -= tokens
    return budget


@part
def schedule(s: State, hybrid: Hybrid, batch: int) -> int:
    """Decide the next step into `batch`; how many tokens it computes."""
    made = BATCHES + batch * BATCH_FIELDS
    for field in range(BATCH_FIELDS):
        s.counts[made + field] = 0
    s.counts[PASS] += 1
    # The threshold keeps a long prompt from starving others: alone, there is nobody to starve.
    threshold = s.limits[THRESHOLD] if s.counts[RUNNING_COUNT] + s.counts[WAITING_COUNT] > 1 else 0
    budget = _schedule_running(s, hybrid, batch, threshold)
    if s.counts[made + B_PREEMPTED] == 0 and s.counts[WAITING_COUNT] > 0:
        schedule_waiting(s, hybrid, batch, budget, threshold)
    s.counts[PREEMPTION_COUNT] += s.counts[made + B_PREEMPTED]
    who = SEAT_BATCH + 3 * batch
    total, context = 0, 0
    for at in range(s.counts[made + B_REQUESTS]):
        row = s.requests[s.seats[at, who]]
        tokens = s.seats[at, who + B_HOW_MANY]
        total += tokens
        computed = row[COMPUTED] + tokens
        row[COMPUTED] = computed
        row[IN_FLIGHT] += tokens
        context += computed
        produces = computed >= row[TOKENS] + row[PLACEHOLDERS]
        s.seats[at, who + B_PRODUCES] = 1 if produces else 0
        if produces and s.limits[ASYNC]:
            row[PLACEHOLDERS] += 1
    s.counts[COMPUTED_RUNNING] += total
    s.counts[made + B_TOKENS] = total
    s.counts[made + B_CONTEXT] = context
    return total


@part
def _end_request(s: State, request: int, now: int) -> None:
    is_running = s.requests[request, STATUS] == RUNNING
    s.requests[request, STATUS] = FINISHED
    s.stamps[request, FINISH] = now
    s.counts[FINISHED_COUNT] += 1
    if is_running:
        free_request(s, request)
    else:
        drop(s, request)


@part
def finish(s: State, hybrid: Hybrid, batch: int, now: int) -> None:
    """The step is over: tokens appear, and requests that have all of theirs leave."""
    who = SEAT_BATCH + 3 * batch
    ended = 0
    for at in range(s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS]):
        request, tokens = s.seats[at, who], s.seats[at, who + B_HOW_MANY]
        row = s.requests[request]
        if row[STATUS] == FINISHED:
            continue
        row[IN_FLIGHT] -= tokens
        is_stale = row[STALE] > 0
        if is_stale:
            row[STALE] -= tokens
        if s.seats[at, who + B_PRODUCES] == 0:
            continue
        row[TOKENS] += 1
        row[PRODUCED] += 1
        if row[PRODUCED] == 1:
            s.stamps[request, FIRST_TOKEN] = now
        is_running = row[STATUS] == RUNNING
        if s.limits[ASYNC]:
            if not is_stale:
                row[PLACEHOLDERS] -= 1
            if is_running and row[COMPUTED] - row[PLACEHOLDERS] >= row[FILLS]:
                cache_blocks(s, hybrid, request, row[COMPUTED] - row[PLACEHOLDERS])
        if row[PRODUCED] >= row[OUTPUT] or row[TOKENS] >= s.limits[MAX_LEN]:
            _end_request(s, request, now)
            ended += 1
    if ended:
        kept = 0
        for at in range(s.counts[RUNNING_COUNT]):
            if s.requests[s.seats[at, SEAT_RUNNING], STATUS] != FINISHED:
                s.seats[kept, SEAT_RUNNING] = s.seats[at, SEAT_RUNNING]
                kept += 1
        s.counts[RUNNING_COUNT] = kept
