"""How the tests run a command, and what they may expect of its answer."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.main import main
from plimsoll.cli.simulate import COMPILING

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CAPTURES = Path(__file__).parents[1] / "captures"
H200 = CAPTURES / "vllm-0.25.1-h200-failures"
CPU = CAPTURES / "vllm-0.32.0-failures"
HEALTHY, FORWARD, CGROUP, CGROUP_DMESG = (
    str(CPU / name) for name in ("healthy.log", "oom-forward-uni.log", "host-memory-cgroup.log", "host-memory-cgroup.dmesg.txt")
)
SPLIT = str(H200 / "snapshots" / "split-frames.pickle.gz")
STORM_PAGE = str(H200 / "preemption-storm.metrics-during.txt")


@dataclass(frozen=True, slots=True)
class Answer:
    """An exit code and what was printed."""

    code: int
    out: str
    err: str

    @property
    def body(self) -> dict[str, Any]:
        """The one JSON object on standard output; NaN is none."""
        return dict(json.loads(self.out, parse_constant=pytest.fail))

    @property
    def codes(self) -> list[str]:
        """The findings' codes in their order."""
        return [finding["code"] for finding in self.body["findings"]]

    @property
    def text(self) -> str:
        """Standard output without its line breaks."""
        return " ".join(self.out.split())

    @property
    def line(self) -> str:
        """The one line of complaint, with nothing on standard output; that something is compiled first may be said before."""
        lines = [line for line in self.err.splitlines(keepends=True) if line.strip() != COMPILING]
        assert (self.out, len(lines)) == ("", 1), (self.out, self.err)
        assert lines[0].startswith(("plimsoll: ", "vllm")), lines
        assert lines[0].endswith("\n"), lines
        assert "Traceback" not in lines[0], lines
        assert "mistake of ours" not in lines[0], lines
        return lines[0]


def ask(text: str, *words: str, code: int | None = 0, given: bytes | None = None) -> Answer:
    """Run `plimsoll TEXT WORDS...` in this process; `code` is what is expected, None any; `given` is its standard input."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            sys.stdin = before if given is None else io.TextIOWrapper(io.BytesIO(given))
            ended = main([*shlex.split(text), *words])
        finally:
            sys.stdin = before
    answer = Answer(ended, out.getvalue(), err.getvalue())
    assert code is None or ended == code, answer
    return answer


def ask_process(words: Sequence[str], *, given: bytes = b"", timeout_s: float = 60.0) -> Answer:
    """Run it as a process of its own, with something on its standard input."""
    command = [sys.executable, "-m", "plimsoll", *words]
    done = subprocess.run(command, input=given, capture_output=True, timeout=timeout_s, check=False)
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def shell(command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `plimsoll` is this one."""
    line = f'plimsoll() {{ "{sys.executable}" -m plimsoll "$@"; }}; {command}'
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=timeout_s)
