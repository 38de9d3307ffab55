"""The outputs of `plimsoll simulate` that the docs show are what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from plimsoll.cli.main import main

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "data" / "traces"
SHOWN = [
    (page, words, output)
    for page in ("docs/simulate.md", "docs/traces.md")
    for words, output in re.findall(
        r"```console\n\$ plimsoll (simulate [^\n]*)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
    )
]


def _steady(output: str) -> str:
    """Without the one figure that differs from run to run."""
    return re.sub(r"^  replay took .*$", "  replay took   -", output, flags=re.MULTILINE)


@pytest.mark.parametrize(("page", "words", "output"), SHOWN, ids=[f"{page}-{n}" for n, (page, _, _) in enumerate(SHOWN)])
def test_the_shown_output_is_true(page: str, words: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each shown run prints what is shown, to the letter, but for how long it took on this machine."""
    command = shlex.split(words)
    if not command[1].startswith("synthetic:"):
        if not TRACES.is_dir():
            pytest.skip("the public traces are not beside the repository")
        command[1] = str(TRACES / command[1])
    assert main(command) == 0, page
    assert _steady(capsys.readouterr().out) == _steady(output)


def test_something_is_shown() -> None:
    """The page of the command shows a run that anybody can repeat."""
    assert {page for page, words, _ in SHOWN if "synthetic:" in words} >= {"docs/simulate.md"}
