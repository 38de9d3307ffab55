"""Stand-ins with gate and probe, as processes that outlive whoever started them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.hardware.processes import boot_mark, read_processes

TOKEN = "a-token-for-the-gates-of-the-farm"


def stand_in(folder: Path, port: int, *flags: str) -> OwnProcess:
    """A stand-in with the gate and the probe, as a process that outlives whoever started it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = [sys.executable, "-m", "plimsoll", "standin", "--port", str(port), "--middleware", "plimsoll.inside.Gate"]
    words += ["--worker-extension-cls", "plimsoll.inside.Probe", "--shutdown-timeout", "30", *flags]
    return OwnProcess(
        words, environment={**os.environ, "PLIMSOLL_TOKEN": TOKEN, "TMPDIR": str(folder)}, state_path=folder / "engine.json",
        log_path=folder / "engine.log", processes=read_processes, boot=boot_mark(),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(engines: Sequence[OwnProcess]) -> AsyncIterator[None]:
    """Started, and stopped however the scene ends."""
    try:
        for engine in engines:
            outcome = await engine.start()
            assert outcome.is_done, outcome
        yield
    finally:
        await asyncio.gather(*(engine.stop(5.0) for engine in engines))
