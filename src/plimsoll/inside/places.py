"""The folder that the processes of one vLLM server share, which only its user may enter, and which process belongs to which.

One vLLM server is several processes: API servers, engine cores, workers. A worker writes its figures to the folder with
the list of its ancestors; an API server takes those with its key among the ancestors. The key is the process that started
everything: with one API server that server itself, with several the launcher, the parent of all of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import sys
import tempfile

from plimsoll.inside.faults import FAULTS

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of our own in it, checked below
ONE_OF_SEVERAL = "ApiServer_"
WORKER = "VllmWorker"
INSPECTION = "vllm.model_executor.models.registry"  # a short-lived process that looks at a model's class


def run_folder(wanted: str = "") -> str | None:
    """Returns the folder, made if need be; None where there is no safe one, which is counted and logged."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
    # Process numbers are valid in one namespace only, and several containers may share a /dev/shm.
    folder = wanted or os.path.join(base, f"plimsoll-{os.getuid()}-{_namespace()}")  # noqa: PTH118
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        about = os.lstat(folder)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            FAULTS.say("the shared folder", f"{folder} is not a folder of this user; figures are not shared")
            return None
        if about.st_mode & 0o022:  # someone else could put figures there
            os.chmod(folder, stat.S_IMODE(about.st_mode) & ~0o022)  # noqa: PTH101
    except OSError as error:
        FAULTS.note("the shared folder", error)
        return None
    return folder


def server_key() -> int:
    """Returns, in an API server, the number of the process from which all processes of this vLLM server descend.

    vLLM names one of several API servers `ApiServer_0` and so on; one that a supervisor has started for a data-parallel
    rank looks the same otherwise, but has another name and is a server of its own.
    """
    import multiprocessing  # loaded already where there is a parent

    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not multiprocessing.current_process().name.startswith(ONE_OF_SEVERAL):
        return os.getpid()
    return parent.pid


def may_hold_core() -> bool:
    """True if this process may hold an engine core: it is no worker, nor does vLLM only look at a model's class in it."""
    import multiprocessing  # loaded already where there is a parent

    return main_module() != INSPECTION and not multiprocessing.current_process().name.startswith(WORKER)


def main_module() -> str:
    return str(getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", ""))


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0


def ancestors(pid: int) -> list[int]:
    """Returns a process and its ancestors, nearest first."""
    line: list[int] = []
    while pid > 0 and pid not in line:
        line.append(pid)
        pid = _number(pid, 1)
    return line


def is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def is_same_process(pid: int, started: int) -> bool:
    """True if the process with this number that began at these ticks still runs."""
    return is_alive(pid) and start_ticks(pid) == started


def start_ticks(pid: int) -> int:
    """Returns the process's start in the kernel's ticks, 0 when it is gone. Number and start together are unique for ever."""
    return _number(pid, 19)


@functools.cache
def start_unix(pid: int) -> float | None:
    """Returns a process's start like prometheus_client's process_start_time_seconds; None where the kernel does not tell it.

    Computed once, as prometheus_client does: when the clock is set, the kernel moves its boot time.
    """
    ticks = start_ticks(pid)
    try:
        with open("/proc/stat", encoding="ascii") as file:  # noqa: PTH123
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    except (OSError, StopIteration, ValueError):
        return None
    return round(boot + ticks / os.sysconf("SC_CLK_TCK"), 2) if ticks else None


def _number(pid: int, place: int) -> int:
    words = _stat(pid)[place : place + 1]
    return int(words[0]) if words and words[0].isdecimal() else 0


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, which may hold any text: state, parent, ...; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


# Pages, locks, rings and reports: KIND-PID-START, with a dot before it while it is being written.
_FILE = re.compile(r"\.?(?:gate|api|call|ring|salt|worker|core|knobs)-(\d+)-(\d+)(?:-\d+)*(?:\..*)?", re.ASCII | re.DOTALL)


def sweep(folder: str) -> None:
    """Removes the files of processes that are gone, also half-written ones; each is named after its process and its start."""
    names: list[str] = []
    with FAULTS.noting("sweeping the shared folder"):
        names = os.listdir(folder)  # noqa: PTH208
    for name in names:
        named = _FILE.fullmatch(name)
        if named is not None and not is_same_process(int(named[1]), int(named[2])):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))  # noqa: PTH108, PTH118
