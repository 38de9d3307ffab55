"""Our figures on vLLM's page: the names that the rest reads, counters that never go back, whole things counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, generate_latest

from plimsoll.doctor.rules.trend_growth import EXTERNAL_METRICS
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.meters import METERS, Meters
from tests.inside.test_endpoints import put_figures
from tests.inside.test_gate_control import feed, made

ROOT = Path(__file__).parents[2]


def values(page: str | None = None) -> dict[str, float]:
    text = generate_latest(REGISTRY).decode() if page is None else page
    lines = [line for line in text.splitlines() if line.startswith("plimsoll_")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def worker(name: str) -> str:
    return f'{name}{{engine="0",worker="0"}}'


ALLOCATOR: dict[str, Any] = {
    "allocated": 1000, "reserved": 1500, "inactive_split": 100, "releasable": 400, "alloc_retries": 2, "ooms": 1
}  # fmt: skip


def test_names_are_those_that_doctor_reads(tmp_path: Path) -> None:
    """Every name of ours in the table of outside metrics is on the page, to the letter."""
    core, _ = made(tmp_path)
    put_figures(tmp_path, allocator=ALLOCATOR)
    Meters(core).refresh()
    names = {name.partition("{")[0] for name in values()}
    ours = {name for name in EXTERNAL_METRICS if name.startswith("plimsoll_")}
    assert ours
    assert ours <= names
    assert values()[worker("plimsoll_torch_allocated_bytes")] == 1000
    assert worker("plimsoll_torch_segments") not in values(), "what is not known is not there"


def test_everything_that_is_named_can_be_set(tmp_path: Path) -> None:
    """No metric without its sentence, none twice; ready, phases and reasons follow the core."""
    core, client = made(tmp_path)
    assert len({meter.name for meter in METERS}) == len(METERS)
    assert all(meter.says.endswith(".") for meter in METERS)
    meters = Meters(core)
    meters.refresh()
    assert values()["plimsoll_ready"] == 1
    client.errored = True
    meters.refresh()
    found = values()
    assert found["plimsoll_ready"] == 0
    assert found['plimsoll_not_ready{reason="dead"}'] == 1
    assert found['plimsoll_not_ready{reason="asleep"}'] == 0
    assert found["plimsoll_engine_last_step_age_seconds"] != found["plimsoll_engine_last_step_age_seconds"], "NaN: none seen"
    feed(core, 1, 0)
    core.publish_queue()
    meters.refresh()
    assert values()["plimsoll_engine_last_step_age_seconds"] < 5


def test_registering_twice_counts_once(tmp_path: Path) -> None:
    """A second set of meters takes over the first one's, and what was counted is not counted again."""
    core, _ = made(tmp_path)
    first = Meters(core)
    first.refresh()
    before = values()["plimsoll_begun_total"]
    for _ in range(5):
        core.enter()
        core.begin()
    first.refresh()
    Meters(core).refresh()
    first.refresh()
    assert values()["plimsoll_begun_total"] == before + 5
    assert values()["plimsoll_in_flight"] == 5


def test_counters_never_go_back_and_a_new_worker_counts_on(tmp_path: Path) -> None:
    """Its total begins at nothing; what it then has is added."""
    core, _ = made(tmp_path)
    meters = Meters(core)
    seen = []
    for retries in (7, 7, 9, 1, 1, 4):
        put_figures(tmp_path, allocator={**ALLOCATOR, "alloc_retries": retries})
        meters.refresh()
        seen.append(values()[worker("plimsoll_torch_num_alloc_retries_total")])
    assert [value - seen[0] for value in seen] == [0, 0, 2, 3, 3, 6]


def test_one_worker_s_rubbish_does_not_hide_the_others(tmp_path: Path) -> None:
    """It is counted, and the rest is fresh."""
    core, _ = made(tmp_path)
    put_figures(tmp_path, allocator={**ALLOCATOR, "allocated": "much"})
    put_figures(tmp_path, allocator={**ALLOCATOR, "allocated": 5}, rank=1, pid=1)
    before = FAULTS.counts.get("a worker's metrics", 0)
    Meters(core).refresh()
    assert FAULTS.counts["a worker's metrics"] == before + 1
    assert values()['plimsoll_torch_allocated_bytes{engine="0",worker="1"}'] == 5


def test_with_several_api_servers_parts_add_up_and_whole_things_do_not(tmp_path: Path) -> None:
    """In prometheus_client's several-process mode, as vLLM runs it: one page from two processes."""
    (tmp_path / "metrics").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.inside.gate_processes", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = values(done.stdout)
    assert (found["plimsoll_in_flight"], found["plimsoll_begun_total"]) == (7, 7)
    assert (found["plimsoll_ready"], found["plimsoll_drain_phase"]) == (1, 0)
    assert found[worker("plimsoll_torch_allocated_bytes")] == 1000
    assert found[worker("plimsoll_torch_num_alloc_retries_total")] == 5
