"""Run a command and say how long it took and how much memory it held at most, from its start to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 1800.0


class Timed(NamedTuple):
    """One run of a command."""

    seconds: float
    peak_mb: float
    exit_code: int
    out: str
    err: str


def timed(command: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> Timed:
    """Run it to its end.

    Linux lets a new process inherit the peak of whoever started it, and we hold numpy and more. So a bare Python in between
    starts the command: what is measured then begins near 10 MB.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        done = subprocess.run(
            [sys.executable, "-S", "-E", __file__, str(said), *command],
            capture_output=True,
            text=True,
            errors="replace",
            env=None if environ is None else dict(environ),
            timeout=limit_s,
            check=False,
        )
        if not said.exists():
            raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{command[0]} did not start")
        seconds, peak_mb, exit_code = json.loads(said.read_text(encoding="utf-8"))
    return Timed(seconds, peak_mb, exit_code, done.stdout, done.stderr)


def main() -> None:
    """The bare Python in between: FILE COMMAND..., the figures go into FILE."""
    start_s = time.perf_counter()
    pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
    _, status, used = os.wait4(pid, 0)
    figures = [time.perf_counter() - start_s, used.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)]
    Path(sys.argv[1]).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
