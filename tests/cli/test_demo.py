"""`plimsoll demo` as a user meets it: what it takes, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.cli.main import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """The one line on standard error."""
    assert main(["demo", *words]) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert "mistake of ours" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--speed", "--speed needs a value"),
        ("--speed fast", "a number from 0.25 to 4"),
        ("--speed 0", "a number from 0.25 to 4"),
        ("--speed 100", "a number from 0.25 to 4"),
        ("--speed nan", "a number from 0.25 to 4"),
        ("--balancer nginx", "own or haproxy"),
        ("--quick", "no option '--quick'"),
        ("H100", "demo takes no 'H100'"),
        ("-- vllm serve", "demo takes no '--'"),
    ],
)
def test_what_it_does_not_take_is_one_line(capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    """Exit code 2, and nothing was started."""
    assert says in refusal(capsys, *words.split())


def test_help_names_every_option_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """On one screen."""
    assert main(["demo", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--speed", "--keep", "--balancer", "--json", "Exit codes: 0", "docs/demo.md"))
    assert len(text.splitlines()) < 25


def test_a_temporary_folder_that_cannot_be_made_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With what to set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    assert "set TMPDIR" in refusal(capsys, code=3)
