"""The processes of this machine as they are now, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll.domain.process_table import Process, parse_stat


def read_processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Every process that can be seen; empty where there is no /proc."""
    found = {}
    try:
        names = os.listdir(proc)  # noqa: PTH208 - only the names, of hundreds
    except OSError:
        return {}
    for name in names:
        if name.isdecimal() and (process := read_process(int(name), proc)):
            found[process.pid] = process
    return found


def read_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """One of them; None where it is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_stat(text)


def boot_mark(proc: Path = Path("/proc")) -> str:
    """Where a process's number and start mean something: this boot of this machine, this space of numbers. Empty: unknown."""
    try:
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii", errors="replace").strip()
        space = os.readlink(proc / "self" / "ns" / "pid")  # noqa: PTH115 - its text, not a path
    except OSError:
        return ""
    return f"{boot} {space}"
