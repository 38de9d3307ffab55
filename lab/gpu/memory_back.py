"""How long a real card takes to give back what a killed process held, and whether `DeviceMemory` waits for it.

    PYTHONPATH=src python -m lab.gpu.memory_back FOLDER [GIB]

Needs a card, torch and nvidia-ml-py. Prints what NVML says each hundredth of a second after SIGKILL, then what guard concludes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from plimsoll.guard.adapters.device_memory import DeviceMemory
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.guard.daemon.evidence import EvidenceSources, EvidenceStore
from plimsoll.hardware.processes import boot_mark, marks, read_processes

# Two processes, as an API server and its worker in a session of its own; the worker holds the memory and hears no SIGTERM.
HOLDER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    import torch
    held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1) for _ in range(int(sys.argv[1]))]
    torch.cuda.synchronize()
    print("holding", flush=True)
time.sleep(600)
"""


async def measure(folder: Path, gib: int) -> None:
    """Start, look, kill, wait; each printed as a line."""
    engine = OwnProcess(
        [sys.executable, "-c", HOLDER, str(gib)], environment=os.environ, state_path=folder / "state.json",
        log_path=folder / "engine.log", processes=read_processes, boot=boot_mark(),
    )  # fmt: skip
    memory = DeviceMemory()
    print("empty card:", memory.look([]))
    print(await engine.start())
    while "holding" not in (folder / "engine.log").read_text(encoding="utf-8"):
        assert await engine.is_running(), (folder / "engine.log").read_text(encoding="utf-8")
        await asyncio.sleep(0.1)
    pids = await engine.pids()
    old = marks(process for pid, process in read_processes().items() if pid in pids)
    before = memory.look(pids)
    print("held:", pids, before)
    kept = await EvidenceStore(folder / "evidence").take("card", "1", EvidenceSources(str(folder / "engine.log"), pids))
    print("evidence:", kept, json.dumps(dict(kept.facts)))
    print((Path(str(kept.facts["folder"])) / "CONTENTS.txt").read_text(encoding="utf-8"))
    watching = asyncio.create_task(asyncio.to_thread(_watch, memory, pids))
    stopped = await engine.stop(0.5)
    print("stopped:", stopped, json.dumps(dict(stopped.facts)))
    begun = time.monotonic()
    back = await memory.wait_back(old, before, 60.0)
    print(f"back after {time.monotonic() - begun:.2f} s: {back} {json.dumps(dict(back.facts))}")
    await watching


def _watch(memory: DeviceMemory, pids: tuple[int, ...]) -> None:
    begun, last = time.monotonic(), None
    while time.monotonic() - begun < 8.0:
        alive = sum(pid in (table := read_processes()) and table[pid].is_alive for pid in pids)
        now = (alive, memory.look(pids))
        if now != last:
            print(f"  {time.monotonic() - begun:6.2f} s: {alive} alive, {now[1]}", flush=True)
        last = now
        time.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(measure(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100))
