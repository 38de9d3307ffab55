"""Windows, parts and mixtures of traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.simulate.trace import Trace, make_trace
from plimsoll.simulate.traffic import cut, merge, take

SECOND = 10**9
FIVE = make_trace(
    "five",
    [0, SECOND, SECOND, 2 * SECOND, 5 * SECOND],
    [10, 20, 30, 40, 50],
    [1, 2, 3, 4, 5],
    [0, 1, 2, 3, 4],
    [[1], [1, 2], [], [1, 2, 3], [7, 8, 9, 9]],
    16,
)


def rows(trace: Trace) -> list[tuple[int, int, int, int, list[int]]]:
    """Every request with all that is known of it."""
    columns = (trace.arrival_ns, trace.prompt, trace.output, trace.priority)
    return [(*(int(column[i]) for column in columns), trace.ids_of(i).tolist()) for i in range(trace.size)]


def tokens(trace: Trace, request: int) -> list[tuple[str, int]]:
    """The prompt as far as it is known, token by token, as the ids tell it."""
    flat = [("id", one) for one in trace.ids_of(request).tolist() for _ in range(trace.prefix_block)]
    return flat[: trace.prompt[request]]


def shared(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> int:
    """How many tokens two prompts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_window_or_a_count_of_requests_begins_at_its_own_zero() -> None:
    """From the start on, before the end; ids come along; beyond the end there is nothing more."""
    assert rows(cut(FIVE, 1, 5)) == [
        (0, 20, 2, 1, [1, 2]), (0, 30, 3, 2, []), (SECOND, 40, 4, 3, [1, 2, 3]),
    ]  # fmt: skip
    assert rows(cut(FIVE, 4, float("inf"))) == [(SECOND, 50, 5, 4, [7, 8, 9, 9])]
    assert rows(take(FIVE, 3, 10)) == [(0, 40, 4, 3, [1, 2, 3]), (3 * SECOND, 50, 5, 4, [7, 8, 9, 9])]
    assert rows(take(FIVE, 0, 5)) == rows(FIVE)


def test_requests_that_are_not_there_cannot_be_taken() -> None:
    """A window with nothing in it, backwards, before time or no number; beyond the last, before the first, none."""
    for window in ((3, 4), (2, 2), (-1, 3), (float("nan"), 3), (9, 12)):
        with pytest.raises(BadInput):
            cut(FIVE, *window)
    for part in ((5, 1), (-1, 1), (0, 0)):
        with pytest.raises(BadInput):
            take(FIVE, *part)


def test_two_services_keep_their_content_apart() -> None:
    """Arrivals interleave, the first trace goes first at an instant, and equal ids of two traces are different content."""
    both = merge([FIVE, FIVE._replace(name="again", bad_rows=2)])
    assert (both.name, both.size, both.bad_rows, both.prefix_block) == ("five + again", 10, 2, 16)
    assert both.arrival_ns.tolist() == sorted(FIVE.arrival_ns.tolist() * 2)
    assert both.prompt.tolist() == [10, 10, 20, 30, 20, 30, 40, 40, 50, 50]
    assert shared(tokens(both, 0), tokens(both, 1)) == 0
    assert shared(tokens(both, 2), tokens(both, 6)) == 20


def test_a_trace_without_content_does_not_change_the_blocks() -> None:
    """Only blocks that stand for something are brought to one size."""
    bare = make_trace("bare", [5], [100], [1], prefix_block=7)
    assert merge([bare, FIVE]).prefix_block == 16
    assert merge([bare]).prefix_ids.size == 0
    with pytest.raises(BadInput):
        merge([])


REQUEST = st.tuples(st.integers(0, 20), st.integers(1, 60), st.lists(st.integers(0, 2), max_size=6))


@given(st.lists(st.tuples(st.sampled_from([4, 6, 8, 12]), st.lists(REQUEST, min_size=1, max_size=5)), min_size=1, max_size=3))
def test_merging_changes_no_token(parts: list[tuple[int, list[tuple[int, int, list[int]]]]]) -> None:
    """Any two requests of a trace share as many tokens as before, those of two traces none, whatever the block sizes."""
    traces = []
    for block, requests in parts:
        requests.sort(key=lambda one: one[0])
        known = [ids[: -(-prompt // block)] for _, prompt, ids in requests]
        arrivals, prompts, _ = zip(*requests, strict=True)
        traces.append(make_trace("t", arrivals, prompts, [1] * len(prompts), None, known, block))
    merged = merge(traces)
    before = [(arrival, part, i) for part, trace in enumerate(traces) for i, arrival in enumerate(trace.arrival_ns.tolist())]
    before.sort(key=lambda one: one[0])
    assert merged.arrival_ns.tolist() == [arrival for arrival, _, _ in before]
    texts = [tokens(merged, i) for i in range(merged.size)]
    for a, (_, part, i) in enumerate(before):
        assert len(texts[a]) == len(tokens(traces[part], i))
        for b, (_, other, j) in enumerate(before):
            expected = shared(tokens(traces[part], i), tokens(traces[other], j)) if part == other else 0
            assert shared(texts[a], texts[b]) == expected
    assert np.all(np.diff(merged.prefix_start) <= -(-merged.prompt // merged.prefix_block))
