"""What docs/doctor.md shows of `plimsoll doctor` is what it prints, and how right it is, is what is measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.doctor_accuracy import LOGS, of_others, of_ours, table
from plimsoll.doctor.read.text import read_log
from tests.doctor.labelled import labelled

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.real
def test_the_table_of_accuracy_is_what_is_measured() -> None:
    """Every row, computed again; the rows on logs of other people only where these lie beside the repository."""
    everything = [*(of_others(LOGS) if LOGS.is_dir() else ()), *of_ours()]
    made, _ = table([(one, read_log(str(one.path))) for one in everything])
    start, end = "<!-- accuracy: python -m benchmarks.doctor_accuracy --write -->\n", "<!-- end of accuracy -->"
    written = PAGE.partition(start)[2].partition(end)[0].strip().splitlines()
    first = "" if LOGS.is_dir() else "| ours"
    assert [row for row in written if row.startswith(first)] == [row for row in made.splitlines() if row.startswith(first)]


def test_numbers_in_the_words_agree_with_the_recordings_and_every_option_is_named() -> None:
    """How many recordings there are is said in the table and below it; inputs, watching and bundling are explained."""
    counted = Counter(one.path.parent.name for one in labelled())
    for folder, number in counted.items():
        assert f"| ours: {folder}, with all texts | {number} and {number} of {number} | |" in PAGE
    assert f"Of the {counted['vllm-0.32.0-failures']} recordings of 0.32.0" in PAGE
    options = "--exit-code --since --bundle --explain --json --schema".split()
    assert [option for option in options if option not in PAGE] == []
