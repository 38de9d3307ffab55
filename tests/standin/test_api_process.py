"""What a page says of the server's process is what the kernel says of it, and what a fault pretends."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from plimsoll.standin.serve.metrics import ProcessFigures
from tests.standin.engines import GIB, engine
from tests.standin.servers import standin
from tests.standin.test_api_admin import DEV

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel tells nothing of a process here")


def value_of(page: bytes, name: str) -> float:
    """The value of a metric without labels."""
    return next(float(line.split()[1]) for line in page.decode().splitlines() if line.startswith(f"{name} "))


def test_host_memory_is_the_process_own_and_what_a_fault_has_added() -> None:
    """One of a fleet leaves out processor time, files and address space, which cannot be told apart."""
    found = ProcessFigures(lambda: 5, is_alone=False, registry=CollectorRegistry()).collect()
    assert [metric.name for metric in found] == ["process_resident_memory_bytes", "process_start_time_seconds"]
    one = engine("host-growth@0s=1GiB")
    with standin(DEV, one=one) as server:
        before = value_of(server.ask("GET", "/metrics").body, "process_resident_memory_bytes")
        server.do(lambda: one.memory.grow_host(20 * GIB))
        after = value_of(server.ask("GET", "/metrics").body, "process_resident_memory_bytes")
        assert after - before > 19 * GIB
