"""The loop of a run that takes requests while it goes on: the same steps as a replay's, reported one by one.

It can stop at any moment. A step that has begun and not ended by then stays under way, so the arrays show at that moment what a
server would show. A tally adds up what happened, and holds the events.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.simulate.clock import RunRecord, arrivals, start_step
from plimsoll.simulate.compiled import compiled, hot, part, wide
from plimsoll.simulate.groups import Hybrid, free_request, preempt

from plimsoll.simulate.layout import (  # isort: skip
    ARRIVAL, ASYNC, BATCHES, BATCH_FIELDS, B_END, B_PREEMPTED, B_PRODUCES, B_REQUESTS, B_TOKENS, CACHED, FINISH, FINISHED,
    FINISHED_COUNT, IN_FLIGHT_BATCHES, LAST_TOKEN, MAX_LEN, NEXT_ARRIVAL, NOT_ARRIVED, NOW, NUMBER, OLDEST_BATCH, OUTPUT,
    PREEMPTIONS, PREEMPTION_COUNT, PRODUCED, PROMPT, REJECTED, REJECTED_COUNT, RUNNING, RUNNING_COUNT, SEAT_BATCH, SEAT_RUNNING,
    STATUS, TOKENS, TOLD, WAITING_COUNT, Int64, RunState,
)  # fmt: skip
from plimsoll.simulate.queues import drop
from plimsoll.simulate.scheduler import brings, finish, schedule

# `Tally.sums`. WANTS_TOKENS: every token is an event. HAS_TRIED: with one step under way no second one could be scheduled.
# MOST_TOKENS: of the largest step since somebody set this to 0. STEP_TOKENS, OUTPUT_STEPS: over steps with output.
# COUNTS_CACHED: a step's tokens include those of its prompts that were found in the cache.
(
    EVENTS, WANTS_TOKENS, HAS_TRIED, PROMPT_TOKENS, GENERATED, STEP_TOKENS, OUTPUT_STEPS, GAP_NS, GAPS, PREEMPTIONS_TOLD,
    MOST_TOKENS, LAST_STEP, ENDED_STEPS, COUNTS_CACHED,
) = range(14)  # fmt: skip
SUMS = 14

FIRST, TOKEN, DONE = range(3)
KIND, ROW, WHO, AT = range(4)
EVENT_FIELDS = 4


class Tally(NamedTuple):
    """Counts, histograms and events of a run, for its metrics."""

    sums: Int64
    events: Int64
    """One row each: what, the request's row, its number, when. Once they are full, the run stands still until they are read."""
    step_edges: Int64
    step_counts: Int64
    """Steps with output, by how many tokens they brought: the prompt with a first token, and one for each token."""
    gap_edges: Int64
    gap_counts: Int64
    """Tokens but the first, by the ns since the one before."""


@hot
def _add(edges: Int64, counts: Int64, value: int) -> None:
    at = 0
    while at < len(edges) and value > edges[at]:
        at += 1
    counts[at] += 1


@hot
def _tell(tally: Tally, kind: int, row: int, number: int, now: int) -> None:
    at = tally.sums[EVENTS]
    tally.events[at, KIND] = kind
    tally.events[at, ROW] = row
    tally.events[at, WHO] = number
    tally.events[at, AT] = now
    tally.sums[EVENTS] = at + 1


@part
def _note(s: RunState, batch: int, tally: Tally, now: int) -> None:
    """Adds a step's output to the tally, just before the step ends."""
    who, made = SEAT_BATCH + 3 * batch, BATCHES + batch * BATCH_FIELDS
    sums, max_len = tally.sums, s.limits[MAX_LEN]
    prompts = generated = cached = 0
    for at in range(s.counts[made + B_REQUESTS]):
        request = s.seats[at, who]
        row, stamps = s.requests[request], s.stamps[request]
        if s.seats[at, who + B_PRODUCES] == 0 or row[STATUS] == FINISHED:
            continue
        brought = min(brings(s, request, s.seats[at, who + B_PRODUCES]), row[OUTPUT] - row[PRODUCED], max_len - row[TOKENS])
        generated += brought
        if row[PRODUCED] == 0:
            prompts += row[PROMPT]
            cached += row[CACHED]
            _tell(tally, FIRST, request, stamps[NUMBER], now)
        else:
            gap = now - stamps[LAST_TOKEN]
            sums[GAP_NS] += gap
            sums[GAPS] += 1
            _add(tally.gap_edges, tally.gap_counts, gap)
            if sums[WANTS_TOKENS]:
                _tell(tally, TOKEN, request, stamps[NUMBER], now)
        stamps[LAST_TOKEN] = now
        # vLLM counts a preemption with the victim's next token.
        sums[PREEMPTIONS_TOLD] += row[PREEMPTIONS] - stamps[TOLD]
        stamps[TOLD] = row[PREEMPTIONS]
        if row[PRODUCED] + brought >= row[OUTPUT] or row[TOKENS] + brought >= max_len:
            _tell(tally, DONE, request, stamps[NUMBER], now)
    sums[ENDED_STEPS] += 1
    sums[LAST_STEP] = now
    if generated > 0:
        sums[PROMPT_TOKENS] += prompts
        sums[GENERATED] += generated
        sums[OUTPUT_STEPS] += 1
        brought = prompts + generated - (0 if sums[COUNTS_CACHED] else cached)
        sums[STEP_TOKENS] += brought
        _add(tally.step_edges, tally.step_counts, wide(brought))


@hot
def _begin(s: RunState, hybrid: Hybrid, record: RunRecord, tally: Tally, depth: int) -> bool:
    """Begins the next step; False if there is none."""
    counts = s.counts
    batch = (counts[OLDEST_BATCH] + counts[IN_FLIGHT_BATCHES]) % depth
    made = BATCHES + batch * BATCH_FIELDS
    while schedule(s, hybrid, batch) == 0:
        # A request was preempted and none was admitted: with no step under way the next attempt finds more room.
        if counts[made + B_PREEMPTED] == 0 or counts[IN_FLIGHT_BATCHES] > 0:
            return False
    start_step(s, batch, record)
    counts[IN_FLIGHT_BATCHES] += 1
    tally.sums[MOST_TOKENS] = max(tally.sums[MOST_TOKENS], counts[made + B_TOKENS])
    return True


@compiled
def go_on(s: RunState, hybrid: Hybrid, record: RunRecord, tally: Tally, most_steps: int, until_ns: int) -> None:
    """Runs up to `until_ns`, unless `most_steps` steps have ended before or there is no room for more events."""
    depth = 2 if s.limits[ASYNC] else 1
    counts, sums = s.counts, tally.sums
    last_step = sums[ENDED_STEPS] + most_steps
    room = len(tally.events) - 2 * len(s.seats)
    while sums[ENDED_STEPS] < last_step and sums[EVENTS] < room:
        arrivals(s, hybrid)
        has_work = counts[RUNNING_COUNT] + counts[WAITING_COUNT] > 0
        if has_work and counts[IN_FLIGHT_BATCHES] < depth and not sums[HAS_TRIED]:
            if _begin(s, hybrid, record, tally, depth):
                if counts[IN_FLIGHT_BATCHES] < depth:
                    continue
            elif counts[IN_FLIGHT_BATCHES] > 0:
                sums[HAS_TRIED] = 1
            else:
                has_work = False  # no waiting request can be admitted: only an arrival changes that
        if counts[IN_FLIGHT_BATCHES] > 0:
            batch = counts[OLDEST_BATCH]
            end = counts[BATCHES + batch * BATCH_FIELDS + B_END]
            if end > until_ns:
                return
            counts[NOW] = max(counts[NOW], end)
            if hybrid is not None:
                arrivals(s, hybrid)
            _note(s, batch, tally, counts[NOW])
            finish(s, hybrid, batch, counts[NOW])
            counts[OLDEST_BATCH] = (batch + 1) % depth
            counts[IN_FLIGHT_BATCHES] -= 1
            sums[HAS_TRIED] = 0
        elif not has_work:
            at = counts[NEXT_ARRIVAL]
            if at >= len(s.stamps) or s.stamps[at, ARRIVAL] > until_ns:
                return
            counts[NOW] = max(counts[NOW], s.stamps[at, ARRIVAL])


@compiled
def abort(s: RunState, request: int, now: int) -> None:
    """Aborts a request, wherever it is; its output of a step under way is lost."""
    row = s.requests[request]
    if row[STATUS] == NOT_ARRIVED:
        row[STATUS] = REJECTED
        s.counts[REJECTED_COUNT] += 1
        return
    if row[STATUS] == RUNNING:
        free_request(s, request)
        kept = 0
        for at in range(s.counts[RUNNING_COUNT]):
            if s.seats[at, SEAT_RUNNING] != request:
                s.seats[kept, SEAT_RUNNING] = s.seats[at, SEAT_RUNNING]
                kept += 1
        s.counts[RUNNING_COUNT] = kept
    else:
        drop(s, request)
    row[STATUS] = FINISHED
    s.stamps[request, FINISH] = now
    s.counts[FINISHED_COUNT] += 1
    for batch in range(2):
        who = SEAT_BATCH + 3 * batch
        for at in range(s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS]):
            if s.seats[at, who] == request:
                s.seats[at, who + B_PRODUCES] = 0


@compiled
def preempt_all(s: RunState) -> None:
    """Preempts every running request, the last first."""
    while s.counts[RUNNING_COUNT] > 0:
        s.counts[RUNNING_COUNT] -= 1
        victim = s.seats[s.counts[RUNNING_COUNT], SEAT_RUNNING]
        for batch in range(2):
            who = SEAT_BATCH + 3 * batch
            for at in range(s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS]):
                if s.seats[at, who] == victim and not s.limits[ASYNC]:
                    s.seats[at, who + B_PRODUCES] = 0
        preempt(s, victim)
        s.counts[PREEMPTION_COUNT] += 1
