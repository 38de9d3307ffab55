"""DynoSim, the offline replay of NVIDIA Dynamo 1.4.2: python -m lab.peers.dynosim

Installs it once into the user's cache folder, as `lab.engine.install` does with vLLM, and prints the folder.
The rest of this file turns a trace into what it reads, runs it and reads its report.

    exit code 0   it is there     2   this machine cannot hold it     3   pip failed, or what it installed does not run
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab.engine.install import (
    CHECK_LIMIT_S,
    COMPLETE,
    InstallError,
    cache_root,
    make_environment,
    only_one,
    pins,
    pip_install,
    recipe_key,
    say,
)
from lab.peers.timed import timed
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace import Trace

REQUIREMENTS = Path(__file__).resolve().parent / "requirements-dynosim.txt"
RECIPE = 1  # raise it when this file installs something else from the same pins
DISK_NEEDED_BYTES = 1 << 30  # 0.5 GB unpacked, and the wheel being unpacked beside it
TRACE_BLOCK = 512
PREEMPTED = "preempted and requeued request"
"""In the line that its scheduler writes at the level `debug` for each preemption."""


class DynoSimError(Exception):
    """DynoSim did not come to its end; the message is one line."""


class DynoSimRun(NamedTuple):
    """One replay."""

    requests: int
    simulation_s: float
    """Its own figure: without imports and without reading the trace."""
    whole_s: float
    """The whole command."""
    peak_mb: float
    preemptions: int | None
    """Counted in its debug log; None when that was off."""


def home() -> Path:
    """Where DynoSim is, or would be."""
    key = recipe_key(REQUIREMENTS.read_text(encoding="utf-8"), sys.version_info[:2], RECIPE)
    return cache_root(os.environ).parent / "peers" / f"dynosim-{key}"


def installed() -> bool:
    """Whether the whole of it is there; never true for an interrupted install."""
    return (home() / COMPLETE).is_file() and (home() / "bin" / "python").exists()


def refuse_machine(system: str, machine: str) -> None:
    """Raise if no wheel can exist for this machine."""
    if (system, machine) not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        raise InstallError(f"DynoSim's packages are for Linux on x86-64 or ARM, this is {system} on {machine}", 2)


def install() -> Path:
    """The folder of the finished environment, made now if it was not there."""
    folder = home()
    if installed():
        return folder
    refuse_machine(platform.system(), platform.machine())
    with only_one(folder):
        if installed():  # the one we waited for did it
            return folder
        if folder.exists():
            say(f"removing an interrupted install in {folder}")
            shutil.rmtree(folder)
        free = shutil.disk_usage(folder.parent).free
        if free < DISK_NEEDED_BYTES:
            raise InstallError(f"DynoSim needs 1.1 GB to be installed, {folder.parent} has {free / 1e9:.1f} GB left", 2)
        _make(folder)
    return folder


def _make(folder: Path) -> None:
    started_s = time.monotonic()
    say(f"installing DynoSim (ai-dynamo 1.4.2) into {folder}: once, about 1 minute and 0.5 GB")
    log = folder.parent / f"{folder.name}.log"
    log.write_text("", encoding="utf-8")
    make_environment(folder, log)
    pip_install(folder, pins(REQUIREMENTS.read_text(encoding="utf-8")), log)
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "dynamo.replay", "--help"],
        capture_output=True,
        text=True,
        timeout=CHECK_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise InstallError(f"the installed DynoSim does not run: {last}", 3)
    (folder / COMPLETE).write_text("ai-dynamo 1.4.2\n", encoding="utf-8")
    say(f"installed in {time.monotonic() - started_s:.0f} s")


def trace_lines(trace: Trace) -> Iterator[str]:
    """The trace in the form DynoSim reads, a line for each request.

    It wants ids for every prompt. A request that shares nothing gets ids that nobody else has.
    """
    block = trace.prefix_block if trace.shares_content else TRACE_BLOCK
    unused = int(trace.prefix_ids.max()) + 1 if trace.shares_content else 0
    for request in range(trace.size):
        ids = trace.ids_of(request).tolist()
        prompt = int(trace.prompt[request])
        if not ids:
            count = -(-prompt // block)
            ids = list(range(unused, unused + count))
            unused += count
        row = {
            "timestamp": int(trace.arrival_ns[request]) / 1e6,
            "input_length": prompt,
            "output_length": int(trace.output[request]),
            "hash_ids": ids,
        }
        yield json.dumps(row)


def engine_arguments(settings: EngineLimits) -> dict[str, int | bool]:
    """Our settings in its words; it does not count vLLM's null block."""
    return {
        "block_size": settings.block_size,
        "num_gpu_blocks": settings.num_blocks - 1,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_prefix_caching": settings.prefix_caching,
        "enable_chunked_prefill": settings.chunked_prefill,
    }


def command(trace_file: Path, block: int, settings: EngineLimits, report: Path) -> list[str]:
    """The command line of one offline replay."""
    words = [str(home() / "bin" / "python"), "-m", "dynamo.replay", str(trace_file), "--trace-block-size", str(block)]
    words += ["--replay-mode", "offline", "--num-workers", "1", "--report-json", str(report)]
    return [*words, "--extra-engine-args", json.dumps(engine_arguments(settings))]


def run(trace_file: Path, settings: EngineLimits, block: int = TRACE_BLOCK, *, count_preemptions: bool = False) -> DynoSimRun:
    """Replay a file of `trace_lines`; writing the debug log makes it slower, so times are for runs without it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DYN_"))}
    level = "debug" if count_preemptions else "error"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = timed(command(trace_file, block, settings, report), {**kept, "DYN_LOG": level})
        if done.exit_code != 0 or not report.is_file():
            last = (done.err.strip() or done.out.strip() or "no output").splitlines()[-1]
            raise DynoSimError(f"DynoSim ended with {done.exit_code}: {last}")
        told = json.loads(report.read_text(encoding="utf-8"))
    preemptions = (done.out + done.err).count(PREEMPTED) if count_preemptions else None
    return DynoSimRun(told["completed_requests"], told["wall_time_ms"] / 1000, done.seconds, done.peak_mb, preemptions)


def main() -> int:
    """Install, print the folder on stdout, and turn every failure into one line and an exit code."""
    try:
        print(install())
    except InstallError as failure:
        say(str(failure))
        return failure.exit_code
    except OSError as failure:
        say(f"DynoSim could not be installed: {failure}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
