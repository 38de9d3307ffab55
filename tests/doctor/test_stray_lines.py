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


RECORD = "2026-11-18 12:00:03,441 INFO [launcher] starts vllm with these flags:"
RAISED = [
    "Traceback (most recent call last):", '  File "/opt/vllm/v1/core/kv_cache_utils.py", line 9, in f', "    raise ValueError(",
    "ValueError: 4.00 GiB KV cache is needed, which is larger than the available KV cache memory (1.20 GiB).",
]  # fmt: skip


@each(("lines", "code"), [
    ([RECORD, *RAISED], "startup.context-too-long"),
    ([*RAISED[:2], RECORD, "on port 8000", *RAISED[2:]], "startup.context-too-long"),
    ([*RAISED[:3], RECORD, *RAISED[3:]], "startup.context-too-long"),
    ([RECORD, "usage: vllm serve [-h]", "vllm serve: error: unrecognized arguments: --foo 1"], "startup.bad-flag"),
    ([RECORD.rstrip(":"), "terminate called after throwing", "  what():  CUDA error: an illegal memory access was encountered"],
     "other.illegal-access"),
])  # fmt: skip
def test_the_servers_own_end_below_another_loggers_record_is_its_own(lines: list[str], code: str) -> None:
    """A traceback, also one that the record broke into, the parser's refusal and a crash in native code."""
    begins = "INFO 11-15 08:00:00 [api_server.py:1] vLLM API server version 0.11.0"
    assert verdict(diagnose([log_of_bytes("x", "\n".join([begins, *lines]).encode())]))[1] == code


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_harmless_records_in_every_capture(tmp_path: Path) -> None:
    """Under 1 in 200 verdicts turns, and none to a confident opposite."""
    found = list(trials(OURS, 1, 1, tmp_path))
    assert sum(trial.is_changed for trial in found) * 200 < len(found)
    assert not any(trial.is_opposite for trial in found)
