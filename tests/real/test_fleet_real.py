"""The fleet's incidents as they run on a card, on stand-ins and on vLLM's CPU build: a dry run of lab/gpu/fleet.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.fleet_score import broken, figures
from tests.real.small_farm import need

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def play(work: Path, kind: str, incidents: str) -> None:
    """One fleet of plimsoll's way through these incidents."""
    need("haproxy", "haproxy")
    command = [sys.executable, "-m", "lab.gpu.fleet", "--kind", kind, "--fleets", "plimsoll", "--incidents", incidents]
    done = subprocess.run([*command, "--work", str(work)], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_planned_work_on_stand_ins_loses_nothing(tmp_path: Path) -> None:
    """A planned restart in which guard is killed, and played again: full service without a person, every answer whole."""
    play(tmp_path, "standin", "guard-drain")
    path = tmp_path / "rows" / "guard-drain-plimsoll-1.json"
    row = json.loads(path.read_text(encoding="utf-8"))
    assert "killed in step drain" in row["told"]
    assert broken([row]) == []
    changed = path.stat().st_mtime_ns
    play(tmp_path, "standin", "guard-drain")  # nothing is left to be played
    assert path.stat().st_mtime_ns == changed


def test_a_knob_and_a_killed_guard_of_the_real_vllm_lose_nothing(tmp_path: Path) -> None:
    """A knob is turned under load, then guard is killed in a drain: no request is lost, nobody has to come."""
    play(tmp_path, "cpu", "knob,guard-drain")
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((tmp_path / "rows").iterdir())]
    assert [row["incident"] for row in rows] == ["guard-drain", "knob"]
    assert broken(rows) == []


@pytest.mark.soak  # two real engines on two cores: a start takes minutes there
def test_a_killed_engine_core_of_the_real_vllm_is_back_in_service(tmp_path: Path) -> None:
    """Only what ran on the killed engine is cut; the engine is back without a person."""
    play(tmp_path, "cpu", "core")
    found = figures(json.loads((tmp_path / "rows" / "core-plimsoll-1.json").read_text(encoding="utf-8")))
    assert found.whole_s is not None
    assert (found.lost_later, found.persons) == (0, 0)
