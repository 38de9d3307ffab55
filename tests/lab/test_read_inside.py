"""The reader of what plimsoll.inside relies on, on a small wheel."""

from __future__ import annotations

from pathlib import Path

from lab.catalogue.read_inside import read_inside
from lab.catalogue.source_tree import SourceTree
from plimsoll.vllm.extension_points import NEEDS
from tests.vllm.vllm_like import files_that_meet_all, write_vllm


def test_one_row_a_need_with_its_words(tmp_path: Path) -> None:
    """What is found has a note only where the way matters; what is not says what is missing."""
    files = files_that_meet_all()
    del files["plugins/__init__.py"]
    write_vllm(tmp_path, "0.32.0", files)
    rows = {row["name"]: row for row in read_inside(SourceTree(tmp_path))}
    assert list(rows) == [need.name for need in NEEDS]
    assert rows["middleware"] == {"name": "middleware", "state": "found"}
    assert rows["general plugins"] == {"name": "general plugins", "state": "absent", "note": "there is no such file"}
