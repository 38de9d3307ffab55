"""The import arrows: drawn in docs/architecture.md, kept by import-linter, and shown to be kept."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "plimsoll"

# Who may import whom. `errors` is open to all; `cli` wires everything.
ARROWS: dict[str, set[str]] = {
    "domain": set(),
    "engine": {"domain"},
    "simulate": {"domain"},
    "plan": {"engine", "domain"},
    "tune": {"plan", "simulate", "domain"},
    "doctor": {"plan", "engine", "domain"},
    "guard": {"doctor", "plan", "engine", "domain"},
    "assets": {"engine", "plan", "domain"},
    "report": {"domain", "engine", "plan", "simulate", "tune", "doctor", "guard", "assets"},
    "dashboard": {"report", "domain"},
    "sources": {"domain", "engine"},
    "actuators": {"domain"},
    "inside": {"domain"},
    "standin": {"simulate", "plan", "engine", "inside", "domain"},
    "demo": {"sources", "actuators", "domain"},
}


def _folders() -> list[str]:
    return sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__")


def _contracts() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser


@pytest.mark.parametrize("folder", [f for f in _folders() if f != "cli"])
def test_every_folder_has_a_contract_that_forbids_all_it_may_not_import(folder: str) -> None:
    """A new folder cannot arrive without its arrows, and no contract is laxer than the drawing."""
    forbidden = set(_contracts()[f"importlinter:contract:{folder}"]["forbidden_modules"].split())
    others = {other for other in _folders() if other not in (folder, *ARROWS[folder])}
    assert {f"plimsoll.{other}" for other in others} <= forbidden


def test_the_drawing_in_the_docs_is_the_same() -> None:
    """docs/architecture.md lists every folder that exists."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert all(f"`{folder}/`" in text for folder in _folders())


def _lint(root: Path) -> subprocess.CompletedProcess[str]:
    linter = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(linter), "--no-cache"], cwd=root, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@pytest.fixture
def copy_of_the_tree(tmp_path: Path) -> Path:
    """The package and its contracts, free to be spoiled."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "plimsoll", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path / ".importlinter")
    return tmp_path


def test_the_tree_keeps_its_arrows(copy_of_the_tree: Path) -> None:
    """import-linter finds nothing to object to."""
    done = _lint(copy_of_the_tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("findings.py", "import plimsoll.vllm.versions"),
        ("vllm/flags.py", "from plimsoll.sources import launches"),
        ("render/flags.py", "import plimsoll.cli.main"),
        ("launch/files.py", "from plimsoll.report import flags"),
        ("vllm/versions.py", "import time"),
        ("vllm/versions.py", "import socket"),
    ],
)
def test_a_deliberately_bad_import_is_caught(copy_of_the_tree: Path, module: str, line: str) -> None:
    """One import against the arrows, or one of the clock in pure code, fails the check."""
    target = copy_of_the_tree / "src" / "plimsoll" / module
    target.write_text(target.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = _lint(copy_of_the_tree)
    assert done.returncode == 1, done.stdout
    assert "BROKEN" in done.stdout
