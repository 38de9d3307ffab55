"""The walks of docs/architecture.md are what a profiler sees, and the files it names by hand exist."""

from __future__ import annotations

from lab.write_walks import GUARD_FILES, PACKAGE, PAGE, section


def test_the_walks_are_as_a_profiler_sees_them() -> None:
    """Every file of a walk is called in that order, and none that is called is missing."""
    assert section() in PAGE.read_text(encoding="utf-8"), "python -m lab.write_walks"


def test_the_walk_by_hand_names_files_that_exist() -> None:
    """From a metrics page to HAProxy."""
    assert [file for file in GUARD_FILES if not (PACKAGE / file).is_file()] == []
