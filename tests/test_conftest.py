"""What failed beside others is tried again, alone; a broken promise and a broken suite are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Fails the first time only, as on a machine that was too busy.
FLAKY = """
import pathlib, pytest

def first_time(name):
    mark = pathlib.Path(__file__).with_name(name + ".ran")
    was = mark.exists()
    mark.touch()
    return not was

def test_well(): pass
"""
LATE = "\ndef test_late(): assert not first_time('late')\n"
PROMISE = "\n@pytest.mark.once\ndef test_promise(): assert not first_time('promise')\n"
MANY = "\n@pytest.mark.parametrize('number', range(4))\ndef test_many(number): assert not first_time(str(number))\n"
BROKEN = "\ndef test_broken(): assert False\n"


@pytest.mark.parametrize(
    ("tests", "code", "says"),
    [(LATE, 0, "1 passed"), (BROKEN, 1, "1 failed"), (LATE + PROMISE, 4, "no second try for a promise that nothing is lost: "),
     (MANY, 4, "4 tests failed: no second try for more than 3"), ("", 5, "deselected")],
    ids=["late", "broken", "promise", "many", "none"],
)  # fmt: skip
def test_a_second_try_is_for_a_busy_machine_alone(tmp_path: Path, tests: str, code: int, says: str) -> None:
    """One that was late passes alone; a broken one fails again; a promise, or more than three at once, has no second try."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = once: a promise\n", encoding="utf-8")
    (tmp_path / "test_flaky.py").write_text(FLAKY + tests, encoding="utf-8")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:kmock", "-p", "no:xdist", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run().returncode == (1 if tests else 0)
    again = run("--lf", "--lfnf=none", "--again")
    assert (again.returncode, says in again.stdout + again.stderr) == (code, True), again.stdout + again.stderr
