"""The table of what each release changed, and the rule that nobody else compares releases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.vllm import versions
from plimsoll.vllm.versions import Behaviour, Coverage, announced_between
from tests.each import cases, each

PACKAGE = Path(__file__).parents[2] / "src" / "plimsoll"
RELEASE = re.compile(r"v?0\.[1-9]\d?(\.\d{1,2}){1,2}")
# Only `versions` compares releases, and beside it the tables that hold stretches of releases. The lists may only shrink.
COMPARING = {"vllm/versions.py", "vllm/flags.py", "vllm/flag_notes.py"}
NAMING = {"vllm/versions.py", "vllm/metrics.py", "__init__.py"}  # the labels of cache_config_info; plimsoll's own version


def _strings(tree: ast.AST) -> Iterator[str]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _comparisons(text: str) -> list[str]:
    """What a module uses to compare releases by itself: our own helpers, or tuples of numbers."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plimsoll.vllm"):
            found += [name.name for name in node.names if name.name in ("Version", "is_before")]
        elif isinstance(node, ast.Attribute) and node.attr == "is_before":
            found.append(node.attr)
        elif isinstance(node, ast.Compare) and not all(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            found += [side for side in sides if re.fullmatch(r"\(0, \d+, \d+\)", side) or RELEASE.fullmatch(side.strip("'\""))]
    return found


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "inside" not in path.relative_to(PACKAGE).parts)


def test_no_module_but_versions_compares_releases() -> None:
    """Others ask `Behaviour.X.is_in(release)`, so that one table says what to revisit when a release comes."""
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in _modules()}
    telling = re.compile(rf"\bVersion\b|is_before|\(0, \d|{RELEASE.pattern}")  # without any of these there is nothing to parse
    found = {name: c for name, text in texts.items() if telling.search(text) and (c := _comparisons(text))}
    assert {name: what for name, what in found.items() if name not in COMPARING} == {}


def test_no_module_but_the_tables_names_a_release() -> None:
    """A release in the code is a fact without a row."""
    named = {}
    for path in _modules():
        source = path.read_text(encoding="utf-8")
        found = [text for text in _strings(ast.parse(source)) if RELEASE.fullmatch(text)] if RELEASE.search(source) else []
        if found:
            named[path.relative_to(PACKAGE).as_posix()] = found
    assert set(named) <= NAMING, named


@pytest.mark.parametrize("line", cases("vllm", "a_comparison_is_caught"))
def test_a_comparison_is_caught(line: str) -> None:
    """The rule would notice each way in which modules used to compare."""
    assert len(_comparisons(line)) == 1


def test_every_row_is_used_and_begins_with_a_release_that_was_read() -> None:
    """Not in the release before, in the one named and in its builds; the sentence and its evidence are there; in order."""
    releases = list(versions.wheels())
    texts = (path.read_text(encoding="utf-8") for path in (*_modules(), *PACKAGE.rglob("*.j2")))
    used = {name for text in texts for name in re.findall(r"\bBehaviour\.(\w+)", text)}
    for row in Behaviour:
        assert row.is_announced or row.name in used, row.name
        assert row.last is None or row.last in releases, row.name
        assert [row.is_in(release) for release in (releases[releases.index(row.since) - 1], row.since)] == [False, True], (
            row.name
        )
        assert row.is_in(f"{row.since}+cu129"), row.name
        assert row.is_in(releases[-1]) is (row.last is None), row.name
        assert len(row.change.split()) >= 3, row.name
        assert re.match(r"[\w/]+\.(py|md)|docs/", row.evidence), row.name
    places = [releases.index(row.since) for row in Behaviour]
    assert places == sorted(places)


@each("part", list(Coverage), ids=lambda part: part.name)
def test_what_was_read_was_read_of_a_release(part: Coverage) -> None:
    """Both ends are releases, and the older one stands first."""
    assert part.has(part.first)
    assert part.has(part.last)
    assert not part.begins_after(part.first)
    assert part.evidence


def test_changes_on_an_upgrade_are_those_in_between() -> None:
    """From the release after the old one up to and including the new one; nothing on the way down."""
    assert [b.since for b in announced_between("0.19.0", "0.22.0")] == ["0.20.0", "0.22.0"]
    assert announced_between("0.32.0", "0.19.0") == ()
