"""How fast a huge log is read, beside grep looking for the same words in the same file in the same run.

    python -m benchmarks.doctor_speed [--size MB]

The log is put together from the captured ones, without repeating the order of their lines, in a temporary folder. Each tool
runs in a process of its own; rounds alternate, and the best of each is compared, in seconds of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from plimsoll.doctor.read.text import PERIODIC, TELLING

ROOT = Path(__file__).parents[1]
CAPTURES = ROOT / "tests" / "captures"
SIZE_MB = 1000
ROUNDS = 3
TIMES_GREP, PEAK_PROMISED_MB = 4.0, 150.0
ROUNDS_SHORT, TIMES_NOTHING = 15, 8.0

READ = """
import json, sys, time
from plimsoll.doctor.read.text import read_log
begin = time.perf_counter()
log = read_log(sys.argv[1])
seconds = time.perf_counter() - begin
try:
    peak_mb = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
except OSError:
    import resource
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024)
print(json.dumps({"seconds": seconds, "peak_mb": peak_mb, "lines": len(log.lines), "last": log.lines[-1].number}))
"""


class Promise(NamedTuple):
    """One figure, and what it may be at most."""

    name: str
    value: float
    limit: float
    unit: str

    def __str__(self) -> str:
        return f"{self.name:44} {self.value:8.2f} {self.unit:3} {f'{self.limit:g} {self.unit}':>12}"


def captured_logs() -> list[list[bytes]]:
    """The lines of every captured log."""
    return [path.read_bytes().splitlines(keepends=True) for path in sorted(CAPTURES.rglob("*.log"))]


def synthesise(path: Path, size_bytes: int) -> int:
    """Write a log of this size: starts of the captured servers in turn, and between them what they said, at random.

    Returns the number of its lines.
    """
    chance = random.Random(5)
    logs = captured_logs()
    everything = [line for log in logs for line in log]
    written = lines = 0
    with path.open("wb") as out:
        while written < size_bytes:
            log = logs[chance.randrange(len(logs))]
            block = b"".join([*log, *chance.choices(everything, k=20_000)])
            lines += block.count(b"\n")
            written += out.write(block)
    return lines


def grepped(path: Path, patterns: Path) -> float:
    """Seconds of CPU of `grep -c -F -f patterns`, for every word our reader looks for."""
    begin = _cpu_of_children()
    # Its output is taken: grep stops at the first match where nobody reads what it says.
    subprocess.run(["grep", "-c", "-F", "-f", str(patterns), str(path)], check=True, stdout=subprocess.PIPE)
    return _cpu_of_children() - begin


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_by_us(path: Path, lines: int) -> tuple[float, float]:
    """Seconds of CPU of the whole process, and its peak in MB."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    begin = _cpu_of_children()
    done = subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True, env=environment)
    seconds = _cpu_of_children() - begin
    said = json.loads(done.stdout)
    assert said["last"] == lines, f"the last line is number {lines}, not {said['last']}"
    return seconds, said["peak_mb"]


def huge_log(size_mb: int) -> list[Promise]:
    """A log of this size, read tail first."""
    with tempfile.TemporaryDirectory() as folder:
        path, patterns = Path(folder) / "huge.log", Path(folder) / "patterns"
        patterns.write_bytes(b"\n".join([*TELLING, PERIODIC]) + b"\n")
        lines = synthesise(path, size_mb * 1_000_000)
        grepped(path, patterns)  # the file is in memory from here on, for both
        grep, ours, peaks = [], [], []
        for _ in range(ROUNDS):
            grep.append(grepped(path, patterns))
            seconds, peak = read_by_us(path, lines)
            ours.append(seconds)
            peaks.append(peak)
    print(f"{size_mb} MB, {lines:,} lines: grep {min(grep):.2f} s, ours {min(ours):.2f} s (medians "
          f"{statistics.median(grep):.2f} and {statistics.median(ours):.2f} s)")  # fmt: skip
    return [
        Promise("a huge log against grep -c -F -f", min(ours) / min(grep), TIMES_GREP, "x"),
        Promise("peak memory of reading it", max(peaks), PEAK_PROMISED_MB, "MB"),
    ]


def usual_log() -> list[Promise]:
    """The whole command on a log of about 100 kB, beside Python doing nothing."""
    lines = (CAPTURES / "vllm-0.25.1-h200-failures" / "logits.log").read_bytes().split(b"\n")
    padded = lines[:60] + [line for line in lines[:60] if b"INFO" in line] * 40 + lines[60:]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        log.write_bytes(b"\n".join(padded)[:60_000] + b"\n" + b"\n".join(lines))
        command, nothing = [str(Path(sys.executable).with_name("plimsoll")), "doctor", str(log)], [sys.executable, "-c", "pass"]
        ours, theirs = [], []
        for _ in range(ROUNDS_SHORT):
            ours.append(_timed(command))
            theirs.append(_timed(nothing))
        kilobytes = log.stat().st_size / 1000
    print(f"plimsoll doctor on {kilobytes:.0f} kB: {min(ours) * 1000:.0f} ms; python -c pass: {min(theirs) * 1000:.0f} ms")
    return [Promise("doctor on a usual log, against python -c pass", min(ours) / min(theirs), TIMES_NOTHING, "x")]


def _timed(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - begin


def snapshot() -> list[Promise]:
    """A memory snapshot of 200 MB, read and judged."""
    from benchmarks.doctor_speed_snapshot import PEAK_PROMISED_MB as MOST_MB
    from benchmarks.doctor_speed_snapshot import measure_snapshot

    cost = measure_snapshot()
    return [Promise("peak memory for a 200 MB snapshot", cost.peak_mb, float(MOST_MB), "MB")]


def main() -> None:
    """Print the table; exit 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=SIZE_MB, metavar="MB", help="size of the huge log")
    options = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("doctor_speed.py") else [])
    measurements: list[Callable[[], list[Promise]]] = [lambda: huge_log(options.size), usual_log, snapshot]
    promises = [promise for measure in measurements for promise in measure()]
    print(f"{'figure':44} {'measured':>12} {'promised':>12}")
    for promise in promises:
        print(promise)
    if broken := [promise.name for promise in promises if promise.value > promise.limit]:
        raise SystemExit(f"promise broken: {', '.join(broken)}")


if __name__ == "__main__":
    main()
