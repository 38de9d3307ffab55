"""The processes of this machine as they are now, read from /proc.

psutil gives no session, and its start time moves with the clock: a later guard could not recognise a process by it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ENDED = "ZX"  # states of a process that only waits to be collected


class Process(NamedTuple):
    """One process. Its number may go to another process later; number and start together are unique until the next boot."""

    pid: int
    parent: int
    session: int
    state: str
    start_ticks: int  # since boot

    @property
    def is_alive(self) -> bool:
        return self.state not in ENDED


ProcessTable = Mapping[int, Process]
Mark = tuple[int, int]  # identifies a process: its number and its start


def parse_stat(text: str) -> Process | None:
    """The process in the text of /proc/PID/stat; None where the text is something else. A process's name may hold anything."""
    before, _, rest = text.rpartition(")")
    pid, _, _ = before.partition("(")
    fields = rest.split()
    if len(fields) < 20 or not pid.strip().isdecimal():
        return None
    numbers = (fields[1], fields[3], fields[19])
    if not all(number.isdecimal() for number in numbers) or len(fields[0]) != 1:
        return None
    parent, session, start = (int(number) for number in numbers)
    return Process(int(pid), parent, session, fields[0], start)


def family(
    table: ProcessTable, roots: Iterable[Mark], sessions: Collection[Mark] = (), spare: Collection[int] = ()
) -> list[Process]:
    """Every living process that is a root, was started by one, or is in a session that one of them leads or led.

    `sessions` are leaders that may have ended: a session outlives its leader. Where the number of a leader now belongs to
    another process, that session is somebody else's. `spare` is never included, nor are processes reached only through it.
    """
    led = {pid for pid, start in sessions if pid not in table or table[pid].start_ticks == start}
    children: dict[int, list[int]] = {}
    members: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
        members.setdefault(process.session, []).append(process.pid)
    left = [pid for pid, start in roots if pid in table and table[pid].start_ticks == start]
    left += [pid for session in led for pid in members.get(session, ())]
    found: set[int] = set()
    while left:
        pid = left.pop()
        if pid in found or pid in spare or pid <= 1:
            continue
        found.add(pid)
        left += children.get(pid, ())
        left += members.get(pid, ())  # of the session that it leads, if it leads one
    return [table[pid] for pid in sorted(found) if pid in table and table[pid].is_alive]


def marks(processes: Iterable[Process]) -> frozenset[Mark]:
    """The marks by which the processes are recognised later."""
    return frozenset((process.pid, process.start_ticks) for process in processes)


def pids(proc: Path = Path("/proc")) -> list[int]:
    """The number of every process that can be seen; none where there is no /proc."""
    try:
        return sorted(int(name) for name in os.listdir(proc) if name.isdecimal())  # noqa: PTH208 - only the names, of hundreds
    except OSError:
        return []


def read_processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    found = (read_process(pid, proc) for pid in pids(proc))
    return {process.pid: process for process in found if process}


def read_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """One process; None where it is gone."""
    return parse_stat(text_of(proc / str(pid) / "stat"))


def text_of(path: Path) -> str:
    """Returns a file's text, or "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def boot_mark(proc: Path = Path("/proc")) -> str:
    """Returns the scope of marks: the machine's boot and the PID namespace; "" where unknown."""
    try:
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii", errors="replace").strip()
        space = os.readlink(proc / "self" / "ns" / "pid")  # noqa: PTH115 - its text, not a path
    except OSError:
        return ""
    return f"{boot} {space}"
