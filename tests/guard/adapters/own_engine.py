"""An engine-like tree that OwnProcess starts, for tests; as a program it starts one and waits to be killed.

python -m tests.guard.adapters.own_engine FOLDER MANNER
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.hardware.processes import boot_mark, read_process, read_processes

ROOT = Path(__file__).parents[3]
NAMES = ("api", "core", "worker")


def own(folder: Path, manner: str = "polite", **more: Any) -> OwnProcess:
    """One that keeps its files in the folder."""
    command = [sys.executable, "-m", "tests.hardware.engine_tree", str(folder), manner]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "ENGINE_SAYS": "hello"}
    given = {"environment": environment, "state_path": folder / "engine.json", "log_path": folder / "engine.log"}
    return OwnProcess(command, **{**given, "processes": read_processes, "boot": boot_mark(), **more})


def wait_up(folder: Path) -> dict[str, int]:
    """The numbers of all three, once they are there."""
    end = time.monotonic() + 20
    while not all((folder / name).exists() and (folder / name).read_text() for name in NAMES):
        assert time.monotonic() < end, "the tree did not come up"
        time.sleep(0.02)
    return {name: int((folder / name).read_text()) for name in NAMES}


def is_alive(pid: int) -> bool:
    """Whether a process still does anything."""
    process = read_process(pid)
    return process is not None and process.is_alive


def end_all(folder: Path) -> None:
    """Whatever a test left: every tree whose command names this folder, also one that is only just starting."""
    for _ in range(2):
        for pid in read_processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"tests.hardware.engine_tree" in words and str(folder).encode() in words:
                    os.kill(pid, signal.SIGKILL)


async def _main() -> None:
    engine = own(Path(sys.argv[1]), sys.argv[2])
    outcome = await engine.start()
    assert outcome.is_done, outcome
    wait_up(Path(sys.argv[1]))
    await engine.pids()  # notes the tree
    print("started", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(_main())
