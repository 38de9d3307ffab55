"""Whatever the traffic and the settings, no block is lost, none is held by the wrong request, and everybody is somewhere."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from plimsoll.simulate import layout as at
from plimsoll.simulate.clock import RunRecord, advance
from plimsoll.simulate.replay import FOREVER, new_record, replay
from plimsoll.simulate.settings import CacheGroup, EngineLimits, StepTime
from plimsoll.simulate.start import start
from plimsoll.simulate.trace import Trace, make_trace
from tests.simulate.state_checks import Content, check_end, check_rows, check_state

MOST_STEPS = 1500
"""Far more than any of these needs: who goes on for longer goes on for ever."""


class Case(NamedTuple):
    """What is replayed, and after how many steps each look is taken."""

    trace: Trace
    settings: EngineLimits
    step_time: StepTime
    piece: int


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    """A few requests that arrive together or apart and share beginnings in every way."""
    prefix_block = draw(st.sampled_from([1, 3, 4, 8, 16]))
    most_prompt, most_output = draw(st.sampled_from([16, 4, 40])), draw(st.sampled_from([20, 30, 6, 1]))
    requests = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 0, 1, 1000, 20_000]),
                st.integers(1, most_prompt),
                st.integers(1, most_output),
                st.integers(-1, 1),
                st.lists(st.integers(1, 2), max_size=12),
            ),
            min_size=draw(st.sampled_from([1, 6, 10])),
            max_size=14,
        )
    )
    gaps, prompts, outputs, priorities, ids = zip(*requests, strict=True)
    known = [row[: -(-prompt // prefix_block)] for row, prompt in zip(ids, prompts, strict=True)]
    return make_trace("random", np.cumsum(gaps), prompts, outputs, priorities, known, prefix_block)


@st.composite
def _groups(draw: st.DrawFn, block_size: int, is_caching: bool) -> tuple[CacheGroup, ...]:
    sliding = st.builds(CacheGroup, st.just("sliding"), st.just(block_size), st.integers(1, 20))
    full, state = st.just(CacheGroup("full", block_size)), st.just(CacheGroup("mamba", block_size))
    groups = draw(st.lists(st.one_of(full, sliding, state), min_size=1, max_size=3))
    kinds = {group.kind for group in groups}
    if len(groups) > 1 and not ("mamba" in kinds and is_caching) and draw(st.booleans()):
        larger = block_size * draw(st.sampled_from([2, 4]))
        groups = [group._replace(block_size=larger) if group.kind != "full" else group for group in groups]
        if len({group.block_size for group in groups}) == 1:
            groups[0] = groups[0]._replace(block_size=block_size)
    return tuple(groups)


@st.composite
def _cases(draw: st.DrawFn, *, hybrid: bool) -> Case:
    trace = draw(_traces())
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    is_caching = draw(st.sampled_from([True, True, True, False]))
    groups = draw(_groups(block_size, is_caching)) if hybrid else ()
    longest = int((trace.prompt + trace.output).max())
    max_model_len = max(2, longest - draw(st.sampled_from([0, 0, 0, 5])))
    max_num_seqs = draw(st.sampled_from([4, 8, 3, 2, 1]))
    budget = max(max_num_seqs, draw(st.sampled_from([1, 4, 8, 16, 100])))
    has_states = any(group.kind == "mamba" for group in groups)
    is_chunked = (is_caching and has_states) or draw(st.sampled_from([True, True, True, False]))
    policy: Literal["fcfs", "priority"] = draw(st.sampled_from(["fcfs", "fcfs", "priority"]))
    alone = sum(-(-longest // group.block_size) for group in groups) or -(-longest // block_size)
    limits = EngineLimits(
        num_blocks=max(2, 1 + alone + draw(st.sampled_from([0, 1, 2, 4, -2, 12]))),
        block_size=groups[0].block_size if len(groups) == 1 else block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if is_chunked else max(budget, max_model_len),
        max_model_len=max_model_len,
        prefix_caching=is_caching,
        chunked_prefill=is_chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 0, 1, 3, 10])),
        async_scheduling=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5])),
        reserve_full_isl=draw(st.booleans()),
        policy=policy,
        groups=groups,
    )
    step_time = StepTime(draw(st.sampled_from([1, 1000])), draw(st.sampled_from([0, 10])), 1, 999)
    return Case(trace, limits, step_time, draw(st.sampled_from([1, 1, 2, 5])))


def _start(case: Case) -> tuple[at.RunState, int | None, RunRecord]:
    state = start(case.trace, case.settings, case.step_time, case.trace.arrival_ns)
    record = new_record(case.settings, case.step_time, log_rows=8)
    return state, None if state.limits[at.SIMPLE] else 1, record


def _drive(case: Case) -> at.RunState:
    """Run in small pieces with a look after each; the state at the end, or after far too many steps."""
    state, hybrid, record = _start(case)
    known: dict[int, Content] = {}
    if state.limits[at.BY_PRIORITY]:
        names = sorted(range(case.trace.size), key=lambda number: int(state.requests[number, at.TIE]))
        assert names == sorted(range(case.trace.size), key=str), "the n-th request is called n, and vLLM compares text"
    check_state(state, case.trace, known)
    while not (state.counts[at.DONE] or state.counts[at.STUCK]) and state.counts[at.STEPS] < MOST_STEPS:
        before = int(state.counts[at.STEPS])
        advance(state, hybrid, record, case.piece, FOREVER)
        rows = record.log[: state.counts[at.LOG_ROWS]].tolist()
        assert [row[0] for row in rows] == list(range(before, int(state.counts[at.STEPS])))
        check_rows(rows, state)
        check_state(state, case.trace, known)
        state.counts[at.LOG_ROWS] = 0
    assert record.usage_ns.sum() == state.counts[at.BUSY_NS]
    return state


def _assert_it_holds(case: Case) -> None:
    state = _drive(case)
    if state.counts[at.STUCK]:
        event("stuck")
        assert state.counts[at.RUNNING_COUNT] + state.counts[at.WAITING_COUNT] > 0
    elif not state.counts[at.DONE]:
        event("endless")
        assert state.counts[at.PREEMPTION_COUNT] > 10, "nobody is in the way and it still does not end"
    else:
        event("preempting" if state.counts[at.PREEMPTION_COUNT] else "calm")
        check_end(state)
        whole = replay(case.trace, case.settings, case.step_time)
        assert whole.finish_ns.tolist() == state.stamps[:, at.FINISH].tolist()
        assert whole.totals.steps == state.counts[at.STEPS]


@given(_cases(hybrid=False), _cases(hybrid=True))
def test_no_block_is_ever_lost(plain: Case, hybrid: Case) -> None:
    """All accounts agree after every step, and a run in pieces is the run in one go: one group, and groups of all kinds."""
    _assert_it_holds(plain)
    _assert_it_holds(hybrid)


CROWDED = Case(
    make_trace("crowded", [0] * 9, [11, 12, 8, 8, 16, 3, 9, 20, 5], [9] * 9, [0, 1, 2] * 3, [[1, 2]] * 6 + [[], [1, 1], []], 4),
    EngineLimits(
        num_blocks=16, block_size=4, max_num_seqs=5, max_num_batched_tokens=16, max_model_len=64, async_scheduling=True
    ),
    StepTime(1000, 10, 1, 999),
    1,
)
