"""How long a command takes to answer, against `python -c pass` in the same run.

    python -m benchmarks.startup

Rounds of all commands alternate, so that a busy moment of the machine hits them alike; the median of each is compared.
Bytecode is compiled first, as pip does for an installed package.
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

import plimsoll

ROUNDS = 41
ROOT = Path(__file__).parents[1]
BASELINE = "python -c pass"
ASSETS = "plimsoll assets ... --check"
ASSETS_S = 1.0  # after start-up, for everything


def commands(folder: str) -> dict[str, tuple[list[str], float | None]]:
    """What is timed, and how many times the baseline it may take; `folder` holds a plan."""
    plimsoll_command = str(Path(sys.executable).with_name("plimsoll"))
    script = str(ROOT / "examples" / "article-start.sh")
    return {
        BASELINE: ([sys.executable, "-c", "pass"], None),
        "plimsoll --version": ([plimsoll_command, "--version"], 3),
        "plimsoll flags -- vllm serve ...": ([plimsoll_command, "flags", "--", "vllm", "serve", "m", "--swap-space", "4"], 6),
        "plimsoll flags start.sh": ([plimsoll_command, "flags", script], 6),
        "plimsoll flags --json start.sh": ([plimsoll_command, "flags", "--json", script], 6),
        # Everything is made and compared with an empty folder. Under a second after start-up; seldom more than a third of one.
        ASSETS: ([plimsoll_command, "assets", f"{folder}/out", "--plan", f"{folder}/plan.json", "--check"], 60),
    }


def write_plan(folder: str) -> None:
    """The plan that files are made from."""
    words = [
        "plan",
        "--gpu",
        "H100",
        "--json",
        "--",
        "vllm",
        "serve",
        "meta-llama/Llama-3.1-8B-Instruct",
        "--max-model-len",
        "32k",
    ]
    command = [str(Path(sys.executable).with_name("plimsoll")), *words]
    plan = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    Path(folder, "plan.json").write_bytes(plan)


def measure(folder: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of each command."""
    compileall.compile_dir(str(Path(plimsoll.__file__).parent), quiet=1)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    write_plan(folder)
    times: dict[str, list[float]] = {name: [] for name in commands(folder)}
    for _ in range(rounds):
        for name, (command, _) in commands(folder).items():
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=environment)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table; exit 1 if a command is slower than promised."""
    with tempfile.TemporaryDirectory() as folder:
        medians = measure(folder)
    base = medians[BASELINE]
    slow = [ASSETS] if medians[ASSETS] - medians["plimsoll --version"] > ASSETS_S else []
    print(f"{'command':36} {'median':>9} {'ratio':>7} {'promised':>9}")
    for name, (_, limit) in commands("").items():
        ratio = medians[name] / base
        print(f"{name:36} {medians[name] * 1000:6.1f} ms {ratio:6.2f}x {f'{limit:g}x' if limit else '':>9}")
        if limit is not None and ratio > limit:
            slow.append(name)
    if slow:
        raise SystemExit(f"slower than promised: {', '.join(slow)}")


if __name__ == "__main__":
    main()
