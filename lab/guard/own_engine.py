"""The real vLLM as a process that guard starts itself; as a program it starts one, says so, and waits to be killed.

python -m lab.guard.own_engine FOLDER PORT
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from lab.engine.server import clean_environment, serve_command
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.hardware.processes import boot_mark, read_processes

FLAGS = ("--shutdown-timeout", "30")


def own_engine(folder: Path, port: int) -> OwnProcess:
    """One that keeps all its files in the folder."""
    return OwnProcess(
        serve_command(port, FLAGS),
        environment={**clean_environment(), "TMPDIR": str(folder)},
        state_path=folder / "engine.json",
        log_path=folder / "engine.log",
        processes=read_processes,
        boot=boot_mark(),
    )


async def _main() -> None:
    engine = own_engine(Path(sys.argv[1]), int(sys.argv[2]))
    print((await engine.start()).message, flush=True)
    while True:  # as guard does: it looks, and notes the tree
        await engine.is_running()
        await asyncio.sleep(1.0)
        print(f"looked at {time.time():.0f}", flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
