"""Waiting for what an old engine held: by its processes, and by the cards where NVML tells."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.guard.adapters.device_memory import CardMemory, DeviceMemory
from plimsoll.hardware.processes import read_process, read_processes
from tests.each import sure

GIB = 1 << 30


class NVMLError(Exception):
    """As the library's."""


def nvml(figures: Callable[[], tuple[int, list[tuple[int, int | None]] | None]] | None) -> Any:
    """The library with one card whose figures are what the test says now; without figures there is no driver."""

    def processes(_: int) -> list[Any]:
        if figures is None or (found := figures()[1]) is None:
            raise NVMLError
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found]

    def count() -> int:
        if figures is None:
            raise NVMLError
        return 1

    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=count, nvmlShutdown=count, nvmlDeviceGetCount=count, nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(free=figures()[0] if figures else 0),
        nvmlDeviceGetComputeRunningProcesses=processes,
    )  # fmt: skip


def test_without_a_card_the_processes_are_waited_for_and_a_card_gives_it_back_later() -> None:
    """A real process: unsure while it lives; of a card it is done when its memory is back, half a second after the process."""
    child = subprocess.Popen(["sleep", "60"])
    process = sure(read_process(child.pid))
    mark = (process.pid, process.start_ticks)
    memory = DeviceMemory(nvml(None), read_processes)
    early = asyncio.run(memory.wait_back([mark], None, 0.2))
    assert (early.is_done, early.message) == (None, "1 process(es) of the old engine still live, after 0.2 s")
    child.kill()
    late = asyncio.run(memory.wait_back([mark], None, 10.0))
    assert (late.is_done, late.message) == (True, "the old engine's processes are gone")
    child.wait()
    begun = time.monotonic()

    def figures() -> tuple[int, list[tuple[int, int | None]]]:
        is_back = time.monotonic() - begun > 0.7
        return (79 * GIB, []) if is_back else (9 * GIB, [(77, 70 * GIB)])

    card = DeviceMemory(nvml(figures), dict)
    before = card.look([77])
    assert before == [CardMemory(9 * GIB, 70 * GIB)]
    outcome = asyncio.run(card.wait_back([(77, 1)], before, 10.0))
    assert outcome.is_done, outcome
    assert time.monotonic() - begun > 0.7


def test_memory_that_does_not_come_back_is_said_and_what_a_neighbour_takes_is_not_waited_for() -> None:
    """How much, on which card; no answer is not free memory; a neighbour is told by its share, or by less free memory."""

    def hangs() -> tuple[int, None]:
        time.sleep(30)
        return 0, None

    memory = DeviceMemory(nvml(lambda: (20 * GIB, [])), dict)
    outcome = asyncio.run(memory.wait_back([(77, 1)], [CardMemory(9 * GIB, 70 * GIB)], 0.6))
    assert outcome.is_done is None
    assert "card 0 lacks 60416 MiB" in outcome.message
    for figures in (None, hangs):
        begun = time.monotonic()
        assert asyncio.run(DeviceMemory(nvml(figures), dict).wait_back([], [CardMemory(1, 1)], 0.1)).is_done is None
        assert time.monotonic() - begun < 25.0
    memory = DeviceMemory(nvml(lambda: (30 * GIB, [(88, 50 * GIB)])), dict)
    known = asyncio.run(memory.wait_back([(77, 1)], [CardMemory(9 * GIB, 70 * GIB, 1 * GIB)], 0.6))
    assert known.is_done, known
    gone = asyncio.run(memory.wait_back([(77, 1)], [CardMemory(9 * GIB, 70 * GIB, 50 * GIB)], 0.6))
    assert gone.is_done is None, "the neighbour held that before"
    free = iter(range(60, 0, -2))
    assert asyncio.run(DeviceMemory(nvml(lambda: (next(free) * GIB, None)), dict).wait_back([(77, 1)], None, 5.0)).is_done


@pytest.mark.parametrize("running", [None, [], [(77, None)]])
def test_where_nobody_tells_whose_memory_it_is_it_must_have_settled(running: list[tuple[int, int | None]] | None) -> None:
    """In a container the sum is all there is: done when it has stopped growing."""
    looks = 0

    def figures() -> tuple[int, list[tuple[int, int | None]] | None]:
        nonlocal looks
        looks += 1
        return min(looks, 5) * 10 * GIB, running

    memory = DeviceMemory(nvml(figures), dict)
    assert memory.look([77]) == [CardMemory(10 * GIB, None)]
    looks = 0
    outcome = asyncio.run(memory.wait_back([(77, 1)], [CardMemory(10 * GIB, None)], 10.0))
    assert outcome.is_done, outcome
    assert looks > 5
