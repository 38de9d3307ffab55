"""The processes of this machine as they are now, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll.domain.process_table import Process, parse_stat


def pids(proc: Path = Path("/proc")) -> list[int]:
    """The number of every process that can be seen; none where there is no /proc."""
    try:
        return sorted(int(name) for name in os.listdir(proc) if name.isdecimal())  # noqa: PTH208 - only the names, of hundreds
    except OSError:
        return []


def read_processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    """All of them as they are now."""
    found = (read_process(pid, proc) for pid in pids(proc))
    return {process.pid: process for process in found if process}


def read_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """One of them; None where it is gone."""
    return parse_stat(text_of(proc / str(pid) / "stat"))


def text_of(path: Path) -> str:
    """What a file holds; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def boot_mark(proc: Path = Path("/proc")) -> str:
    """Where a process's number and start mean something: this boot of this machine, this space of numbers. Empty: unknown."""
    try:
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii", errors="replace").strip()
        space = os.readlink(proc / "self" / "ns" / "pid")  # noqa: PTH115 - its text, not a path
    except OSError:
        return ""
    return f"{boot} {space}"
