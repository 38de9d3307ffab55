"""Where processes meet: a folder of this user alone, and who comes from whom."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import ancestors, is_alive, run_folder, server_key, start_ticks
from tests.inside.gate_processes import tell_key


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """With its parents, and the same at the second time; one that others may write to is closed to them."""
    wanted = tmp_path / "a" / "b"
    assert run_folder(str(wanted)) == run_folder(str(wanted)) == str(wanted)
    assert wanted.stat().st_mode & 0o777 == 0o700
    wanted.chmod(0o777)
    assert run_folder(str(wanted)) == str(wanted)
    assert wanted.stat().st_mode & 0o022 == 0


def test_what_is_no_folder_of_this_user_is_not_used(tmp_path: Path) -> None:
    """A file, a link, a place that cannot be made, one that somebody else made first: None, and it is counted."""
    before = FAULTS.counts.get("the shared folder", 0)
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link", "file/under"):
        assert run_folder(str(tmp_path / name)) is None
    assert run_folder("/proc/nowhere") is None
    assert FAULTS.counts["the shared folder"] == before + 4
    folder = tmp_path
    if os.getuid() == 0:
        os.chown(folder, 54321, -1)
    else:
        folder = Path("/")
    assert run_folder(str(folder)) is None


def test_ancestors_lead_to_the_first_process_and_a_zombie_is_not_alive() -> None:
    """Nearest first, each once; a process that is gone has itself alone; dead is dead before its parent has looked."""
    line = ancestors(os.getpid())
    assert line[:2] == [os.getpid(), os.getppid()]
    assert len(set(line)) == len(line)
    assert ancestors(2**22 + 5) == [2**22 + 5]
    assert ancestors(0) == ancestors(-1) == []
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid)
    process.wait()
    assert not is_alive(process.pid)
    assert start_ticks(process.pid) == 0
    assert is_alive(os.getpid())
    assert start_ticks(os.getpid()) > 0


def test_the_key_is_the_process_that_started_all_api_servers() -> None:
    """For one of several, by vLLM's name for it; any other process is a server of its own."""
    assert server_key() == os.getpid()
    context = multiprocessing.get_context("spawn")
    for name, is_one_of_several in (("ApiServer_0", True), ("Other-1", False)):
        here, there = context.Pipe()
        process = context.Process(target=tell_key, args=(there,), name=name)
        process.start()
        assert here.recv() == (os.getpid() if is_one_of_several else process.pid)
        process.join()
