"""What failed beside others is tried again, alone, but no broken promise; what shares a server runs on one worker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.groups import COSTS_S, in_order

pytest_plugins = ["pytester"]

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
def test_a_second_try_is_for_a_busy_machine_alone(pytester: pytest.Pytester, tests: str, code: int, says: str) -> None:
    """One that was late passes alone; a broken one fails again; a promise, or more than three at once, has no second try."""
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = once: a promise\n")
    pytester.makepyfile(test_flaky=FLAKY + tests)
    plain = ("-p", "no:kmock", "-p", "no:xdist", "--assert=plain")
    assert pytester.runpytest_inprocess(*plain).ret == (1 if tests else 0)
    again = pytester.runpytest_inprocess(*plain, "--lf", "--lfnf=none", "--again")
    assert (again.ret, says in str(again.stdout) + str(again.stderr)) == (code, True)


@pytest.mark.real
def test_what_shares_a_server_runs_on_one_worker(tmp_path: Path) -> None:
    """Every test of a file has the same worker, whatever pytest and xdist make of marks."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    test = "import pathlib, pytest, time\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n, worker_id):\n"
    for name in ("test_one", "test_two", "test_three"):
        kept = f"pathlib.Path({str(tmp_path)!r}, f'{{worker_id}}-{{n}}.{name}').touch()"
        (tmp_path / f"{name}.py").write_text(f"{test}    time.sleep(0.05)\n    {kept}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:kmock", "-n", "2", "--dist", "loadgroup"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    workers: dict[str, set[str]] = {}
    for path in tmp_path.glob("gw*"):
        workers.setdefault(path.suffix, set()).add(path.name.partition("-")[0])
    assert {file: len(names) for file, names in workers.items()} == {".test_one": 1, ".test_two": 1, ".test_three": 1}


def test_the_groups_are_of_files_that_are_there() -> None:
    """A file that is renamed takes its place along; the longest group is first."""
    files = {path.stem for path in (Path(__file__).parent / "real").glob("test_*.py")}
    assert {*COSTS_S} <= files
    longest = max(COSTS_S, key=lambda group: COSTS_S[group])
    assert min(files, key=lambda file: in_order(f"tests/real/{file}.py::test")) == longest
