"""What docs/article.md says is so: commands print what is shown, and figures are those of the recordings and of the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.article import recorded
from lab.article.compare import RESULTS, read
from lab.article.fleet import WATCHERS
from lab.article.incidents import INCIDENTS
from lab.write_article_page import placed, section
from tests.each import sure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "article.md").read_text(encoding="utf-8")


def test_figures_are_those_of_the_recordings(capsys: pytest.CaptureFixture[str]) -> None:
    """Allocated over reserved of every sample; the burst with the article's values; the sidecar computed again."""
    recorded.main()
    shown = sure(re.search(r"```console\n\$ python -m lab\.article\.recorded\n(.*?)```", PAGE, re.DOTALL))
    assert capsys.readouterr().out == shown[1]
    folder = ROOT / "tests" / "captures" / "vllm-0.25.1-h200-inside"
    found: list[float] = []

    def note(one: dict[str, Any]) -> None:
        if isinstance(one.get("allocated"), int) and isinstance(one.get("reserved"), int):
            found.append(one["allocated"] / one["reserved"])

    for path in folder.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), object_hook=note)
    assert f"{min(found):.3f} to {max(found):.3f} in all {len(found)} samples" in PAGE
    rows = recorded.article_flags().rows
    full = [row.at_s for row in rows if row.reading.cache > 0.95]
    assert full[-1] - full[0] == 30
    assert f"up to {max(row.reading.waiting for row in rows):.0f} waiting, 120 of 120 answered" in PAGE
    assert recorded.article_flags().outcome == "120 of 120 answered with 200"


def test_there_are_fifteen_claims_each_with_what_is_right() -> None:
    """In the order of the list at the top, and fair to its author."""
    claims = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:] if part[0].isdigit()]
    numbers = [str(number) for number in range(1, 16)]
    assert [part.split(".")[0] for part in claims] == re.findall(r"^\| \[(\d+)\]\(#", PAGE, re.MULTILINE) == numbers
    assert [part.splitlines()[0] for part in claims if "Right" not in part or "Instead" not in part] == []


def test_figures_are_those_of_the_other_pages() -> None:
    """Block sizes are those of docs/simulate.md, failures those of docs/evidence.md."""
    text = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    rows = [[float(cell) for cell in row.split("|")] for row in re.findall(r"\| empty slots, % \| (.*) \|", text)]
    assert len(rows) == 8
    at = dict(zip((8, 16, 32, 64, 128), zip(*rows, strict=True), strict=True))
    assert f"{min(at[16]):.2f} to {max(at[16]):.2f} % of the used slots" in PAGE
    assert f"at 128 it is {min(at[128]):.1f} to {max(at[128]):.1f} %" in PAGE
    saves = [round(a - b, 2) for a, b in zip(at[16], at[8], strict=True)]
    costs = [round(a - b, 2) for a, b in zip(at[32], at[16], strict=True)]
    assert f"from 16 to 8 saves {min(saves)} to {max(saves)} percentage points" in PAGE
    assert f"from 16 to 32 costs {min(costs)} to {max(costs)};" in PAGE
    evidence = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert "| failures, foreseen: named | 19 of 24 |" in evidence
    assert "| failures that doctor names first |  | 24 of 24 |" in evidence
    assert "of 24 failures on the H200 `plan` named 19 before they were made, and `doctor` named all 24" in PAGE


def test_the_comparison_is_that_of_the_kept_run_which_is_whole() -> None:
    """Written by `python -m lab.write_article_page`; every incident under every watcher, each request served or lost."""
    assert placed(PAGE, section(read(RESULTS))) == PAGE
    scenes = read(RESULTS)["scenes"]
    assert {(one["incident"], one["watcher"]) for one in scenes} == {(one.name, who) for one in INCIDENTS for who in WATCHERS}
    for scene in scenes:
        assert scene["asked"] == scene["served"] + scene["lost"], (scene["incident"], scene["watcher"])
        assert sum(scene["lost_how"].values()) == scene["lost"]
