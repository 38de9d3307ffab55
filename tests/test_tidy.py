"""Habits that a machine can keep: short functions, docstrings, one meaning a name, no leftovers."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.each import each

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "plimsoll"
OURS = sorted(p for folder in ("src", "lab", "benchmarks", "tests") for p in (ROOT / folder).rglob("*.py"))
LINES_PER_FUNCTION = 100
LINES_PER_FILE = 800

# Left from before the rule; the list may only become shorter. `python -m tests.test_tidy` prints what is still needed.
REPLACING = set((
    "cli/doctor cli/guard cli/sweep doctor/read/text doctor/rules/contained doctor/rules/diagnose doctor/rules/facts "
    "doctor/rules/host_memory doctor/rules/metrics doctor/rules/nvidia_smi "
    "doctor/rules/pods doctor/rules/root_cause doctor/rules/supervisors doctor/rules/timeline doctor/rules/trends "
    "guard/act/decide guard/act/journal_replay guard/act/steps guard/adapters/gate guard/adapters/hooks "
    "guard/daemon/acting guard/daemon/conductor guard/daemon/engine_look guard/daemon/host guard/daemon/manual_drain "
    "guard/daemon/observer guard/daemon/run guard/daemon/steps guard/judge/memory guard/page/page inside/admission "
    "inside/gate_control simulate/fit simulate/inputs simulate/open_run simulate/settings simulate/summary "
    "simulate/trace simulate/trace_columns simulate/trace_files simulate/traffic standin/serve/metrics tune/answer "
    "tune/goodput tune/grid tune/search tune/space tune/verdict vllm/metrics_page"
).split())  # fmt: skip


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function in it, however deep, without a look at expressions."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for inner in getattr(node, name, ()):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                yield inner
            yield from _functions(inner)


@each("path", OURS, ids=_name)
def test_functions_are_short_and_tests_say_what_they_promise(path: Path) -> None:
    """Every function ends before its line 100, every file before its line 800; every module and every test has its sentence."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.count("\n")
    assert lines <= LINES_PER_FILE, f"{_name(path)} has {lines} lines"
    if path.name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), f"{_name(path)} has no docstring"
    for node in _functions(tree):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length < LINES_PER_FUNCTION, f"{_name(path)}: {node.name} has {length} lines"
        if node.name.startswith("test_") and "tests" in path.parts:
            assert ast.get_docstring(node), f"{_name(path)}: {node.name} does not say what is promised"


def shared_names() -> dict[str, list[str]]:
    """The class names that several modules of the package define, and which."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            modules[name].add(_name(path))
    return {name: sorted(paths) for name, paths in sorted(modules.items()) if len(paths) > 1}


def replacing_modules() -> list[str]:
    """The modules that change a NamedTuple with `_replace`."""
    return sorted(
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\._replace\b", path.read_text(encoding="utf-8"))
    )


def test_one_class_name_means_one_thing_and_what_is_changed_is_a_dataclass() -> None:
    """No two modules define a class of one name; changed copies are made of dataclasses, not of NamedTuples with `_replace`."""
    assert shared_names() == {}
    assert [module for module in replacing_modules() if module not in REPLACING] == []


def test_nothing_of_this_machine_is_written_down_and_nothing_is_mocked() -> None:
    """No registry host, no private path: the repository speaks of the product alone. Fakes are values and small programs."""
    forbidden = re.compile(r"pypi\.org|pythonhosted|deb\.debian\.org|npmjs|/opt/wheels|/work/main|unittest\.mock|MagicMock")
    for path in [*OURS, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        if path.name != "test_tidy.py":
            named = forbidden.search(path.read_text(encoding="utf-8"))
            assert named is None, f"{_name(path)} names {named.group() if named else ''}"


if __name__ == "__main__":
    print("REPLACING:", *replacing_modules())
