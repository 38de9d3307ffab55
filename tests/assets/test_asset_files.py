"""A folder of generated files: whole or not at all, and nothing through a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.assets.files import LARGEST_BYTES, read_there, remove_files, write_files
from plimsoll.errors import BadInput, WorldFailed


def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    """Folders are made on the way, scripts may be run, and nothing is left beside them."""
    out = tmp_path / "out"
    write_files(str(out), {"a/start.sh": b"#!/bin/sh\n", "b.yml": b"x"})
    assert read_there(str(out), ["a/start.sh", "b.yml", "c"]) == {"a/start.sh": b"#!/bin/sh\n", "b.yml": b"x"}
    assert (out / "a/start.sh").stat().st_mode & 0o777 == 0o755
    assert (out / "b.yml").stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in out.rglob("*") if p.is_file()) == ["b.yml", "start.sh"]


def test_files_are_removed(tmp_path: Path) -> None:
    """One that has gone already is no trouble."""
    write_files(str(tmp_path), {"a": b"x"})
    remove_files(str(tmp_path), ["a", "b"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["link", "folder/x"])
def test_nothing_goes_through_a_link(path: str, tmp_path: Path) -> None:
    """Neither reading nor writing nor removing: what it points to stays as it was."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("theirs", encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(outside / "x")
    (out / "folder").symlink_to(outside)
    with pytest.raises(BadInput, match="a link"):
        read_there(str(out), [path])
    with pytest.raises(BadInput, match="a link"):
        write_files(str(out), {path: b"ours"})
    with pytest.raises(BadInput, match="a link"):
        remove_files(str(out), [path])
    assert (outside / "x").read_text(encoding="utf-8") == "theirs"


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    """The user named it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    write_files(str(tmp_path / "out"), {"a": b"x"})
    assert (tmp_path / "real" / "a").read_bytes() == b"x"


def test_a_place_that_is_taken_is_said(tmp_path: Path) -> None:
    """A file where the folder should be, a folder where a file should be, and a file larger than any of ours."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="a folder is needed"):
        read_there(str(tmp_path / "file"), ["a"])
    with pytest.raises(BadInput, match="neither a file nor free"):
        read_there(str(tmp_path), ["folder"])
    with (tmp_path / "big").open("wb") as file:
        file.truncate(LARGEST_BYTES + 1)
    with pytest.raises(BadInput, match="larger than"):
        read_there(str(tmp_path), ["big"])


def test_a_folder_that_takes_nothing_is_the_worlds_fault() -> None:
    """One line, exit code 3."""
    with pytest.raises(WorldFailed, match="cannot be written"):
        write_files("/proc/plimsoll", {"a": b"x"})
