"""SIGKILL of a real guard process at each numbered write of a real journal, and the next process reaches a safe end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def steps(*names: str) -> list[str]:
    """What is written of these steps: each before and after."""
    return [f"{kind} {name}" for name in names for kind in ("intent", "outcome")]


_DOWN_AND_UP = [
    "intent stop", "restart", "outcome stop",
    *steps("gone", "start", "ready", "check", "warm", "undrain", "unlock", "probation"), "closed",
]  # fmt: skip
WRITES = {
    "restart-serving-told": ["opened", *steps("lock", "evidence", "drain", "idle"), *_DOWN_AND_UP],
    "restart-wedged-told": ["opened", *steps("lock", "evidence", "leave"), *_DOWN_AND_UP],
    "restart-down-told": ["opened", *steps("lock", "evidence", "leave"), *_DOWN_AND_UP],
    "shed-serving-told": ["opened", *steps("lock", "shed", "unlock", "hold", "unshed"), "closed"],
    "compact-serving-told": ["opened", *steps("lock", "compact", "verify", "unlock"), "closed"],
}
"""Every write of every action, by its number. A write that is not in its list fails the test: it must be killed at, too."""


@pytest.mark.parametrize("case", WRITES)
def test_a_process_killed_at_any_write_leaves_what_the_next_one_brings_to_a_safe_end(case: str, tmp_path: Path) -> None:
    """For each numbered write: SIGKILL right before it, SIGKILL right after it, and a second process with the same journal."""
    ran = subprocess.run(
        [sys.executable, "-m", "lab.guard.killed", str(tmp_path / "world"), case],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    wanted = [f"{when} {write}" for write in WRITES[case] for when in ("before", "after")]
    assert [one["at"] for one in told] == wanted
    for one in told:
        assert one["ended"] == ["killed by 9"], one
        assert one["unsafe"] == [], one
