"""What becomes of files that lie there already."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.assets.files import Changes, checksum, decide, differences, manifest, recorded_in

OLD, NEW, MINE = b"old\n", b"new\n", b"mine\n"
NAMES = st.sampled_from(["a", "b", "c"])
CONTENTS = st.sampled_from([OLD, NEW, MINE])


def _recorded(**files: bytes) -> dict[str, str]:
    return {name: checksum(content) for name, content in files.items()}


def test_what_is_not_there_is_written() -> None:
    """An empty folder gets everything."""
    assert decide({"a": NEW}, {}, {}) == Changes(write=("a",))


def test_what_is_the_same_is_left_alone() -> None:
    """Whoever made it."""
    assert decide({"a": NEW}, {"a": NEW}, {}) == Changes(same=("a",))


def test_a_file_of_ours_is_replaced() -> None:
    """It still has the checksum that was written down."""
    assert decide({"a": NEW}, {"a": OLD}, _recorded(a=OLD)) == Changes(write=("a",))


def test_an_edited_file_is_kept() -> None:
    """While what is generated stays the same it is only mentioned; when that changes too, somebody must look."""
    assert decide({"a": OLD}, {"a": MINE}, _recorded(a=OLD)) == Changes(kept=("a",))
    assert decide({"a": NEW}, {"a": MINE}, _recorded(a=OLD)) == Changes(outdated=("a",))


def test_a_file_of_unknown_origin_is_kept() -> None:
    """Without a list every file that differs is somebody's."""
    assert decide({"a": NEW}, {"a": OLD}, {}) == Changes(outdated=("a",))


def test_force_overwrites_edits() -> None:
    """And only that does."""
    assert decide({"a": NEW}, {"a": MINE}, _recorded(a=OLD), is_forced=True) == Changes(write=("a",))


def test_what_is_no_longer_generated_goes_unless_it_was_edited() -> None:
    """The wheel of an older release, say."""
    assert decide({}, {"a": OLD}, _recorded(a=OLD)) == Changes(remove=("a",))
    assert decide({}, {"a": MINE}, _recorded(a=OLD)) == Changes(left=("a",))
    assert decide({}, {}, _recorded(a=OLD)) == Changes()


def test_an_edit_is_told_once_as_outdated_and_stays_known_as_one() -> None:
    """The list takes the new text's checksum: the next run says kept, and a plain run never overwrites it."""
    wanted, there = {"a": NEW}, {"a": MINE}
    changes = decide(wanted, there, _recorded(a=OLD))
    listed = recorded_in(manifest(wanted, _recorded(a=OLD), changes, ["made by"]))
    assert decide(wanted, there, listed) == Changes(kept=("a",))


@given(st.dictionaries(NAMES, CONTENTS), st.dictionaries(NAMES, CONTENTS), st.dictionaries(NAMES, CONTENTS))
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
    assert (
        recorded_in(None)
        == recorded_in(b"{")
        == recorded_in(b"[]")
        == recorded_in(b'{"schema": "x", "files": {"a": "b"}}')
        == {}
    )
    body = json.dumps(
        {"schema": "plimsoll.assets-manifest/1", "files": {"../a": "x", "/b": "x", "c//d": "x", "e": "x", "f": 3}}
    )
    assert recorded_in(body.encode()) == {"e": "x"}


def test_the_difference_is_a_diff() -> None:
    """From what lies there to what would be generated; a new file from nothing, a stale one to nothing, bytes by name."""
    told = list(differences({"a": NEW, "b": NEW, "w": b"\xff\x00"}, {"a": OLD, "s": OLD, "w": b"\xfe"}, ["s"]))
    assert [line for line in told if line[:3] in ("---", "+++", "bin")] == [
        "--- a (as it is)", "+++ a (generated)", "--- /dev/null", "+++ b (generated)", "--- s (as it is)", "+++ /dev/null",
        "binary file w differs",
    ]  # fmt: skip
    assert "-old" in told
    assert "+new" in told
    assert list(differences({"a": NEW}, {"a": NEW}, [])) == []
