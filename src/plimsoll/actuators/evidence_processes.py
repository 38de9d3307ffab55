"""What the kernel says of processes that are about to be stopped: their state, and where each of their threads waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from plimsoll.domain.redaction import redact_words

MOST_PROCESSES = 64
MOST_THREADS = 128
FILE_BYTES = 64 << 10


def of_processes(pids: Iterable[int], proc: Path = Path("/proc")) -> bytes:
    """One text for all of them; a file that this user may not read is named as such."""
    lines: list[str] = []
    for pid in list(pids)[:MOST_PROCESSES]:
        lines += [f"=== pid {pid}", *_of_one(proc / str(pid)), ""]
    return "\n".join(lines).encode("utf-8", "replace")


def _of_one(folder: Path) -> Iterator[str]:
    words = _read(folder / "cmdline").rstrip("\0").split("\0")
    yield f"command: {' '.join(redact_words(words))}"
    for name in ("status", "wchan", "stack", "cgroup", "oom_score", "io"):
        text = _read(folder / name).strip()
        yield f"--- {name}: {text}" if "\n" not in text else f"--- {name}\n{text}"
    try:
        threads = sorted((folder / "task").iterdir(), key=lambda one: one.name.rjust(10))
    except OSError:
        return
    yield f"--- {len(threads)} threads: number, name, state, where it waits"
    for thread in threads[:MOST_THREADS]:
        state = _read(thread / "stat").rpartition(")")[2].split()[:1]
        yield f"{thread.name} {_read(thread / 'comm').strip()} {''.join(state)} {_read(thread / 'wchan').strip()}"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES).decode("utf-8", "replace")
    except OSError as problem:
        return f"cannot be read ({problem.strerror})"
