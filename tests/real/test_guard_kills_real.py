"""SIGKILL of a real guard process at each numbered write of a real journal, and the next process reaches a safe end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lab.guard.killed import PLAYS
from plimsoll.guard.act import journal_entry
from plimsoll.guard.act.steps import Step

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]


def steps(*names: str) -> list[str]:
    """What is written of these steps: each before and after."""
    return [f"{kind} {name}" for name in names for kind in ("intent", "outcome")]


LISTS = yaml.safe_load(Path(__file__).with_name("journal_writes.yaml").read_text(encoding="utf-8"))
WRITES = {
    name: [write for row in rows for write in (steps(row[1:]) if row[0] == "~" else [row])]
    for name, rows in LISTS["writes"].items()
}


@pytest.mark.parametrize("play", WRITES)
def test_a_process_killed_at_any_write_leaves_what_the_next_one_brings_to_a_safe_end(play: str, tmp_path: Path) -> None:
    """For each numbered write: SIGKILL right before it, SIGKILL right after it, and a second process with the same journal."""
    ran = subprocess.run(
        [sys.executable, "-m", "lab.guard.killed", str(tmp_path / "world"), play],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["at"] for one in told] == [f"{when} {write}" for write in WRITES[play] for when in ("before", "after")]
    for one in told:
        assert one["ended"] == ["killed by 9"], one
        assert one["unsafe"] == "", one


def kinds() -> dict[str, str]:
    """Each kind of entry that a journal knows, by its name in the code; a file's first line is the journal's own."""
    source = Path(journal_entry.__file__).read_text(encoding="utf-8")
    return {name: word for name, word in re.findall(r'^([A-Z]+) = "([a-z]+)"', source, re.MULTILINE) if name != "BEGUN"}


def test_no_kind_of_write_no_step_and_no_writer_is_missing() -> None:
    """Each kind and both entries of each step stand in some list; whoever begins to write something is named here."""
    assert set(WRITES) == set(PLAYS)
    written = {write for writes in WRITES.values() for write in writes}
    assert set(kinds().values()) == {write.split()[0] for write in written}
    assert set(steps(*Step)) <= written
    names = "|".join(kinds())
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src" / "plimsoll").rglob("*.py")):
        firsts = re.findall(r"\b(?:write|append)\(([^,)]*)", path.read_text(encoding="utf-8"))
        if written := {name for first in firsts for name in re.findall(rf"\b({names})\b", first)}:
            found[path.name] = written
    assert found == {name: set(kinds) for name, kinds in LISTS["writers"].items()}
