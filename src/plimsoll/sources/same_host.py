"""What this machine itself says of an engine that runs on it: the memory of its processes, its limit, and how its cards are.

The server is found by the port it listens on. Everything is read from /proc, /sys, the kernel's messages and NVML, as far as
this user may; what may not be read is simply not told.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from pathlib import Path
from typing import Any

from plimsoll.domain.look import Card, Look

LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
KMSG_LINES = 4096
KMSG_BYTES = 8192
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): (\d{1,4})[,\s]")
NO_LIMIT = 1 << 60


class SameHost:
    """One engine of this machine. `root` is where /proc, /sys and /dev are; `nvml` the library, for tests."""

    def __init__(self, port: int, root: Path = Path("/"), nvml: Any = None) -> None:
        self._port = port
        self._root = root
        self._nvml = nvml
        self._pid: int | None = None
        self._kernel = _Kernel(root / "dev" / "kmsg")
        self._has_nvml = True

    def add_to(self, look: Look) -> Look:
        """The look with what this machine knows beside it."""
        figures = dict(look.figures)
        tree = self._processes()
        resident = sum(_resident(self._root, pid) for pid in tree)
        if resident > 0:
            figures["host_resident"] = float(resident)
        if tree and (limit := _limit(self._root, tree[0])) is not None:
            figures["host_limit"] = float(limit)
        return look._replace(figures=figures, cards=look.cards or self._cards())

    # Processes

    def _processes(self) -> list[int]:
        """The server and all that it started; empty where it is not found."""
        if self._pid is None or not (self._root / "proc" / str(self._pid)).exists():
            self._pid = _listener(self._root, self._port)
        return [] if self._pid is None else _with_children(self._root, self._pid)

    # Cards

    def _cards(self) -> tuple[Card, ...]:
        xids = self._kernel.xids()
        errors = self._errors()
        if errors is None and not xids and not self._kernel.is_readable:
            return ()
        names = sorted({*(errors or {}), *xids})
        return tuple(Card(name, tuple(xids.get(name, ())), (errors or {}).get(name)) for name in names)

    def _errors(self) -> dict[str, int | None] | None:
        """ECC errors that were not mended, by the card's address; None without NVML."""
        if not self._has_nvml:
            return None
        nvml = self._nvml
        if nvml is None:
            try:
                nvml = importlib.import_module("pynvml")
            except ImportError:
                self._has_nvml = False
                return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            self._has_nvml = self._nvml is not None
            return None
        try:
            return dict(_error_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError:
            return None
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def _error_of(nvml: Any, index: int) -> tuple[str, int | None]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    name = _bus(bus.decode() if isinstance(bus, bytes) else str(bus))
    try:
        count = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    except nvml.NVMLError:
        return name, None  # a card without ECC
    return name, int(count)


def _bus(said: str) -> str:
    """A card's address as the kernel and NVML both could have written it: bus and device."""
    parts = said.strip("\0").lower().split(".")[0].split(":")
    return ":".join(parts[-2:])


class _Kernel:
    """The kernel's messages from now on: those of before say nothing about now."""

    def __init__(self, path: Path) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    @property
    def is_readable(self) -> bool:
        return self._file >= 0

    def xids(self) -> dict[str, list[int]]:
        """The Xids since the last call, by the card's address."""
        found: dict[str, list[int]] = {}
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
                found.setdefault(_bus(bus), []).append(int(xid))
        return found


# /proc and /sys


def _listener(root: Path, port: int) -> int | None:
    """The process that listens on a port, where this user may see it."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        for line in _text(root / "proc" / "net" / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == LISTENS and fields[1].rpartition(":")[2] == f"{port:04X}":
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for pid in _pids(root):
        try:
            handles = list(os.scandir(root / "proc" / str(pid) / "fd"))
        except OSError:
            continue
        for handle in handles:
            with contextlib.suppress(OSError):
                if os.readlink(handle.path) in inodes:  # noqa: PTH115 - thousands of them
                    return pid
    return None


def _pids(root: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(root / "proc") if name.isdecimal())  # noqa: PTH208
    except OSError:
        return []


def _with_children(root: Path, pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for one in _pids(root):
        fields = _text(root / "proc" / str(one) / "stat").rpartition(")")[2].split()
        if len(fields) > 1 and fields[1].isdecimal():
            children.setdefault(int(fields[1]), []).append(one)
    tree, left = [], [pid]
    while left:
        tree.append(left.pop())
        left += children.get(tree[-1], [])
    return tree


def _resident(root: Path, pid: int) -> int:
    """Memory of its own: what processes share is counted once by nobody, so pages of files are left out."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", _text(root / "proc" / str(pid) / "status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _limit(root: Path, pid: int) -> int | None:
    """The tightest memory limit of the control groups around a process; None where there is none."""
    limits = []
    for line in _text(root / "proc" / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        kinds, _, group = rest.partition(":")
        if number == "0" or "memory" in kinds.split(","):
            base = root / "sys" / "fs" / "cgroup" / ("" if number == "0" else "memory")
            parts = Path(group.lstrip("/")).parts
            for depth in range(len(parts), -1, -1):
                folder = base.joinpath(*parts[:depth])
                said = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
                if said.strip().isdecimal() and int(said) < NO_LIMIT:
                    limits.append(int(said))
    return min(limits, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
