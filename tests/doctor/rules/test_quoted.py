"""What only quotes a log is no log."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.doctor.rules.timeline import without_quotes
from plimsoll.findings import Code
from plimsoll.render.doctor import as_text
from tests.doctor.log_maker import ENGINE_DEAD, STARTED, log, traceback

ROOT = Path(__file__).parents[3]
FAILED = log(STARTED, traceback("v1/worker/gpu_model_runner.py:execute_model"), ENGINE_DEAD, source="failed.log")
PAGE = (
    "# Notes",
    "See [that](a.md).",
    "## Why",
    'It says "Engine core initialization failed", or `CUDA out of memory. Tried`.',
)


@pytest.mark.parametrize(
    "name", ["README.md", "docs/doctor.md", "docs/findings/engine.dead.md", "docs/findings/kv.saturated.md"]
)
def test_a_written_page_has_no_failure(name: str) -> None:
    """Our own pages quote many errors, and no server of ours failed."""
    found = diagnose([read_log(str(ROOT / name), source=name)])
    assert (found.memory_failure, found.findings) == (None, ())
    assert "somebody wrote" in str(found.facts["remarks"])


def test_a_log_pasted_into_a_page_is_still_read() -> None:
    """Where records of a program stand in it, nothing of it is passed over."""
    pasted = FAILED._replace(lines=[*log(*PAGE).lines, *FAILED.lines])
    assert without_quotes(pasted) == (pasted, False)
    assert diagnose([pasted]).findings[0].code is Code.RUNTIME_FORWARD
    bare = log(*PAGE[:3], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert diagnose([bare]).memory_failure is True


def test_an_earlier_report_is_passed_over_and_the_log_around_it_is_not() -> None:
    """As a terminal shows it: the server, what doctor said of it, and the next server."""
    report = log(*str(as_text(diagnose([FAILED]))).splitlines(), source="report.txt")
    assert diagnose([report]).findings == ()
    both = FAILED._replace(lines=[*report.lines, *FAILED.lines])
    assert [one.code for one in diagnose([both]).findings] == [Code.RUNTIME_FORWARD]
