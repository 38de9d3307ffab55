"""A whole run: repeatable, honest about what it cannot do, and right in small cases that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from plimsoll.errors import BadInput
from plimsoll.simulate import layout as at
from plimsoll.simulate.clock import advance
from plimsoll.simulate.replay import FOREVER, LOG_ROWS, STEP_COLUMNS, Replay, new_record, replay, speed_up
from plimsoll.simulate.settings import CacheGroup, EngineLimits, StepTime
from plimsoll.simulate.start import start
from plimsoll.simulate.trace import Integers, Trace, make_trace
from tests.simulate.busy_runs import BUSY_SETTINGS, REQUEST_ARRAYS, busy_run, busy_trace, stepped

AT = {name: place for place, name in enumerate(STEP_COLUMNS)}
MS = 1_000_000
TICK = StepTime(base_ns=10, token_ns=0, seq_ns=0, ctx_ps=0)
"""Every step takes ten: stamps count steps."""


def _trace(requests: Sequence[tuple[int, int, int]], ids: list[list[int]] | None = None, block: int = 16) -> Trace:
    """Requests as (arrival, prompt, output)."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return make_trace("small", arrivals, prompts, outputs, None, ids, block)


def _run(trace: Trace, settings: EngineLimits, step_time: StepTime = TICK) -> tuple[Replay, Integers]:
    """The run and all of its step rows."""
    return stepped(trace, settings, step_time)


def _column(rows: Integers, name: str) -> list[int]:
    return [int(value) for value in rows[:, AT[name]]]


@pytest.mark.parametrize("name", BUSY_SETTINGS)
def test_the_same_input_gives_the_same_run(name: str) -> None:
    """Twice in one process, to the last stamp and row; and the run is one in which something happens."""
    (one, rows), (other, again) = busy_run(name), busy_run(name)
    assert one.totals == other.totals
    assert np.array_equal(rows, again)
    for column in REQUEST_ARRAYS:
        assert np.array_equal(getattr(one, column), getattr(other, column)), column
    assert one.totals.preemptions > 0
    assert one.totals.hit_tokens > 0
    assert one.totals.finished == 60


def test_one_request_by_hand() -> None:
    """Base, tokens, requests and context in the time of each step; one token each; blocks grow when they are needed."""
    run, rows = _run(_trace([(0, 31, 3)]), EngineLimits(), StepTime(1000, 100, 10, 2000))
    assert _column(rows, "sched_tokens") == [31, 1, 1]
    assert _column(rows, "ctx_tokens") == [31, 32, 33]
    assert _column(rows, "used_blocks") == [2, 2, 3]
    assert _column(rows, "waste_slots") == [1, 0, 15]
    first, second, third = 1000 + 3100 + 10 + 62, 1000 + 100 + 10 + 64, 1000 + 100 + 10 + 66
    assert _column(rows, "t_end_ns") == [first, first + second, first + second + third]
    assert (run.first_sched_ns.tolist(), run.first_token_ns.tolist()) == ([0], [first])
    assert run.finish_ns.tolist() == [run.totals.end_ns] == [first + second + third]
    assert (run.totals.busy_ns, run.totals.peak_blocks, run.totals.scheduled_tokens) == (run.totals.end_ns, 3, 33)
    assert run.usage_ns[:4].tolist() == [0, 0, first + second, third]


def test_nothing_to_do_is_a_result() -> None:
    """Rejected requests or none make no step; the clock jumps to the next arrival, and idle time is not busy time."""
    run = replay(_trace([(0, 90, 10), (50, 91, 10)]), EngineLimits(max_model_len=20), TICK)
    assert (run.totals.rejected, run.totals.steps, run.totals.busy_ns) == (2, 0, 0)
    run = replay(make_trace("none", [], [], []))
    assert set(run.totals) == {0}
    assert len(run.finish_ns) == 0
    run, rows = _run(_trace([(0, 5, 1), (1000, 5, 1)]), EngineLimits())
    assert _column(rows, "t_start_ns") == [0, 1000]
    assert (run.totals.busy_ns, run.totals.end_ns) == (20, 1010)


def test_a_preempted_request_hits_its_own_blocks() -> None:
    """It finds its full blocks but the one taken meanwhile, and computes the rest again; without a cache, all of it."""
    settings = EngineLimits(num_blocks=7, max_num_seqs=2, max_num_batched_tokens=64)
    without, _ = _run(_trace([(0, 32, 30), (0, 32, 20)]), settings._replace(prefix_caching=False))
    assert (without.totals.preemptions, without.totals.resumed_hit_tokens, without.totals.recomputed_tokens) == (1, 0, 48)
    run, rows = _run(_trace([(0, 32, 30), (0, 32, 20)]), settings)
    assert run.preemptions.tolist() == [0, 1]
    assert run.cached_tokens.tolist() == [0, 0]  # of first admissions alone
    totals = run.totals
    assert (totals.preemptions, totals.preempted_requests) == (1, 1)
    assert (totals.resumed_query_tokens, totals.resumed_hit_tokens) == (49, 48 - 16)
    assert totals.recomputed_tokens == 48 - 32
    assert totals.scheduled_tokens == 32 + 29 + 32 + 19 + totals.recomputed_tokens
    assert sum(_column(rows, "resumed")) == sum(_column(rows, "preempted")) == 1
    assert run.produced.tolist() == [30, 20]


def test_a_table_of_step_times_replaces_the_line() -> None:
    """by_tokens[T] is the cost of T tokens; requests and context are added to it."""
    table = np.arange(2049, dtype=np.int64) ** 2
    run, _ = _run(_trace([(0, 30, 2)]), EngineLimits(), StepTime(seq_ns=7, ctx_ps=0, by_tokens=table))
    assert run.finish_ns.tolist() == [900 + 7 + 1 + 7]


def test_speed_up_divides_arrivals() -> None:
    """Rounded down to the nanosecond, and told in the result; the trace itself stays as it is."""
    trace = _trace([(0, 5, 1), (1000, 5, 1), (2001, 5, 1)])
    assert speed_up(trace, 1.0).tolist() == [0, 1000, 2001]
    assert speed_up(trace, 3).tolist() == [0, 333, 667]
    run = replay(trace, step_time=TICK, speedup=1e15)
    assert (run.arrival_ns.tolist(), run.totals.steps) == ([0, 0, 0], 1)
    assert run.trace.arrival_ns.tolist() == [0, 1000, 2001]
    assert replay(trace, step_time=TICK, speedup=0.5).arrival_ns.tolist() == [0, 2000, 4002]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_speed_up_must_be_above_zero(factor: float) -> None:
    """Anything else is refused in one line that names the option."""
    with pytest.raises(BadInput, match=r"^--speedup must be above 0, not"):
        replay(_trace([(0, 5, 1)]), speedup=factor)


def test_pieces_of_the_step_log_make_the_whole() -> None:
    """A run of more steps than the log's room comes in several pieces, without a gap, and progress reaches the end."""
    pieces: list[Integers] = []
    progress: list[tuple[int, int]] = []
    long = LOG_ROWS + 1000
    trace = _trace([(0, 100, long), (5, 100, 20), (5, 200_000, 1)])
    run = replay(
        trace, EngineLimits(max_model_len=100_000), TICK, on_steps=lambda rows: pieces.append(rows.copy()),
        on_progress=lambda done, of: progress.append((done, of)),
    )  # fmt: skip
    rows = np.concatenate(pieces)
    assert len(pieces) > 1
    assert max(len(piece) for piece in pieces) <= LOG_ROWS
    assert _column(rows, "step") == list(range(run.totals.steps))
    assert _column(rows, "t_end_ns")[:-1] == _column(rows, "t_start_ns")[1:]
    assert sum(_column(rows, "sched_tokens")) == run.totals.scheduled_tokens == 100 + long - 1 + 100 + 19
    assert (progress[-1], sorted(progress)) == ((3, 3), progress)


def test_neither_the_log_nor_the_clock_changes_a_run() -> None:
    """With and without step rows it is the same; wall time is what the clock says, or not known."""
    run, _ = busy_run("plain")
    assert replay(busy_trace(), BUSY_SETTINGS["plain"]).totals == run.totals
    readings = iter([5.0, 7.5])
    assert replay(_trace([(0, 5, 1)]), clock=lambda: next(readings)).wall_seconds == 2.5
    assert replay(_trace([(0, 5, 1)])).wall_seconds == 0.0


@pytest.mark.parametrize("name", ["async", "hybrid"])
def test_a_run_can_be_stopped_at_any_time_and_go_on(name: str) -> None:
    """In slices of simulated time the run is the one made in one go."""
    trace, settings = busy_trace(), BUSY_SETTINGS[name]
    state = start(trace, settings, StepTime(), trace.arrival_ns)
    record = new_record(settings, StepTime())
    until = 0
    while not state.counts[at.DONE]:
        until = max(until, int(state.counts[at.NOW])) + 3 * MS
        advance(state, None if state.limits[at.SIMPLE] else 1, record, FOREVER, until)
        assert state.counts[at.DONE] or state.counts[at.NOW] >= until
    whole = replay(trace, settings)
    assert state.stamps[:, at.FINISH].tolist() == whole.finish_ns.tolist()
    assert record.usage_ns.tolist() == whole.usage_ns.tolist()


def test_a_run_that_never_ends_says_so() -> None:
    """A prompt that no empty pool can take, and two requests that push each other out for ever: what to change, in one line."""
    groups = (CacheGroup("full", 16), CacheGroup("sliding", 16, 64))
    stuck = EngineLimits(num_blocks=9, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=512, groups=groups)
    endless = EngineLimits(
        num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=40, prefix_caching=False, long_prefill_token_threshold=1,
        reserve_full_isl=False, policy="priority",
    )  # fmt: skip
    for requests, settings, says in (
        ([(0, 100, 4), (0, 5, 1)], stuck, "2 requests wait"),
        ([(0, 7, 2), (0, 7, 4)], endless, "keep preempting each other"),
    ):
        with pytest.raises(BadInput, match=says) as caught:
            replay(_trace(requests), settings)
        assert ("--num-blocks" in str(caught.value), "\n" in str(caught.value)) == (True, False)
    assert replay(_trace([(0, 7, 2), (0, 7, 4)]), endless._replace(num_blocks=7)).totals.finished == 2
