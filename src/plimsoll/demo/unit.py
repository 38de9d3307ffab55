"""One stand-in as commands start and stop it: `python -m plimsoll.demo.unit FOLDER start|stop|is-running|pids`.

This is what a service manager does on a real machine. Exit codes are those of guard's contract for commands (docs/balancers.md
and docs/guard-config.md): 0 done or running, 3 not running, 151 it ended by itself, else failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from plimsoll.actuators.command_restart import ENDED, NOT_RUNNING
from plimsoll.actuators.own_process import OwnProcess
from plimsoll.sources.process_tree import boot_mark, read_processes

FILE = "unit.json"
STOP_S = 60.0


def write_unit(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """Keep the command and what its environment has beside ours."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / FILE
    path.touch(mode=0o600)
    path.write_text(json.dumps({"words": words, "environment": environment}), encoding="utf-8")


def unit(folder: Path) -> OwnProcess:
    """The one of this folder."""
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return OwnProcess(
        found["words"], environment={**os.environ, **found["environment"]}, state_path=folder / "engine.json",
        log_path=folder / "engine.log", processes=read_processes, boot=boot_mark(), orphans_s=1.0,
    )  # fmt: skip


async def obey(engine: OwnProcess, verb: str) -> int:
    """One word of the contract."""
    if verb == "is-running":
        if await engine.is_running():
            return 0
        last = await engine.last_exit()
        return ENDED if last.is_done and not last.facts.get("asked") else NOT_RUNNING
    if verb == "pids":
        print(*await engine.pids())
        return 0
    if verb not in ("start", "stop"):
        print(f"there is no {verb}")
        return 2
    outcome = await (engine.start() if verb == "start" else engine.stop(float(os.environ.get("PLIMSOLL_DEADLINE_S", STOP_S))))
    print(outcome.says)
    return 0 if outcome.is_done else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(obey(unit(Path(sys.argv[1])), sys.argv[2])))
