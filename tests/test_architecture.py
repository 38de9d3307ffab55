"""The one rule of the house: packages import downwards, and deciding is pure. Kept by machines, and shown to be kept."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.each import each

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "plimsoll"

# What decides takes what it decides by as arguments. The modules named here read and write what their package keeps.
PURE: dict[str, set[str]] = {
    "plan": {"read", "store"}, "simulate": {"compiled", "inputs", "trace_columns", "trace_files"},
    "tune": {"inputs", "runners"}, "doctor/rules": set(), "doctor/remedies": set(), "guard/judge": set(), "guard/act": set(),
}  # fmt: skip
# No clock, socket, file, process, event loop, terminal or dice. Packaged data, msgspec, numpy and numba are fine.
MAY_IMPORT = set(
    "__future__ abc array bisect collections contextlib copy dataclasses enum fnmatch functools hashlib heapq html importlib"
    " itertools json math msgspec numpy operator re shlex statistics string textwrap types typing".split()
)
MAY_IMPORT_OF_OURS = set(
    "doctor errors findings guard hardware launch models plan redaction simulate tune units unknown vllm".split()
)
PURE_MODULES = [
    path for folder, others in PURE.items() for path in sorted((PACKAGE / folder).glob("*.py")) if path.stem not in others
]


def _imports(text: str) -> Iterator[str]:
    """Every module that is imported, in functions, too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _impure(text: str) -> list[str]:
    bad = []
    for name in _imports(text):
        top, _, rest = name.partition(".")
        if top == "plimsoll":
            inner = rest.split(".")
            stems = {f"{folder}/{stem}" for folder, others in PURE.items() for stem in others - {"compiled"}}
            is_impure = inner[0] not in MAY_IMPORT_OF_OURS or any("/".join(inner[:n]) in stems for n in (2, 3))
        else:
            is_impure = top not in MAY_IMPORT
        bad += [name] if is_impure else []
    return bad


def test_the_docs_name_every_package() -> None:
    """docs/architecture.md lists every folder that exists."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in text] == []


@each("path", PURE_MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_pure_modules_import_only_what_is_pure(path: Path) -> None:
    """What decides imports from a list, and nothing that reads or writes the world."""
    assert _impure(path.read_text(encoding="utf-8")) == []


@each("line", [
    "import time", "from pathlib import Path", "def late():\n    import socket", "import rich",
    "from plimsoll.net.client import HttpClient", "from plimsoll.plan.store import forget", "from plimsoll.plan import store",
])  # fmt: skip
def test_an_impure_import_is_caught(line: str) -> None:
    """The list would notice a clock, a file, a socket, and our own modules that use them."""
    assert len(_impure(line)) == 1


def test_deliberately_bad_imports_are_caught(tmp_path: Path) -> None:
    """Each import upwards, or out of a package that stands alone, is named by the check; `make check` finds none."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "plimsoll", ignore=shutil.ignore_patterns("__pycache__", "data", "templates"))
    shutil.copy(ROOT / ".importlinter", tmp_path / ".importlinter")
    bad = [
        ("errors", "vllm.versions"), ("vllm.flags", "launch.files"), ("plan.ledger", "doctor.rules.facts"),
        ("doctor.rules.facts", "guard.judge.look"), ("guard.judge.look", "cli.main"), ("render.flags", "cli.main"),
        ("net.inputs", "launch.files"), ("inside.gate", "vllm.flags"),
    ]  # fmt: skip
    for module, target in bad:
        with (tmp_path / "src" / "plimsoll" / f"{module.replace('.', '/')}.py").open("a", encoding="utf-8") as file:
            file.write(f"\nimport plimsoll.{target}\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    said = " ".join(done.stdout.split())
    assert [pair for pair in bad if f"plimsoll.{pair[0]} -> plimsoll.{pair[1]} " not in said] == [], done.stdout
