"""Time: requests arrive, steps take as long as their work, and with async scheduling two are under way at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plimsoll.simulate.compiled import compiled, hot, part, wide
from plimsoll.simulate.groups import Hybrid

from plimsoll.simulate.layout import (  # isort: skip
    ARRIVAL, ASYNC, BATCHES, BATCH_FIELDS, BUSY_NS, B_CONTEXT, B_ENCODED, B_END, B_LOADED, B_NEW, B_PAIRS, B_PREEMPTED,
    B_REQUESTS, B_RESUMED, B_TOKENS, COMPUTED_RUNNING, CTX_PS, DEVICE_FREE, DONE, DRAFT_PPM, EMBED_PS, FIRST_SCHED, FREE_BLOCKS,
    FULL_GROUPS, FULL_SLOTS, HITS, IN_FLIGHT_BATCHES, LOAD_NS, LOG_ROWS, MAX_QUEUED, MAX_QUEUED_TOKENS, NEXT_ARRIVAL,
    NOT_ARRIVED, NOW, NUM_BLOCKS, OLDEST_BATCH, PAIR_FS, PEAK_BLOCKS, PEAK_RUNNING, PEAK_WAITING, PRODUCED, PROMPT, PROMPT_NS,
    QUERIES, REFUSED, REFUSED_COUNT, RESUMED_HITS, RESUMED_QUERIES, RUNNING_COUNT, SCHEDULED_TOKENS, SEAT_BATCH, SEAT_RUNNING,
    SEQ_NS, SPEC_TOKENS, STATUS, STEPS, STUCK, TABLE_BLOCKS, WAITING, WAITING_COUNT, Int64, RunState,
)  # fmt: skip
from plimsoll.simulate.queues import enqueue, waiting_at
from plimsoll.simulate.scheduler import finish, schedule
from plimsoll.simulate.trace import Floats

WASTE, TABLES = range(2)


class RunRecord(NamedTuple):
    """The step times, and the arrays that record a run."""

    step_ns: Int64  # By the number of tokens in it
    usage_ns: Int64  # By the number of blocks in use
    sums: Floats  # Empty slots, and blocks in tables, times ns: whole numbers would not last for a week of a large pool
    log: Int64  # No row: no log


@part
def _is_full(s: RunState) -> bool:
    """True if vLLM's API server refuses a request that comes now: AsyncLLM.check_admission."""
    running, waiting = s.counts[RUNNING_COUNT], s.counts[WAITING_COUNT]
    if running + waiting >= s.limits[MAX_QUEUED] >= 0:
        return True
    if s.limits[MAX_QUEUED_TOKENS] < 0:
        return False
    tokens = wide(0)  # prompts of the requests that have no first token yet
    for at in range(running + waiting):
        row = s.requests[s.seats[at, SEAT_RUNNING] if at < running else waiting_at(s, at - running)]
        if row[PRODUCED] == 0:
            tokens += row[PROMPT]
    return bool(tokens >= s.limits[MAX_QUEUED_TOKENS])


@hot
def arrivals(s: RunState, hybrid: Hybrid) -> None:
    """Puts the requests that have arrived by now in the waiting queue, unless it is full."""
    at = s.counts[NEXT_ARRIVAL]
    while at < len(s.stamps) and s.stamps[at, ARRIVAL] <= s.counts[NOW]:
        if s.requests[at, STATUS] == NOT_ARRIVED:
            is_refused = False
            if hybrid is not None:
                is_refused = _is_full(s)
            if is_refused:
                s.requests[at, STATUS] = REFUSED
                s.counts[REFUSED_COUNT] += 1
            else:
                s.requests[at, STATUS] = WAITING
                enqueue(s, at)
        at += 1
    s.counts[NEXT_ARRIVAL] = at


@hot
def _write_row(s: RunState, batch: int, row: Int64, start: int, used: int, waste: int) -> None:
    made = BATCHES + batch * BATCH_FIELDS
    row[0] = s.counts[STEPS]
    row[1] = start
    row[2] = s.counts[made + B_END]
    row[3] = s.counts[RUNNING_COUNT]
    row[4] = s.counts[WAITING_COUNT]
    row[5] = s.counts[made + B_REQUESTS]
    row[6] = s.counts[made + B_TOKENS]
    row[7] = s.counts[made + B_NEW]
    row[8] = s.counts[made + B_RESUMED]
    row[9] = s.counts[made + B_PREEMPTED]
    row[10] = s.counts[made + B_CONTEXT]
    row[11] = used
    row[12] = s.counts[TABLE_BLOCKS]
    row[13] = waste
    row[14] = s.counts[HITS] + s.counts[RESUMED_HITS]
    row[15] = s.counts[QUERIES] + s.counts[RESUMED_QUERIES]
    s.counts[LOG_ROWS] += 1


@hot
def start_step(s: RunState, batch: int, record: RunRecord) -> None:
    """Starts the batch when the device is free, and adds up the step's time and the blocks in use."""
    made = BATCHES + batch * BATCH_FIELDS
    counts = s.counts
    tokens, requests = counts[made + B_TOKENS], counts[made + B_REQUESTS]
    taken = record.step_ns[tokens] + s.limits[SEQ_NS] * requests + s.limits[CTX_PS] * counts[made + B_CONTEXT] // 1000
    if counts[made + B_PAIRS] > 0:
        taken += s.limits[PROMPT_NS] + s.limits[PAIR_FS] * counts[made + B_PAIRS] // 1_000_000
    taken += s.limits[LOAD_NS] * counts[made + B_LOADED]
    taken += s.limits[EMBED_PS] * counts[made + B_ENCODED] // 1000
    if s.limits[DRAFT_PPM] > 0:  # the first draft reads all tokens of the step, each further one a token of each request
        drafting = record.step_ns[tokens] + (s.limits[SPEC_TOKENS] - 1) * record.step_ns[requests]
        taken += s.limits[DRAFT_PPM] * drafting // 1_000_000
    start = max(counts[NOW], counts[DEVICE_FREE])
    counts[DEVICE_FREE] = start + taken
    counts[made + B_END] = start + taken
    # New requests were added last.
    for at in range(requests - counts[made + B_NEW] - counts[made + B_RESUMED], requests):
        request = s.seats[at, SEAT_BATCH + 3 * batch]
        if s.stamps[request, FIRST_SCHED] < 0:
            s.stamps[request, FIRST_SCHED] = start
    used = s.limits[NUM_BLOCKS] - 1 - counts[FREE_BLOCKS]
    waste = counts[FULL_SLOTS] - s.limits[FULL_GROUPS] * counts[COMPUTED_RUNNING]
    counts[SCHEDULED_TOKENS] += tokens
    counts[BUSY_NS] += taken
    record.sums[WASTE] += np.float64(waste) * taken
    record.sums[TABLES] += np.float64(counts[TABLE_BLOCKS]) * taken
    record.usage_ns[used] += taken
    counts[PEAK_BLOCKS] = max(counts[PEAK_BLOCKS], used)
    counts[PEAK_RUNNING] = max(counts[PEAK_RUNNING], counts[RUNNING_COUNT])
    counts[PEAK_WAITING] = max(counts[PEAK_WAITING], counts[WAITING_COUNT])
    if len(record.log) > 0:
        _write_row(s, batch, record.log[counts[LOG_ROWS]], start, used, waste)
    counts[STEPS] += 1


@compiled
def advance(s: RunState, hybrid: Hybrid, record: RunRecord, most_steps: int, until_ns: int) -> None:
    """Runs until all requests are done, `most_steps` steps were made, `until_ns` has come, or the log is full."""
    depth = 2 if s.limits[ASYNC] else 1
    last_step = s.counts[STEPS] + most_steps
    counts = s.counts
    while True:
        if (
            counts[STEPS] >= last_step
            or counts[NOW] >= until_ns
            or (len(record.log) > 0 and counts[LOG_ROWS] >= len(record.log))
        ):
            return
        arrivals(s, hybrid)
        has_work = counts[RUNNING_COUNT] + counts[WAITING_COUNT] > 0
        if counts[IN_FLIGHT_BATCHES] < depth and has_work:
            batch = (counts[OLDEST_BATCH] + counts[IN_FLIGHT_BATCHES]) % depth
            if schedule(s, hybrid, batch) > 0:
                start_step(s, batch, record)
                counts[IN_FLIGHT_BATCHES] += 1
                if counts[IN_FLIGHT_BATCHES] < depth:
                    continue
            elif counts[BATCHES + batch * BATCH_FIELDS + B_PREEMPTED] == 0 and counts[IN_FLIGHT_BATCHES] == 0:
                if counts[NEXT_ARRIVAL] >= len(s.stamps):
                    counts[STUCK] = 1
                    return
                counts[NOW] = s.stamps[counts[NEXT_ARRIVAL], ARRIVAL]
                continue
        if counts[IN_FLIGHT_BATCHES] > 0:
            batch = counts[OLDEST_BATCH]
            counts[NOW] = max(counts[NOW], counts[BATCHES + batch * BATCH_FIELDS + B_END])
            if hybrid is not None:
                arrivals(s, hybrid)  # who came during the step met a queue that still had those that it ends
            finish(s, hybrid, batch, counts[NOW])
            counts[OLDEST_BATCH] = (batch + 1) % depth
            counts[IN_FLIGHT_BATCHES] -= 1
        elif not has_work:
            if counts[NEXT_ARRIVAL] >= len(s.stamps):
                counts[DONE] = 1
                return
            counts[NOW] = max(counts[NOW], s.stamps[counts[NEXT_ARRIVAL], ARRIVAL])
