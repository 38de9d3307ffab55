"""A real vLLM with its gate as a unit that commands start and stop, for tests of guard's own restarts.

    python -m lab.guard.unit FOLDER start|stop|is-running|pids

The folder holds `unit.json` (port, flags, environment), the log and the state. What `stop` answers is what the contract of
guard's commands asks for: 0 done, 3 not running, 151 ended by itself, else failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from lab.engine.server import OOM_FLAG_FILE, PLUGIN, PLUGIN_HOME, clean_environment, let_others_run, serve_command
from plimsoll.demo.fleet import obey
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.hardware.processes import boot_mark, read_processes

GATE = ("--worker-extension-cls", "plimsoll.inside.Probe", "--middleware", "plimsoll.inside.Gate")
NICE = 5  # behind a balancer that asks twice a second, an engine that makes way for everybody would be taken for dead
SOURCE = str(Path(__file__).resolve().parents[2] / "src")


def write_unit(folder: Path, port: int, token: str, flags: tuple[str, ...] = ("--shutdown-timeout", "30")) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = {"PYTHONPATH": os.pathsep.join((SOURCE, str(PLUGIN_HOME))), "PLIMSOLL_TOKEN": token}
    environment |= {"VLLM_SERVER_DEV_MODE": "0", "VLLM_PLUGINS": PLUGIN, OOM_FLAG_FILE: str(oom_flag(folder))}
    unit = {"port": port, "flags": [*GATE, *flags], "environment": environment}
    (folder / "unit.json").write_text(json.dumps(unit), encoding="utf-8")


def oom_flag(folder: Path) -> Path:
    """While this file is there, every step of the real engine fails with torch's out-of-memory error."""
    return folder / "oom"


def unit(folder: Path) -> OwnProcess:
    found = json.loads((folder / "unit.json").read_text(encoding="utf-8"))
    return OwnProcess(
        serve_command(found["port"], found["flags"]),
        environment={**clean_environment(), **found["environment"], "TMPDIR": str(folder)},
        state_path=folder / "engine.json", log_path=folder / "engine.log", processes=read_processes, boot=boot_mark(),
    )  # fmt: skip


async def gently(engine: OwnProcess, verb: str) -> int:
    """One word of the contract. What is started leaves room: on two cores its processes spin, and nobody else gets a turn."""
    if verb != "start":
        return await obey(engine, verb)
    let_others_run(os.getpid(), NICE)
    code = await obey(engine, verb)
    for pid in await engine.pids():
        let_others_run(pid, NICE)  # a session of its own has a weight of its own
    return code


if __name__ == "__main__":
    raise SystemExit(asyncio.run(gently(unit(Path(sys.argv[1])), sys.argv[2])))
