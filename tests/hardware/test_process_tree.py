"""The machine's processes, read from the real /proc and from a made-up one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from plimsoll.guard.daemon.host import tree
from plimsoll.hardware.processes import Process, boot_mark, read_process, read_processes


def test_this_process_and_its_child() -> None:
    """Both are there, related as they are; one that is gone is not."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        table = read_processes()
        assert table[os.getpid()].is_alive
        assert (table[child.pid].parent, table[child.pid].session) == (os.getpid(), child.pid)
        child.kill()
    assert read_process(child.pid) is None


def test_a_proc_that_is_not_there_or_odd(tmp_path: Path) -> None:
    """Nothing is read, and nothing is raised."""
    assert read_processes(tmp_path / "none") == {}
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "stat").write_bytes(b"\xff\x00 nonsense")
    assert read_processes(tmp_path) == {}
    assert boot_mark(tmp_path) == ""


def test_all_that_a_process_started() -> None:
    """Children and theirs, nobody else; numbers that changed hands while they were read do not lead in a circle."""
    parents = {10: 1, 11: 10, 12: 11, 20: 1, 31: 32, 32: 31}
    table = {pid: Process(pid, parent, pid, "S", 5) for pid, parent in parents.items()}
    assert sorted(tree(table, 10)) == [10, 11, 12]
    assert tree(table, 99) == (99,)
    assert set(tree(table, 31)) == {31, 32}
