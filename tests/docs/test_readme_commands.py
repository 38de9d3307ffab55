"""Every command that README.md shows is run: here what needs no engine, in tests/real the rest; what cannot be is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.page import commands_of
from lab.run_page import run_page
from plimsoll.cli.main import COMMANDS, main
from tests.each import each

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")

# What is shown and not run here, with the reason; each must be in the README, so that nothing stays listed that is gone.
ELSEWHERE = {
    "git clone <this repository> && cd plimsoll && make demo": (
        "tests/real/test_demo_real.py runs the demo and holds what it tells against these lines; `make` itself would make the "
        "virtual environment that runs this test, and there is nowhere to clone from"
    ),
    "make demo": "the same",
    "make test": "it is what runs this test",
    "vllm serve MODEL --worker-extension-cls plimsoll.inside.Probe --middleware plimsoll.inside.Gate": (
        "needs an engine: tests/real/test_readme_real.py"
    ),
    "PLIMSOLL_SURVIVE=1 vllm serve MODEL ...": "needs an engine: tests/real/test_survive_real.py",
}
WITHIN_A_SENTENCE = {
    "plimsoll plan --certify": "needs a command line behind it: tests/docs/test_certify_page.py",
    "plimsoll guard --engine http://127.0.0.1:8000": "needs an engine: tests/real/test_readme_real.py",
    "pip install .": "needs a package index: tests/real/test_readme_real.py",
    "pip install '.[simulate]'": "needs a package index: tests/real/test_readme_real.py",
    "pip install '.[all]'": "needs a package index; CI installs the same packages, from the same list",
    "kubectl logs --previous POD | plimsoll doctor -": "needs a cluster; doctor reads such logs in tests/cli/test_doctor.py",
    "kubectl describe pod POD": "needs a cluster",
}
PROGRAMS = r"(?:plimsoll|pip|make|vllm|python3?|docker|kubectl|systemctl|curl)"


def test_every_command_of_the_readme_prints_what_is_shown() -> None:
    """To the letter, but for the time that a replay took; with the exit code that is right."""
    assert main(["simulate", "synthetic:requests=10", "--json"]) == 0  # compiled once, so that no word of it is printed below
    run_page(README, left_out=ELSEWHERE)
    assert len(commands_of(TEXT)) - len(ELSEWHERE) == 3


def test_commands_within_a_sentence_are_known() -> None:
    """A command with options is listed with where it is run; a bare one is a command of ours."""
    spans = re.findall(rf"`({PROGRAMS} [^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    bare = {span.removeprefix("plimsoll ") for span in spans if re.fullmatch(r"plimsoll \w+", span)}
    assert bare == set(COMMANDS)
    assert {span for span in spans if not re.fullmatch(r"plimsoll \w+", span)} == set(WITHIN_A_SENTENCE)


@each("name", COMMANDS)
def test_every_command_of_the_table_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`plimsoll NAME --help`, as typed."""
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: plimsoll {name}")
