"""Counts the lines of src/plimsoll and tests, by package: code, docstrings, comments and blank lines.

python -m lab.count_lines [FOLDER ...]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("code", "docstring", "comment", "blank")


def kinds_of_lines(text: str) -> Counter[str]:
    """How many lines of a module are of each kind; a line with code and a comment is code."""
    lines = text.splitlines()
    kinds = ["blank" if not line.strip() else "code" for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip() == "":
            kinds[token.start[0] - 1] = "comment"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kinds[node.lineno - 1 : node.end_lineno] = ["docstring"] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return Counter(kinds)


def count(folder: Path) -> dict[str, tuple[int, Counter[str]]]:
    """Files and lines of every package directly under a folder; the folder's own modules stand under "."."""
    packages: dict[str, tuple[int, Counter[str]]] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        name = parts[0] if len(parts) > 1 else "."
        files, lines = packages.get(name, (0, Counter()))
        packages[name] = files + 1, lines + kinds_of_lines(path.read_text(encoding="utf-8"))
    return packages


def print_table(folder: Path) -> None:
    """One line a package and one for all, widest figures first."""
    packages = count(folder)
    total = sum((lines for _, lines in packages.values()), Counter[str]())
    everything = {**packages, "all": (sum(files for files, _ in packages.values()), total)}
    print(f"{folder.name:<12}{'files':>7}{'lines':>8}" + "".join(f"{kind:>11}" for kind in KINDS))
    for name, (files, lines) in everything.items():
        print(f"{name:<12}{files:>7,}{lines.total():>8,}" + "".join(f"{lines[kind]:>11,}" for kind in KINDS))


def main(arguments: list[str]) -> int:
    """Print a table for each folder."""
    for folder in [Path(name) for name in arguments] or [ROOT / "src" / "plimsoll", ROOT / "tests"]:
        if not folder.is_dir():
            print(f"count_lines: {folder}: no such folder", file=sys.stderr)
            return 2
        print_table(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
