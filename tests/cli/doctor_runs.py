"""How the tests of `plimsoll doctor` run it, and what they give it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.cli.main import main

if TYPE_CHECKING:
    import pytest

CAPTURES = Path(__file__).parents[1] / "captures"
H200 = CAPTURES / "vllm-0.25.1-h200-failures"
CPU = CAPTURES / "vllm-0.32.0-failures"
HEALTHY = str(CPU / "healthy.log")
FORWARD = str(CPU / "oom-forward-uni.log")
CGROUP = str(CPU / "host-memory-cgroup.log")
CGROUP_DMESG = str(CPU / "host-memory-cgroup.dmesg.txt")
SPLIT = str(H200 / "snapshots" / "split-frames.pickle.gz")
STORM_PAGE = str(H200 / "preemption-storm.metrics-during.txt")


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def body(self) -> dict[str, Any]:
        """The one object on standard output."""
        return dict(json.loads(self.out))

    @property
    def codes(self) -> list[str]:
        """The findings' codes in their order."""
        return [finding["code"] for finding in self.body["findings"]]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    """Run it here, in this process."""
    capsys.readouterr()
    code = main(["doctor", *words])
    captured = capsys.readouterr()
    return Said(code, captured.out, captured.err)


def said_by_process(words: Sequence[str], *, given: bytes = b"", timeout_s: float = 30.0) -> Said:
    """Run it as a process of its own, with something on its standard input."""
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", "doctor", *words], input=given, capture_output=True, timeout=timeout_s, check=False
    )
    return Said(done.returncode, done.stdout.decode(), done.stderr.decode())


def one_line(answer: Said) -> str:
    """The one line of complaint on standard error, with nothing on standard output."""
    assert answer.out == ""
    assert answer.err.count("\n") == 1, answer.err
    assert answer.err.startswith("plimsoll: ")
    assert "Traceback" not in answer.err
    assert "mistake of ours" not in answer.err
    return answer.err
