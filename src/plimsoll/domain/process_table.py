"""Processes of a Linux machine as its /proc names them, and which of them belong together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

ENDED = "ZX"  # states of a process that only waits to be collected


class Process(NamedTuple):
    """One process. Its number may be given to another one later; number and start together may not, until the next boot."""

    pid: int
    parent: int
    session: int
    state: str
    start_ticks: int  # since boot

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, sleeps or hangs."""
        return self.state not in ENDED


Table = Mapping[int, Process]
Mark = tuple[int, int]  # a process for good: its number and its start


def parse_stat(text: str) -> Process | None:
    """The one that /proc/PID/stat tells of; None where that is something else. A process's name may hold anything."""
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


def family(table: Table, roots: Iterable[Mark], sessions: Collection[Mark] = (), spare: Collection[int] = ()) -> list[Process]:
    """Everything alive that is one of the roots, was started by one, or is in a session that one of them leads or led.

    `sessions` are leaders that may have ended: a session outlives its leader. Where the number of a leader now belongs to
    another process, that session is somebody else's. `spare` is never part of it, nor is what comes after it.
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
    """How to know them again."""
    return frozenset((process.pid, process.start_ticks) for process in processes)
