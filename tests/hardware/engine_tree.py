"""A program that looks like vLLM to whoever stops it: an API server, a child in its session, one in a session of its own.

    python -m tests.hardware.engine_tree FOLDER polite|deaf|leaves|crash|quick

Each process writes its number to FOLDER/NAME and appends to FOLDER/signals when SIGTERM reaches it. `polite` ends its children
and then itself, `deaf` ignores SIGTERM, `leaves` ends itself alone, `crash` ends with 0 soon after its start, `quick` at once
with 3.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def _told(folder: Path, name: str) -> None:
    with (folder / "signals").open("a", encoding="ascii") as file:
        file.write(f"{name}\n")


def child(folder: Path, name: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: _told(folder, name))
    (folder / name).write_text(str(os.getpid()), encoding="ascii")
    while True:
        time.sleep(60)


def fork(folder: Path, name: str, *, own_session: bool) -> int:
    pid = os.fork()
    if pid == 0:
        if own_session:
            os.setsid()
        child(folder, name)
    return pid


def main() -> None:
    folder, manner = Path(sys.argv[1]), sys.argv[2]
    if manner == "quick":
        sys.exit(3)
    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        _told(folder, "api")
        is_over = manner != "deaf"

    signal.signal(signal.SIGTERM, end)
    children = [fork(folder, "core", own_session=False), fork(folder, "worker", own_session=True)]
    print("serving", os.environ.get("ENGINE_SAYS", ""), flush=True)
    (folder / "api").write_text(str(os.getpid()), encoding="ascii")
    until = time.monotonic() + (0.5 if manner == "crash" else 1e9)
    while not is_over and time.monotonic() < until:
        time.sleep(0.02)
    if manner == "polite":
        time.sleep(0.3)  # requests in flight
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
