"""Reads this machine's facts about an engine on it: its processes' memory and limit, and the state of its GPUs.

The server is found by its port; a listener that is no engine (a proxy, a tunnel) is ignored. /proc, the kernel log and the
driver are read in threads with deadlines, once for all engines of this machine: a driver call may hang for ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from plimsoll.guard.judge.look import CardState, Look, Reach
from plimsoll.hardware.processes import Process, ProcessTable, pids, read_process, read_processes, text_of
from plimsoll.inside.memory import group_files, host_memory

KMSG_LINES = 4096
KMSG_BYTES = 8192
XIDS_KEPT = 1024
INIT_AGAIN_S = 60.0  # the driver may be loaded later, or be replaced
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): (\d{1,4})[,\s]")


class CardNow(NamedTuple):
    """One GPU as NVML shows it; None where it does not."""

    total: float | None = None
    free: float | None = None
    uncorrectable: int | None = None  # uncorrected ECC errors since the first reading
    held: Mapping[int, float | None] = {}
    """Bytes held by each process, by the driver's own pid."""
    use: float | None = None  # the share of the last moment in which a kernel ran on it


class NvmlDriver:
    """NVML, initialised once. `library` is for tests."""

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._handles: list[tuple[str, Any]] | None = None
        self._first: dict[str, int] = {}  # ECC errors before the first reading
        self._next_s = 0.0
        self._lock = threading.Lock()

    def read(self) -> dict[str, CardNow] | None:
        """Returns every GPU by its bus address; None without NVML."""
        with self._lock:
            if self._handles is None and not self._begin():
                return None
            found = {name: self._card(name, handle) for name, handle in self._handles or ()}
            if found and not any(card.total is not None or card.uncorrectable is not None for card in found.values()):
                self._end()  # no GPU can be read: perhaps the driver was replaced
            return found

    def close(self) -> None:
        """Shuts NVML down; waits for a reading in progress."""
        with self._lock:
            self._end()
            self._next_s = 0.0

    def _begin(self) -> bool:
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + INIT_AGAIN_S
        try:
            nvml = self._library = self._library or importlib.import_module("pynvml")
        except ImportError:
            return False
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return False
        self._handles = []
        with contextlib.suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):  # a lost GPU; go on with the others
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
                    self._handles.append((bus_of(bus.decode() if isinstance(bus, bytes) else str(bus)), handle))
        return True

    def _end(self) -> None:
        if self._handles is not None:
            self._handles = None
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlShutdown()

    def _card(self, name: str, handle: Any) -> CardNow:
        nvml = self._library
        total = free = count = use = None
        held: dict[int, float | None] = {}
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            total, free = float(memory.total), float(memory.free)
        with contextlib.suppress(nvml.NVMLError):
            for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                held[int(one.pid)] = None if one.usedGpuMemory is None else float(one.usedGpuMemory)
        with contextlib.suppress(nvml.NVMLError):  # NVML has none for a MIG slice
            use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
        with contextlib.suppress(nvml.NVMLError):  # a card without ECC has no count
            count = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        if count is not None and int(count) < self._first.setdefault(name, int(count)):
            self._first[name] = 0  # the count began again: the driver was reloaded
        return CardNow(total, free, None if count is None else int(count) - self._first[name], held, use)


class KernelLog:
    """Collects the Xids of the kernel log from its opening on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._lock = threading.Lock()
        self._seen: deque[tuple[int, str, int]] = deque(maxlen=XIDS_KEPT)
        self.count = 0  # of Xids ever seen

    def open(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._file, 0, os.SEEK_END)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def read(self) -> None:
        with self._lock:
            for _ in range(KMSG_LINES if self._file >= 0 else 0):
                try:
                    line = os.read(self._file, KMSG_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    continue  # messages were overwritten before they were read
                if not line:
                    break
                for bus, xid in _XID.findall(line.decode("utf-8", "replace")):
                    self.count += 1
                    self._seen.append((self.count, bus_of(bus), int(xid)))

    def since(self, count: int) -> tuple[dict[str, tuple[int, ...]], int]:
        """Returns the Xids after the first `count`, by the GPU's address, and their number by now."""
        found: dict[str, tuple[int, ...]] = {}
        for number, bus, xid in list(self._seen):
            if number > count:
                found[bus], count = (*found.get(bus, ()), xid), number
        return found, count


def bus_of(said: str) -> str:
    """Returns a GPU's address in a form that the kernel and NVML share: bus and device."""
    parts = said.strip("\0").lower().split(".")[0].split(":")
    return ":".join(parts[-2:])


LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
FIRST_NAMESPACE = "pid:[4026531836]"  # the kernel's own number for the pid namespace that is no container's
# Names of Python's and vLLM's processes: the command, or a title such as "VLLM::EngineCore".
_PYTHON = re.compile(r"python|pypy|vllm\Z|VLLM::")


def tree(table: ProcessTable, pid: int) -> tuple[int, ...]:
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.pop(found[-1], ())  # pop: reused pids could lead in a circle
    return tuple(found)


def sockets_at(root: Path, ports: Iterable[int]) -> dict[str, int]:
    """Returns the listening sockets of these ports, as /proc/PID/fd names them."""
    wanted = {f"{port:04X}": port for port in ports}
    found: dict[str, int] = {}
    for name in ("tcp", "tcp6") if wanted else ():
        for line in text_of(root / "proc" / "net" / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == LISTENS and (port := wanted.get(fields[1].rpartition(":")[2])) is not None:
                found[f"socket:[{fields[9]}]"] = port
    return found


def socket_holders(root: Path, sockets: Mapping[str, int]) -> dict[int, int]:
    """Returns the first process that holds a socket of each port, as far as this user may see."""
    left, found = set(sockets.values()), dict[int, int]()
    for pid in pids(root / "proc") if left else ():
        try:
            handles = list(os.scandir(root / "proc" / str(pid) / "fd"))
        except OSError:
            continue
        for handle in handles:
            with contextlib.suppress(OSError):
                port = sockets.get(os.readlink(handle.path))  # noqa: PTH115 - thousands of them
                if port is not None and port in left:
                    left.discard(port)
                    found[port] = pid
        if not left:
            break
    return found


def is_python(root: Path, pid: int) -> bool:
    """True if a process may be vLLM's: Python, by its program, its command or the name it gave itself."""
    folder = root / "proc" / str(pid)
    program = ""
    with contextlib.suppress(OSError):
        program = os.readlink(folder / "exe")  # noqa: PTH115 - it may be gone
    command = text_of(folder / "cmdline").split("\0")[0]
    names = (program.rpartition("/")[2], command.rpartition("/")[2], text_of(folder / "comm").strip())
    return any(_PYTHON.match(name) for name in names)


def resident(root: Path, pid: int) -> int:
    """Returns its anonymous memory in bytes: file pages are shared, so they are left out."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", text_of(root / "proc" / str(pid) / "status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def limit(root: Path, pid: int) -> int | None:
    """Returns the tightest cgroup memory limit of a process; None without one."""
    place = str(root).rstrip("/")
    return host_memory(place, group_files(place, pid))[0]["limit"]


Answer = TypeVar("Answer")


class SlowQuestion(Generic[Answer]):
    """A call that may hang, run in a thread, one at a time; its answer is cached for `keep_s`.

    Not in a pool of Python's: at its end the interpreter waits for those, and a hung thread never ends.
    """

    def __init__(self, ask: Callable[[], Answer], *, deadline_s: float, keep_s: float) -> None:
        self._ask, self._deadline_s, self._keep_s = ask, deadline_s, keep_s
        self._job: concurrent.futures.Future[Answer | None] | None = None
        self._began_s = 0.0
        self._answer: Answer | None = None
        self._answered_s: float | None = None

    @property
    def is_stuck(self) -> bool:
        """True if the call has exceeded its deadline."""
        return self._job is not None and not self._job.done() and time.monotonic() - self._began_s >= self._deadline_s

    async def answer(self) -> Answer | None:
        """Returns the answer; None if the call failed or hangs. While it hangs, no caller waits again."""
        if self._answered_s is not None and time.monotonic() - self._answered_s < self._keep_s:
            return self._answer
        if self._job is None or self._job.done():
            self._job, self._began_s = concurrent.futures.Future(), time.monotonic()
            try:
                threading.Thread(target=self._run, args=(self._job,), name="plimsoll-slow-question", daemon=True).start()
            except RuntimeError:  # no more threads on this machine
                self._job.set_result(None)
        job, left_s = self._job, self._began_s + self._deadline_s - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await asyncio.shield(asyncio.wrap_future(job))
        return None

    def forget(self) -> None:
        self._answered_s = None

    def _run(self, job: concurrent.futures.Future[Answer | None]) -> None:
        try:
            found: Answer | None = self._ask()
        except Exception:  # whatever a driver does
            found = None
        self._answer, self._answered_s = found, time.monotonic()
        job.set_result(found)


DEADLINE_S = 1.5
KEEP_S = 2.0  # of the five seconds between looks
LOOK_AGAIN_S = 60.0  # for a socket whose holder was not visible


class ServerProcess(NamedTuple):
    """The server at one port, as /proc shows it."""

    server: Process
    tree: tuple[int, ...]  # the server and all that it started
    is_python: bool
    resident: int
    limit: int | None


class Machine:
    """This machine, for all engines on it. `root` is where /proc, /sys and /dev are; `nvml` the library, for tests."""

    def __init__(
        self, root: Path = Path("/"), nvml: Any = None, *, deadline_s: float = DEADLINE_S, keep_s: float = KEEP_S
    ) -> None:
        self._root, self._proc = root, root / "proc"
        self.ports: list[int] = []  # of the watched engines
        self._servers: dict[int, Process] = {}
        self._boots: dict[float, None] = {}  # every boot time that this machine has shown
        self._ahead_s = math.inf
        self._unseen: dict[str, float] = {}  # sockets whose holder was not visible, and when to look again
        self._driver = NvmlDriver(nvml)
        self.kernel = KernelLog(root / "dev" / "kmsg")
        self.servers = SlowQuestion(self._walk, deadline_s=deadline_s, keep_s=keep_s)  # by port; reads the kernel log as well
        self.cards = SlowQuestion(self._driver.read, deadline_s=deadline_s, keep_s=keep_s)  # by address; None without NVML

    @property
    def note(self) -> str:
        """The part of this machine that does not answer; empty if all do."""
        stuck = [name for name, one in (("/proc", self.servers), ("the GPU driver", self.cards)) if one.is_stuck]
        return f"{' and '.join(stuck)} on this machine does not answer: not asked again until it does" if stuck else ""

    @functools.cached_property
    def knows_pids(self) -> bool:
        """True if the driver's pids are those of /proc: guard is not in a pid namespace."""
        try:
            return os.readlink(self._proc / "self" / "ns" / "pid") == FIRST_NAMESPACE  # noqa: PTH115 - it leads nowhere
        except OSError:
            return False

    def join(self, port: int) -> None:
        """Begins to watch an engine at this port."""
        if not self.ports:
            self.kernel.open()
        self.ports.append(port)
        self.servers.forget()  # the last walk did not look for this one

    def leave(self, port: int) -> None:
        """Stops watching it; after the last one, everything is closed."""
        self.ports.remove(port)
        if not self.ports:
            self.kernel.close()
            self._servers.clear()
            # The driver may hang in this, too.
            threading.Thread(target=self._driver.close, name="plimsoll-driver-end", daemon=True).start()

    def start_of(self, process: Process, shown: float | None) -> float | None:
        """Returns when a process began, by the boot time that is nearest to what its page shows; None if unknown.

        Setting the clock moves the boot time, and a page keeps the one of its own process's start.
        """
        ahead_s = time.time() - time.monotonic()
        if abs(ahead_s - self._ahead_s) > 0.5:  # the first time, and when the clock was set
            self._ahead_s = ahead_s
            if found := re.search(r"^btime (\d+)$", text_of(self._proc / "stat"), re.MULTILINE):
                self._boots[float(found[1])] = None
        starts = [boot + process.start_ticks / os.sysconf("SC_CLK_TCK") for boot in self._boots]
        return min(starts, key=lambda start: abs(start - (shown or start)), default=None)

    async def is_open(self, port: int) -> bool | None:
        """True if a port is open; None where the kernel does not show it."""
        if not (self._proc / "net" / "tcp").exists():
            return None
        return bool(await asyncio.to_thread(sockets_at, self._root, [port]))

    # In the thread

    def _walk(self) -> dict[int, ServerProcess]:
        self.kernel.read()
        ports, seen = set(self.ports), read_processes(self._proc)
        starts = {pid: process.start_ticks for pid, process in seen.items()}  # a pid may be another process's by now
        known = self._servers.items()
        self._servers = {port: one for port, one in known if port in ports and starts.get(one.pid) == one.start_ticks}
        now_s = time.monotonic()
        self._unseen = {name: until_s for name, until_s in self._unseen.items() if until_s > now_s}
        missing = sockets_at(self._root, ports - self._servers.keys())
        sockets = {name: port for name, port in missing.items() if name not in self._unseen}
        holders = socket_holders(self._root, sockets)
        self._servers |= {port: one for port, pid in holders.items() if (one := read_process(pid, self._proc))}
        self._unseen |= {name: now_s + LOOK_AGAIN_S for name, port in sockets.items() if port not in holders}
        found = {}
        for port, server in self._servers.items():
            family, root = tree(seen, server.pid), self._root
            is_vllm, held = any(is_python(root, pid) for pid in family), sum(resident(root, pid) for pid in family)
            found[port] = ServerProcess(server, family, is_vllm, held, limit(root, server.pid))
        return found


@functools.cache
def this_machine() -> Machine:
    return Machine()


class SameHost:
    """Adds this machine's facts to the looks at one engine on it."""

    def __init__(self, port: int, machine: Machine | None = None) -> None:
        self._port = port
        self._machine = machine or this_machine()
        self._is_open = False
        self._was_open: bool | None = None  # whether its port was seen open while it answered
        self._xids = 0
        self._has_figures = False  # whether the last look had the whole tree's
        self._was_here = False
        self._tied: frozenset[str] = frozenset()  # the GPUs it was last seen on; they count also after its end
        self._guessed: frozenset[str] = frozenset()

    @property
    def note(self) -> str:
        return self._machine.note

    async def add_to(self, look: Look) -> Look:
        """Returns the look with this machine's figures. GPUs are included even if the engine has ended."""
        if not self._is_open:  # not before: an engine without looks needs nothing from this machine
            self._is_open = True
            self._machine.join(self._port)
            self._xids = self._machine.kernel.count
        servers, cards = await asyncio.gather(self._machine.servers.answer(), self._machine.cards.answer())
        found = None if servers is None else servers.get(self._port)
        if found is not None and not found.is_python:  # only a holder of GPU memory can be an engine here
            is_holder = any(not card.held.keys().isdisjoint(found.tree) for card in (cards or {}).values())
            found = found if is_holder else None
        states = self._cards(found, cards)
        if look.reach is not Reach.ANSWERS:
            is_open = await self._machine.is_open(self._port) if look.reach is Reach.REFUSED else None
            # Packets to a container may be forwarded without a listener here: then a closed port says nothing.
            return look._replace(cards=states, is_port_open=is_open or (False if is_open is False and self._was_open else None))
        if self._was_open is None:
            self._was_open = found is not None or await self._machine.is_open(self._port)
        figures = dict(look.figures)
        if found is not None:
            self._has_figures = True
            if found.resident > 0:
                figures["host_resident"] = float(found.resident)
            if found.limit is not None:
                figures["host_limit"] = float(found.limit)
        elif self._has_figures:
            # The metrics' figure covers one process: after the whole tree's, memory would seem to have shrunk.
            figures.pop("host_resident", None)
            self._has_figures = servers is None
        start = None if found is None else self._machine.start_of(found.server, look.started_unix_s)
        return look._replace(figures=figures, cards=states, local_start=start)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._machine.leave(self._port)

    def _cards(self, found: ServerProcess | None, cards: Mapping[str, CardNow] | None) -> tuple[CardState, ...]:
        seen, self._xids = self._machine.kernel.since(self._xids)
        tree = frozenset(() if found is None else found.tree)
        tied = frozenset(name for name, card in (cards or {}).items() if not tree.isdisjoint(card.held))
        self._was_here = self._was_here or found is not None
        self._tied = tied or self._tied
        is_alone = self._was_here and len(self._machine.ports) == 1
        if self._tied or not is_alone or (cards and self._machine.knows_pids):
            self._guessed = frozenset()
        else:  # the driver has other pids, or is absent: with one engine, the GPUs are its own
            self._guessed |= frozenset(cards or ()) | frozenset(seen)
        own = self._tied or self._guessed
        return tuple(_card(name, (cards or {}).get(name), seen.get(name, ()), tree) for name in sorted(own))


def _card(name: str, now: CardNow | None, xids: tuple[int, ...], tree: frozenset[int]) -> CardState:
    if now is None:
        return CardState(name, xids)
    held = [size for pid, size in now.held.items() if pid in tree]
    known = [size for size in held if size is not None]
    by_engine = sum(known) if known and len(known) == len(held) else None
    return CardState(name, xids, now.uncorrectable, now.total, now.free, by_engine, now.use)
