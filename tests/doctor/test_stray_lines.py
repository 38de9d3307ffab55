"""A record that a server writes and goes on, or that quotes a failure, turns no verdict: the same trials as the benchmark's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from benchmarks.doctor_accuracy import of_ours
from benchmarks.doctor_stray_lines import read_harmless, trials, verdict
from plimsoll.doctor.rules.diagnose import diagnose
from tests.each import each
from tests.log_bytes import log_of_bytes

if TYPE_CHECKING:
    from pathlib import Path

OURS = [(one.name, one.path) for one in of_ours()]


def test_a_harmless_record_turns_no_verdict(tmp_path: Path) -> None:
    """Each of seventy kinds in two captures, at places that never change."""
    kinds = read_harmless()
    assert len(kinds) >= 75
    assert all(kinds.values())
    some = random.Random(7).sample(OURS, 2)
    assert [trial for trial in trials(some, 1, 7, tmp_path) if trial.is_changed] == []


@each("name", ["full-cache", "healthy"])
def test_another_programs_failure_at_either_end_turns_no_verdict(name: str) -> None:
    """Before the server's first line and after its last: a client's traceback, a worker that ran out, one that vLLM caught."""
    log = next(path.read_bytes() for known, path in reversed(OURS) if known == name).strip(b"\n")
    before = verdict(diagnose([log_of_bytes("x", log)]))
    kinds = read_harmless()
    for record in (record.encode() for kind in ("client", "celery", "caught", "bench") for record in kinds[kind]):
        for text in (record + b"\n" + log, log + b"\n" + record + b"\n"):
            assert verdict(diagnose([log_of_bytes("x", text)])) == before, record


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_harmless_records_in_every_capture(tmp_path: Path) -> None:
    """Under 1 in 200 verdicts turns, and none to a confident opposite."""
    found = list(trials(OURS, 1, 1, tmp_path))
    assert sum(trial.is_changed for trial in found) * 200 < len(found)
    assert not any(trial.is_opposite for trial in found)
