"""The H200 tables of docs/knobs.md are those of the recorded run."""

from __future__ import annotations

from lab.knobs_score import PAGE, page


def test_the_tables_are_what_the_run_says() -> None:
    """Made by `python -m lab.knobs_score` from lab/results/knobs-h200."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
