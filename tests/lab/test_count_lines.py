"""The counter of lines: every line is of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab import count_lines

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MODULE = '''"""A module.

Two paragraphs.
"""

# a comment
X = """no docstring
# no comment"""  # beside code


def f() -> None:
    """One line."""
'''


def test_every_line_is_of_one_kind() -> None:
    """Docstrings, comments and blank lines are told from code, also inside of strings."""
    assert count_lines.kinds_of_lines(MODULE) == {"docstring": 5, "comment": 1, "blank": 3, "code": 3}


def test_packages_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modules beside the packages stand under a dot, and the last line is the sum."""
    (tmp_path / "part" / "deep").mkdir(parents=True)
    for name in ("a.py", "part/b.py", "part/deep/c.py"):
        (tmp_path / name).write_text(MODULE, encoding="utf-8")
    assert count_lines.main([str(tmp_path)]) == 0
    rows = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {".": ["1", "12"], "part": ["2", "24"], "all": ["3", "36"]}
    assert count_lines.main([str(tmp_path / "none")]) == 2
