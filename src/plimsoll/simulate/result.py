"""What a replay found: a line for each request, a line for each step, and what they add up to."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.simulate.settings import Settings, StepTime
from plimsoll.simulate.trace import Flags, Floats, Integers, States, Trace

STEP_COLUMNS = (
    "step t_start_ns t_end_ns running waiting sched_reqs sched_tokens new resumed preempted ctx_tokens used_blocks "
    "table_blocks waste_slots hit_tokens_cum query_tokens_cum"
).split()
REQUEST_COLUMNS = "req arrival_ns first_sched_ns first_token_ns finish_ns prompt output preemptions cached_tokens".split()
NEVER = -1  # A stamp of something that did not happen


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
    table_block_ns: float = 0.0  # Blocks in the tables of running requests times ns: a shared block counts once for each holder


class Replay(NamedTuple):
    """One run. Arrays of requests have the trace's order and length; stamps are NEVER where nothing happened."""

    trace: Trace
    settings: Settings
    step_time: StepTime
    totals: Totals
    arrival_ns: Integers  # After the speed-up
    first_sched_ns: Integers
    first_token_ns: Integers
    finish_ns: Integers
    produced: Integers
    preemptions: Integers
    cached_tokens: Integers
    is_rejected: Flags  # Longer than the model or the pool allows: never admitted
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


class BlockMap(NamedTuple):
    """The pool's blocks at some moments. One row a moment, one column a block (block 0 is the null block)."""

    at_ns: Integers
    state: States  # FREE, CACHED, HELD, SHARED or PARTLY_FILLED
    every: int = 1  # Only each so-manieth block of a large pool is looked at


FREE, CACHED, HELD, SHARED, PARTLY_FILLED = range(5)
"""Free and empty; free but still of use to the prefix cache; held by one request; held by several; held and not full."""


class AtBlockSize(NamedTuple):
    """What a block size does."""

    block_size: int
    waste_percent: float | None  # Slots without a token, of those in used blocks
    hit_rate: float
    preemptions: int
    table_entries_mean: float  # Blocks in the tables of running requests, on average over busy time
