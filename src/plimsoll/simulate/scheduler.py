"""vLLM's V1 scheduler: chooses the requests and tokens of the next step, and preempts requests for room.

    schedule()   running requests first, in order; then waiting ones, unless a request was preempted in this step
    finish()     the step is over: tokens appear, ended requests leave

Words are vLLM's own. A request has COMPUTED tokens and catches up with its TOKENS; with async scheduling it also has
PLACEHOLDERS for tokens that are under way.
"""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.admission import schedule_waiting
from plimsoll.simulate.compiled import hot, part, wide
from plimsoll.simulate.encoder import encode, let_go_all, let_go_passed, look_at_items
from plimsoll.simulate.groups import Hybrid, cache_blocks, extend, free_request, mamba_aligned, preempt

from plimsoll.simulate.layout import (  # isort: skip
    ACCEPTANCE, ACCEPTED, ARRIVAL, ASYNC, BATCHES, BATCH_FIELDS, BLOCK_SIZE, BUDGET, BY_PRIORITY, B_CONTEXT, B_ENCODED,
    B_HOW_MANY, B_PAIRS, B_PREEMPTED, B_PRODUCES, B_REQUESTS, B_TOKENS, COMPUTED, COMPUTED_RUNNING, DRAFTED, DRAFTS,
    DRAFT_SLOTS, ENCODED, ENCODER_BUDGET, ENCODER_COUNT, ENCODER_TOKENS, FILLS, FINISH, FINISHED, FINISHED_COUNT, FIRST_TOKEN,
    FULL_BUDGET, HELD, IN_FLIGHT, LOOKAHEAD, MAMBA_ALIGN, MAX_LEN, NUMBER, OUTPUT, PASS, PLACEHOLDERS, PREEMPTION_COUNT,
    PRIORITY, PRODUCED, PROMPT, RUNNING, RUNNING_COUNT, SEAT_BATCH, SEAT_RUNNING, SPEC_TOKENS, STALE, STATUS, STEP_BUDGET,
    THRESHOLD, TOKENS, WAITING_COUNT, Int32, RunState,
)  # fmt: skip
from plimsoll.simulate.pool import mix
from plimsoll.simulate.queues import drop

SHARE_BITS = 30  # of the share of drafts that are accepted
_DRAFT_DICE, _TO_SHARE = np.uint64(0xD1B54A32D192ED03), np.uint64(64 - SHARE_BITS)


@part
def _victim(s: RunState) -> int:
    """Returns the place of the running request to preempt: the last, or with priorities the least urgent."""
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
def _unschedule(s: RunState, batch: int, request: int) -> int:
    """Takes a request out of the batch being made; returns the tokens it would have computed."""
    who = SEAT_BATCH + 3 * batch
    count = s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS]
    for at in range(count):
        if s.seats[at, who] == request:
            tokens = s.seats[at, who + B_HOW_MANY]
            for index in range(at, count - 1):
                s.seats[index, who] = s.seats[index + 1, who]
                s.seats[index, who + B_HOW_MANY] = s.seats[index + 1, who + B_HOW_MANY]
                s.seats[index, who + B_PRODUCES] = s.seats[index + 1, who + B_PRODUCES]  # its drafts, while the step is made
            s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS] = count - 1
            return tokens
    return 0


@part
def _push_out(s: RunState, batch: int) -> tuple[int, int, int]:
    """Preempts a running request; returns the request, its place, and the tokens of this step that it gives back."""
    where = _victim(s)
    victim = s.seats[where, SEAT_RUNNING]
    s.counts[RUNNING_COUNT] -= 1
    for index in range(where, s.counts[RUNNING_COUNT]):
        s.seats[index, SEAT_RUNNING] = s.seats[index + 1, SEAT_RUNNING]
    tokens = _unschedule(s, batch, victim) if s.limits[BY_PRIORITY] else 0
    if tokens > 0:
        s.counts[ENCODER_BUDGET] += s.stamps[victim, ENCODED]
    preempt(s, victim)
    s.counts[BATCHES + batch * BATCH_FIELDS + B_PREEMPTED] += 1
    return victim, where, tokens


@hot
def _schedule_running(s: RunState, hybrid: Hybrid, batch: int, threshold: int) -> int:
    """Schedules running requests in their order, preempting others where blocks are short; returns the budget left."""
    # This loop takes most of the time. Locals hold the values it reads often: the compiler reads an array anew each time.
    who = SEAT_BATCH + 3 * batch
    made = BATCHES + batch * BATCH_FIELDS
    requests, seats = s.requests, s.seats
    running, max_len, is_aligned = s.counts[RUNNING_COUNT], s.limits[MAX_LEN], s.limits[MAMBA_ALIGN] != 0
    budget = s.counts[STEP_BUDGET]
    scheduled, drafts, slots, lookahead, encoder_budget = wide(0), wide(0), wide(0), wide(0), wide(0)
    if hybrid is not None:
        slots, lookahead = s.limits[DRAFT_SLOTS], s.limits[LOOKAHEAD]
    at = 0
    while at < running and budget > slots:
        request = seats[at, SEAT_RUNNING]
        at += 1
        row = requests[request]
        computed, under_way, known = wide(row[COMPUTED]), wide(row[PLACEHOLDERS]), wide(row[TOKENS])
        # Its last token is under way: nothing is left to compute.
        if under_way > 0 and computed + 2 - under_way >= row[PROMPT] + row[OUTPUT]:
            continue
        if hybrid is not None:
            drafts = wide(row[DRAFTS])
        tokens = known + drafts + under_way - computed
        if tokens != 1:
            if 0 < threshold < tokens:
                tokens = threshold
            tokens = min(tokens, budget - slots)
        tokens = min(tokens, max_len - computed - 1)
        if is_aligned and tokens > 0:
            tokens = mamba_aligned(s, request, computed, tokens)
        if hybrid is not None:
            encoder_budget = s.counts[ENCODER_BUDGET]
            tokens = look_at_items(s, request, computed, tokens)
        if tokens <= 0:
            continue
        # Nearly always there is room in the request's last block, and nothing to do.
        if computed + tokens > row[HELD]:
            is_gone = False
            end = min(computed + tokens + lookahead, max_len)
            while not is_gone and not extend(s, hybrid, request, end, max(0, computed - row[IN_FLIGHT])):
                s.counts[made + B_REQUESTS] = scheduled
                victim, where, given_back = _push_out(s, batch)
                scheduled, running = s.counts[made + B_REQUESTS], s.counts[RUNNING_COUNT]
                budget += given_back + (slots if given_back > 0 else 0)
                if where < at - 1:
                    at -= 1
                is_gone = victim == request
            if is_gone:
                break
        if computed + tokens >= row[FILLS]:
            cache_blocks(s, hybrid, request, min(computed + tokens, known))
        seats[scheduled, who] = request
        seats[scheduled, who + B_HOW_MANY] = tokens
        if hybrid is not None:
            s.counts[ENCODER_BUDGET] = encode(s, request, encoder_budget)
            seats[scheduled, who + B_PRODUCES] = max(0, min(drafts, computed + tokens - known - under_way))
        scheduled += 1
        budget -= tokens + slots
    s.counts[made + B_REQUESTS] = scheduled
    return budget


@hot
def schedule(s: RunState, hybrid: Hybrid, batch: int) -> int:
    """Schedules the next step into `batch`; returns the number of tokens it computes."""
    made = BATCHES + batch * BATCH_FIELDS
    for field in range(BATCH_FIELDS):
        s.counts[made + field] = 0
    s.counts[PASS] += 1
    # A budget that was turned down starves no request: each running one gets a token, and a prompt a block where it needs one.
    needed = s.counts[RUNNING_COUNT] + (s.limits[BLOCK_SIZE] if s.limits[MAMBA_ALIGN] else 0)
    s.counts[STEP_BUDGET] = max(s.limits[BUDGET], min(s.limits[FULL_BUDGET], needed))
    # The threshold keeps a long prompt from starving others: a request that is alone needs none.
    threshold = s.limits[THRESHOLD] if s.counts[RUNNING_COUNT] + s.counts[WAITING_COUNT] > 1 else 0
    s.counts[ENCODER_BUDGET] = s.limits[ENCODER_TOKENS]
    budget = _schedule_running(s, hybrid, batch, threshold)
    if s.counts[made + B_PREEMPTED] == 0 and s.counts[WAITING_COUNT] > 0:
        schedule_waiting(s, hybrid, batch, budget, threshold)
    s.counts[PREEMPTION_COUNT] += s.counts[made + B_PREEMPTED]
    who, is_async = SEAT_BATCH + 3 * batch, s.limits[ASYNC] != 0
    requests, seats = s.requests, s.seats
    total, context, pairs, drafts = 0, 0, 0, wide(0)
    for at in range(s.counts[made + B_REQUESTS]):
        row = requests[seats[at, who]]
        tokens = seats[at, who + B_HOW_MANY]
        total += tokens
        computed, under_way = row[COMPUTED] + tokens, row[PLACEHOLDERS]
        row[COMPUTED] = computed
        context += computed
        produces = computed >= row[TOKENS] + under_way
        if hybrid is not None:
            drafts = seats[at, who + B_PRODUCES]
            row[DRAFTS] = s.limits[SPEC_TOKENS] if produces else 0
            s.counts[made + B_ENCODED] += s.stamps[seats[at, who], ENCODED]
        if tokens > 1 + abs(drafts):  # twice the number of pairs of a token and one that it looks at
            pairs += tokens * (2 * computed - tokens)
        seats[at, who + B_PRODUCES] = (1 + drafts if drafts >= 0 else drafts) if produces else 0
        # With one step at a time, no step is under way when this is read.
        if is_async:
            row[IN_FLIGHT] += tokens
            if produces:
                row[PLACEHOLDERS] = under_way + 1 + abs(drafts)
    s.counts[ENCODER_COUNT] += s.counts[made + B_ENCODED]
    s.counts[COMPUTED_RUNNING] += total
    s.counts[made + B_TOKENS] = total
    s.counts[made + B_CONTEXT] = context
    s.counts[made + B_PAIRS] = pairs
    return total


@hot
def _is_over(row: Int32, tokens: int) -> bool:
    """Takes a finished step's tokens off those under way and stale; True if the request ended before."""
    if row[STATUS] == FINISHED:
        return True
    row[IN_FLIGHT] -= tokens
    if row[STALE] > 0:
        row[STALE] -= tokens
    return False


@part
def brings(s: RunState, request: int, produces: int) -> int:
    """Returns the number of tokens that a step verifies for a request, of the drafts and the one after them."""
    row = s.requests[request]
    accepted = wide(0)
    if produces > 1:
        dice = mix(mix(_DRAFT_DICE, np.uint64(s.stamps[request, NUMBER])), np.uint64(row[PRODUCED]))
        share = s.limits[ACCEPTANCE]
        while accepted < produces - 1 and wide(dice >> _TO_SHARE) < share:
            accepted += 1
            share = share * s.limits[ACCEPTANCE] >> SHARE_BITS
    return accepted + 1


@part
def _reject_drafts(s: RunState, request: int, rejected: int) -> None:
    """Takes rejected drafts back; those of a request that was preempted meanwhile are gone already."""
    row = s.requests[request]
    if row[STATUS] == RUNNING:
        row[COMPUTED] -= rejected
        s.counts[COMPUTED_RUNNING] -= rejected
        if s.limits[ASYNC]:
            row[PLACEHOLDERS] -= rejected


@part
def _end_request(s: RunState, request: int, now: int) -> None:
    is_running = s.requests[request, STATUS] == RUNNING
    s.requests[request, STATUS] = FINISHED
    s.stamps[request, FINISH] = now
    s.counts[FINISHED_COUNT] += 1
    if is_running:
        free_request(s, request)
    else:
        let_go_all(s, request)
        drop(s, request)


@hot
def finish(s: RunState, hybrid: Hybrid, batch: int, now: int) -> None:
    """Ends the step: its tokens appear, and requests that have all of theirs leave."""
    who = SEAT_BATCH + 3 * batch
    requests, seats = s.requests, s.seats
    is_async, max_len = s.limits[ASYNC] != 0, s.limits[MAX_LEN]
    ended = 0
    for at in range(s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS]):
        request = seats[at, who]
        row = requests[request]
        if is_async and _is_over(row, seats[at, who + B_HOW_MANY]):
            continue
        if hybrid is not None:
            let_go_passed(s, request)
        if seats[at, who + B_PRODUCES] == 0:
            continue
        brought = wide(1)
        if hybrid is not None:
            produces = seats[at, who + B_PRODUCES]
            if produces != 1:
                brought = brings(s, request, produces)
                drafts = produces - 1 if produces > 0 else -produces
                _reject_drafts(s, request, drafts + 1 - brought)
                s.counts[DRAFTED] += drafts
                s.counts[ACCEPTED] += brought - 1
                brought = min(brought, row[OUTPUT] - row[PRODUCED], max_len - row[TOKENS])
        known, produced = row[TOKENS] + brought, row[PRODUCED] + brought
        if row[PRODUCED] == 0:
            s.stamps[request, FIRST_TOKEN] = now
        row[TOKENS] = known
        row[PRODUCED] = produced
        if is_async and row[STATUS] == RUNNING:
            row[PLACEHOLDERS] -= brought
            if row[COMPUTED] - row[PLACEHOLDERS] >= row[FILLS]:
                cache_blocks(s, hybrid, request, row[COMPUTED] - row[PLACEHOLDERS])
        if produced >= row[OUTPUT] or known >= max_len:
            _end_request(s, request, now)
            ended += 1
    if ended:
        kept = 0
        for at in range(s.counts[RUNNING_COUNT]):
            if requests[seats[at, SEAT_RUNNING], STATUS] != FINISHED:
                seats[kept, SEAT_RUNNING] = seats[at, SEAT_RUNNING]
                kept += 1
        s.counts[RUNNING_COUNT] = kept
