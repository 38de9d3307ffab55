"""The tables of recorded runs: what they count, and that unknown stays unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab import survive_score
from lab.fleet_score import RESULTS, broken, figures, main, read, spread, table
from lab.survive_score import Row
from tests.each import cases


def part(served: int, requests: int = 48, **more: Any) -> Row:
    """One load of a run: so many served, the others lost unless said otherwise."""
    ends = {"refused": 0, "aborted": 0} | {name: more.pop(name) for name in ("refused", "aborted") if name in more}
    lost = requests - served - sum(ends.values())
    usual = {"tokens_per_s": 1000.0, "still_s": 0.5, "contained": 0, "sites": [], "distinct_tokens": 9}
    return {"requests": requests, "served": served, "lost": lost, **ends, **usual, **more}


def run(way: str, served: int, number: int = 1, **more: Any) -> Row:
    """One run of the killer `neighbour` on the small shape."""
    name = f"neighbour-small-eager-1-{way}-{number}"
    keys = {"killer": "neighbour", "shape": "small", "mode": "eager", "runner": "1", "way": way, "number": number}
    died = way == "plain"
    round_keys = ("refused", "aborted", "still_s", "contained", "sites", "tokens_per_s", "tokens_as_undisturbed")
    round_part = part(served, **{key: more.pop(key) for key in round_keys if key in more})
    usual: Row = {
        "ready": True, "wrong": None, "died": died, "reach_s": 40.0, "ready_s": 8.0, "flags": [], "before": part(12, 12),
    }  # fmt: skip
    return {"name": name, **keys, **usual, "round": round_part, "after": part(0 if died else 12, 12), **more}


def test_a_later_good_run_replaces_a_failed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of several calls are one set of results; the page holds what the kept ones print."""
    assert survive_score.main([str(tmp_path)]) == 2
    assert "no survive-*.json" in capsys.readouterr().err
    bad, good = run("contained", 0, wrong="x"), run("contained", 48)
    (tmp_path / "survive-a.json").write_text(json.dumps({"rows": [bad, run("plain", 0)]}), encoding="utf-8")
    (tmp_path / "survive-b.json").write_text(json.dumps({"rows": [good]}), encoding="utf-8")
    assert [row["wrong"] for row in survive_score.read(tmp_path)] == [None, None]
    assert survive_score.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "48 of 48" in said
    assert "## Not played" not in said
    printed = survive_score.report(survive_score.read(survive_score.RESULTS)).strip().replace("## ", "### ")
    page = (survive_score.RESULTS.parents[2] / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert f"-->\n\n{printed}\n\n<!-- end of survive -->" in page


def asked(sent: float, end: str = "whole", **other: Any) -> dict[str, Any]:
    return {"sent": sent, "over": sent + 1, "first": 0.1, "tokens": 5, "tries": 1, "refusals": 0, "end": end, **other}


def row(**other: Any) -> dict[str, Any]:
    looks = [[-1.0, [True, True], [10, 20]], [0.0, [True, True], [10, 20]], [2.0, [False, True], [10, 20]],
             [6.0, [False, True], [0, 20]], [9.0, [False, True], [11, 20]], [12.0, [True, True], [11, 20]]]  # fmt: skip
    made = {
        "incident": "core", "way": "plimsoll", "round": 1, "before": {"a": 10, "b": 20}, "fault_at": 100.0, "back_at": 112.0,
        "persons": 0, "breaks": 1, "may_lose": "running", "looks": looks, "told": "core", "victim": "a",
        "steps": [[101.0, "a", "start"]], "asked": [asked(99), asked(99.5, "cut"), asked(105, tries=2, refusals=1, first=3.0)],
    }  # fmt: skip
    return made | other


def test_a_row_in_numbers_what_was_not_kept_and_how_rounds_add_up(tmp_path: Path) -> None:
    """Requests are counted by their end, times from the fault; counts are sums, times the least and the greatest."""
    found = figures(row())
    assert (found.asked, found.whole, found.cut, found.lost, found.lost_later) == (3, 2, 1, 0, 0)
    assert (found.refusals, found.sent_again, found.slow) == (1, 1, 1)
    assert (found.acted_s, found.whole_s, found.out_s, found.persons) == (9.0, 12.0, 9.0, 0)
    assert figures(row(breaks=0)).whole_s == 0.0, "nothing left service"
    assert broken([row()]) == []
    later = row(asked=[asked(105, "lost")])
    planned = row(incident="planned", may_lose="nothing", back_at=None, told="restart refused")
    others = row(incident="burst", asked=[]), row(incident="both", asked=[]), row(steps=[])
    assert broken([later, planned, row(way="nothing", back_at=None), *others]) == cases("lab", "what_was_not_kept")
    (tmp_path / "rows").mkdir()
    for number, back in enumerate((112.0, 130.0, None)):
        (tmp_path / "rows" / f"{number}.json").write_text(json.dumps(row(round=number, back_at=back)), encoding="utf-8")
    (tmp_path / "rows" / "wrong.json").write_text('{"wrong": "not whole before it"}', encoding="utf-8")
    main(["--pack", str(tmp_path / "rows"), str(tmp_path / "run.json.gz")])
    rows = read(tmp_path)
    assert len(rows) == 3
    assert "| core | plimsoll | 3 | 9 | 3 | 0 | 0 |" in table(rows)
    assert spread([12.0, 30.0, None]) == "12 to 30; never in 1"
    with pytest.raises(SystemExit, match="no rows"):
        main([str(tmp_path / "elsewhere")])


def test_the_page_has_the_fleets_table_as_the_recorded_rows_give_it() -> None:
    """Everything that was promised and not kept stands before it, with its figures."""
    page = (RESULTS.parents[2] / "docs" / "evidence.md").read_text(encoding="utf-8")
    rows = read(RESULTS)
    assert f"\n{table(rows)}\n<!-- end of fleet -->" in page
    others = read(RESULTS.with_name("fleet-cpu"))
    assert f"\n{table(others, has_times=False)}\n<!-- end of fleet-cpu -->" in page
    assert broken(others) == []
    assert broken(rows) == []
    missing = page.partition("# Part five")[2].partition("## All incidents")[0]
    # Its figures, from the same rows; and the one of the README.
    ours, others = ([row for row in rows if row["way"] == way] for way in ("plimsoll", "supervisor"))

    def of(chosen: list[Any], name: str, *incidents: str) -> list[Any]:
        return [getattr(figures(row), name) for row in chosen if row["incident"] in incidents]

    both = {name: sum(of(ours, name, "both")) for name in ("asked", "lost", "lost_later", "slow")}
    assert both.pop("lost_later") == 0, "sent after the fault"
    assert "{lost} of {asked} requests gave up, and {slow} waited".format(**both) in missing
    sooner = [
        when - other for incident in ("core", "api")
        for when in of(ours, "whole_s", incident) for other in of(others, "whole_s", incident)
    ]  # fmt: skip
    assert f"{min(sooner):.0f} to {max(sooner):.0f} s sooner" in missing
    planned = f"{sum(of(ours, 'cut', 'planned') + of(ours, 'lost', 'planned'))} of {sum(of(ours, 'asked', 'planned')):,}"
    assert f"| {planned} | requests lost in planned restarts" in (RESULTS.parents[2] / "README.md").read_text(encoding="utf-8")
