"""A folder of generated files: what becomes of those that lie there already; whole or not at all; nothing through a link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.assets.files import (
    LARGEST_BYTES,
    Changes,
    checksum,
    decide,
    differences,
    manifest,
    read_there,
    recorded_in,
    remove_files,
    write_files,
)
from plimsoll.errors import BadInput, WorldFailed
from tests.each import each

OLD, NEW, MINE = b"old\n", b"new\n", b"mine\n"
FILES = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([OLD, NEW, MINE]))


@each(
    ("wanted", "there", "listed", "fate"),
    [
        (NEW, None, None, "write"),
        (NEW, NEW, None, "same"),
        (NEW, OLD, OLD, "write"),  # it still has the checksum that was written down
        (OLD, MINE, OLD, "kept"),  # edited, and what is generated stays the same
        (NEW, MINE, OLD, "outdated"),  # both have changed: somebody must look
        (NEW, OLD, None, "outdated"),  # without a list every file that differs is somebody's
        (None, OLD, OLD, "remove"),  # no longer generated: the wheel of an older release, say
        (None, MINE, OLD, "left"),
        (None, None, OLD, None),
    ],
)
def test_what_becomes_of_a_file(wanted: bytes | None, there: bytes | None, listed: bytes | None, fate: str | None) -> None:
    """Ours is replaced or goes, an edit is kept unless --force is said, and what differs on both sides is told once."""
    made, lies, known = ({} if content is None else {"a": content} for content in (wanted, there, listed))
    recorded = {name: checksum(content) for name, content in known.items()}
    changes = decide(made, lies, recorded)
    assert changes == (Changes(**{fate: ("a",)}) if fate else Changes())
    forced = {"kept": "write", "outdated": "write", "left": "remove"}.get(fate or "", fate)
    assert decide(made, lies, recorded, is_forced=True) == (Changes(**{forced: ("a",)}) if forced else Changes())
    if fate == "outdated":
        again = recorded_in(manifest(made, recorded, changes, ["made by"]))
        assert decide(made, lies, again) == Changes(kept=("a",)), "the list takes the new text's checksum"


@given(FILES, FILES, FILES)
def test_nobodys_work_is_ever_lost(wanted: dict[str, bytes], there: dict[str, bytes], listed: dict[str, bytes]) -> None:
    """Whatever lies there: only files with the checksum of the list are replaced or removed; a second run is quiet."""
    recorded = {name: checksum(content) for name, content in listed.items()}
    changes = decide(wanted, there, recorded)
    for name in (*changes.write, *changes.remove):
        assert name not in there or recorded[name] == checksum(there[name])
    parts = [name for part in vars(changes).values() for name in part]
    assert len(parts) == len(set(parts))
    after = {**there, **{name: wanted[name] for name in changes.write}}
    for name in changes.remove:
        del after[name]
    again = decide(wanted, after, recorded_in(manifest(wanted, recorded, changes, [])))
    assert (again.write, again.remove, again.outdated) == ((), (), ())


def test_a_list_that_is_none_is_no_list() -> None:
    """Broken, of another schema, or with a path that leads out: nothing of it is believed."""
    for content in (None, b"{", b"[]", b'{"schema": "x", "files": {"a": "b"}}'):
        assert recorded_in(content) == {}
    files = {"../a": "x", "/b": "x", "c//d": "x", "e": "x", "f": 3}
    assert recorded_in(json.dumps({"schema": "plimsoll.assets-manifest/1", "files": files}).encode()) == {"e": "x"}


def test_the_difference_is_a_diff() -> None:
    """From what lies there to what would be generated; a new file from nothing, a stale one to nothing, bytes by name."""
    told = list(differences({"a": NEW, "b": NEW, "w": b"\xff\x00"}, {"a": OLD, "s": OLD, "w": b"\xfe"}, ["s"]))
    assert [line for line in told if line[:3] in ("---", "+++", "bin")] == [
        "--- a (as it is)", "+++ a (generated)", "--- /dev/null", "+++ b (generated)", "--- s (as it is)", "+++ /dev/null",
        "binary file w differs",
    ]  # fmt: skip
    assert {"-old", "+new"} <= set(told)
    assert list(differences({"a": NEW}, {"a": NEW}, [])) == []


def test_files_are_written_read_back_and_removed(tmp_path: Path) -> None:
    """Folders are made on the way, scripts may be run, nothing is left beside them; the folder itself may be a link."""
    (tmp_path / "real").mkdir()
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "real")
    write_files(str(out), {"a/start.sh": b"#!/bin/sh\n", "b.yml": b"x"})
    assert read_there(str(out), ["a/start.sh", "b.yml", "c"]) == {"a/start.sh": b"#!/bin/sh\n", "b.yml": b"x"}
    assert (out / "a/start.sh").stat().st_mode & 0o777 == 0o755
    assert (out / "b.yml").stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in (tmp_path / "real").rglob("*") if p.is_file()) == ["b.yml", "start.sh"]
    remove_files(str(out), ["b.yml", "never-there"])
    assert not (out / "b.yml").exists()


def test_nothing_goes_through_a_link(tmp_path: Path) -> None:
    """Neither reading nor writing nor removing: what it points to stays as it was."""
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (outside / "x").write_text("theirs", encoding="utf-8")
    (out / "link").symlink_to(outside / "x")
    (out / "folder").symlink_to(outside)
    for path in ("link", "folder/x"):
        with pytest.raises(BadInput, match="a link"):
            read_there(str(out), [path])
        with pytest.raises(BadInput, match="a link"):
            write_files(str(out), {path: b"ours"})
        with pytest.raises(BadInput, match="a link"):
            remove_files(str(out), [path])
    assert (outside / "x").read_text(encoding="utf-8") == "theirs"


def test_a_place_that_is_taken_is_said(tmp_path: Path) -> None:
    """A file for a folder, a folder for a file, a file larger than any of ours; a folder that takes nothing is exit code 3."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "big").open("wb") as file:
        file.truncate(LARGEST_BYTES + 1)
    for folder, path, says in (
        (tmp_path / "file", "a", "a folder is needed"),
        (tmp_path, "folder", "neither a file nor free"),
        (tmp_path, "big", "larger than"),
    ):
        with pytest.raises(BadInput, match=says):
            read_there(str(folder), [path])
    with pytest.raises(WorldFailed, match="cannot be written"):
        write_files("/proc/plimsoll", {"a": b"x"})
