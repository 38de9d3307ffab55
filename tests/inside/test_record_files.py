"""The files of a recording: private, whole, bounded."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.inside.recorder import RecordFiles

LINE = b"x" * 99 + b"\n"
STARTED = 1_700_000_000.0
STEM = f"requests-20231114T221320Z-{os.getpid()}"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_folder_and_the_file_are_for_this_user_alone(tmp_path: Path) -> None:
    """A folder that has to be made gets 0700, a file 0600."""
    files = RecordFiles(str(tmp_path / "new"), 1000, 8, STARTED)
    files.append(LINE)
    files.close()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert names(tmp_path / "new") == [f"{STEM}.jsonl"]
    assert stat.S_IMODE(Path(files.path).stat().st_mode) == 0o600


def test_a_full_file_is_followed_by_the_next_and_the_oldest_go(tmp_path: Path) -> None:
    """No file is larger than its bound, and no more are kept than were asked for."""
    files = RecordFiles(str(tmp_path), 250, 3, STARTED)
    for _ in range(11):
        files.append(LINE)
    files.close()
    assert names(tmp_path) == [f"{STEM}-0004.jsonl", f"{STEM}-0005.jsonl", f"{STEM}-0006.jsonl"]
    assert [file.stat().st_size for file in sorted(tmp_path.iterdir())] == [200, 200, 100]


def test_only_files_named_like_ours_are_removed(tmp_path: Path) -> None:
    """An operator's own files in that folder stay, old as they may be; so does a link with a name like ours."""
    (tmp_path / "target").write_bytes(b"keep me")
    for name in ("requests.jsonl", "requests-2023.jsonl", "notes.txt", "requests-20200101T000000Z-1.jsonl.gz"):
        (tmp_path / name).write_bytes(b"keep me")
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "requests-20200101T000000Z-3.jsonl"
    link.symlink_to(tmp_path / "target")
    os.utime(link, (0, 0), follow_symlinks=False)
    old = tmp_path / "requests-20200101T000000Z-1.jsonl"
    old.write_bytes(LINE)
    os.utime(old, (1, 1))
    files = RecordFiles(str(tmp_path), 1000, 1, STARTED)
    files.append(LINE)
    files.close()
    assert not old.exists()
    assert len(names(tmp_path)) == 7


def test_a_file_that_another_process_still_writes_is_left(tmp_path: Path) -> None:
    """Several API servers share a folder: what changed within the last minute may be in use."""
    other = tmp_path / "requests-20231114T221320Z-1.jsonl"
    other.write_bytes(LINE)
    files = RecordFiles(str(tmp_path), 1000, 1, STARTED)
    files.append(LINE)
    files.close()
    assert other.exists()


def test_a_file_of_the_same_name_is_never_written_over(tmp_path: Path) -> None:
    """In a container every start has the same process number, and may come within the same second."""
    (tmp_path / f"{STEM}.jsonl").write_bytes(LINE)
    files = RecordFiles(str(tmp_path), 1000, 8, STARTED)
    files.append(LINE)
    files.close()
    assert names(tmp_path) == [f"{STEM}-0002.jsonl", f"{STEM}.jsonl"]
    assert (tmp_path / f"{STEM}.jsonl").read_bytes() == LINE


def test_after_a_file_was_removed_by_hand_the_next_lines_have_a_new_one(tmp_path: Path) -> None:
    """Nothing is written to a file without a name."""
    files = RecordFiles(str(tmp_path), 1000, 8, STARTED)
    files.append(LINE)
    Path(files.path).unlink()
    files.append(LINE)
    files.close()
    assert names(tmp_path) == [f"{STEM}-0002.jsonl"]


def test_what_a_full_disk_cuts_off_is_taken_back(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: no half a line stays, and lines can follow later."""
    code = (
        "import resource, signal, sys\n"
        "from plimsoll.inside.recorder import RecordFiles\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "files = RecordFiles(sys.argv[1], 10_000, 8, 1.7e9)\n"
        "files.append(b'a' * 99 + b'\\n')\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))\n"
        "try:\n"
        "    files.append(b'b' * 99 + b'\\n')\n"
        "except OSError:\n"
        "    print('failed')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "files.append(b'c' * 99 + b'\\n')\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "failed\n"
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == b"a" * 99 + b"\n" + b"c" * 99 + b"\n"


def test_a_folder_that_cannot_be_made_is_an_error_each_time(tmp_path: Path) -> None:
    """The caller counts it and comes again."""
    (tmp_path / "file").write_bytes(b"")
    files = RecordFiles(str(tmp_path / "file" / "folder"), 1000, 8, STARTED)
    for _ in range(2):
        with pytest.raises(OSError, match="file"):
            files.append(LINE)
