"""How long `import plimsoll.inside` takes, against `python -c pass` in the same run.

    python -m benchmarks.inside_import

From the sources as an installed package has them, with their bytecode, and out of the wheel itself, which has none: that is
how a mounted file is loaded. Gate and Probe are measured on top of parts of the standard library that any vLLM process has
loaded by then. Rounds alternate, so that a busy moment of the machine hits all alike.
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import plimsoll
from plimsoll.assets.inside_wheel import make_wheel, write_wheel

ROUNDS = 21
BASELINE = "python -c pass"
PROMISED_MS = 50.0
"""What `import plimsoll.inside` may add to the start of a process."""
LOADED = "import asyncio, concurrent.futures, ctypes, hashlib, inspect, json, logging, multiprocessing, secrets, tempfile"
BESIDE = "what a vLLM process has loaded"


class Timed(NamedTuple):
    """One start of Python: what it runs, where modules are found, what it is compared with, what it may add."""

    code: str
    path: str = ""
    against: str = BASELINE
    limit_ms: float | None = None


def commands(sources: str, wheel: str) -> dict[str, Timed]:
    """What is timed, by name."""
    both = f"{LOADED}; from plimsoll.inside import Gate, Probe"
    return {
        BASELINE: Timed("pass"),
        "import plimsoll.inside": Timed("import plimsoll.inside", sources, limit_ms=PROMISED_MS),
        "  out of the wheel": Timed("import plimsoll.inside", wheel, limit_ms=PROMISED_MS),
        BESIDE: Timed(LOADED),
        "from plimsoll.inside import Gate, Probe": Timed(both, sources, BESIDE),
        "  both out of the wheel": Timed(both, wheel, BESIDE),
    }


def measure(wheel: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of each command."""
    package = Path(plimsoll.__file__).parent
    compileall.compile_dir(str(package), quiet=1)
    times: dict[str, list[float]] = {}
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(rounds):
        for name, timed in commands(str(package.parent), wheel).items():
            start = time.perf_counter()
            # -S: an editable install would be found first.
            subprocess.run([sys.executable, "-S", "-c", timed.code], check=True, env={**kept, "PYTHONPATH": timed.path})
            times.setdefault(name, []).append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table; exit 1 if the import adds more than is promised."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = str(write_wheel(make_wheel(), folder))
        medians = measure(wheel)
        slow = []
        print(f"{'command':40} {'median':>9} {'ratio':>7} {'adds':>9} {'promised':>9}")
        for name, timed in commands("", wheel).items():
            added_ms = medians[name] - medians[timed.against]
            promised = f"{timed.limit_ms:.0f} ms" if timed.limit_ms else ""
            print(
                f"{name:40} {medians[name]:6.1f} ms {medians[name] / medians[BASELINE]:6.2f}x {added_ms:6.1f} ms {promised:>9}"
            )
            if timed.limit_ms is not None and added_ms > timed.limit_ms:
                slow.append(name)
    if slow:
        raise SystemExit(f"slower than promised: {', '.join(slow)}")


if __name__ == "__main__":
    main()
