"""Habits that a machine can keep: short functions, docstrings, no leftovers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.each import each

ROOT = Path(__file__).parents[1]
OURS = sorted(p for folder in ("src", "lab", "benchmarks", "tests") for p in (ROOT / folder).rglob("*.py"))
LINES_PER_FUNCTION = 100
LINES_PER_FILE = 800


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@each("path", OURS, ids=_name)
def test_functions_are_short_and_tests_say_what_they_promise(path: Path) -> None:
    """Every function ends before its line 100, every module and every test has its sentence."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), f"{_name(path)} has no docstring"
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length < LINES_PER_FUNCTION, f"{_name(path)}: {node.name} has {length} lines"
        if node.name.startswith("test_") and "tests" in path.parts:
            assert ast.get_docstring(node), f"{_name(path)}: {node.name} does not say what is promised"


@each("path", OURS, ids=_name)
def test_files_stay_small(path: Path) -> None:
    """A file that outgrows its name is two files."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_PER_FILE, f"{_name(path)} has {lines} lines"


def test_nothing_of_this_machine_is_written_down() -> None:
    """No registry host, no private path: the repository speaks of the product alone."""
    forbidden = re.compile(r"pypi\.org|pythonhosted|deb\.debian\.org|npmjs|/opt/wheels|/work/main")
    for path in [*OURS, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        if path.name == "test_tidy.py":
            continue
        found = forbidden.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{_name(path)} names {found.group() if found else ''}"


def test_no_mock_library() -> None:
    """Fakes are values and small programs, not patches."""
    for path in OURS:
        if path.name != "test_tidy.py":
            text = path.read_text(encoding="utf-8")
            assert "unittest.mock" not in text, _name(path)
            assert "MagicMock" not in text, _name(path)
