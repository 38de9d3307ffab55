"""What a page says of the server's process is what the kernel says of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from plimsoll.standin.serve.metrics import process_figures
from tests.standin.engines import GIB, engine
from tests.standin.servers import standin
from tests.standin.test_api_admin import DEV

HAS_PROC = Path("/proc/self/stat").exists()


def value_of(page: bytes, name: str) -> float:
    """The value of a metric without labels."""
    return next(float(line.split()[1]) for line in page.decode().splitlines() if line.startswith(f"{name} "))


@pytest.mark.skipif(not HAS_PROC, reason="the kernel tells nothing of a process here")
def test_the_figures_are_this_process_own() -> None:
    """Memory, files, time and start are those of this process, not made up."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith(("VmSize", "VmRSS"))}
    found = process_figures()
    assert found.virtual == pytest.approx(kib["VmSize"] * 1024, rel=0.1)
    assert found.resident == pytest.approx(kib["VmRSS"] * 1024, rel=0.1)
    assert found.open_fds == pytest.approx(len(os.listdir("/proc/self/fd")), abs=3)  # noqa: PTH208
    assert found.cpu_seconds == pytest.approx(time.process_time(), abs=1)
    assert found.start_time is not None
    assert 0 < time.time() - found.start_time < 86_400


def test_without_proc_nothing_is_said(tmp_path: Path) -> None:
    """A Mac's page has no lines of the process, as with Prometheus' own client."""
    found = process_figures(5, proc=tmp_path)
    assert (found.virtual, found.resident, found.start_time, found.cpu_seconds, found.open_fds, found.max_fds) == (None,) * 6
    assert found.python is not None


@pytest.mark.skipif(not HAS_PROC, reason="the kernel tells nothing of a process here")
def test_one_of_a_fleet_does_not_tell_what_all_use() -> None:
    """Processor time, files and address space cannot be told apart and are left out."""
    found = process_figures(is_alone=False)
    assert (found.virtual, found.cpu_seconds, found.open_fds, found.max_fds) == (None,) * 4
    assert found.resident is not None


@pytest.mark.skipif(not HAS_PROC, reason="the kernel tells nothing of a process here")
def test_host_memory_that_grows_by_a_fault_shows_on_the_page() -> None:
    """What is resident is the process' own, and what the fault has added."""
    one = engine("host-growth@0s=1GiB")
    with standin(DEV, one=one) as server:
        before = value_of(server.ask("GET", "/metrics").body, "process_resident_memory_bytes")
        assert before < process_figures().resident + GIB  # type: ignore[operator]
        server.do(lambda: one.memory.grow_host(20 * GIB))
        after = value_of(server.ask("GET", "/metrics").body, "process_resident_memory_bytes")
        assert after - before > 19 * GIB
