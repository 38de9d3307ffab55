"""The fleet's incidents as they run on a card, on stand-ins and on vLLM's CPU build: a dry run of lab/gpu/fleet.py.

HAProxy, guard with its defaults and clients are the real ones; what must be true at each end is that of the recorded runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.fleet_score import broken, figures
from plimsoll.guard.act.journal_entry import OUTCOME
from plimsoll.guard.daemon.journal import read_journal
from tests.real.conftest import need_vllm
from tests.real.small_farm import need, ran

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.real, pytest.mark.once, pytest.mark.timeout(1500)]


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder whose path is short: vLLM's own sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-fleet-") as folder:
        yield Path(folder)


def play(work: Path, kind: str, *incidents: str) -> list[dict[str, Any]]:
    """One fleet of plimsoll's way through these incidents; a row for each, in their order."""
    need("haproxy", "haproxy")
    words = ("--kind", kind, "--fleets", "plimsoll", "--incidents", ",".join(incidents), "--work", str(work))
    done = ran(sys.executable, "-m", "lab.gpu.fleet", *words, cwd=ROOT, timeout=1400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    paths = [work / "rows" / f"{name}-plimsoll-1.json" for name in incidents]
    assert all(path.exists() for path in paths), done.stdout
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def test_on_stand_ins_nothing_is_lost_and_a_run_goes_on_where_it_stopped(work: Path) -> None:
    """Restarts in which guard is killed, in the drain and in the stop; what has been played is not played again."""
    assert broken(play(work, "standin", "guard-drain")) == []
    first = (work / "rows" / "guard-drain-plimsoll-1.json").stat().st_mtime_ns
    assert broken(play(work, "standin", "guard-drain", "guard-stop")) == []
    assert (work / "rows" / "guard-drain-plimsoll-1.json").stat().st_mtime_ns == first


def test_on_the_real_vllm_nobody_notices_what_guard_does(work: Path, record_property: Callable[[str, object], None]) -> None:
    """A knob, a compaction, guard killed in a drain and a start: 0 lost. A killed core: only what ran on it, with evidence."""
    need_vllm()
    rows = play(work, "cpu", "knob", "compact", "guard-drain", "guard-start", "core")
    assert broken(rows) == []
    journals = work.glob("plimsoll-*/**/guard.journal")
    kept = [one for path in journals for one in read_journal(path).entries if (one.kind, one.step) == (OUTCOME, "evidence")]
    assert "engine.dead" in max(kept, key=lambda one: one.at).fields["says"], "doctor's word on the killed engine"
    found = [(row["incident"], figures(row)) for row in rows]
    record_property("figures", {name: f"{one.asked} requests, {one.cut + one.lost} lost" for name, one in found})
