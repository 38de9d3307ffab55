"""Every command that README.md shows is run: here what needs no engine, in tests/real the rest; what cannot be is listed."""

from __future__ import annotations

import re
from pathlib import Path

from lab.page import commands_of
from lab.run_page import run_page
from plimsoll.cli.main import COMMANDS
from tests.each import cases

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")

# What is shown and not run here, with the reason; each must be in the README, so that nothing stays listed that is gone.
ELSEWHERE = dict(cases("docs", "shown_and_not_run_here"))
WITHIN_A_SENTENCE = dict(cases("docs", "within_a_sentence"))
PROGRAMS = r"(?:plimsoll|pip|make|vllm|python3?|docker|kubectl|systemctl|curl)"


def test_every_command_of_the_readme_prints_what_is_shown() -> None:
    """To the letter, but for the time that a replay took; with the exit code that is right."""
    run_page(README, left_out=ELSEWHERE)
    assert len(commands_of(TEXT)) - len(ELSEWHERE) == 2


def test_commands_within_a_sentence_are_known() -> None:
    """A command with options is listed with where it is run; a bare one is a command of ours."""
    spans = re.findall(rf"`({PROGRAMS} [^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    assert {span.removeprefix("plimsoll ") for span in spans if re.fullmatch(r"plimsoll \w+", span)} == set(COMMANDS)
    assert {span for span in spans if not re.fullmatch(r"plimsoll \w+", span)} == set(WITHIN_A_SENTENCE)
