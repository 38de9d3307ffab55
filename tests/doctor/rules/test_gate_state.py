"""What a gate said of its engine, read as one more piece of evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.doctor.read.inputs import judge_gate_state, read_inputs
from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.findings import Code
from tests.each import each

STATE = {
    "schema": "plimsoll.state/1", "ready": False, "reason": "wedged",
    "engine": {"is_dead": False, "is_wedged": True, "last_step_age_s": 12.8, "longest_step_s": 0.04},
}  # fmt: skip


def log_of(text: str) -> Log:
    """A text as it is read."""
    return Log("state.json", [LogLine(n, "", "", None, line) for n, line in enumerate(text.splitlines(), 1)])


def test_a_wedge_that_the_gate_proved_is_a_finding() -> None:
    """With the line that says so, and without a word about memory."""
    judged = judge_gate_state(log_of(json.dumps(STATE, indent=2)))
    (finding,) = judged.findings
    assert finding.code is Code.ENGINE_WEDGED
    assert "no step for 13 s" in finding.because
    assert finding.evidence[0].text == '"is_wedged": true,'


@pytest.mark.parametrize(
    "engine",
    [{"is_wedged": False}, {"is_wedged": "yes"}, {"is_wedged": None}, {}, None, [], "wedged"],
)
def test_what_the_gate_did_not_prove_is_no_finding(engine: object) -> None:
    """Only its own true counts."""
    assert judge_gate_state(log_of(json.dumps({**STATE, "engine": engine}))).findings == ()


def test_figures_that_are_missing_are_left_out() -> None:
    """Never a made-up 0."""
    (finding,) = judge_gate_state(log_of(json.dumps({**STATE, "engine": {"is_wedged": True}}))).findings
    assert finding.because.startswith("no step with requests there;")


@pytest.mark.parametrize("text", ['{"schema": "plimsoll.state/1", "engine": {"is_wed', "", "[" * 100_000])
def test_a_text_that_is_cut_off_says_nothing(text: str) -> None:
    """And breaks nothing."""
    assert judge_gate_state(log_of(text or " ")).findings == ()


@each(("text", "is_one"), [
    (json.dumps(STATE), True), (json.dumps(STATE, indent=2), True), ('INFO got {"schema": "plimsoll.state/1"}', False),
    ('{"schema": "plimsoll.memory/1"}', False),
])  # fmt: skip
def test_other_texts_are_not_taken_for_one(text: str, is_one: bool, tmp_path: Path) -> None:
    """A log that quotes one stays a log."""
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    inputs = read_inputs([str(tmp_path / "a.txt")], timeout_s=5, time_range={}, range_flags=frozenset())
    assert (len(inputs.gate_states), len(inputs.logs)) == (is_one, not is_one)


def test_doctor_finds_it_in_a_folder_of_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plimsoll doctor FOLDER` names the wedge, and says that it is no memory failure or that it cannot tell."""
    (tmp_path / "state.json").write_text(json.dumps(STATE, indent=2), encoding="utf-8")
    assert main(["doctor", "--json", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["code"] for one in found["findings"]] == ["engine.wedged"]
    assert found["memory_failure"] is not True
