"""A record that a server writes and goes on, or that quotes a failure, turns no verdict: the same trials as the benchmark's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from benchmarks.doctor_accuracy import of_ours
from benchmarks.doctor_stray_lines import read_harmless, trials

if TYPE_CHECKING:
    from pathlib import Path

OURS = [(one.name, one.path) for one in of_ours()]


def test_a_harmless_record_turns_no_verdict(tmp_path: Path) -> None:
    """Each of thirty kinds in four captures, at places that never change."""
    kinds = read_harmless()
    assert len(kinds) >= 30
    assert all(kinds.values())
    some = random.Random(7).sample(OURS, 4)
    assert [trial for trial in trials(some, 1, 7, tmp_path) if trial.is_changed] == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_harmless_records_in_every_capture(tmp_path: Path) -> None:
    """Under 1 in 200 verdicts turns, and none to a confident opposite."""
    found = list(trials(OURS, 1, 1, tmp_path))
    assert sum(trial.is_changed for trial in found) * 200 < len(found)
    assert not any(trial.is_opposite for trial in found)
