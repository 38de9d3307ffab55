"""A process that guard starts itself, with real processes: how it is started, found again, and stopped whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.hardware.processes import boot_mark, read_process, read_processes
from tests.guard.adapters.own_engine import ROOT, end_all, is_alive, own, wait_up

PLACES = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
CGROUPS = next((path for path in PLACES if (path / "cgroup.procs").exists()), None)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For one engine; nothing of it survives the test."""
    yield tmp_path
    end_all(tmp_path)


def signalled(folder: Path) -> list[str]:
    path = folder / "signals"
    return path.read_text().split() if path.exists() else []


def started(folder: Path, manner: str, **more: Any) -> tuple[OwnProcess, dict[str, int]]:
    engine = own(folder, manner, **more)
    outcome = asyncio.run(engine.start())
    assert outcome.is_done, outcome
    return engine, wait_up(folder)


def test_it_starts_in_its_own_session_with_its_output_in_a_file(folder: Path) -> None:
    """stdin is empty, the log is this user's alone, the environment is the one given, and nothing is shared with guard."""
    engine, pids = started(folder, "polite")
    process = read_process(pids["api"])
    assert process is not None
    assert process.session == pids["api"]
    assert Path(f"/proc/{pids['api']}/fd/0").readlink() == Path("/dev/null")
    assert Path(f"/proc/{pids['api']}/fd/1").readlink() == folder / "engine.log"
    assert (folder / "engine.log").read_text() == "serving hello\n"
    assert stat.S_IMODE((folder / "engine.log").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "engine.json").stat().st_mode) == 0o600
    assert "HOME" not in Path(f"/proc/{pids['api']}/environ").read_text()
    handles = [str(entry.readlink()) for entry in Path(f"/proc/{pids['api']}/fd").iterdir()]
    assert not [handle for handle in handles if handle.startswith("pipe:")], "the way it was started is closed"
    assert asyncio.run(engine.is_running()) is True
    assert asyncio.run(engine.pids()) == (pids["api"], *sorted((pids["core"], pids["worker"])))


def test_a_polite_engine_is_signalled_alone_and_ends_whole(folder: Path) -> None:
    """SIGTERM reaches the API server and no other; its exit code is seen, nothing is left and nothing was killed."""
    engine, pids = started(folder, "polite")
    outcome = asyncio.run(engine.stop(10.0))
    assert outcome.is_done, outcome
    assert outcome.facts == {"how": "term", "killed": 0, "left": 0, "was_running": True, "asked": True, "exit_code": 0}
    assert signalled(folder) == ["api"]
    assert not any(is_alive(pid) for pid in pids.values())
    assert asyncio.run(engine.is_running()) is False
    assert asyncio.run(engine.stop(1.0)).facts["was_running"] is False, "stopping twice does the same as once"


def test_a_deaf_engine_is_killed_with_all_it_has(folder: Path) -> None:
    """Past the deadline everything goes, also what is in a session of its own."""
    engine, pids = started(folder, "deaf")
    outcome = asyncio.run(engine.stop(0.5))
    assert outcome.is_done, outcome
    assert (outcome.facts["how"], outcome.facts["killed"], outcome.facts["left"]) == ("kill", 3, 0)
    assert (outcome.facts["exit_code"], outcome.facts["signal"]) == (137, 9)
    assert not any(is_alive(pid) for pid in pids.values())


def test_what_an_engine_leaves_behind_goes_too(folder: Path) -> None:
    """An API server that ends alone leaves workers with the card's memory: they have a moment, and are killed then."""
    engine, pids = started(folder, "leaves", orphans_s=0.3)
    outcome = asyncio.run(engine.stop(10.0))
    assert (outcome.facts["how"], outcome.facts["killed"]) == ("term", 2)
    assert not any(is_alive(pid) for pid in pids.values())
    assert signalled(folder) == ["api"]


def test_a_stopped_engine_is_killed_as_well(folder: Path) -> None:
    """One that stands still (SIGSTOP) reads no signal; SIGKILL does not ask."""
    engine, pids = started(folder, "polite")
    os.kill(pids["api"], signal.SIGSTOP)
    outcome = asyncio.run(engine.stop(0.3))
    assert (outcome.is_done, outcome.facts["how"]) == (True, "kill")
    assert not any(is_alive(pid) for pid in pids.values())


def test_an_exit_of_0_that_nobody_asked_for_is_told_as_such(folder: Path) -> None:
    """Its code is 0, and it was not asked; the rest of it keeps a new one from starting until it is cleared away."""
    engine, pids = started(folder, "crash")

    async def look() -> None:
        await engine.pids()
        while await engine.is_running():
            await asyncio.sleep(0.02)
        outcome = await engine.last_exit()
        assert outcome.facts == {"exit_code": 0, "asked": False}
        assert "without having been asked" in outcome.message
        refused = await engine.start()
        assert (refused.is_done, refused.facts["left"]) == (False, 2)
        assert (await engine.stop(1.0)).facts["killed"] == 2
        again = await engine.start()
        assert again.is_done, again

    asyncio.run(look())
    assert not is_alive(pids["worker"])
    asyncio.run(engine.stop(0.2))


def test_start_refuses_while_the_old_one_lives(folder: Path) -> None:
    """Two engines on one card is what must never be."""
    engine, pids = started(folder, "polite")
    outcome = asyncio.run(engine.start())
    assert outcome == Outcome(False, f"it runs already, as pid {pids['api']}", {"pid": pids["api"], "running": True})
    assert asyncio.run(own(folder).start()).facts["running"], "also by another guard"
    asyncio.run(engine.stop(10.0))
    assert asyncio.run(engine.start()).is_done
    assert json.loads((folder / "engine.json").read_text())["asked"] is False


@pytest.mark.parametrize("command", [["/nonexistent/vllm"], ["/etc/passwd"], ["a\0b"]])
def test_a_command_that_cannot_be_run(folder: Path, command: list[str]) -> None:
    """One sentence, no process, and the next start is free."""
    engine = OwnProcess(
        command, environment={}, state_path=folder / "engine.json", log_path=folder / "log", processes=read_processes, boot="b"
    )
    outcome = asyncio.run(engine.start())
    assert outcome.is_done is False
    assert "cannot be started" in outcome.message
    assert asyncio.run(engine.is_running()) is False


def test_guard_is_killed_and_another_takes_over(folder: Path) -> None:
    """SIGKILL of the starter leaves the engine untouched; the next guard holds it, knows its tree, and stops all of it."""
    words = [sys.executable, "-m", "tests.guard.adapters.own_engine", str(folder), "polite"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        starter.kill()
    pids = wait_up(folder)
    time.sleep(0.2)
    assert all(is_alive(pid) for pid in pids.values())
    assert signalled(folder) == []

    other = own(folder)
    assert asyncio.run(other.is_running()) is True
    assert set(asyncio.run(other.pids())) == set(pids.values())
    outcome = asyncio.run(other.stop(10.0))
    assert (outcome.is_done, outcome.facts["how"], outcome.facts["asked"]) == (True, "term", True)
    assert "exit_code" not in outcome.facts, "it was not this guard's child"
    assert not any(is_alive(pid) for pid in pids.values())
    assert "nobody saw" in asyncio.run(other.last_exit()).message


def test_what_an_adopted_engine_left_in_other_sessions_is_known(folder: Path) -> None:
    """The API server was killed while no guard looked: the notes of the one before lead to its workers all the same."""
    words = [sys.executable, "-m", "tests.guard.adapters.own_engine", str(folder), "polite"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        starter.kill()
    pids = wait_up(folder)
    os.kill(pids["api"], signal.SIGKILL)
    while is_alive(pids["api"]):
        time.sleep(0.01)
    other = own(folder)
    assert asyncio.run(other.is_running()) is False
    assert set(asyncio.run(other.pids())) == {pids["core"], pids["worker"]}
    assert asyncio.run(other.start()).facts == {"left": 2}
    assert asyncio.run(other.stop(1.0)).facts["killed"] == 2


@pytest.mark.parametrize(
    ("change", "is_running"),
    [({"start_ticks": 12345}, False), ({"session": 2}, False), ({"boot": "another"}, False), ({"command": "0" * 64}, None)],
)
def test_only_what_agrees_in_everything_is_adopted(folder: Path, change: dict[str, Any], is_running: bool | None) -> None:
    """Another process with the number, another boot: not ours. Another command: ours, but not to be touched."""
    _, pids = started(folder, "polite")
    path = folder / "engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    other = own(folder)
    assert asyncio.run(other.is_running()) is is_running
    if is_running is None:
        for outcome in (asyncio.run(other.stop(0.1)), asyncio.run(other.start())):
            assert outcome.is_done is False
            assert "another command" in outcome.message
    elif "boot" in change:
        assert asyncio.run(other.stop(0.1)).facts["was_running"] is False
    assert is_alive(pids["api"])
    assert signalled(folder) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema":"plimsoll.own-process/1"}', '{"schema":"x","pid":1}'])
def test_a_damaged_state_file_stops_everything(folder: Path, text: str) -> None:
    """Nobody knows what runs: nothing is started beside it, and the sentence says what to do."""
    (folder / "engine.json").write_text(text)
    engine = own(folder)
    assert asyncio.run(engine.is_running()) is None
    for outcome in (asyncio.run(engine.start()), asyncio.run(engine.stop(0.1))):
        assert outcome.is_done is False
        assert "engine.json" in outcome.message
    assert asyncio.run(engine.last_exit()).is_done is False


def test_a_guard_that_dies_before_it_has_written_leaves_no_engine(folder: Path) -> None:
    """The state file cannot be written: the process never becomes the engine."""
    engine = own(folder, state_path=folder / "engine.json")
    (folder / ".engine.json.new").mkdir()  # nothing can be written in its place
    outcome = asyncio.run(engine.start())
    assert outcome.is_done is False
    time.sleep(0.3)
    assert not (folder / "api").exists()
    assert (folder / "engine.log").read_text() == ""


# Starts a command and is killed while it writes down whom it has started.
DIES = """
import os, signal, sys
from plimsoll.guard.adapters.own_process import start
def write_down(pid):
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
start(["touch", sys.argv[1]], {"PATH": os.environ["PATH"]}, None, 2, write_down)
"""


def test_a_guard_that_is_killed_before_it_has_written(folder: Path) -> None:
    """The process waits to be written down: with its starter dead it ends, and never becomes the engine."""
    words = [sys.executable, "-c", DIES, str(folder / "ran")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
    while is_alive(pid):
        time.sleep(0.01)
    time.sleep(0.2)
    assert not (folder / "ran").exists()


def test_two_guards_start_one_engine(folder: Path) -> None:
    """Of two that start it at once only one does, and the other then knows of it, though it had another before."""
    one, other = own(folder), own(folder)

    async def act() -> tuple[Outcome, Outcome]:
        assert (await other.start()).is_done
        await asyncio.to_thread(wait_up, folder)
        assert (await other.stop(10.0)).is_done
        return await asyncio.gather(one.start(), other.start())

    outcomes = asyncio.run(act())
    assert sorted(outcome.is_done is True for outcome in outcomes) == [False, True], outcomes
    pid = next(outcome.facts["pid"] for outcome in outcomes if outcome.is_done)
    for engine in (one, other):
        assert asyncio.run(engine.is_running()) is True
        assert asyncio.run(engine.pids())[0] == pid
    assert asyncio.run(own(folder).stop(10.0)).is_done


def test_a_quick_end_is_no_failure_to_start_but_is_seen(folder: Path) -> None:
    """It began and ended with 3 at once: both are known."""
    engine = own(folder, "quick")

    async def look() -> Outcome:
        assert (await engine.start()).is_done
        while await engine.is_running():
            await asyncio.sleep(0.02)
        return await engine.last_exit()

    assert asyncio.run(look()).facts == {"exit_code": 3, "asked": False}


@pytest.mark.skipif(CGROUPS is None, reason="needs a control group (v2) that this user may write to")
def test_in_a_control_group_of_its_own(folder: Path) -> None:
    """Where guard may make one, all of the tree is in it, and it is gone when the engine is."""
    assert CGROUPS is not None
    engine = own(folder, "deaf", cgroup_parent=CGROUPS)
    assert asyncio.run(engine.start()).is_done
    pids = wait_up(folder)
    group = json.loads((folder / "engine.json").read_text())["cgroup"]
    if not group:
        pytest.skip("this user may make no control group")
    assert {int(line) for line in (Path(group) / "cgroup.procs").read_text().split()} == set(pids.values())
    assert asyncio.run(engine.stop(0.2)).is_done
    assert not any(is_alive(pid) for pid in pids.values())
    assert not Path(group).exists()


def test_boot_mark_is_of_this_boot() -> None:
    """The same each time it is read, and not empty on Linux."""
    assert boot_mark() == boot_mark() != ""
