"""A process that guard starts itself, with real processes: how it is started, found again, and stopped whole; and its log."""

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.adapters.own_process import NEW_LIFE, OwnProcess, open_log, rotate
from plimsoll.hardware.processes import read_process, read_processes
from tests.each import cases, in_loop, sure
from tests.fakes import eventually
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
    assert sure(read_process(pids["api"])).session == pids["api"]
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


@pytest.mark.parametrize(("manner", "deadline_s", "facts"), cases("guard", "ends of an own process"))
def test_it_is_signalled_alone_and_ends_whole(folder: Path, manner: str, deadline_s: float, facts: dict[str, Any]) -> None:
    """SIGTERM reaches the API server and no other; past the deadline, or a moment after it ended, what is left is killed."""
    engine, pids = started(folder, "polite" if manner == "stopped" else manner, orphans_s=0.3)
    if manner == "stopped":
        os.kill(pids["api"], signal.SIGSTOP)
    outcome = asyncio.run(engine.stop(deadline_s))
    assert outcome.is_done, outcome
    assert outcome.facts == {"left": 0, "was_running": True, "asked": True, **facts}
    assert signalled(folder) == ([] if manner == "stopped" else ["api"])
    assert not any(is_alive(pid) for pid in pids.values())
    assert asyncio.run(engine.is_running()) is False
    assert asyncio.run(engine.stop(1.0)).facts["was_running"] is False, "stopping twice does the same as once"


@in_loop
async def test_an_exit_of_0_that_nobody_asked_for_is_told_as_such(folder: Path) -> None:
    """Its code is 0, and it was not asked; the rest of it keeps a new one from starting until it is cleared away."""
    engine = own(folder, "crash")
    assert (await engine.start()).is_done
    pids = await asyncio.to_thread(wait_up, folder)
    await engine.pids()
    while await engine.is_running():
        await asyncio.sleep(0.02)
    outcome = await engine.last_exit()
    assert outcome.facts == {"exit_code": 0, "asked": False}
    assert "without having been asked" in outcome.message
    refused = await engine.start()
    assert (refused.is_done, refused.facts["left"]) == (False, 2)
    assert (await engine.stop(1.0)).facts["killed"] == 2
    assert (await engine.start()).is_done
    assert not is_alive(pids["worker"])
    await engine.stop(0.2)


def test_what_refuses_a_start_and_what_fails_it(folder: Path) -> None:
    """Never two engines on one card; of a command that cannot be run one sentence, no process, and a free next start."""
    engine, pids = started(folder, "polite")
    outcome = asyncio.run(engine.start())
    assert outcome == Outcome(False, f"it runs already, as pid {pids['api']}", {"pid": pids["api"], "running": True})
    assert asyncio.run(own(folder).start()).facts["running"], "also by another guard"
    asyncio.run(engine.stop(10.0))
    assert asyncio.run(engine.start()).is_done
    assert json.loads((folder / "engine.json").read_text())["asked"] is False
    for command in (["/nonexistent/vllm"], ["/etc/passwd"], ["a\0b"]):
        engine = OwnProcess(
            command, environment={}, state_path=folder / "engine.json", log_path=folder / "log", processes=read_processes,
            boot="b",
        )  # fmt: skip
        outcome = asyncio.run(engine.start())
        assert outcome.is_done is False
        assert "cannot be started" in outcome.message
        assert asyncio.run(engine.is_running()) is False
    engine = own(folder, "quick")
    assert asyncio.run(engine.start()).is_done
    eventually(lambda: not asyncio.run(engine.is_running()))
    assert asyncio.run(engine.last_exit()).facts == {"exit_code": 3, "asked": False}


@pytest.mark.parametrize("is_orphaned", [False, True])
def test_guard_is_killed_and_another_takes_over(folder: Path, is_orphaned: bool) -> None:
    """The next guard holds the engine, which is untouched, and stops all of it, also where the API server died meanwhile."""
    words = [sys.executable, "-m", "tests.guard.adapters.own_engine", str(folder), "polite"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as starter:
        assert sure(starter.stdout).readline() == b"started\n"
        starter.kill()
    pids, other = wait_up(folder), own(folder)
    assert all(is_alive(pid) for pid in pids.values())
    if is_orphaned:
        os.kill(pids["api"], signal.SIGKILL)
        eventually(lambda: not is_alive(pids["api"]))
    assert asyncio.run(other.is_running()) is not is_orphaned
    assert set(asyncio.run(other.pids())) == {pid for name, pid in pids.items() if name != "api" or not is_orphaned}
    if is_orphaned:
        assert asyncio.run(other.start()).facts == {"left": 2}
    outcome = asyncio.run(other.stop(10.0))
    how = ("none", 2, False) if is_orphaned else ("term", 0, True)
    assert (outcome.is_done, outcome.facts["how"], outcome.facts["killed"], outcome.facts["asked"]) == (True, *how)
    assert "exit_code" not in outcome.facts, "it was not this guard's child"
    assert not any(is_alive(pid) for pid in pids.values())
    assert "nobody saw" in asyncio.run(other.last_exit()).message


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


def test_a_damaged_state_file_stops_everything_and_a_killed_guard_leaves_no_process(folder: Path) -> None:
    """Nothing is started beside what nobody knows; a process that is not written down yet never becomes the engine."""
    for text in ("", "{", "[]", '{"schema":"plimsoll.own-process/1"}', '{"schema":"x","pid":1}'):
        (folder / "engine.json").write_text(text)
        engine = own(folder)
        assert asyncio.run(engine.is_running()) is None
        for outcome in (asyncio.run(engine.start()), asyncio.run(engine.stop(0.1))):
            assert outcome.is_done is False
            assert "engine.json" in outcome.message
        assert asyncio.run(engine.last_exit()).is_done is False
    (folder / "engine.json").unlink()
    (folder / ".engine.json.new").mkdir()  # nothing can be written in its place
    assert asyncio.run(own(folder).start()).is_done is False
    words = [sys.executable, "-c", DIES, str(folder / "ran")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}) as starter:
        pid = int(sure(starter.stdout).readline())
    eventually(lambda: not is_alive(pid))
    time.sleep(0.2)
    assert not (folder / "ran").exists()
    assert not (folder / "api").exists()
    assert (folder / "engine.log").read_text() == ""


# Starts a command and is killed while it writes down whom it has started.
DIES = """
import os, signal, sys
from plimsoll.guard.adapters.own_process import start
def write_down(pid):
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
start(["touch", sys.argv[1]], {"PATH": os.environ["PATH"]}, 2, write_down)
"""


@in_loop
async def test_two_guards_start_one_engine(folder: Path) -> None:
    """Of two that start it at once only one does, and the other then knows of it, though it had another before."""
    one, other = own(folder), own(folder)
    assert (await other.start()).is_done
    await asyncio.to_thread(wait_up, folder)
    assert (await other.stop(10.0)).is_done
    outcomes = await asyncio.gather(one.start(), other.start())
    assert sorted(outcome.is_done is True for outcome in outcomes) == [False, True], outcomes
    pid = next(outcome.facts["pid"] for outcome in outcomes if outcome.is_done)
    for engine in (one, other):
        assert await engine.is_running() is True
        assert (await engine.pids())[0] == pid
    assert (await own(folder).stop(10.0)).is_done


@pytest.mark.skipif(CGROUPS is None, reason="needs a control group (v2) that this user may write to")
def test_in_a_control_group_of_its_own(folder: Path) -> None:
    """Where guard may make one, all of the tree is in it, and it is gone when the engine is."""
    engine = own(folder, "deaf", cgroup_parent=sure(CGROUPS))
    assert asyncio.run(engine.start()).is_done
    pids = wait_up(folder)
    group = json.loads((folder / "engine.json").read_text())["cgroup"]
    if not group:
        pytest.skip("this user may make no control group")
    assert {int(line) for line in (Path(group) / "cgroup.procs").read_text().split()} == set(pids.values())
    assert asyncio.run(engine.stop(0.2)).is_done
    assert not any(is_alive(pid) for pid in pids.values())
    assert not Path(group).exists()


# Its log

# Numbered lines as fast as it can, to the descriptor that it was given as stdout.
WRITER = "import os\nfor number in range(200000): os.write(1, b'line %d\\n' % number)"


def test_a_log_is_a_plain_file_that_is_appended_to_and_private(tmp_path: Path) -> None:
    """What was there stays, and others may not read it; a link would write elsewhere, and a pipe would hang."""
    path = tmp_path / "engine.log"
    path.write_text("before\n")
    path.chmod(0o644)
    log = open_log(path)
    os.write(log, b"after\n")
    os.close(log)
    assert path.read_text() == f"before\n\n{NEW_LIFE.decode()}after\n"
    fresh = tmp_path / "fresh.log"
    os.close(open_log(fresh))
    assert fresh.read_bytes() == b"", "its first line is the server's own"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for kind in ("link", "pipe", "folder"):
        with pytest.raises(OSError, match=r".+"):
            open_log(tmp_path / kind)
    assert not (tmp_path / "elsewhere").exists()


def test_old_ones_move_on_and_the_oldest_goes_and_a_copy_is_whole_before_the_log_is_cut(tmp_path: Path) -> None:
    """NAME.1 is the youngest, there are no more than asked for; whoever ends guard amid it, or a full disk, loses nothing."""
    path = tmp_path / "engine.log"
    assert rotate(path, 100) is False
    path.write_bytes(b"x" * 99)
    assert rotate(path, 100) is False
    assert path.stat().st_size == 99
    for number in range(5):
        path.write_text(f"{number}" * 100)
        assert rotate(path, 100, kept=3)
    assert path.read_text() == ""
    assert sorted(one.name for one in tmp_path.iterdir()) == ["engine.log", "engine.log.1", "engine.log.2", "engine.log.3"]
    assert [(tmp_path / f"engine.log.{number}").read_text()[0] for number in (1, 2, 3)] == ["4", "3", "2"]
    assert stat.S_IMODE((tmp_path / "engine.log.1").stat().st_mode) == 0o600
    kept, is_over = list[bytes](), list[bool]()

    def look(event: str, _arguments: object) -> None:  # Python tells it of every file that is cut
        if event == "os.truncate" and not is_over:
            kept.append((tmp_path / "engine.log.1").read_bytes())

    path.write_bytes(b"x" * 1000)
    sys.addaudithook(look)
    try:
        assert rotate(path, 100)
    finally:
        is_over.append(True)
    assert kept == [b"x" * 1000]
    path.write_bytes(b"x" * 1000)
    (tmp_path / "engine.log.new").mkdir()
    with pytest.raises(OSError, match=r".+"):
        rotate(path, 100)
    assert path.stat().st_size == 1000


def test_a_process_writes_on_while_its_log_is_cut(tmp_path: Path) -> None:
    """Whatever it floods the log with: the order holds, and only at a cut can lines be missing."""
    path = tmp_path / "engine.log"
    log = open_log(path)
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=log) as writer:
        os.close(log)
        while writer.poll() is None:
            rotate(path, 200_000, kept=50)
            time.sleep(0.02)
    names = [f"engine.log.{number}" for number in range(50, 0, -1)] + ["engine.log"]
    texts = [(tmp_path / name).read_text() for name in names if (tmp_path / name).exists()]
    kept = [line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]  # the others were cut
    numbers = [int(line.split()[1]) for line in kept if line.startswith("line ")]
    assert len(texts) > 3
    assert numbers == sorted(numbers)
    gaps = [after - before for before, after in pairwise(numbers) if after != before + 1]
    assert len(gaps) < len(texts)
    assert numbers[0] == 0
    assert len(numbers) > 100_000, gaps
