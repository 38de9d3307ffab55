"""What the process of this server is like, as the kernel tells it; where the kernel does not (no /proc), nothing is made up."""

from __future__ import annotations

import gc
import os
import platform
import resource
from pathlib import Path

from plimsoll.standin.page import ProcessFigures

PROC = Path("/proc")
PYTHON = {
    "implementation": platform.python_implementation(),
    **dict(zip(("major", "minor", "patchlevel"), platform.python_version_tuple(), strict=True)),
    "version": platform.python_version(),
}
# Places in /proc/self/stat behind the name of the process.
USER, SYSTEM, STARTED, VIRTUAL, RESIDENT = 11, 12, 19, 20, 21


def process_figures(added: int = 0, *, is_alone: bool = True, proc: Path = PROC) -> ProcessFigures:
    """This process now. `added` is host memory that a fault pretends to hold.

    One of a fleet shares its process with the others: what all of them use together is left out. What is resident stays, as a
    fault shows in it.
    """
    found = ProcessFigures(python=PYTHON, collections=gc.get_stats())
    try:
        fields = (proc / "self" / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        found = found._replace(
            resident=int(fields[RESIDENT]) * os.sysconf("SC_PAGE_SIZE") + added,
            start_time=_booted(proc) + int(fields[STARTED]) / ticks,
        )
        if is_alone:
            found = found._replace(
                virtual=int(fields[VIRTUAL]),
                cpu_seconds=(int(fields[USER]) + int(fields[SYSTEM])) / ticks,
                open_fds=sum(1 for _ in (proc / "self" / "fd").iterdir()),
                max_fds=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
    except (OSError, ValueError, IndexError):
        pass
    return found


def _booted(proc: Path) -> float:
    """When the machine started, in unix seconds."""
    with (proc / "stat").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("btime "):
                return float(line.split()[1])
    raise ValueError("no btime")
