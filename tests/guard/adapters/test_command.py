"""An engine behind the user's own commands, with real ones."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from plimsoll.guard.adapters.command import CommandRestarter
from tests.each import each
from tests.guard.adapters.own_engine import is_alive


@pytest.fixture
def script(tmp_path: Path) -> str:
    """One that starts and stops a sleeping process."""
    path = tmp_path / "engine"
    shutil.copy(Path(__file__).with_name("played_engine.sh"), path)
    path.chmod(0o755)
    return str(path)


def restarter(script: str, stop: str = "stop", is_running: str = "is-running") -> CommandRestarter:
    engine = CommandRestarter(*([script, verb] for verb in (stop, "start", is_running, "pids")))
    engine.grace_s, engine.patience_s = 0.5, 0.0
    return engine


def test_start_and_stop(script: str, tmp_path: Path) -> None:
    """The service outlives the command that started it; the sentence is the command's, without its secrets."""
    engine = restarter(script)
    assert asyncio.run(engine.is_running()) is False
    started = asyncio.run(engine.start())
    assert (started.is_done, started.message) == (True, "started: on its way")
    assert asyncio.run(engine.is_running()) is True
    assert asyncio.run(engine.start()).facts == {"running": True}
    pid = int((tmp_path / "pid").read_text())
    assert asyncio.run(engine.pids()) == (pid,)
    assert is_alive(pid)
    stopped = asyncio.run(engine.stop(7.0))
    assert stopped.is_done, stopped
    assert "hf_0123" not in stopped.message
    assert not is_alive(pid)
    assert "stop 7" in (tmp_path / "asked").read_text().splitlines()


@each(
    ("stop", "is_done", "says"),
    [("nonsense", False, "ended with 7: what?"), ("lie", False, "but the engine runs"), ("hang", None, "did not end within")],
)
def test_a_stop_that_is_none(script: str, tmp_path: Path, stop: str, is_done: bool | None, says: str) -> None:
    """A command that fails, one that says it is done while the engine runs, one that hangs."""
    (tmp_path / "pid").write_text("0")
    outcome = asyncio.run(restarter(script, stop).stop(0.5))
    assert outcome.is_done is is_done
    assert says in outcome.message


def test_what_nobody_knows_to_run_is_neither_started_nor_stopped(script: str) -> None:
    """A command that fails, or does not exist, is nobody's knowledge."""
    for engine in (restarter(script, "lie", "nonsense"), CommandRestarter(["/no"], ["/no"], ["/no"])):
        assert asyncio.run(engine.is_running()) is None
        assert asyncio.run(engine.start()).is_done is False
        assert asyncio.run(engine.stop(1.0)).is_done is None
    assert asyncio.run(engine.pids()) == ()


@each(
    ("code", "is_running", "is_done"),
    [(0, True, False), (3, False, None), (150, False, True), (151, False, True), (1, None, None)],
)
def test_a_status_command_may_say_that_somebody_stopped_it(
    script: str, code: int, is_running: bool | None, is_done: bool | None
) -> None:
    """150: it does not run, and that is wanted; 151: it ended by itself; 3 says nothing of who wanted it."""
    engine = restarter(script, is_running=str(code))
    assert asyncio.run(engine.is_running()) is is_running
    outcome = asyncio.run(engine.last_exit())
    assert (outcome.is_done, outcome.facts.get("by_hand", False)) == (is_done, code == 150)
