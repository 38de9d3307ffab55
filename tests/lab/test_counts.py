"""The counters: every line is of one kind; words are prose and tables, nothing that a program wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lab import count_lines, count_words

MODULE, PAGE = yaml.safe_load(Path(__file__).with_name("counted.yaml").read_text(encoding="utf-8")).values()


def test_every_line_is_of_one_kind_and_no_programs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Docstrings, comments and blank lines are told from code; fenced blocks, generated parts and addresses do not count."""
    assert count_lines.kinds_of_lines(MODULE) == {"docstring": 5, "comment": 1, "blank": 3, "code": 3}
    (tmp_path / "part" / "deep").mkdir(parents=True)
    for name in ("a.py", "part/b.py", "part/deep/c.py"):
        (tmp_path / name).write_text(MODULE, encoding="utf-8")
    assert count_lines.main([str(tmp_path)]) == 0
    rows = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {".": ["1", "12"], "part": ["2", "24"], "all": ["3", "36"]}
    assert count_lines.main([str(tmp_path / "none")]) == 2
    assert count_words.words_of(PAGE) == 2 + 3 + 2 + 2 + 2
    assert count_words.words_of("One.\n<!-- The list is printed by `python -m lab.x`; change it there -->\nnot counted") == 1
