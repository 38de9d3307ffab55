"""The log of a process that guard started: appended to by the process, kept small by guard, read by this user alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from plimsoll.guard.adapters.own_process import open_log, rotate

# Numbered lines as fast as it can, to the descriptor that it was given as stdout.
WRITER = "import os\nfor number in range(200000): os.write(1, b'line %d\\n' % number)"


def test_it_is_appended_to_and_private(tmp_path: Path) -> None:
    """What was there stays, and others may not read it, whatever they could before."""
    path = tmp_path / "engine.log"
    path.write_text("before\n")
    path.chmod(0o644)
    log = open_log(path)
    os.write(log, b"after\n")
    os.close(log)
    assert path.read_text() == "before\nafter\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_plain_file_is_a_log(tmp_path: Path, kind: str) -> None:
    """Neither a link, which would write elsewhere, nor a pipe, which would hang."""
    path = tmp_path / "engine.log"
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r".+"):
        open_log(path)
    assert not (tmp_path / "elsewhere").exists()


def test_small_and_absent_logs_are_left_alone(tmp_path: Path) -> None:
    """Nothing happens before its time."""
    path = tmp_path / "engine.log"
    assert rotate(path, 100) is False
    path.write_bytes(b"x" * 99)
    assert rotate(path, 100) is False
    assert path.stat().st_size == 99


def test_old_ones_move_on_and_the_oldest_goes(tmp_path: Path) -> None:
    """NAME.1 is the youngest, and there are no more than asked for."""
    path = tmp_path / "engine.log"
    for number in range(5):
        path.write_text(f"{number}" * 100)
        assert rotate(path, 100, kept=3)
    assert path.read_text() == ""
    assert sorted(one.name for one in tmp_path.iterdir()) == ["engine.log", "engine.log.1", "engine.log.2", "engine.log.3"]
    assert [(tmp_path / f"engine.log.{number}").read_text()[0] for number in (1, 2, 3)] == ["4", "3", "2"]
    assert stat.S_IMODE((tmp_path / "engine.log.1").stat().st_mode) == 0o600


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


def test_a_full_disk_leaves_the_log_as_it_is(tmp_path: Path) -> None:
    """There is nowhere to copy it to: it is not cut."""
    path = tmp_path / "engine.log"
    path.write_bytes(b"x" * 1000)
    (tmp_path / "engine.log.new").mkdir()
    with pytest.raises(OSError, match=r".+"):
        rotate(path, 100)
    assert path.stat().st_size == 1000
