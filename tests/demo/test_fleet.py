"""The fleet's files: a configuration that guard itself takes, and secrets that only this user can read."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.demo.fleet import NAMES, DemoFleet, run_plimsoll, unit, write_unit
from plimsoll.errors import WorldFailed
from plimsoll.guard.config import read_guard_config


def test_guard_takes_the_configuration_as_its_own_and_tokens_are_private(tmp_path: Path) -> None:
    """What the demo sets, anybody can set; two fleets share nothing, and only this user can read their tokens."""
    fleet = DemoFleet(tmp_path)
    path = tmp_path / "plimsoll.toml"
    path.write_text(fleet.config(), encoding="utf-8")
    found = read_guard_config(str(path))
    assert [engine.name for engine in found.engines] == list(NAMES)
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    one, two = DemoFleet(tmp_path / "x"), DemoFleet(tmp_path / "y")
    assert one.gate_token != two.gate_token
    for path in (tmp_path / "x").glob("*.token"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.real
def test_a_unit_starts_says_that_it_runs_and_stops(tmp_path: Path) -> None:
    """By the exit codes that guard asks of commands."""
    write_unit(tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"], {})
    environment = {**os.environ, "PLIMSOLL_DEADLINE_S": "2"}

    def ctl(verb: str) -> int:
        words = [sys.executable, "-m", "plimsoll.demo.fleet", str(tmp_path), verb]
        return subprocess.run(words, env=environment, capture_output=True, timeout=30, check=False).returncode

    assert ctl("is-running") == 3
    try:
        assert (ctl("start"), ctl("is-running"), ctl("pids")) == (0, 0, 0)
        assert (ctl("stop"), ctl("is-running"), ctl("explode")) == (0, 3, 2)
    finally:
        asyncio.run(unit(tmp_path).stop(0.1))


def test_a_command_that_hangs_is_ended() -> None:
    """And said in one line."""
    with pytest.raises(WorldFailed, match="did not end within"):
        asyncio.run(run_plimsoll("plan", "--help", limit_s=0.001))
