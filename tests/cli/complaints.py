"""What a refused command may say; for the tests of `plimsoll simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll.cli.simulate import COMPILING

if TYPE_CHECKING:
    import pytest


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error, and nothing else anywhere; that something is compiled first may be said before it."""
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines(keepends=True) if line.strip() != COMPILING]
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("plimsoll: ")
    assert lines[0].endswith("\n")
    assert "Traceback" not in lines[0]
    assert "mistake of ours" not in lines[0]
    return lines[0]
