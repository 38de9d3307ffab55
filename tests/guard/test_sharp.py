"""The judge and every fault of the stand-in that guard can see; benchmarks/guard_sharp.py does it for 200 onsets of each."""

from __future__ import annotations

from lab.guard.faults import CASES, Case, play
from tests.each import each, times


@each("seed", range(3, 3 + times(1, 5)))
@each("case", CASES, ids=lambda case: case.name)
def test_a_fault_is_found_in_time_under_its_own_name(case: Case, seed: int) -> None:
    """Within its window and three looks, and no other condition that could lead to an action holds meanwhile."""
    outcome = play(case, seed)
    assert outcome.is_in_time, outcome
    assert outcome.others == (), outcome
