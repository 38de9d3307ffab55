"""A run that is never over: requests are handed in while it goes on, and can be taken back.

    run = OpenRun(Settings(), StepTime())
    number = run.submit(prompt=512, output=64, arrival_ns=0)
    for events in run.until(10**9):
        ...                               # what happened in the first second: first tokens, tokens, ends

Fed with a trace in pieces of any size it makes the same steps at the same nanosecond as `replay` of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.simulate import layout
from plimsoll.simulate.blocks import Hybrid, free_request, preempt
from plimsoll.simulate.clock import Record, arrivals, start_step
from plimsoll.simulate.compiled import compiled, hot, part, wide
from plimsoll.simulate.layout import (
    ARRIVAL,
    ASYNC,
    B_END,
    B_PREEMPTED,
    B_PRODUCES,
    B_REQUESTS,
    B_TOKENS,
    BATCH_FIELDS,
    BATCHES,
    CACHED,
    FINISH,
    FINISHED,
    FINISHED_COUNT,
    IN_FLIGHT_BATCHES,
    LAST_TOKEN,
    MAX_LEN,
    NEXT_ARRIVAL,
    NOT_ARRIVED,
    NOW,
    NUMBER,
    OLDEST_BATCH,
    OUTPUT,
    PREEMPTION_COUNT,
    PREEMPTIONS,
    PRODUCED,
    PROMPT,
    REJECTED,
    REJECTED_COUNT,
    RUNNING,
    RUNNING_COUNT,
    SEAT_BATCH,
    SEAT_RUNNING,
    STATUS,
    TOKENS,
    TOLD,
    WAITING_COUNT,
    Int64,
    State,
)
from plimsoll.simulate.pool import chain
from plimsoll.simulate.queues import drop
from plimsoll.simulate.replay import hybrid_of, new_record
from plimsoll.simulate.scheduler import finish, schedule
from plimsoll.simulate.settings import Settings, StepTime, groups_of
from plimsoll.simulate.start import start
from plimsoll.simulate.trace import Integers, make_trace

# The loop of a run whose requests come while it goes on: the same steps as a replay's, told one by one.
#
# It stops between any two moments. A step that has begun and not ended by then stays under way, so what is seen at a moment
# is
# what a server would show at that moment. What happened is added up in a tally, and told as events.

# `Tally.sums`. WANTS_TOKENS: whether every token is an event. HAS_TRIED: with one step under way a second one was looked for
# in vain. MOST_TOKENS: of the largest step since somebody set this to 0. STEP_TOKENS, OUTPUT_STEPS: over steps with output.
# COUNTS_CACHED: whether a step's tokens are with those of its prompts that were found in the cache.
(
    EVENTS, WANTS_TOKENS, HAS_TRIED, PROMPT_TOKENS, GENERATED, STEP_TOKENS, OUTPUT_STEPS, GAP_NS, GAPS, PREEMPTIONS_TOLD,
    MOST_TOKENS, LAST_STEP, ENDED_STEPS, COUNTS_CACHED,
) = range(14)  # fmt: skip
SUMS = 14

FIRST, TOKEN, DONE = range(3)
KIND, ROW, WHO, AT = range(4)
EVENT_FIELDS = 4


class Tally(NamedTuple):
    """What happened, for whoever keeps the metrics."""

    sums: Int64
    events: Int64
    """One row each: what, the request's row, its number, when. Once they are full, the run stands still until they are read."""
    step_edges: Int64
    step_counts: Int64
    """Steps with output, by how many tokens they brought: the prompt with a first token, and one for each token."""
    gap_edges: Int64
    gap_counts: Int64  # Tokens but the first, by the ns since the one before


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
def _note(s: State, batch: int, tally: Tally, now: int) -> None:
    """Add up what a step brings, just before it ends."""
    who, made = SEAT_BATCH + 3 * batch, BATCHES + batch * BATCH_FIELDS
    sums, max_len = tally.sums, s.limits[MAX_LEN]
    prompts = generated = cached = 0
    for at in range(s.counts[made + B_REQUESTS]):
        request = s.seats[at, who]
        row, stamps = s.requests[request], s.stamps[request]
        if s.seats[at, who + B_PRODUCES] == 0 or row[STATUS] == FINISHED:
            continue
        generated += 1
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
        # vLLM tells of a preemption with the victim's next token.
        sums[PREEMPTIONS_TOLD] += row[PREEMPTIONS] - stamps[TOLD]
        stamps[TOLD] = row[PREEMPTIONS]
        if row[PRODUCED] + 1 >= row[OUTPUT] or row[TOKENS] + 1 >= max_len:
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
def _begin(s: State, hybrid: Hybrid, record: Record, tally: Tally, depth: int) -> bool:
    """Begin the next step if there is one; False if there is none."""
    counts = s.counts
    batch = (counts[OLDEST_BATCH] + counts[IN_FLIGHT_BATCHES]) % depth
    made = BATCHES + batch * BATCH_FIELDS
    while schedule(s, hybrid, batch) == 0:
        # Somebody was pushed out and nobody came in: with nothing under way the next look finds more room.
        if counts[made + B_PREEMPTED] == 0 or counts[IN_FLIGHT_BATCHES] > 0:
            return False
    start_step(s, batch, record)
    counts[IN_FLIGHT_BATCHES] += 1
    tally.sums[MOST_TOKENS] = max(tally.sums[MOST_TOKENS], counts[made + B_TOKENS])
    return True


@compiled
def go_on(s: State, hybrid: Hybrid, record: Record, tally: Tally, most_steps: int, until_ns: int) -> None:
    """Do all that happens up to `until_ns`, unless `most_steps` steps have ended before or there is no room for more events."""
    depth = 2 if s.limits[ASYNC] else 1
    counts, sums = s.counts, tally.sums
    last_step = sums[ENDED_STEPS] + most_steps
    room = len(tally.events) - 2 * len(s.seats)
    while sums[ENDED_STEPS] < last_step and sums[EVENTS] < room:
        arrivals(s)
        has_work = counts[RUNNING_COUNT] + counts[WAITING_COUNT] > 0
        if has_work and counts[IN_FLIGHT_BATCHES] < depth and not sums[HAS_TRIED]:
            if _begin(s, hybrid, record, tally, depth):
                if counts[IN_FLIGHT_BATCHES] < depth:
                    continue
            elif counts[IN_FLIGHT_BATCHES] > 0:
                sums[HAS_TRIED] = 1
            else:
                has_work = False  # nobody who waits can ever be let in: only an arrival changes that
        if counts[IN_FLIGHT_BATCHES] > 0:
            batch = counts[OLDEST_BATCH]
            end = counts[BATCHES + batch * BATCH_FIELDS + B_END]
            if end > until_ns:
                return
            counts[NOW] = max(counts[NOW], end)
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
def abort(s: State, request: int, now: int) -> None:
    """Take a request back, wherever it is; what a step that is under way would bring it is lost."""
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
def preempt_all(s: State) -> None:
    """Push every running request out, the last first."""
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


FIRST_ROWS = 256
FOREVER = 2**62
FROZEN_NS = 2**60
NO_IDS: Integers = np.zeros(0, dtype=np.int64)


class OpenRun:
    """One engine's scheduler and block pool. Times are ns from its start; numbers name requests and are never used again."""

    def __init__(
        self,
        settings: Settings,
        step_time: StepTime,
        *,
        step_edges: Sequence[int] = (),
        gap_edges: Sequence[int] = (),
        wants_tokens: bool = False,
        prefix_block: int = 0,
        first_rows: int = FIRST_ROWS,
    ) -> None:
        """The edges are the upper bounds of the two histograms that only the inner loop can fill; see `Tally`.

        `prefix_block`: how many tokens one id stands for; by default what every group's blocks are made of.
        `first_rows`: for how many requests there is room at first.
        """
        self.prefix_block = prefix_block or int(np.gcd.reduce([group.block_size for group in groups_of(settings)]))
        nobody = make_trace("open", [], [], [], prefix_block=self.prefix_block)
        self._state = start(nobody, settings, step_time, nobody.arrival_ns, is_open=True)
        self._hybrid = hybrid_of(self._state)
        self._record = new_record(settings, step_time)
        self._requests = np.zeros((first_rows, layout.REQUEST_FIELDS), dtype=np.int32)
        self._stamps = np.zeros((first_rows, layout.STAMP_FIELDS), dtype=np.int64)
        self._chains = np.zeros(4 * first_rows if settings.prefix_caching else 0, dtype=np.uint64)
        self._used = self._chains_used = self._next_number = 0
        self._last_arrival = 0
        self._frozen_at: int | None = None
        self._state = self._state._replace(waiting=np.zeros(first_rows + 1, dtype=np.int32), chains=self._chains)
        self._show_rows()
        edges, gaps = np.array(step_edges, dtype=np.int64), np.array(gap_edges, dtype=np.int64)
        self.tally = Tally(
            sums=np.zeros(SUMS, dtype=np.int64),
            events=np.zeros((4 * len(self._state.seats) + 1024, EVENT_FIELDS), dtype=np.int64),
            step_edges=edges,
            step_counts=np.zeros(len(edges) + 1, dtype=np.int64),
            gap_edges=gaps,
            gap_counts=np.zeros(len(gaps) + 1, dtype=np.int64),
        )
        self.tally.sums[WANTS_TOKENS] = wants_tokens

    # What it is like now

    @property
    def state(self) -> layout.State:
        """The arrays themselves, to be looked at."""
        return self._state

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return int(self._state.counts[layout.RUNNING_COUNT])

    @property
    def waiting(self) -> int:
        """Requests that wait, those that were pushed out among them."""
        return int(self._state.counts[layout.WAITING_COUNT])

    @property
    def kv_usage(self) -> float:
        """The share of blocks that somebody holds."""
        counts, limits = self._state.counts, self._state.limits
        return 1.0 - float(counts[layout.FREE_BLOCKS]) / float(limits[layout.NUM_BLOCKS] - 1)

    @property
    def next_end_ns(self) -> int | None:
        """When the step that is under way ends; None if none is, or none ever will."""
        counts = self._state.counts
        if counts[layout.IN_FLIGHT_BATCHES] == 0 or self.is_frozen:
            return None
        return int(counts[layout.BATCHES + int(counts[layout.OLDEST_BATCH]) * layout.BATCH_FIELDS + layout.B_END])

    @property
    def next_ns(self) -> int | None:
        """When something happens next: a step ends, or a request arrives that was handed in before its time."""
        if self.is_frozen:
            return None
        end, arrival = self.next_end_ns, int(self._state.counts[layout.NEXT_ARRIVAL])
        if end is not None or arrival >= self._used:
            return end
        return int(self._stamps[arrival, layout.ARRIVAL])

    def count(self, which: int) -> int:
        """One of the sums of `layout`: QUERIES, HITS, RECOMPUTED and the like."""
        return int(self._state.counts[which])

    # Requests

    def submit(
        self, prompt: int, output: int, arrival_ns: int, *, priority: int = 0, ids: Integers = NO_IDS, ids_tokens: int = 0
    ) -> int:
        """A new request; its number. `ids` name the content of its first `ids_tokens` tokens, `prefix_block` tokens each."""
        assert prompt > 0 < output, "vLLM takes no empty prompt, and produces a token at least"
        assert arrival_ns >= self._last_arrival, "requests are handed in as they arrive"
        self._last_arrival = arrival_ns
        if self._used == len(self._requests):
            self._make_room()
        row, number = self._used, self._next_number
        fields = self._requests[row]
        fields[:] = 0
        fields[layout.PROMPT] = fields[layout.TOKENS] = prompt
        fields[layout.OUTPUT], fields[layout.SLOT] = output, -1
        fields[layout.PRIORITY], fields[layout.TIE] = priority, number & 0x7FFFFFFF
        begin, end = self._keep_chain(ids)
        self._stamps[row] = (arrival_ns, -1, -1, -1, begin, end, ids_tokens, number, 0, 0)
        self._used += 1
        self._next_number += 1
        self._show_rows()
        return number

    def row_of(self, number: int) -> int | None:
        """Where a request is kept; None for one that ended long ago."""
        numbers = self._stamps[: self._used, layout.NUMBER]
        row = int(np.searchsorted(numbers, number))
        return row if row < self._used and numbers[row] == number else None

    def abort(self, number: int, now_ns: int) -> bool:
        """Take a request back; False if it is over already."""
        row = self.row_of(number)
        if row is None or self._requests[row, layout.STATUS] in (layout.FINISHED, layout.REJECTED):
            return False
        abort(self._state, row, now_ns)
        return True

    # Time

    def until(self, until_ns: int, most_steps: int = FOREVER) -> Iterator[Integers]:
        """Go on to this moment; each piece of events is to be read before the next one is asked for."""
        sums, events = self.tally.sums, self.tally.events
        last_step = int(sums[ENDED_STEPS]) + most_steps
        while True:
            sums[EVENTS] = 0
            go_on(self._state, self._hybrid, self._record, self.tally, last_step - sums[ENDED_STEPS], until_ns)
            count = int(sums[EVENTS])
            if count:
                yield events[:count]
            # It stopped for want of room, or there is nothing left to do.
            if count < len(events) - 2 * len(self._state.seats) or sums[ENDED_STEPS] >= last_step:
                return

    def delay(self, by_ns: int) -> None:
        """What is under way ends so much later: the device did something else meanwhile."""
        counts = self._state.counts
        counts[layout.DEVICE_FREE] += by_ns
        for batch in range(2):
            counts[layout.BATCHES + batch * layout.BATCH_FIELDS + layout.B_END] += by_ns

    def freeze(self, now_ns: int) -> None:
        """No step ends any more, neither the one under way nor one that is begun from now on."""
        counts = self._state.counts
        counts[layout.DEVICE_FREE] = max(int(counts[layout.DEVICE_FREE]), now_ns)
        self._frozen_at = now_ns
        self.delay(FROZEN_NS)

    def thaw(self, now_ns: int) -> None:
        """Go on where it stood still; who was let in meanwhile begins now."""
        assert self._frozen_at is not None, "it goes on already"
        by_ns = now_ns - self._frozen_at - FROZEN_NS
        self._frozen_at = None
        self.delay(by_ns)
        begun = self._stamps[: self._used, layout.FIRST_SCHED]
        begun[begun >= FROZEN_NS] += by_ns

    @property
    def is_frozen(self) -> bool:
        """Whether it stands still."""
        return self._frozen_at is not None

    # The cache

    def preempt_all(self) -> None:
        """Push every running request out: their blocks are free, and they compute everything anew."""
        preempt_all(self._state)

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, as vLLM says it, while anybody holds a block."""
        state = self._state
        if state.counts[layout.FREE_BLOCKS] != state.limits[layout.NUM_BLOCKS] - 1:
            return False
        state.keys[:] = 0
        for field in (layout.BUCKET_PREV, layout.BUCKET_NEXT, layout.BUCKET_FIRST, layout.BUCKET_LAST, layout.FRESH_IN):
            state.links[:, field] = 0
        return True

    # Rows

    def _show_rows(self) -> None:
        """The loop takes the end of the rows for the last arrival: let it see those that are used."""
        self._state = self._state._replace(requests=self._requests[: self._used], stamps=self._stamps[: self._used])

    def _keep_chain(self, ids: Integers) -> tuple[int, int]:
        if not len(self._chains) or not len(ids):
            return 0, 0
        begin, end = self._chains_used, self._chains_used + len(ids)
        if end > len(self._chains):
            grown = np.zeros(max(end, 2 * len(self._chains)), dtype=np.uint64)
            grown[:begin] = self._chains[:begin]
            self._chains = grown
            self._state = self._state._replace(chains=grown)
        chain(ids, np.array((0, len(ids)), dtype=np.int64), self._chains[begin:end])
        self._chains_used = end
        return begin, end

    def _make_room(self) -> None:
        """Drop the rows of requests that are over; if that gives little, have more."""
        kept = self._living()
        size = len(self._requests) * (2 if 2 * len(kept) > len(self._requests) else 1)
        moved = np.full(self._used, -1, dtype=np.int64)
        moved[kept] = np.arange(len(kept))
        requests = np.zeros((size, layout.REQUEST_FIELDS), dtype=np.int32)
        stamps = np.zeros((size, layout.STAMP_FIELDS), dtype=np.int64)
        requests[: len(kept)], stamps[: len(kept)] = self._requests[kept], self._stamps[kept]
        self._move_chains(stamps[: len(kept)])
        counts, seats = self._state.counts, self._state.seats
        waiting = self._moved_waiting(moved, size)
        seats[: self.running, layout.SEAT_RUNNING] = moved[seats[: self.running, layout.SEAT_RUNNING]]
        for who, count in self._under_way():
            seats[:count, who] = moved[seats[:count, who]]
        counts[layout.NEXT_ARRIVAL] = int((kept < counts[layout.NEXT_ARRIVAL]).sum())
        self._requests, self._stamps, self._used = requests, stamps, len(kept)
        self._state = self._state._replace(waiting=waiting)
        self._show_rows()

    def _living(self) -> Integers:
        status = self._requests[: self._used, layout.STATUS]
        is_kept = (status != layout.FINISHED) & (status != layout.REJECTED)
        for who, count in self._under_way():
            is_kept[self._state.seats[:count, who]] = True
        return np.flatnonzero(is_kept)

    def _under_way(self) -> list[tuple[int, int]]:
        """For each step that is under way, where in the seats its requests are, and how many."""
        counts = self._state.counts
        depth = 2 if self._state.limits[layout.ASYNC] else 1
        batches = [int(counts[layout.OLDEST_BATCH] + one) % depth for one in range(int(counts[layout.IN_FLIGHT_BATCHES]))]
        return [
            (layout.SEAT_BATCH + 3 * one, int(counts[layout.BATCHES + one * layout.BATCH_FIELDS + layout.B_REQUESTS]))
            for one in batches
        ]

    def _moved_waiting(self, moved: Integers, size: int) -> layout.Int32:
        """Who waits, in the same order; a ring begins at its head again."""
        counts, old = self._state.counts, self._state.waiting
        head = 0 if self._state.limits[layout.BY_PRIORITY] else int(counts[layout.WAITING_HEAD])
        waiting = np.zeros(size + 1, dtype=np.int32)
        waiting[: self.waiting] = moved[old[(head + np.arange(self.waiting)) % len(old)]]
        counts[layout.WAITING_HEAD] = 0
        return waiting

    def _move_chains(self, stamps: Integers) -> None:
        lengths = stamps[:, layout.IDS_END] - stamps[:, layout.IDS_BEGIN]
        ends = np.cumsum(lengths)
        chains = np.zeros_like(self._chains)
        for begin, end, new_end in zip(
            stamps[:, layout.IDS_BEGIN].tolist(), stamps[:, layout.IDS_END].tolist(), ends.tolist(), strict=True
        ):
            chains[new_end - (end - begin) : new_end] = self._chains[begin:end]
        stamps[:, layout.IDS_BEGIN], stamps[:, layout.IDS_END] = ends - lengths, ends
        self._chains_used = int(ends[-1]) if len(ends) else 0
        self._chains = chains
        self._state = self._state._replace(chains=chains)
