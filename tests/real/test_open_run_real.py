"""Requests handed to a run with several groups of layers: compiling that takes longer than all else in `make test`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.test_invariants import Case, _cases
from tests.simulate.test_open_run import assert_as_replayed


@given(_cases(hybrid=True), st.sampled_from([7, 500, 3000, 10**6]))
def test_with_groups_it_is_the_replay_of_all(case: Case, piece_ns: int) -> None:
    """Full, sliding and Mamba groups: every first and last token at the same nanosecond as in a replay of all."""
    assert_as_replayed(case, piece_ns)
