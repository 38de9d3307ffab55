"""The walks of docs/architecture.md are what a profiler sees, and the files it names by hand exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.write_walks import GUARD_FILES, PACKAGE

ROOT = Path(__file__).parents[2]


def test_the_walks_are_as_a_profiler_sees_them() -> None:
    """Every file of a walk is called in that order, and none that is called is missing."""
    command = [sys.executable, "-m", "lab.write_walks", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr


def test_the_walk_by_hand_names_files_that_exist() -> None:
    """From a metrics page to HAProxy."""
    assert [file for file in GUARD_FILES if not (PACKAGE / file).is_file()] == []
