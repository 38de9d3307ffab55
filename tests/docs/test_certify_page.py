"""What docs/certify.md shows is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from tests.docs.test_article_page import is_in

PAGE = (Path(__file__).parents[2] / "docs" / "certify.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```console\n\$ plimsoll ([^\n]*)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("words", "shown"), SHOWN)
def test_the_shown_output_is_true(words: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line that is shown is printed, in this order."""
    main(shlex.split(words))
    assert is_in(shown.splitlines(), capsys.readouterr().out.splitlines()) == []
