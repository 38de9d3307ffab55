"""Logs of servers whose steps ran out of memory and were contained: a recorded failure, with containment's lines in its place.

The tracebacks are real (an H200 in one process; two processes on the CPU build), the lines of containment are written by hand
in the form that docs/findings/runtime.contained.md shows.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from tests.doctor.log_maker import REQUEST

CAPTURES = Path(__file__).parents[1] / "captures"
ONE_PROCESS = CAPTURES / "vllm-0.25.1-h200-failures" / "forward.log"
TWO_PROCESSES = CAPTURES / "vllm-0.32.0-failures" / "oom-forward.log.gz"
FATAL = "EngineCore encountered a fatal error"
NUMBERS = "(asked for 1.95 GiB, 1.10 GiB free)"


def core(text: str, who: str = "(EngineCore pid=2) ", level: str = "WARNING", at: str = "11-15 09:18:15") -> str:
    """A line of containment as vLLM's logger prints it."""
    return f"{who}{level} {at} [contain.py:88] plimsoll: survive: {text}"


def prompt(text: str) -> str:
    """A request log with this in its prompt."""
    return f"(APIServer pid=1) INFO 11-15 09:18:15 [logger.py:40] Received request cmpl-1: prompt: '{text}', params: x"


def contained(
    number: int, tokens: int = 8192, to: int = 4096, site: str = "forward", numbers: str = NUMBERS, requests: int = 48
) -> str:
    """The line of one contained failure, without its prefix."""
    return (
        f"contained failure {number}: a step of {tokens} tokens in {requests} requests ran out of device memory at {site} "
        f"{numbers}; {requests} requests preempted, 190000 tokens to recompute; steps of at most {to} tokens and 48 sequences "
        "from here"
    ).replace(" ;", ";")


ARMED = "armed (vLLM 0.32.0, first runner, synchronous scheduling)"
ABORTED = f"aborted request cmpl-abc: it ran out of device memory alone, in a step of 512 tokens at encoder {NUMBERS}"
GREW = "growing back: steps of at most 6144 tokens and 256 sequences"
STORM = "storm: 30 contained failures in 600 s; this server should be drained and restarted"
GAVE_UP = "gave up after 60 contained failures in 600 s; vLLM ends as it would without plimsoll"
CANNOT = "cannot contain this failure: the executor lost a worker; vLLM ends as it would without plimsoll"


class Recorded:
    """A recorded failure taken apart: its start, the failed step as the process that failed tells it, and its end."""

    def __init__(self, path: Path) -> None:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8").splitlines()
        fatal = next(at for at, line in enumerate(lines) if FATAL in line)
        failed = next((at for at, line in enumerate(lines) if "WorkerProc hit an exception" in line), fatal)
        if failed == fatal:
            end = next(at for at in range(fatal, len(lines)) if "OutOfMemoryError" in lines[at]) + 1
            self.start, self.step, self.end = lines[:fatal], lines[fatal + 1 : end], lines[fatal:]
        else:
            self.start, self.step, self.end = lines[:failed], lines[failed:fatal], lines[fatal:]
        self.who = next(line.partition(") ")[0] + ") " for line in lines if line.startswith("(EngineCore pid="))
        self.at = self.step[0].partition("ERROR ")[2].partition(" [")[0]

    def says(self, text: str) -> str:
        """A line of containment in this server's engine core."""
        return core(text, self.who, at=self.at)


def survived(path: Path) -> list[str]:
    """A whole log of a server that lives on after two contained failures."""
    one = Recorded(path)
    failures = [one.says(contained(1)), one.says(contained(2, 4096, 2048))]
    return [*one.start, one.says(ARMED), *one.step, *failures, *[REQUEST] * 4, one.says(GREW), *[REQUEST] * 4]
