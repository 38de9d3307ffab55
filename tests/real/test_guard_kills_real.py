"""SIGKILL of a real guard process at each numbered write of a real journal, and the next process reaches a safe end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.guard.killed import PLAYS
from plimsoll.guard.act import journal_entry
from plimsoll.guard.act.steps import Step

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]


def steps(*names: str) -> list[str]:
    """What is written of these steps: each before and after."""
    return [f"{kind} {name}" for name in names for kind in ("intent", "outcome")]


_STOP = ["intent stop", "restart", "outcome stop"]
_UP = [*steps("ready", "check", "warm", "undrain", "unlock", "probation"), "closed"]
_DOWN_AND_UP = [*_STOP, *steps("gone", "start"), *_UP]
_OUT = ["opened", *steps("lock", "evidence", "drain")]
_BACK = [*steps("undrain", "unlock"), "closed"]
ASKED = ["approval asked", "approval denied"]
WRITES = {
    "restart-serving-told": [*_OUT, *steps("idle"), *_DOWN_AND_UP],
    "restart-wedged-told": ["opened", *steps("lock", "evidence", "leave"), *_DOWN_AND_UP],
    "restart-down-told": ["opened", *steps("lock", "evidence", "leave"), *_DOWN_AND_UP],
    "shed-serving-told": ["opened", *steps("lock", "shed", "unlock", "hold", "unshed"), "closed"],
    "compact-serving-told": ["opened", *steps("lock", "compact", "verify", "unlock"), "closed"],
    # The way back.
    "restart stood back": ["opened", *steps("lock"), "closed"],
    "restart taken back": [*_OUT, *steps("idle"), *_BACK],
    "restart not taken back": [*_OUT, *steps("idle", "undrain", "undrain"), *_BACK],
    "restart held": [*_OUT, *steps("idle"), *_STOP, *steps("gone", "start", "start", "unlock"), "closed"],
    "shed not done": ["opened", *steps("lock", "shed", "unlock"), "closed"],
    # A guard that finds what another one left, and is killed over it as well.
    "takes a drain back": ["note", *_BACK],
    "takes a drain back late": ["note", "note", *_BACK],
    "finishes a stop": ["note", *_STOP, *steps("gone", "start"), *_UP],
    "finishes a start": ["note", *steps("start"), *_UP],
    "ends a shedding": [*steps("unshed"), "closed"],
    "closes a compaction": ["closed"],
    # What people do.
    "drain by hand": [*_OUT, "intent idle", "note", "note", "outcome idle", *_BACK],
    "drain by hand not done": [*_OUT, *_BACK],
    "put back by hand": [*_OUT, *_BACK],
    "pause, resume, and what others do": [*["switch pause"] * 4, *["switch rung-restart"] * 2, *ASKED, "seen", "restart"],
}
"""Every write of every life, by its number. A write that is not in its list fails the test: it must be killed at, too."""

WRITERS = {
    "conductor.py": {"OPENED", "INTENT", "OUTCOME", "NOTE", "RESTART", "CLOSED", "SWITCH"},  # of every action, whoever does it
    "approvals.py": {"APPROVAL"},  # nothing is under way while somebody is asked
    "manual_drain.py": {"OPENED", "NOTE"},
    "knob_settings.py": {"SWITCH", "NOTE"},  # a knob goes back by its own lease
    "quarantine.py": {"SWITCH"},  # its end is written before it begins
    "acting.py": {"SWITCH", "SEEN", "RESTART"},  # the switch of a dry run is only in memory; a restart by others is one seen
}
"""Who writes to the journal, and what."""


@pytest.mark.parametrize("play", WRITES)
def test_a_process_killed_at_any_write_leaves_what_the_next_one_brings_to_a_safe_end(play: str, tmp_path: Path) -> None:
    """For each numbered write: SIGKILL right before it, SIGKILL right after it, and a second process with the same journal."""
    ran = subprocess.run(
        [sys.executable, "-m", "lab.guard.killed", str(tmp_path / "world"), play],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    wanted = [f"{when} {write}" for write in WRITES[play] for when in ("before", "after")]
    assert [one["at"] for one in told] == wanted
    for one in told:
        assert one["ended"] == ["killed by 9"], one
        assert one["unsafe"] == "", one


def kinds() -> dict[str, str]:
    """Each kind of entry that a journal knows, by its name in the code; a file's first line is the journal's own."""
    source = Path(journal_entry.__file__).read_text(encoding="utf-8")
    return {name: word for name, word in re.findall(r'^([A-Z]+) = "([a-z]+)"', source, re.MULTILINE) if name != "BEGUN"}


def test_no_kind_of_write_and_no_step_is_missing() -> None:
    """Each kind that a journal knows and both entries of each step stand in some list, and each life has its list."""
    assert set(WRITES) == set(PLAYS)
    written = {write for writes in WRITES.values() for write in writes}
    assert set(kinds().values()) == {write.split()[0] for write in written}
    assert set(steps(*Step)) <= written


def test_nobody_else_writes_to_the_journal() -> None:
    """A part of guard that begins to write something must be killed at it, too: so it is named here."""
    names = "|".join(kinds())
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src" / "plimsoll").rglob("*.py")):
        firsts = re.findall(r"\b(?:write|append)\(([^,)]*)", path.read_text(encoding="utf-8"))
        if written := {name for first in firsts for name in re.findall(rf"\b({names})\b", first)}:
            found[path.name] = written
    assert found == WRITERS
