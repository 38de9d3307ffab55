"""Waits until an old engine's processes are gone and their memory on the cards is free again.

A process that was killed is gone before the driver has taken its memory back. An engine that starts in that moment finds less
than there will be, and keeps to it. Without NVML (no card, or a container that does not see it) only the processes count.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from plimsoll.guard.act.ports import Outcome, done, unsure
from plimsoll.guard.adapters.run_command import in_thread
from plimsoll.hardware.processes import Mark, ProcessTable, read_processes

LOOK_EVERY_S = 0.5
SLACK_BYTES = 512 << 20  # what the driver itself may need in addition
SETTLED_BYTES = 16 << 20


class CardMemory(NamedTuple):
    """One card: its free memory, the memory of the given processes, and that of all others.

    `held_bytes` is None where NVML does not report memory by process.
    """

    free_bytes: int
    held_bytes: int | None
    others_bytes: int = 0


class DeviceMemory:
    """The cards of this machine. `nvml` is the library, for tests."""

    def __init__(self, nvml: Any = None, processes: Callable[[], ProcessTable] = read_processes) -> None:
        self._nvml, self._processes = nvml, processes

    def look(self, pids: Collection[int]) -> list[CardMemory] | None:
        """Returns every card as it is now; None without NVML. Call it before the stop, with the engine's processes."""
        try:
            nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            return None
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            try:
                return [_holding(nvml, index, pids) for index in range(nvml.nvmlDeviceGetCount())]
            finally:
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlShutdown()
        return None

    async def wait_back(self, old: Collection[Mark], before: list[CardMemory] | None, deadline_s: float) -> Outcome:
        """Waits until the old processes are gone and their memory is free; unsure if the deadline passes first.

        `before` is what `look` returned while they still ran. Where it knows what they held, that much more must be free now,
        less what others have taken since; where it does not, the free memory must have stopped growing.
        """
        end = time.monotonic() + deadline_s
        last: list[CardMemory] | None = None
        while True:
            table = await asyncio.to_thread(self._processes)
            left = sum(pid in table and table[pid].start_ticks == start and table[pid].is_alive for pid, start in old)
            now = None
            with contextlib.suppress(TimeoutError):  # a sick card's driver may never answer
                async with asyncio.timeout(max(1.0, end - time.monotonic())):
                    now = await in_thread(lambda: self.look([pid for pid, _ in old]))
            why = f"{left} process(es) of the old engine still live" if left else _why_not(before, last, now)
            if why is None:
                return done("what the old engine held is free again" if now else "the old engine's processes are gone")
            if time.monotonic() >= end:
                return unsure(f"{why}, after {deadline_s:g} s")
            last = now
            await asyncio.sleep(LOOK_EVERY_S)


def _why_not(before: list[CardMemory] | None, last: list[CardMemory] | None, now: list[CardMemory] | None) -> str | None:
    """Returns why the memory is not back; None where it is, or where there is no card to ask."""
    if now is None:
        return None if before is None else "the cards no longer tell what is free on them"
    for index, card in enumerate(now):
        if card.held_bytes:
            return f"card {index} still counts {card.held_bytes >> 20} MiB for the old engine"
        held = before[index] if before and index < len(before) else None
        if held and held.held_bytes == 0:
            continue  # it held nothing on this card
        if held and held.held_bytes is not None:
            taken = max(0, card.others_bytes - held.others_bytes)
            missing = held.free_bytes + held.held_bytes - card.free_bytes - taken
            if missing > SLACK_BYTES:
                return f"card {index} lacks {missing >> 20} MiB of what the old engine held"
        elif last is None or index >= len(last) or card.free_bytes - last[index].free_bytes > SETTLED_BYTES:
            return f"what is free on card {index} still grows"  # a decrease is a neighbour's
    return None


def _holding(nvml: Any, index: int, pids: Collection[int]) -> CardMemory:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    free = int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return CardMemory(free, None)
    mine, others = ([p.usedGpuMemory for p in running if (p.pid in pids) is ours] for ours in (True, False))
    # A container sees the sum, but neither the ids nor the memory of others' processes.
    if any(used is None for used in mine) or (not mine and pids and not running):
        return CardMemory(free, None)
    return CardMemory(free, sum(int(used) for used in mine), sum(int(used or 0) for used in others))
