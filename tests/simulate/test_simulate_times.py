"""Where step times come from: fitted, kept and used again for other options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.main import main

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-traffic"
RUN = str(CAPTURES / "tight.requests.jsonl.gz")
ENGINE = ["--num-blocks", "2048", "--async-scheduling", "--json"]


def _answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["simulate", RUN, *words]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_what_was_learnt_is_kept_and_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same options give the same run; others are replayed with the same times, also with a larger budget."""
    kept = str(tmp_path / "times.json")
    series = str(CAPTURES / "tight.series.csv.gz")
    fitted = _answer([*ENGINE, "--fit", RUN, "--fit-series", series, "--save-times", kept], capsys)
    again = _answer([*ENGINE, "--times", kept], capsys)
    for name in ("steps", "sim_seconds", "ttft", "tpot", "preemptions"):
        assert again[name] == fitted[name]
    assert isinstance(again["step_time"], dict)
    assert again["step_time"]["label"].startswith("fitted to 500 measured requests")
    assert not any("does not match" in note for note in fitted["notes"]), "a first token by chance a step later is no poor fit"
    larger = ["--num-blocks", "9000", "--max-num-batched-tokens", "8192", "--async-scheduling", "--json"]
    more = _answer([*larger, "--times", kept], capsys)
    assert more["preemptions"] == 0


def test_a_page_of_metrics_is_fitted_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The kind of file is found out by looking at it."""
    answer = _answer([*ENGINE, "--fit", str(CAPTURES / "tight.metrics.txt.gz")], capsys)
    assert isinstance(answer["step_time"], dict)
    assert "histograms of 524 requests" in answer["step_time"]["label"]


def test_a_fit_under_the_wrong_options_is_a_rough_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that the run did not have: the fit cannot match, says so first, and is not taken for a good one when kept."""
    kept = str(tmp_path / "times.json")
    engine = ["--num-blocks", "700", "--async-scheduling"]
    for times in (["--fit", RUN, "--save-times", kept], ["--times", kept]):
        answer = _answer([*engine, "--json", *times], capsys)
        assert any("does not match its run" in note for note in answer["notes"])
        assert answer["reading"][0].startswith("The fit does not match its run")
        assert answer["step_time"]["label"].startswith("rough guide: poor fit; fitted to")
    assert main(["simulate", RUN, *engine, "--times", kept]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[2].startswith("  The fit does not match its run")
    assert text.count("does not match its run") == 1
    assert "  rough guide: poor fit\n" in text
    assert "  step times fitted to 500 measured requests" in text
    assert main(["sweep", RUN, "max_num_seqs=8,16", *engine, "--times", kept]) == 0
    text = capsys.readouterr().out
    assert "  rough guide: poor fit; fitted to" in text
    assert text.index("The fit does not match its run") < text.index("max_num_seqs")


def test_a_page_of_other_traffic_teaches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A fit that is off by several times what was measured is none: one line with the figure, not times that look measured."""
    words = ["simulate", "synthetic:requests=200,rate=400,prompt=4000,output=600", *ENGINE]
    assert main([*words, "--fit", str(CAPTURES / "tight.metrics.txt.gz")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "nothing can be learnt from that" in said


def test_a_file_without_stamps_is_no_measured_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --fit wants is said, not what a trace looks like."""
    (tmp_path / "start.sh").write_text("vllm serve m\n", encoding="utf-8")
    assert main(["simulate", RUN, *ENGINE, "--fit", str(tmp_path / "start.sh")]) == 2
    assert "not a measured run: requests with stamps are wanted" in capsys.readouterr().err


NAMED = '{"schema": "plimsoll.step-time/1"'


@pytest.mark.parametrize("text", ["{}", "[", NAMED + "}", NAMED + ', "base_ns": -1}'])
def test_what_is_no_step_time_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, negative or no JSON at all."""
    kept = tmp_path / "times.json"
    kept.write_text(text, encoding="utf-8")
    assert main(["simulate", RUN, *ENGINE, "--times", str(kept)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("plimsoll: ")
    assert "\n" not in said
