"""What docs/doctor.md shows of `plimsoll doctor` is what it prints, and how right it is, is what is measured."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.doctor_accuracy import LOGS, of_others, of_ours, table
from plimsoll.doctor.read.text import read_log
from plimsoll.findings import Code
from plimsoll.vllm.failure_texts import TEXTS
from tests.doctor.labelled import labelled

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
PROMISED_CODES = 28


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
    options = "--exit-code --since --html --bundle --explain --json --schema".split()
    assert [option for option in options if option not in PAGE] == []


def _produced() -> dict[str, set[str]]:
    """Each code, and where it can come from: a recording, a text that names it, the step of an allocation, another judge."""
    found: dict[str, set[str]] = {}
    for one in labelled():
        for code in one.codes[:1]:
            found.setdefault(code, set()).add(f"recording {one.name}")
    for text in TEXTS:
        if text.code is not None:
            found.setdefault(str(text.code), set()).add(f"text {text.name}")
    for path in sorted((ROOT / "src" / "plimsoll" / "doctor").rglob("*.py")):
        for name in re.findall(r"Code\.([A-Z_]+)\b", path.read_text(encoding="utf-8")):
            found.setdefault(str(Code[name]), set()).add(path.name)
    for path in sorted((ROOT / "src" / "plimsoll" / "doctor" / "data").glob("*.yaml")):
        for code in re.findall(r"\bcode: ([a-z-]+\.[a-z-]+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(str(Code(code)), set()).add(path.name)
    return found


def test_enough_codes_can_come_out_and_are_tested() -> None:
    """At least 28 codes are produced by doctor, others are named; as many are asserted in its tests or label a recording."""
    produced = _produced()
    assert len(produced) >= PROMISED_CODES
    missing = {str(code) for code in Code} - set(produced)
    # They show only while somebody watches.
    by_guard = {"gpu.thin-slack", "engine.changed", "startup.differs-from-plan", "engine.slow", "engine.garbage",
                "engine.stalled"}  # fmt: skip
    assert missing <= {"kv.internal-fragmentation", *by_guard}, missing
    names = {code.name: str(code) for code in Code}
    tested = {code for one in labelled() for code in one.codes[:1]}
    for path in sorted((ROOT / "tests" / "doctor").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        tested |= {names[name] for name in re.findall(r"Code\.([A-Z_]+)\b", text) if name in names}
        tested |= {str(code) for code in Code if f'"{code}"' in text}
    assert len(tested) >= PROMISED_CODES
    assert {code for code in produced if code not in tested} <= {"kv.internal-fragmentation"}
