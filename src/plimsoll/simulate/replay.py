"""Replays a trace from its first arrival to its last token, with results by request, by step and in sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.simulate import layout as at
from plimsoll.simulate.clock import TABLES, WASTE, RunRecord, advance
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.start import start, turn_limits
from plimsoll.simulate.trace import Flags, Floats, Integers, Trace

STEP_COLUMNS = (
    "step t_start_ns t_end_ns running waiting sched_reqs sched_tokens new resumed preempted ctx_tokens used_blocks "
    "table_blocks waste_slots hit_tokens_cum query_tokens_cum"
).split()
REQUEST_COLUMNS = "req arrival_ns first_sched_ns first_token_ns finish_ns prompt output preemptions cached_tokens".split()
NEVER = -1  # The stamp of an event that did not happen


class Totals(NamedTuple):
    """Sums over the whole run."""

    requests: int
    finished: int
    rejected: int
    steps: int
    end_ns: int  # When the last step ended
    busy_ns: int
    scheduled_tokens: int
    preemptions: int
    preempted_requests: int
    recomputed_tokens: int
    """Tokens computed again after a preemption: those of resumed requests that the prefix cache did not hold any more."""
    query_tokens: int
    hit_tokens: int
    resumed_query_tokens: int
    resumed_hit_tokens: int
    peak_blocks: int
    peak_running: int
    peak_waiting: int
    used_block_ns: int  # Used blocks times ns; over `busy_ns` it is the mean
    waste_slot_ns: float
    refused: int = 0  # They came when --max-num-queued-reqs or --max-num-queued-tokens was reached
    drafted_tokens: int = 0  # By speculative decoding
    accepted_tokens: int = 0  # Of those
    host_hit_tokens: int = 0  # Found in the host's memory and loaded
    table_block_ns: float = 0.0  # Blocks in the tables of running requests times ns: a shared block counts once for each holder


class Replay(NamedTuple):
    """One run. Arrays of requests have the trace's order and length; stamps are NEVER where nothing happened."""

    trace: Trace
    settings: EngineLimits
    step_time: StepTime
    totals: Totals
    arrival_ns: Integers  # After the speed-up
    first_sched_ns: Integers
    first_token_ns: Integers
    finish_ns: Integers
    produced: Integers
    preemptions: Integers
    cached_tokens: Integers
    is_rejected: Flags  # Never admitted: longer than the model or the pool allows, or refused when the queue was full
    usage_ns: Integers  # usage_ns[u]: ns of busy time in which u blocks were in use
    wall_seconds: float


class Series(NamedTuple):
    """The run over time, in bins of equal width: means weighted by time, or counts."""

    bin_ns: int
    running: Floats
    waiting: Floats
    used_blocks: Floats
    waste_slots: Floats
    tokens: Floats  # Scheduled in the bin
    preemptions: Floats  # In the bin
    hit_tokens: Floats
    query_tokens: Floats


class AtBlockSize(NamedTuple):
    """The effects of a block size."""

    block_size: int
    waste_percent: float | None  # Slots without a token, of those in used blocks
    hit_rate: float
    preemptions: int
    table_entries_mean: float  # Blocks in the tables of running requests, on average over busy time


FOREVER = 2**62
LOG_ROWS = 1 << 16
STEPS_AT_ONCE = 20_000  # Steps between two looks at the clock, for the progress bar

PATIENCE_STEPS = 500_000  # Steps without any request finishing, beyond ten times the longest one, after which none ever will

OnSteps = Callable[[Integers], None]
OnProgress = Callable[[int, int], None]


def speed_up(trace: Trace, factor: float) -> Integers:
    """Arrivals divided by the factor as in the reference, so that logs agree to the nanosecond."""
    if factor == 1.0:
        return trace.arrival_ns
    if not factor > 0:
        raise BadInput(f"--speedup must be above 0, not {factor}")
    if trace.size and not float(trace.arrival_ns[-1]) / factor < FOREVER:
        raise BadInput(f"--speedup {factor:g}: the last request would arrive after more than a hundred years")
    return (trace.arrival_ns / factor).astype(np.int64)


def hybrid_of(state: at.RunState) -> int | None:
    """Selects the compiled loop: None for the one of a single group of full attention, 1 for the one that knows all kinds."""
    return None if state.limits[at.SIMPLE] else 1


def new_record(settings: EngineLimits, step_time: StepTime, log_rows: int = 0) -> RunRecord:
    """An empty record of a run to come."""
    return RunRecord(
        step_time.table(settings.max_num_batched_tokens),
        np.zeros(settings.num_blocks, dtype=np.int64),
        np.zeros(2),
        np.zeros((log_rows, len(STEP_COLUMNS)), dtype=np.int64),
    )


def replay(
    trace: Trace,
    settings: EngineLimits | None = None,
    step_time: StepTime | None = None,
    speedup: float = 1.0,
    on_steps: OnSteps | None = None,
    on_progress: OnProgress | None = None,
    clock: Callable[[], float] | None = None,
    turns: Sequence[tuple[int, EngineLimits]] = (),
) -> Replay:
    """Runs the whole trace.

    `on_steps` gets the rows of the step log (see STEP_COLUMNS) as the run goes, in an array that is used again: copy what you
    keep. `on_progress` gets the number of requests done and of all. `clock` gives the seconds; without it `wall_seconds` is 0.
    `turns` are limits that hold from a step on, in the order of the steps: knobs that were turned.
    """
    settings, step_time = settings or EngineLimits(), step_time or StepTime()
    state = start(trace, settings, step_time, speed_up(trace, speedup) + step_time.front_ns)
    record = new_record(settings, step_time, LOG_ROWS if on_steps else 0)
    hybrid = hybrid_of(state)
    # Makes no step: it compiles or loads the code before the clock is read.
    advance(state, hybrid, record, 0, FOREVER)
    begin = clock() if clock else 0.0
    counts = state.counts
    finished, at_step, patience = -1, 0, PATIENCE_STEPS + 10 * settings.max_model_len
    left = list(turns)
    while not counts[at.DONE]:
        while left and counts[at.STEPS] >= left[0][0]:
            turn_limits(state.limits, left.pop(0)[1])
        advance(
            state, hybrid, record, min(STEPS_AT_ONCE, left[0][0] - int(counts[at.STEPS])) if left else STEPS_AT_ONCE, FOREVER
        )
        if counts[at.FINISHED_COUNT] > finished:
            finished, at_step = int(counts[at.FINISHED_COUNT]), int(counts[at.STEPS])
        elif counts[at.STEPS] - at_step > patience:
            raise never_finished(int(counts[at.RUNNING_COUNT]), int(counts[at.WAITING_COUNT]))
        if on_steps is not None and counts[at.LOG_ROWS]:
            on_steps(record.log[: counts[at.LOG_ROWS]])
            counts[at.LOG_ROWS] = 0
        if on_progress is not None:
            on_progress(int(counts[[at.FINISHED_COUNT, at.REJECTED_COUNT, at.REFUSED_COUNT]].sum()), trace.size)
        if counts[at.NOW] >= FOREVER:
            raise BadInput("the run would take more than a hundred years: steps take too long, or arrivals are too far apart")
        if counts[at.STUCK]:
            raise never_scheduled(int(counts[at.WAITING_COUNT]), settings)
    took = clock() - begin if clock else 0.0
    return told(trace, settings, step_time, state, record, state.stamps[:, at.ARRIVAL] - step_time.front_ns, took)


def never_finished(running: int, waiting: int) -> BadInput:
    """The error of a run that goes on for ever."""
    return BadInput(
        f"the {running} running and {waiting} waiting requests keep preempting each other and none finishes, as they would in "
        "vLLM: give more with --num-blocks, or lower --max-num-seqs"
    )


def never_scheduled(waiting: int, settings: EngineLimits) -> BadInput:
    """The error of a run in which so many requests are left over."""
    why = f"the pool of {settings.num_blocks} blocks is too small for the longest of them; give more with --num-blocks"
    if settings.speculation is not None and settings.speculation.slots and not settings.chunked_prefill:
        why = "a whole prompt and its drafter's slots must fit into a step; raise --max-num-batched-tokens"
    return BadInput(f"{waiting} requests wait and none can ever be scheduled: {why}")


def told(
    trace: Trace, settings: EngineLimits, step_time: StepTime, state: at.RunState, record: RunRecord, arrival_ns: Integers,
    wall_seconds: float = 0.0,
) -> Replay:  # fmt: skip
    """The replay of a run that is over, from its arrays."""
    stamps, requests = state.stamps, state.requests
    return Replay(
        trace=trace,
        settings=settings,
        step_time=step_time,
        totals=_totals(state, record),
        arrival_ns=arrival_ns,
        first_sched_ns=stamps[:, at.FIRST_SCHED],
        first_token_ns=stamps[:, at.FIRST_TOKEN],
        finish_ns=stamps[:, at.FINISH],
        produced=requests[:, at.PRODUCED].astype(np.int64),
        preemptions=requests[:, at.PREEMPTIONS].astype(np.int64),
        cached_tokens=requests[:, at.CACHED].astype(np.int64),
        is_rejected=requests[:, at.STATUS] >= at.REJECTED,
        usage_ns=record.usage_ns,
        wall_seconds=wall_seconds,
    )


def _totals(state: at.RunState, record: RunRecord) -> Totals:
    count = state.counts.tolist()
    used = np.flatnonzero(record.usage_ns)
    return Totals(
        requests=len(state.stamps),
        finished=count[at.FINISHED_COUNT],
        rejected=count[at.REJECTED_COUNT],
        refused=count[at.REFUSED_COUNT],
        steps=count[at.STEPS],
        end_ns=count[at.NOW],
        busy_ns=count[at.BUSY_NS],
        scheduled_tokens=count[at.SCHEDULED_TOKENS],
        preemptions=count[at.PREEMPTION_COUNT],
        preempted_requests=count[at.PREEMPTED_COUNT],
        recomputed_tokens=count[at.RECOMPUTED],
        query_tokens=count[at.QUERIES],
        hit_tokens=count[at.HITS],
        resumed_query_tokens=count[at.RESUMED_QUERIES],
        resumed_hit_tokens=count[at.RESUMED_HITS],
        peak_blocks=count[at.PEAK_BLOCKS],
        peak_running=count[at.PEAK_RUNNING],
        peak_waiting=count[at.PEAK_WAITING],
        # In Python's whole numbers: a week of a large pool needs more than 64 bits.
        used_block_ns=sum(blocks * ns for blocks, ns in zip(used.tolist(), record.usage_ns[used].tolist(), strict=True)),
        waste_slot_ns=float(record.sums[WASTE]),
        drafted_tokens=count[at.DRAFTED],
        accepted_tokens=count[at.ACCEPTED],
        host_hit_tokens=count[at.HOST_HITS],
        table_block_ns=float(record.sums[TABLES]),
    )
