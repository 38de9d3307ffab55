"""A folder that holds what `plimsoll doctor` said of it before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.doctor_runs import FORWARD, said

Capsys = pytest.CaptureFixture[str]


def test_an_earlier_report_in_the_folder_is_no_evidence(tmp_path: Path, capsys: Capsys) -> None:
    """It quotes the log that it was made from: read again, it would be cited as a log of its own."""
    (tmp_path / "vllm.log").write_bytes(Path(FORWARD).read_bytes())
    report = said(capsys, str(tmp_path), "--json")
    (tmp_path / "doctor.json").write_text(report.out)
    again = said(capsys, str(tmp_path), "--json")
    assert again.codes == report.codes == ["runtime.forward"]
    assert [one["source"] for one in again.body["facts"]["inputs"]] == [str(tmp_path / "vllm.log")]
    assert any("doctor.json (an earlier report" in note for note in again.body["facts"]["notes"])
