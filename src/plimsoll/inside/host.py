"""What this process and its group hold of the machine's memory, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

_NO_LIMIT = 1 << 60  # cgroup v1 says "no limit" with a number of about 2**63


GroupFiles = Sequence[tuple[str, str]]  # where a group's limit and its use are


def host_memory(root: str = "", groups: GroupFiles | None = None) -> tuple[dict[str, int | None], dict[str, str]]:
    """The figures in bytes, and the reason for each that is unknown.

    `root` is put before every path; `groups` is what `group_files` has found before, which spares the search.
    """
    own = _table(_text(f"{root}/proc/self/status"), "VmRSS", "VmHWM")
    machine = _table(_text(f"{root}/proc/meminfo"), "MemTotal", "MemAvailable")
    limit, used = group_memory(group_files(root) if groups is None else groups)
    figures = {
        "resident": own.get("VmRSS"),
        "resident_peak": own.get("VmHWM"),
        "total": machine.get("MemTotal"),
        "available": machine.get("MemAvailable"),
        "limit": limit,
        "used_by_group": used,
    }
    reasons = {f"host_memory.{name}": "the kernel does not say" for name, value in figures.items() if value is None}
    if limit is None:
        reasons["host_memory.limit"] = "no control group limits this process's memory, as far as it can see"
    return figures, reasons


def resident_bytes(root: str = "") -> int | None:
    """What of this process is in memory now."""
    return _table(_text(f"{root}/proc/self/status"), "VmRSS").get("VmRSS")


def group_memory(groups: GroupFiles) -> tuple[int | None, int | None]:
    """The tightest limit on this process's control group, and what that group uses, file cache included.

    A limit holds for everything below it, so all groups up to the top are asked. Without any limit the use is that of
    the process's own group.
    """
    tightest: tuple[int, int | None] | None = None
    own_use: int | None = None
    for limit_file, use_file in groups:
        limit, use = _number(_text(limit_file)), _number(_text(use_file))
        own_use = use if own_use is None else own_use
        if limit is not None and limit < _NO_LIMIT and (tightest is None or limit < tightest[0]):
            tightest = limit, use
    return (None, own_use) if tightest is None else tightest


def group_files(root: str = "") -> GroupFiles:
    """The files that hold limit and use of this process's groups and are there, the process's own group first."""
    files = []
    for line in _text(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":  # version 2
            top, limit, use = f"{root}/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, use = f"{root}/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the group may be named as the host sees it; then only the top is there, and it is ours.
        parts = [part for part in group.split("/") if part not in ("", "..")][:64]
        files += [("/".join((top, *parts[:n], limit)), "/".join((top, *parts[:n], use))) for n in range(len(parts), -1, -1)]
    return [pair for pair in files if any(os.access(path, os.R_OK) for path in pair)]


def _table(text: str, *names: str) -> Mapping[str, int]:
    """Of lines like `VmRSS:  123 kB` those with these names, in bytes."""
    found = {}
    for name in names:
        words = f"\n{text}".partition(f"\n{name}:")[2].partition("\n")[0].split()
        if len(words) == 2 and words[1] == "kB" and words[0].isascii() and words[0].isdigit():
            found[name] = int(words[0][:18]) * 1024
    return found


def _number(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isascii() and word.isdigit() and len(word) < 25 else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(256 * 1024)
    except OSError:
        return ""
