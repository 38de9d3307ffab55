"""What the docs say is true: outputs, links, generated pages, flags named as remedies."""

from __future__ import annotations

import re
from pathlib import Path

from lab.write_catalogue_docs import page as catalogue_page
from plimsoll.cli.main import COMMANDS
from tests.each import each

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").glob("*.md")])


@each("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of every page is a file."""
    text = path.read_text(encoding="utf-8")
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", t)]
    assert [t for t in targets if not (path.parent / t).exists()] == []


def test_every_command_is_in_the_readme_and_the_index() -> None:
    """A command nobody can find does not exist."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"docs/{name}.md" in readme
        assert f"({name}.md)" in index


def test_the_catalogue_page_is_in_step_with_the_tables() -> None:
    """Remade with `python -m lab.write_catalogue_docs`."""
    assert (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8") == catalogue_page()


def test_every_variable_that_a_user_may_meet_is_in_the_docs() -> None:
    """What plimsoll reads from the environment, and what it gives to others' commands; a message names the last itself."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    names = {name for text in sources for name in re.findall(r'"(PLIMSOLL_[A-Z_]+)"', text)} - {"PLIMSOLL_DEBUG"}
    docs = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", docs)] == []


@each("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_and_modules_named_in_docs_exist(path: Path) -> None:
    """`make x` and `python -m x` in the docs can be typed."""
    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m ((?:lab|benchmarks)[\w.]*)", text):
        base = ROOT.joinpath(*module.split("."))
        assert base.with_suffix(".py").is_file() or (base / "__main__.py").is_file(), module
