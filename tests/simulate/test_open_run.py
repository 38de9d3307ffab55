"""A run that requests are handed to while it goes on does what a replay of all of them does, and loses nothing on the way."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from plimsoll.simulate import layout as at
from plimsoll.simulate import open_loop as loop
from plimsoll.simulate.clock import advance
from plimsoll.simulate.open_run import OpenRun
from plimsoll.simulate.replay import FOREVER, replay
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.start import too_long
from plimsoll.simulate.trace import Trace, make_trace
from tests.simulate.state_checks import Content, check_state
from tests.simulate.test_invariants import CROWDED, MOST_STEPS, Case, _cases, _start

SECOND = 10**9


def _ends(case: Case) -> bool:
    """Whether all of its requests come to an end; some cases of vLLM's do not."""
    state, hybrid, record = _start(case)
    while not state.counts[at.DONE] and not state.counts[at.STUCK] and state.counts[at.STEPS] < MOST_STEPS:
        advance(state, hybrid, record, 8, FOREVER)
        state.counts[at.LOG_ROWS] = 0
    return bool(state.counts[at.DONE])


def _open(case: Case, first_rows: int = 2) -> OpenRun:
    """With so few rows that they are used again all the time."""
    return OpenRun(case.settings, case.step_time, prefix_block=case.trace.prefix_block, first_rows=first_rows)


def _only(trace: Trace, rows: list[int]) -> Trace:
    ids = [trace.ids_of(row).tolist() for row in rows]
    return make_trace(
        "some", trace.arrival_ns[rows], trace.prompt[rows], trace.output[rows], trace.priority[rows], ids, trace.prefix_block
    )


def _submit(run: OpenRun, trace: Trace, at_row: int) -> int:
    ids = trace.prefix_ids[trace.prefix_start[at_row] : trace.prefix_start[at_row + 1]]
    prompt, output = int(trace.prompt[at_row]), int(trace.output[at_row])
    arrival, priority = int(trace.arrival_ns[at_row]), int(trace.priority[at_row])
    return run.submit(prompt, output, arrival, priority=priority, ids=ids, ids_tokens=prompt)


def _fed(case: Case, piece_ns: int, coming: list[int]) -> tuple[OpenRun, dict[int, tuple[int, int]]]:
    """Each request's first and last token, of a run that was handed each request as it came and looked at now and then."""
    run, trace = _open(case), case.trace
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    names: dict[int, int] = {}
    left, now = list(coming), 0
    while len(last) < len(coming):
        # Whoever comes before the next look is handed in: the run must not let it in any sooner for that.
        while left and trace.arrival_ns[left[0]] <= now + piece_ns:
            number = _submit(run, trace, left[0])
            names[number] = left.pop(0)
        now += piece_ns
        for events in run.until(now):
            for kind, _, who, when in events.tolist():
                assert when <= now
                (first if kind == loop.FIRST else last)[names[who]] = when
        assert run.next_end_ns is None or run.next_end_ns > now
    assert run.kv_usage == 0
    return run, {who: (first[who], last[who]) for who in first}


def assert_as_replayed(case: Case, piece_ns: int) -> None:
    """Every first and last token at the same nanosecond, however often somebody looks and however rows are used again."""
    piece_ns = piece_ns if case.trace.arrival_ns[-1] + 10**5 < 2000 * piece_ns else 10**4
    # vLLM breaks ties of priority by the request's id as text, where "10" comes before "9": numbers are their own order here.
    assume(case.settings.policy == "fcfs" or case.trace.size <= 10)
    assume(_ends(case))
    whole = replay(case.trace, case.settings, case.step_time)
    coming = np.flatnonzero(~whole.is_rejected).tolist()
    assume(coming)
    run, found = _fed(case, piece_ns, coming)
    assert found == {one: (whole.first_token_ns[one], whole.finish_ns[one]) for one in coming}
    sums = run.tally.sums
    assert run.count(at.STEPS) == whole.totals.steps == sums[loop.ENDED_STEPS]
    assert run.count(at.PREEMPTION_COUNT) == whole.totals.preemptions
    assert sums[loop.PREEMPTIONS_TOLD] == whole.preemptions.sum(), "everybody came to a token after it was pushed out"
    assert sums[loop.GENERATED] == whole.produced.sum()
    assert sums[loop.PROMPT_TOKENS] == np.maximum(1, case.trace.prompt[coming]).sum()
    assert run.count(at.HITS) == whole.totals.hit_tokens


@given(_cases(hybrid=False), st.sampled_from([1, 7, 500, 3000, 10**6]))
def test_handed_in_one_by_one_it_is_the_replay_of_all(case: Case, piece_ns: int) -> None:
    """To the nanosecond, for one group; tests/real has those of several."""
    assert_as_replayed(case, piece_ns)


@given(_cases(hybrid=False), st.data())
def test_requests_can_be_taken_back_at_any_time(case: Case, data: st.DataObject) -> None:
    """Waiting, running, pushed out or under way: all accounts agree afterwards, and every block comes back."""
    is_long = too_long(case.trace.prompt + case.trace.output, case.settings)
    trace = _only(case.trace, np.flatnonzero(~is_long).tolist())
    run = _open(case, first_rows=64)  # none is dropped, so that a row is the trace's own
    numbers = [_submit(run, trace, one) for one in range(trace.size)]
    now, gone = int(case.trace.arrival_ns[-1]), set()
    known: dict[int, Content] = {}
    for _ in range(12):
        for _events in run.until(now, most_steps=data.draw(st.integers(0, 4))):
            pass
        if numbers:
            victim = data.draw(st.sampled_from(numbers))
            was_there = run.row_of(victim) is not None
            if run.abort(victim, now):
                assert was_there
                assert victim not in gone
                gone.add(victim)
        if data.draw(st.integers(0, 9)) == 0:
            run.preempt_all()
        check_state(run.state, trace, known)
        now += data.draw(st.sampled_from([0, 100, 5000]))
    for number in numbers:
        run.abort(number, now)
    for _events in run.until(now + 10**9):
        pass
    assert (run.running, run.waiting, run.kv_usage, run.next_end_ns) == (0, 0, 0.0, None)
    assert run.reset_prefix_cache()


def test_a_cache_can_be_forgotten_and_an_answer_hit_by_the_next_turn() -> None:
    """vLLM refuses while a block is held; afterwards nobody hits anything. Ids may stand for the answer, too."""
    limits = EngineLimits(num_blocks=64, block_size=4, max_model_len=64)
    run, ids = OpenRun(limits, StepTime()), np.arange(1, 4, dtype=np.int64)
    run.submit(12, 2, 0, ids=ids, ids_tokens=12)
    list(run.until(1))
    assert not run.reset_prefix_cache()
    list(run.until(SECOND))
    run.submit(13, 2, SECOND, ids=ids, ids_tokens=12)
    list(run.until(2 * SECOND))
    assert run.count(at.HITS) == 12
    assert run.reset_prefix_cache()
    run.submit(13, 2, 2 * SECOND, ids=ids, ids_tokens=12)
    list(run.until(3 * SECOND))
    assert run.count(at.HITS) == 12
    run = OpenRun(limits, StepTime())
    run.submit(8, 9, 0, ids=np.arange(1, 5, dtype=np.int64), ids_tokens=16)
    list(run.until(SECOND))
    run.submit(20, 2, SECOND, ids=np.arange(1, 6, dtype=np.int64), ids_tokens=20)
    list(run.until(2 * SECOND))
    assert run.count(at.HITS) == 16


def test_every_token_is_told_and_a_delay_moves_what_is_under_way() -> None:
    """One first token, then one event for each further one, and the end with the last; later by just the delay."""
    run = OpenRun(EngineLimits(), StepTime(), wants_tokens=True, step_edges=(1, 8, 64), gap_edges=(10**6, 10**8))
    run.submit(40, 5, 0)
    list(run.until(0))
    before = run.next_end_ns
    run.delay(5_000)
    assert before is not None
    assert run.next_end_ns == before + 5_000
    kinds = [int(kind) for events in run.until(SECOND) for kind in events[:, loop.KIND]]
    assert kinds == [loop.FIRST, loop.TOKEN, loop.TOKEN, loop.TOKEN, loop.TOKEN, loop.DONE]
    assert (run.tally.step_counts.tolist(), run.tally.gap_counts.tolist()) == ([4, 0, 1, 0], [0, 4, 0])
    assert run.tally.sums[loop.MOST_TOKENS] == 40


def test_a_crowd_is_kept_in_the_rows_of_the_living() -> None:
    """Three thousand requests one after the other need no more rows than are alive at once."""
    run = OpenRun(CROWDED.settings, CROWDED.step_time, first_rows=2)
    for turn in range(3000):
        run.submit(9, 3, turn * 10**6)
        list(run.until(turn * 10**6 + 10**5))
    assert len(run._requests) <= 8
