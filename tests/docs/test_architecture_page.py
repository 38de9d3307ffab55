"""The walks of docs/architecture.md are what a profiler sees, and the files it names by hand exist."""

from __future__ import annotations

import re

from lab.write_walks import GUARD_FILES, PACKAGE, PAGE, section


def test_the_walks_are_as_a_profiler_sees_them() -> None:
    """Every file of a walk is called in that order, none that is called is missing, and no walk passes through more than 20."""
    walks = section()
    assert walks in PAGE.read_text(encoding="utf-8"), "python -m lab.write_walks"
    assert "\n21. " not in walks


def test_what_is_named_by_hand_exists() -> None:
    """Every file of the walk from a metrics page to HAProxy, and every path that the page names."""
    named = re.findall(r"`([a-z_]+/[\w/]+\.\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 60
    assert [
        path for path in (*GUARD_FILES, *named) if not ((PACKAGE / path).is_file() or (PAGE.parents[1] / path).is_file())
    ] == []
