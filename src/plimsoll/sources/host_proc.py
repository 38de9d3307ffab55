"""What /proc and /sys of this machine say: who listens on a port, what it started, its memory and its limit.

Everything is read as far as this user may; what may not be read is simply not told. `root` is where /proc and /sys are.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from plimsoll.domain.process_table import Table
from plimsoll.sources.process_tree import pids, text_of

LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
NO_LIMIT = 1 << 60
FIRST_NAMESPACE = "pid:[4026531836]"  # of processes; the kernel's own number for the one that is not a container's
# How Python's own processes are called, and vLLM's: by its command, or renamed as in "VLLM::EngineCore".
_PYTHON = re.compile(r"python|pypy|vllm\Z|VLLM::")


def tree(table: Table, pid: int) -> tuple[int, ...]:
    """A process and all that it started."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.pop(found[-1], ())  # once: numbers that changed hands meanwhile could lead in a circle
    return tuple(found)


def sockets_at(root: Path, ports: Iterable[int]) -> dict[str, int]:
    """The listening sockets of these ports, as /proc/PID/fd names them."""
    wanted = {f"{port:04X}": port for port in ports}
    found: dict[str, int] = {}
    for name in ("tcp", "tcp6") if wanted else ():
        for line in text_of(root / "proc" / "net" / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == LISTENS and (port := wanted.get(fields[1].rpartition(":")[2])) is not None:
                found[f"socket:[{fields[9]}]"] = port
    return found


def holders(root: Path, sockets: Mapping[str, int]) -> dict[int, int]:
    """For each port the first process that holds one of these sockets, where this user may see it. Looks at all handles."""
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
    """Whether a process may be vLLM's: Python, by its program, its command or the name it gave itself."""
    folder = root / "proc" / str(pid)
    program = ""
    with contextlib.suppress(OSError):
        program = os.readlink(folder / "exe")  # noqa: PTH115 - it need not exist any more
    command = text_of(folder / "cmdline").split("\0")[0]
    names = (program.rpartition("/")[2], command.rpartition("/")[2], text_of(folder / "comm").strip())
    return any(_PYTHON.match(name) for name in names)


def resident(root: Path, pid: int) -> int:
    """Memory of its own: what processes share is counted once by nobody, so pages of files are left out."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", text_of(root / "proc" / str(pid) / "status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def limit(root: Path, pid: int) -> int | None:
    """The tightest memory limit of the control groups around a process; None where there is none."""
    limits = []
    for line in text_of(root / "proc" / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        kinds, _, group = rest.partition(":")
        if number == "0" or "memory" in kinds.split(","):
            base = root / "sys" / "fs" / "cgroup" / ("" if number == "0" else "memory")
            parts = Path(group.lstrip("/")).parts
            for depth in range(len(parts), -1, -1):
                folder = base.joinpath(*parts[:depth])
                said = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")
                if said.strip().isdecimal() and int(said) < NO_LIMIT:
                    limits.append(int(said))
    return min(limits, default=None)


def is_first_namespace(root: Path) -> bool:
    """Whether process numbers here are those that the driver uses: we run in no container of processes."""
    try:
        return os.readlink(root / "proc" / "self" / "ns" / "pid") == FIRST_NAMESPACE  # noqa: PTH115 - it leads nowhere
    except OSError:
        return False
