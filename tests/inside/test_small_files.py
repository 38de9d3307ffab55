"""Small files between processes: whole or not at all, and distrusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll.inside.figures import read_whole, write_whole


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    """For this user's eyes only, nothing left beside it; what is no JSON or has no folder leaves the old one."""
    write_whole(str(tmp_path), "core-7", {"a": [1, None]})
    path = tmp_path / "core-7.json"
    assert read_whole(str(path), 100) == {"a": [1, None]}
    assert [one.name for one in tmp_path.iterdir()] == ["core-7.json"]
    assert path.stat().st_mode & 0o077 == 0
    write_whole(str(tmp_path), "core-7", {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_whole(str(tmp_path), "core-7", {"a": float("nan")})
    with pytest.raises(FileNotFoundError):
        write_whole(str(tmp_path / "gone"), "core-7", {})
    assert read_whole(str(tmp_path / "core-7.json"), 100) == {"a": 1}


def test_a_link_a_pipe_or_a_huge_file_is_refused(tmp_path: Path) -> None:
    """A reader must not follow, wait or swallow."""
    write_whole(str(tmp_path), "core-7", {"a": "x" * 200})
    path = tmp_path / "core-7.json"
    with pytest.raises(ValueError, match="too large"):
        read_whole(str(path), 100)
    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(OSError, match="Too many levels"):
        read_whole(str(tmp_path / "link.json"), 1000)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="not a file"):
        read_whole(str(tmp_path / "pipe.json"), 1000)
