"""A run without an end: requests can be submitted and aborted while it goes on.

    run = OpenRun(Settings(), StepTime())
    number = run.submit(prompt=512, output=64, arrival_ns=0)
    for events in run.until(10**9):
        ...                               # the events of the first second: first tokens, tokens, ends

Given a trace in pieces of any size it makes the same steps at the same nanosecond as `replay` of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from plimsoll.simulate import layout as at
from plimsoll.simulate import open_loop as loop
from plimsoll.simulate.clock import RunRecord
from plimsoll.simulate.pool import chain
from plimsoll.simulate.replay import FOREVER, hybrid_of, new_record
from plimsoll.simulate.settings import EngineLimits, StepTime, groups_of
from plimsoll.simulate.start import start, too_long, turn_limits
from plimsoll.simulate.trace import Integers, make_trace

FIRST_ROWS = 256
FROZEN_NS = 2**60
NO_IDS: Integers = np.zeros(0, dtype=np.int64)


class OpenRun:
    """One engine's scheduler and block pool. Times are ns from its start; numbers name requests and are never used again."""

    def __init__(
        self,
        settings: EngineLimits,
        step_time: StepTime,
        *,
        step_edges: Sequence[int] = (),
        gap_edges: Sequence[int] = (),
        wants_tokens: bool = False,
        prefix_block: int = 0,
        first_rows: int = FIRST_ROWS,
    ) -> None:
        """The edges are the upper bounds of the two histograms that only the inner loop can fill; see `Tally`.

        `prefix_block`: the number of tokens that one id covers; by default the greatest common divisor of the block sizes.
        `first_rows`: the number of requests there is room for at first.
        """
        self.settings = settings
        self.prefix_block = prefix_block or int(np.gcd.reduce([group.block_size for group in groups_of(settings)]))
        nobody = make_trace("open", [], [], [], prefix_block=self.prefix_block)
        self._state = start(nobody, settings, step_time, nobody.arrival_ns, is_open=True)
        self._hybrid = hybrid_of(self._state)
        self._record = new_record(settings, step_time)
        self._requests = np.zeros((first_rows, at.REQUEST_FIELDS), dtype=np.int32)
        self._stamps = np.zeros((first_rows, at.STAMP_FIELDS), dtype=np.int64)
        self._chains = np.zeros(4 * first_rows if settings.prefix_caching else 0, dtype=np.uint64)
        self._used = self._chains_used = self._next_number = 0
        self._last_arrival = 0
        self._adapters = {0: 0}  # by the trace's number, ours
        self._frozen_at: int | None = None
        self._state = self._state._replace(waiting=np.zeros(first_rows + 1, dtype=np.int32), chains=self._chains)
        self._show_rows()
        edges, gaps = np.array(step_edges, dtype=np.int64), np.array(gap_edges, dtype=np.int64)
        self.tally = loop.Tally(
            sums=np.zeros(loop.SUMS, dtype=np.int64),
            events=np.zeros((4 * len(self._state.seats) + 1024, loop.EVENT_FIELDS), dtype=np.int64),
            step_edges=edges,
            step_counts=np.zeros(len(edges) + 1, dtype=np.int64),
            gap_edges=gaps,
            gap_counts=np.zeros(len(gaps) + 1, dtype=np.int64),
        )
        self.tally.sums[loop.WANTS_TOKENS] = wants_tokens

    # The present state

    @property
    def state(self) -> at.RunState:
        """The arrays themselves, to read."""
        return self._state

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return int(self._state.counts[at.RUNNING_COUNT])

    @property
    def waiting(self) -> int:
        """Requests that wait, preempted ones among them."""
        return int(self._state.counts[at.WAITING_COUNT])

    @property
    def kv_usage(self) -> float:
        """The share of blocks that requests hold."""
        counts, limits = self._state.counts, self._state.limits
        return 1.0 - float(counts[at.FREE_BLOCKS]) / float(limits[at.NUM_BLOCKS] - 1)

    @property
    def next_end_ns(self) -> int | None:
        """The end of the step under way; None if there is none, or it never ends."""
        counts = self._state.counts
        if counts[at.IN_FLIGHT_BATCHES] == 0 or self.is_frozen:
            return None
        return int(counts[at.BATCHES + int(counts[at.OLDEST_BATCH]) * at.BATCH_FIELDS + at.B_END])

    @property
    def next_ns(self) -> int | None:
        """The time of the next event: a step's end, or the arrival of a request that was submitted before its time."""
        if self.is_frozen:
            return None
        end, arrival = self.next_end_ns, int(self._state.counts[at.NEXT_ARRIVAL])
        if end is not None or arrival >= self._used:
            return end
        return int(self._stamps[arrival, at.ARRIVAL])

    def count(self, which: int) -> int:
        """One of the sums of `layout`: QUERIES, HITS, RECOMPUTED and the like."""
        return int(self._state.counts[which])

    # Requests

    def submit(
        self, prompt: int, output: int, arrival_ns: int, *, priority: int = 0, ids: Integers = NO_IDS, ids_tokens: int = 0,
        adapter: int = 0,
    ) -> int:  # fmt: skip
        """Adds a request and returns its number. `ids` name the content of its first `ids_tokens` tokens, `prefix_block` each.

        A request that is too long for the model or the pool is refused at once, as by vLLM's API server.
        """
        assert prompt > 0 < output, "vLLM takes no empty prompt, and produces a token at least"
        assert arrival_ns >= self._last_arrival, "requests are handed in as they arrive"
        self._last_arrival = arrival_ns
        if self._used == len(self._requests):
            self._make_room()
        row, number = self._used, self._next_number
        adapter = self._adapters.setdefault(adapter, len(self._adapters))
        fields = self._requests[row]
        fields[:] = 0
        fields[at.PROMPT] = fields[at.TOKENS] = prompt
        fields[at.OUTPUT], fields[at.SLOT] = output, -1
        fields[at.PRIORITY], fields[at.TIE] = priority, number & 0x7FFFFFFF
        if too_long(np.array([prompt + output]), self.settings)[0]:
            fields[at.STATUS] = at.REJECTED
            self._state.counts[at.REJECTED_COUNT] += 1
        begin = end = 0
        if len(self._chains) and len(ids):
            begin, end = self._chains_used, self._chains_used + len(ids)
            if end > len(self._chains):
                grown = np.zeros(max(end, 2 * len(self._chains)), dtype=np.uint64)
                grown[:begin] = self._chains[:begin]
                self._chains = grown
                self._state = self._state._replace(chains=grown)
            chain(ids, np.array((0, len(ids)), dtype=np.int64), np.array([adapter]), self._chains[begin:end])
            self._chains_used = end
        self._stamps[row] = (arrival_ns, -1, -1, -1, begin, end, ids_tokens, number, adapter, -1, 0, 0, 0, 0, 0)
        if adapter >= len(self._state.adapters):
            self._state = self._state._replace(adapters=np.zeros(adapter + 1, dtype=np.int64))
        self._used += 1
        self._next_number += 1
        self._show_rows()
        return number

    def row_of(self, number: int) -> int | None:
        """Returns the row of a request; None for one that ended long ago."""
        numbers = self._stamps[: self._used, at.NUMBER]
        row = int(np.searchsorted(numbers, number))
        return row if row < self._used and numbers[row] == number else None

    def abort(self, number: int, now_ns: int) -> bool:
        """Aborts a request; False if it is over already."""
        row = self.row_of(number)
        if row is None or self._requests[row, at.STATUS] in (at.FINISHED, at.REJECTED, at.REFUSED):
            return False
        loop.abort(self._state, row, now_ns)
        return True

    # Time

    def until(self, until_ns: int, most_steps: int = FOREVER) -> Iterator[Integers]:
        """Runs to this moment and yields its events in pieces; each must be read before the next is taken."""
        sums, events = self.tally.sums, self.tally.events
        last_step = int(sums[loop.ENDED_STEPS]) + most_steps
        while True:
            sums[loop.EVENTS] = 0
            loop.go_on(self._state, self._hybrid, self._record, self.tally, last_step - sums[loop.ENDED_STEPS], until_ns)
            count = int(sums[loop.EVENTS])
            if count:
                yield events[:count]
            # It stopped because the events are full, or nothing is left to do.
            if count < len(events) - 2 * len(self._state.seats) or sums[loop.ENDED_STEPS] >= last_step:
                return

    def turn(self, settings: EngineLimits) -> None:
        """Sets from the next step on those limits of these settings that a running engine can change."""
        turn_limits(self._state.limits, settings)

    def delay(self, by_ns: int) -> None:
        """Delays the steps under way by `by_ns`: the device did something else meanwhile."""
        counts = self._state.counts
        counts[at.DEVICE_FREE] += by_ns
        for batch in range(2):
            counts[at.BATCHES + batch * at.BATCH_FIELDS + at.B_END] += by_ns

    def freeze(self, now_ns: int) -> None:
        """Stops the device until `thaw`: no step ends, neither the one under way nor one that begins from now on."""
        counts = self._state.counts
        counts[at.DEVICE_FREE] = max(int(counts[at.DEVICE_FREE]), now_ns)
        self._frozen_at = now_ns
        self.delay(FROZEN_NS)

    def thaw(self, now_ns: int) -> None:
        """Goes on after `freeze`; requests that were admitted meanwhile begin now."""
        assert self._frozen_at is not None, "it goes on already"
        by_ns = now_ns - self._frozen_at - FROZEN_NS
        self._frozen_at = None
        self.delay(by_ns)
        begun = self._stamps[: self._used, at.FIRST_SCHED]
        begun[begun >= FROZEN_NS] += by_ns

    def ended(self) -> tuple[at.RunState, RunRecord]:
        """Returns the arrays and the record of a run that has nothing to do any more; only requests whose rows it kept."""
        return self._state, self._record

    @property
    def is_frozen(self) -> bool:
        """True between `freeze` and `thaw`."""
        return self._frozen_at is not None

    # The cache

    def preempt_all(self) -> None:
        """Preempts every running request: their blocks are free, and they compute everything anew."""
        loop.preempt_all(self._state)

    def reset_prefix_cache(self) -> bool:
        """Forgets all content; False, as in vLLM, while a request holds a block."""
        state = self._state
        if state.counts[at.FREE_BLOCKS] != state.limits[at.NUM_BLOCKS] - 1:
            return False
        state.keys[:] = 0
        for field in (at.BUCKET_PREV, at.BUCKET_NEXT, at.BUCKET_FIRST, at.BUCKET_LAST, at.FRESH_IN):
            state.links[:, field] = 0
        return True

    # Rows

    def _show_rows(self) -> None:
        """Shows the loop only the rows in use: it takes the end of the rows for the last arrival."""
        self._state = self._state._replace(requests=self._requests[: self._used], stamps=self._stamps[: self._used])

    def _make_room(self) -> None:
        """Drops the rows of requests that are over; adds rows where that frees few."""
        counts, seats = self._state.counts, self._state.seats
        depth = 2 if self._state.limits[at.ASYNC] else 1
        batches = [int(counts[at.OLDEST_BATCH] + one) % depth for one in range(int(counts[at.IN_FLIGHT_BATCHES]))]
        # For each step under way, the column of its requests in the seats, and their number.
        under_way = [
            (at.SEAT_BATCH + 3 * one, int(counts[at.BATCHES + one * at.BATCH_FIELDS + at.B_REQUESTS])) for one in batches
        ]
        status = self._requests[: self._used, at.STATUS]
        is_kept = status < at.FINISHED
        for who, count in under_way:
            is_kept[seats[:count, who]] = True
        kept = np.flatnonzero(is_kept)
        size = len(self._requests) * (2 if 2 * len(kept) > len(self._requests) else 1)
        moved = np.full(self._used, -1, dtype=np.int64)
        moved[kept] = np.arange(len(kept))
        requests = np.zeros((size, at.REQUEST_FIELDS), dtype=np.int32)
        stamps = np.zeros((size, at.STAMP_FIELDS), dtype=np.int64)
        requests[: len(kept)], stamps[: len(kept)] = self._requests[kept], self._stamps[kept]
        self._move_chains(stamps[: len(kept)])
        # The waiting requests, in the same order; a ring begins at its head again.
        old, head = self._state.waiting, 0 if self._state.limits[at.BY_PRIORITY] else int(counts[at.WAITING_HEAD])
        waiting = np.zeros(size + 1, dtype=np.int32)
        waiting[: self.waiting] = moved[old[(head + np.arange(self.waiting)) % len(old)]]
        counts[at.WAITING_HEAD] = 0
        seats[: self.running, at.SEAT_RUNNING] = moved[seats[: self.running, at.SEAT_RUNNING]]
        for who, count in under_way:
            seats[:count, who] = moved[seats[:count, who]]
        counts[at.NEXT_ARRIVAL] = int((kept < counts[at.NEXT_ARRIVAL]).sum())
        self._requests, self._stamps, self._used = requests, stamps, len(kept)
        self._state = self._state._replace(waiting=waiting)
        self._show_rows()

    def _move_chains(self, stamps: Integers) -> None:
        lengths = stamps[:, at.IDS_END] - stamps[:, at.IDS_BEGIN]
        ends = np.cumsum(lengths)
        chains = np.zeros_like(self._chains)
        for (begin, end), new_end in zip(stamps[:, [at.IDS_BEGIN, at.IDS_END]].tolist(), ends.tolist(), strict=True):
            chains[new_end - (end - begin) : new_end] = self._chains[begin:end]
        stamps[:, at.IDS_BEGIN], stamps[:, at.IDS_END] = ends - lengths, ends
        self._chains_used = int(ends[-1]) if len(ends) else 0
        self._chains = chains
        self._state = self._state._replace(chains=chains)
