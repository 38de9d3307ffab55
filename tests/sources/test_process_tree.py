"""The machine's processes, read from the real /proc and from a made-up one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from plimsoll.sources.process_tree import boot_mark, read_process, read_processes


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
