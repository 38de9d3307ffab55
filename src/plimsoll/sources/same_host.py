"""What this machine itself says of an engine that runs on it: the memory of its processes, its limit, and how its cards are.

The server is found by the port it listens on; what listens there and is no engine (a proxy, a tunnel) says nothing of one.
/proc, the kernel's log and the driver are read in threads, once for all engines of this machine; nobody waits for them long.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.domain.look import Card, Look, Reach
from plimsoll.domain.process_table import Process, Table
from plimsoll.sources import host_proc
from plimsoll.sources.host_cards import CardNow, Driver, KernelLog
from plimsoll.sources.process_tree import read_process, read_processes
from plimsoll.sources.slow_question import SlowQuestion

DEADLINE_S = 1.5
KEEP_S = 2.0  # of the five seconds between looks
LOOK_AGAIN_S = 60.0  # for the holder of a socket, where it was not to be seen


class Found(NamedTuple):
    """The server at one port, as /proc shows it."""

    server: Process
    tree: tuple[int, ...]  # it and all that it started
    is_python: bool
    resident: int
    limit: int | None


class Machine:
    """This machine, for all engines on it. `root` is where /proc, /sys and /dev are; `nvml` the library, for tests."""

    def __init__(
        self, root: Path = Path("/"), nvml: Any = None, *, deadline_s: float = DEADLINE_S, keep_s: float = KEEP_S
    ) -> None:
        self._root, self._proc = root, root / "proc"
        self._ports: list[int] = []
        self._servers: dict[int, Process] = {}
        self._unseen: dict[str, float] = {}  # sockets whose holder was not to be seen, and when to look again
        self._driver = Driver(nvml)
        self.kernel = KernelLog(root / "dev" / "kmsg")
        self._processes = SlowQuestion(self._walk, deadline_s=deadline_s, keep_s=keep_s)
        self._cards = SlowQuestion(self._driver.read, deadline_s=deadline_s, keep_s=keep_s)

    @property
    def note(self) -> str:
        """What of this machine does not answer, in words; empty if all is well."""
        stuck = [name for name, one in (("/proc", self._processes), ("the GPU driver", self._cards)) if one.is_stuck]
        return f"{' and '.join(stuck)} of this machine does not answer: it is not asked again until it does" if stuck else ""

    @property
    def has_one_engine(self) -> bool:
        """Whether one engine alone is watched here."""
        return len(self._ports) == 1

    @functools.cached_property
    def knows_pids(self) -> bool:
        """Whether the driver's numbers of processes are those of /proc."""
        return host_proc.is_first_namespace(self._root)

    def join(self, port: int) -> None:
        """An engine at this port is watched from now on."""
        if not self._ports:
            self.kernel.open()
        self._ports.append(port)
        self._processes.forget()  # the last walk did not look for this one

    def leave(self, port: int) -> None:
        """It is not any more; after the last one, everything that is open is closed."""
        self._ports.remove(port)
        if not self._ports:
            self.kernel.close()
            self._servers.clear()
            # The driver may hang in this, too.
            threading.Thread(target=self._driver.close, name="plimsoll-driver-end", daemon=True).start()

    async def found(self) -> Mapping[int, Found] | None:
        """The servers of the ports that are watched; None if that is not known. Reads the kernel's log as well."""
        return await self._processes.answer()

    async def cards(self) -> Mapping[str, CardNow] | None:
        """All cards by their address; None without NVML, and while it hangs."""
        return await self._cards.answer()

    # In the thread

    def _walk(self) -> dict[int, Found]:
        self.kernel.read()
        ports, seen = set(self._ports), read_processes(self._proc)
        self._servers = {port: one for port, one in self._servers.items() if port in ports and _is_there(one, seen)}
        now_s = time.monotonic()
        self._unseen = {name: until_s for name, until_s in self._unseen.items() if until_s > now_s}
        missing = host_proc.sockets_at(self._root, ports - self._servers.keys())
        sockets = {name: port for name, port in missing.items() if name not in self._unseen}
        holders = host_proc.holders(self._root, sockets)
        self._servers |= {port: one for port, pid in holders.items() if (one := read_process(pid, self._proc))}
        self._unseen |= {name: now_s + LOOK_AGAIN_S for name, port in sockets.items() if port not in holders}
        return {port: self._found(one, host_proc.tree(seen, one.pid)) for port, one in self._servers.items()}

    def _found(self, server: Process, tree: tuple[int, ...]) -> Found:
        return Found(
            server,
            tree,
            any(host_proc.is_python(self._root, pid) for pid in tree),
            sum(host_proc.resident(self._root, pid) for pid in tree),
            host_proc.limit(self._root, server.pid),
        )


def _is_there(one: Process, seen: Table) -> bool:
    """Whether it is, and not another one under its number."""
    return one.pid in seen and seen[one.pid].start_ticks == one.start_ticks


@functools.cache
def this_machine() -> Machine:
    """The one that guard runs on."""
    return Machine()


class SameHost:
    """One engine of this machine, by its port."""

    def __init__(self, port: int, machine: Machine | None = None) -> None:
        self._port = port
        self._machine = machine or this_machine()
        self._is_open = False
        self._xids = 0
        self._has_figures = False  # whether the last look had those of its whole tree
        self._was_here = False
        self._tied: frozenset[str] = frozenset()  # the cards that it was last seen on: they count also when it is gone
        self._guessed: frozenset[str] = frozenset()

    @property
    def note(self) -> str:
        """What of this machine does not answer, in words."""
        return self._machine.note

    async def add_to(self, look: Look) -> Look:
        """The look with what this machine knows beside it. Cards are told whatever became of the engine."""
        if not self._is_open:  # not before: an engine that is never looked at is none of this machine's
            self._is_open = True
            self._machine.join(self._port)
            self._xids = self._machine.kernel.count
        servers, cards = await asyncio.gather(self._machine.found(), self._machine.cards())
        found = None if servers is None else servers.get(self._port)
        if found is not None and not _is_engine(found, cards):
            found = None
        told = self._cards(found, cards)
        if look.reach is not Reach.ANSWERS:
            return look._replace(cards=told)
        figures = dict(look.figures)
        if found is not None:
            self._has_figures = True
            if found.resident > 0:
                figures["host_resident"] = float(found.resident)
            if found.limit is not None:
                figures["host_limit"] = float(found.limit)
        elif self._has_figures:
            # The page's figure is of one process alone: after that of the whole tree it would look as if memory had shrunk.
            figures.pop("host_resident", None)
            self._has_figures = servers is None
        return look._replace(figures=figures, cards=told)

    def close(self) -> None:
        """It is not watched any more."""
        if self._is_open:
            self._is_open = False
            self._machine.leave(self._port)

    def _cards(self, found: Found | None, cards: Mapping[str, CardNow] | None) -> tuple[Card, ...]:
        seen, self._xids = self._machine.kernel.since(self._xids)
        tree = frozenset(() if found is None else found.tree)
        tied = frozenset(name for name, card in (cards or {}).items() if not tree.isdisjoint(card.held))
        self._was_here = self._was_here or found is not None
        self._tied = tied or self._tied
        is_alone = self._was_here and self._machine.has_one_engine
        if self._tied or not is_alone or (cards and self._machine.knows_pids):
            self._guessed = frozenset()
        else:  # the driver counts processes in another way, or is not there: with one engine, the cards are its own
            self._guessed |= frozenset(cards or ()) | frozenset(seen)
        own = self._tied or self._guessed
        return tuple(_card(name, (cards or {}).get(name), seen.get(name, ()), tree) for name in sorted(own))


def _is_engine(found: Found, cards: Mapping[str, CardNow] | None) -> bool:
    """Whether what listens there can be an engine: Python, or something that holds memory of a card."""
    return found.is_python or any(not card.held.keys().isdisjoint(found.tree) for card in (cards or {}).values())


def _card(name: str, now: CardNow | None, xids: tuple[int, ...], tree: frozenset[int]) -> Card:
    if now is None:
        return Card(name, xids)
    held = [size for pid, size in now.held.items() if pid in tree]
    known = [size for size in held if size is not None]
    by_engine = sum(known) if known and len(known) == len(held) else None
    return Card(name, xids, now.uncorrectable, now.total, now.free, by_engine)
