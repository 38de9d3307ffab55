"""What one release of vLLM has of that which plimsoll.inside relies on."""

from __future__ import annotations

from typing import Any

from lab.catalogue.source_tree import SourceTree
from plimsoll.vllm.extension_points import NEEDS, Sources, judge


def sources_of(tree: SourceTree) -> Sources:
    """The release's files as the rules ask for them."""
    package = tree.root / "vllm"

    def read(path: str) -> str | None:
        file = package / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def listed(folder: str) -> list[str]:
        return sorted(file.relative_to(package).as_posix() for file in (package / folder).rglob("*.py"))

    return Sources(read, listed)


def read_inside(tree: SourceTree) -> list[dict[str, Any]]:
    """One row a need: what became of it, and in which words."""
    rows = []
    for answer in judge(sources_of(tree), NEEDS):
        row = {"name": answer.name, "state": answer.state.value}
        if answer.note:
            row["note"] = answer.note
        rows.append(row)
    return rows
