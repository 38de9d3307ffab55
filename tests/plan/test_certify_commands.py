"""The forty commands of lab/certify."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lab.certify.__main__ import HERE, main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_forty_commands_are_certified_on_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command gets its answer, some yes and some no; the trials for the GPU are the ones that the answers make."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trials = tmp_path / "h200.json"
    assert main(["--h200", str(trials)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 41
    answers = [line.split()[1] for line in lines[:-1]]
    assert set(answers) == {"certified", "not"}
    assert 10 <= answers.count("certified") <= 30
    assert trials.read_text(encoding="utf-8") == (HERE / "h200.json").read_text(encoding="utf-8")


def test_the_trials_are_eight_servers_with_requests_inside_and_outside() -> None:
    """A certified server has nothing outside; any other has a larger request outside than inside."""
    trials = json.loads((HERE / "h200.json").read_text(encoding="utf-8"))
    assert len(trials) == 8
    for trial in trials:
        assert trial["inside"]
        assert bool(trial["outside"]) != trial["certified"], trial["name"]
        for request in (*trial["inside"], *trial["outside"]):
            assert set(request) == {"prompt_tokens", "prompt_logprobs", "logprobs", "n", "max_tokens"}
