"""The cards of this machine: what NVML says of each, and the errors that the kernel's log tells of.

Any call of the driver may hang, for ever when a card has fallen off its bus. So nothing of this is called from the event loop.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

KMSG_LINES = 4096
KMSG_BYTES = 8192
XIDS_KEPT = 1024
INIT_AGAIN_S = 60.0  # the driver may be loaded later, or be replaced
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): (\d{1,4})[,\s]")


class CardNow(NamedTuple):
    """One card as NVML shows it; None for what it does not."""

    total: float | None = None
    free: float | None = None
    uncorrectable: int | None = None  # ECC errors that were not mended, since the first reading
    held: Mapping[int, float | None] = {}
    """What each process holds there, by the driver's own number of it."""


class Driver:
    """NVML, initialised once. `library` is for tests."""

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._handles: list[tuple[str, Any]] | None = None
        self._first: dict[str, int] = {}  # ECC errors of before we looked
        self._next_s = 0.0
        self._lock = threading.Lock()

    def read(self) -> dict[str, CardNow] | None:
        """Every card by its address; None without NVML."""
        with self._lock:
            if self._handles is None and not self._begin():
                return None
            found = {name: self._card(name, handle) for name, handle in self._handles or ()}
            if found and not any(card.total is not None or card.uncorrectable is not None for card in found.values()):
                self._end()  # nothing is told of any card: the driver was replaced under us, perhaps
            return found

    def close(self) -> None:
        """Let the driver go; waits for a reading that is under way."""
        with self._lock:
            self._end()
            self._next_s = 0.0

    def _begin(self) -> bool:
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + INIT_AGAIN_S
        if self._library is None:
            try:
                self._library = importlib.import_module("pynvml")
            except ImportError:
                return False
        nvml = self._library
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return False
        self._handles = []
        with contextlib.suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):  # a lost one; the others are read
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
        total = free = count = None
        held: dict[int, float | None] = {}
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            total, free = float(memory.total), float(memory.free)
        with contextlib.suppress(nvml.NVMLError):
            for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                held[int(one.pid)] = None if one.usedGpuMemory is None else float(one.usedGpuMemory)
        with contextlib.suppress(nvml.NVMLError):  # a card without ECC has no count
            count = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        return CardNow(total, free, None if count is None else self._since_first(name, int(count)), held)

    def _since_first(self, name: str, count: int) -> int:
        """What the driver counts began before guard did: only errors since then are news."""
        if count < self._first.setdefault(name, count):  # counted anew: the driver was loaded again
            self._first[name] = 0
        return count - self._first[name]


class KernelLog:
    """The Xids of the kernel's messages from now on: those of before say nothing about now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._lock = threading.Lock()
        self._seen: deque[tuple[int, str, int]] = deque(maxlen=XIDS_KEPT)
        self.count = 0  # of Xids ever seen

    def open(self) -> None:
        """Begin to listen."""
        with self._lock, contextlib.suppress(OSError):
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._file, 0, os.SEEK_END)

    def close(self) -> None:
        """Stop."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def read(self) -> None:
        """Take what has come since the last time."""
        with self._lock:
            for _ in range(KMSG_LINES if self._file >= 0 else 0):
                try:
                    line = os.read(self._file, KMSG_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    continue  # messages were overwritten before they were read: go on with the next
                if not line:
                    break
                for bus, xid in _XID.findall(line.decode("utf-8", "replace")):
                    self.count += 1
                    self._seen.append((self.count, bus_of(bus), int(xid)))

    def since(self, count: int) -> tuple[dict[str, tuple[int, ...]], int]:
        """The Xids after so many, by the card's address, and how many there were by now."""
        found: dict[str, tuple[int, ...]] = {}
        for number, bus, xid in list(self._seen):
            if number > count:
                found[bus], count = (*found.get(bus, ()), xid), number
        return found, count


def bus_of(said: str) -> str:
    """A card's address as the kernel and NVML both could have written it: bus and device."""
    parts = said.strip("\0").lower().split(".")[0].split(":")
    return ":".join(parts[-2:])
