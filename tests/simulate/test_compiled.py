"""Compiled code is kept, never out of date, never somebody else's; and nothing depends on it but speed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from plimsoll.simulate import compiled
from tests.simulate.busy_runs import BUSY_SETTINGS, told

ROOT = Path(__file__).parents[2]
SIMULATE = Path(compiled.__file__).parent
SAYS_WHEN = """
from plimsoll.simulate.compiled import HAS_NUMBA, telling
from plimsoll.simulate.replay import replay
from plimsoll.simulate.trace import make_trace
said = []
with telling(lambda: said.append(1)):
    steps = replay(make_trace("t", [0], [20], [3])).totals.steps
print(HAS_NUMBA, len(said), steps)
"""


def _python(*words: str, **environment: str) -> str:
    """What a new interpreter prints, with the folders named first in its search path."""
    search = os.pathsep.join(filter(None, [environment.pop("FIRST", ""), str(ROOT), str(ROOT / "src")]))
    keep = {name: os.environ[name] for name in ("PATH", "LANG", "HOME", "XDG_CACHE_HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, *words], env={**keep, "PYTHONPATH": search, **environment}, cwd=ROOT, capture_output=True, text=True,
        check=True, timeout=110,
    )  # fmt: skip
    return done.stdout


def _imports(path: Path) -> set[str]:
    """The files of this package that a file takes something from."""
    modules = [
        node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module
    ]
    prefix = "plimsoll.simulate."
    return {f"{module.removeprefix(prefix)}.py" for module in modules if module.startswith(prefix)}


def _is_compiled(path: Path) -> bool:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    marks = {mark.id for one in functions for mark in one.decorator_list if isinstance(mark, ast.Name)}
    return bool(marks & {"compiled", "part", "hot", "wrapping"})


def test_every_compiled_file_counts() -> None:
    """A file with compiled functions, and all that it takes from others, is part of the digest: none can be out of date."""
    listed = set(compiled.SOURCES)
    assert {path.name for path in SIMULATE.glob("*.py") if _is_compiled(path)} <= listed
    for name in listed:
        assert _imports(SIMULATE / name) <= listed, name
    assert list(compiled.SOURCES) == sorted(listed)


def _copied(folder: Path) -> ModuleType:
    """The module that chooses the folder, as if it had been installed elsewhere."""
    spec = importlib.util.spec_from_file_location("a_copy", folder / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_new_version_never_meets_old_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's name changes with every compiled file, and with no other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "copy"
    shutil.copytree(SIMULATE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    module = _copied(copy)
    before = module.cache_folder.__wrapped__()
    assert before == compiled.cache_folder.__wrapped__()
    (copy / "settings.py").write_text("")
    assert module.cache_folder.__wrapped__() == before
    seen = {before}
    for name in compiled.SOURCES:
        with (copy / name).open("a") as file:
            file.write("# changed\n")
        seen.add(module.cache_folder.__wrapped__())
    assert len(seen) == 1 + len(compiled.SOURCES)


def test_machine_code_is_kept_where_nobody_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's cache folder, closed to others; else in the place for temporary files; never in somebody else's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiled.cache_folder.__wrapped__().is_relative_to(tmp_path / "home" / ".cache" / "plimsoll")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ours = compiled.cache_folder.__wrapped__()
    assert ours.is_relative_to(tmp_path / "cache" / "plimsoll")
    assert ours.stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    folder = compiled.cache_folder.__wrapped__()
    assert folder.is_relative_to(tmp_path / f"plimsoll-{os.getuid()}")
    assert compiled.cache_folder.__wrapped__() == folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    private = compiled.cache_folder.__wrapped__()
    assert (private != ours, private.parent) == (True, tmp_path)
    assert private.name.startswith("plimsoll-compiled-")
    assert private.stat().st_mode & 0o077 == 0


def test_without_numba_everything_is_the_same(tmp_path: Path) -> None:
    """Plain Python gives every stamp and every row that compiled code gives, only slower."""
    (tmp_path / "numba.py").write_text("raise ImportError('there is no numba here')\n")
    is_there = _python("-c", "from plimsoll.simulate.compiled import HAS_NUMBA; print(HAS_NUMBA)", FIRST=str(tmp_path))
    assert is_there.strip() == "False"
    slow = json.loads(_python("-W", "error", "-m", "tests.simulate.busy_runs", FIRST=str(tmp_path)))
    for name in BUSY_SETTINGS:
        assert slow[name] == told(name), name


def test_with_compiling_off_the_same_is_computed_at_once() -> None:
    """PLIMSOLL_COMPILE=0 is as if numba were not installed: nothing is compiled, nothing is kept, the steps are the same."""
    plain = _python("-c", SAYS_WHEN, PLIMSOLL_COMPILE="0").split()
    assert plain[:2] == ["False", "0"]
    assert _python("-c", SAYS_WHEN).split()[2] == plain[2]


def test_a_second_container_does_not_compile_again(tmp_path: Path) -> None:
    """What an image brings is copied into an empty cache, once; another version's code is not."""
    assert _python("-c", SAYS_WHEN).split()[0] == "True", "compiled by now, in the user's own cache"
    empty, brought = str(tmp_path / "empty"), str(compiled.cache_folder().parent)
    assert _python("-c", SAYS_WHEN, XDG_CACHE_HOME=empty, PLIMSOLL_COMPILED=brought).split()[:2] == ["True", "0"]
    kept = tmp_path / "empty" / "plimsoll" / "compiled" / compiled.sources_digest()
    assert {path.name for path in kept.rglob("*.nbi")} == {path.name for path in compiled.cache_folder().rglob("*.nbi")}
