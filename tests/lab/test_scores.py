"""The tables of recorded runs: what they count, and that unknown stays unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab import survive_score
from lab.fleet_score import broken, figures, main, read, spread, table
from lab.survive_score import Row


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
        "ready": True,
        "wrong": None,
        "died": died,
        "reach_s": 40.0,
        "ready_s": 8.0,
        "flags": [],
        "before": part(12, 12),
    }
    return {"name": name, **keys, **usual, "round": round_part, "after": part(0 if died else 12, 12), **more}


def cells(lines: list[str], *words: str) -> list[str]:
    """The cells of the first line of a table that has all these words."""
    line = next(line for line in lines if all(word in line for word in words))
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_rounds_of_a_way_add_up() -> None:
    """A dead server is out of service for at least the fastest start; refused and aborted requests are not lost ones."""
    rows = [run("plain", 3, 1), run("plain", 0, 2, ready_s=6.0), run("contained", 48, contained=3), run("contained", 47, 2)]
    lines = survive_score.service_table(rows)
    plain = cells(lines, "| plain |")
    assert plain[5:] == ["2", "3 of 96", "93", "0", "0", "2 of 2", "> 46 s", "0 of 24"]
    assert cells(lines, "| contained |")[5:] == ["2", "95 of 96", "1", "0", "0", "0 of 2", "0.50 s", "24 of 24"]
    assert cells(survive_score.totals(rows), "| plain |") == ["plain", "2", "96", "3", "93", "0", "0", "2"]
    rows = [run("door", 46, refused=2), run("contained", 46, aborted=2)]
    assert cells(survive_score.service_table(rows), "| door |")[6:10] == ["46 of 48", "0", "2", "0"]
    assert cells(survive_score.service_table(rows), "| contained |")[6:10] == ["46 of 48", "0", "0", "2"]


def test_tokens_are_told_beside_what_two_undisturbed_runs_have_in_common() -> None:
    """A comparison means nothing without the machine's noise beside it; what was not measured is a dash, not zero."""
    contained = run(
        "contained", 48, contained=2, sites=["forward"], steps={"round": 2048},
        tokens_as_undisturbed={"compared": 48, "equal": 45, "first_differences": [3, 4, 5]},
        undisturbed=part(48, tokens_per_s=2000.0, still_s=0.1),
        undisturbed_twice={"compared": 48, "equal": 44, "first_differences": [1, 2, 3, 4]},
    )  # fmt: skip
    line = cells(survive_score.speed_table([contained]), "| neighbour |")
    assert line[5:] == [
        "1,000", "1,000", "2,000", "1,000", "0.50 (0.10)", "2", "forward", "2048", "45 of 48", "44 of 48",
    ]  # fmt: skip

    unknown = run("contained", 48, still_s=None, tokens_per_s=None)
    line = cells(survive_score.speed_table([unknown]), "| neighbour |")
    assert line[6:] == ["-", "-", "1,000", "- (-)", "0", "-", "-", "-", "-"]
    assert survive_score.out_of_service([run("contained", 0, still_s=None)], None) == "unknown"
    assert survive_score.out_of_service([run("plain", 0)], None) == "until restarted"


def test_a_failed_run_is_named_and_certificates_tell_both_sides() -> None:
    """A server that never came up is not counted; inside must not fail, and the share outside that does is reported."""
    bad = run("contained", 0, wrong="Traceback\nRuntimeError: no such flag")
    late = {"name": "logits-small-eager-1-plain-1", "ready": False, "wrong": None, "killer": "logits", "way": "plain"}
    assert cells(survive_score.totals([bad, late]), "| contained |")[1] == "0"
    assert survive_score.wrong_lines([bad, late]) == [
        "- `neighbour-small-eager-1-contained-1`: RuntimeError: no such flag",
        "- `logits-small-eager-1-plain-1`: not ready",
    ]

    trial: Row = {
        "name": "trial-a", "killer": "trial", "shape": "m", "mode": "alone", "ready": True, "wrong": None, "certified": True,
        "inside": [{"parts": 1, "sent": 48, "failed": 0}, {"parts": 2, "sent": 52, "failed": 0}], "inside_failed": 0,
        "outside": [], "died_outside": False,
    }  # fmt: skip
    other = trial | {"name": "trial-b", "certified": False, "outside": [{"prompt_tokens": 8000}], "died_outside": True}
    lines = survive_score.trial_table([trial, other])
    assert cells(lines, "| a |") == ["a", "yes", "100", "0", "0", "no"]
    assert cells(lines, "| b |") == ["b", "no", "100", "0", "1", "yes"]
    assert lines[-1] == "2 commands: 0 requests inside failed; 1 of 1 servers were ended by requests outside."
    assert survive_score.trial_table([]) == []


def test_the_overhead_has_its_bound() -> None:
    """Each pair of servers has its ratios and its change; all together have a bound, and one by servers."""

    def measured(ratios: list[float], mean: float) -> Row:
        gap = {"with": 6.4, "without": 6.5}
        answers = {"compared": 12, "equal": 12, "tokens": 384}
        result = {"mean": mean, "ratios": ratios, "gap_p50_ms": gap}
        return {"name": "overhead", "wrong": None, "result": result, "same_answers": answers}

    *head, _, both, answers = survive_score.overhead_lines([measured([0.995, 0.997], 0.004), measured([1.01, 1.0], -0.005)])
    assert cells(head, "0.9950") == ["1", "0.9950, 0.9970", "-0.40%", "6.40 / 6.50"]
    assert both.startswith("4 pairs: +0.05% tokens a second with it, a loss of at most 0.73% with 95 % confidence; ")
    assert both.endswith("a loss of at most 2.79% with 95 % confidence.")
    assert answers == "24 of 24 requests, sent one at a time, got equal tokens (768 tokens)."
    alone = survive_score.overhead_lines([measured([0.99], 0.01)])[-2]
    assert alone.startswith("1 pairs: -1.00% tokens a second with it, the bound unknown; ")


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


def test_runs_under_batch_invariance_stand_apart_and_an_aborted_killer_is_not_lost() -> None:
    """They prove equality of tokens and are slower; the engine says that it was aborted."""
    odd = run("contained", 48, tokens_as_undisturbed={"compared": 48, "equal": 48, "first_differences": []})
    odd["name"] = "invariant-" + odd["name"]
    assert cells(survive_score.totals([odd]), "| contained |")[1] == "0"
    assert cells(survive_score.invariant_table([odd]), "invariant-")[2:] == ["48 of 48", "-", "9"]
    lost = part(46, killers_lost=2, killers_aborted=0)
    row = survive_score.with_aborted(run("contained", 46) | {"round": lost, "again": lost, "state": {"aborted": 3}})
    assert (row["round"]["lost"], row["round"]["aborted"]) == (0, 2)
    assert (row["again"]["lost"], row["again"]["aborted"]) == (1, 1)


BEFORE = {"a": 10, "b": 20}


def asked(sent: float, end: str = "whole", **other: Any) -> dict[str, Any]:
    return {"sent": sent, "over": sent + 1, "first": 0.1, "tokens": 5, "tries": 1, "refusals": 0, "end": end, **other}


def row(**other: Any) -> dict[str, Any]:
    looks = [[-1.0, [True, True], [10, 20]], [0.0, [True, True], [10, 20]], [2.0, [False, True], [10, 20]],
             [6.0, [False, True], [0, 20]], [9.0, [False, True], [11, 20]], [12.0, [True, True], [11, 20]]]  # fmt: skip
    made = {
        "incident": "core", "way": "plimsoll", "round": 1, "before": BEFORE, "fault_at": 100.0, "back_at": 112.0, "persons": 0,
        "may_lose": "running", "looks": looks, "told": "core",
        "asked": [asked(99), asked(99.5, "cut"), asked(105, tries=2, refusals=1, first=3.0)],
    }  # fmt: skip
    return made | other


def test_a_row_in_numbers_and_what_was_not_kept() -> None:
    """Requests are counted by their end, times from the fault; what was promised and not kept is named."""
    found = figures(row())
    assert (found.asked, found.whole, found.cut, found.lost, found.lost_later) == (3, 2, 1, 0, 0)
    assert (found.refusals, found.sent_again, found.slow) == (1, 1, 1)
    assert (found.acted_s, found.whole_s, found.out_s, found.persons) == (9.0, 12.0, 9.0, 0)

    assert broken([row()]) == []
    later = row(asked=[asked(105, "lost")])
    planned = row(incident="planned", may_lose="nothing", back_at=None)
    assert broken([later, planned, row(way="nothing", back_at=None)]) == [
        "core round 1: 1 requests lost that were sent after the fault",
        "planned round 1: 1 requests lost where none may be",
        "planned round 1: not in full service without a person",
    ]


def test_rounds_add_up_and_times_show_their_spread(tmp_path: Path) -> None:
    """A packed run is read again; counts are sums, times the least and the greatest, and what never came is said."""
    (tmp_path / "rows").mkdir()
    for number, back in enumerate((112.0, 130.0, None)):
        (tmp_path / "rows" / f"{number}.json").write_text(json.dumps(row(round=number, back_at=back)), encoding="utf-8")
    (tmp_path / "rows" / "wrong.json").write_text('{"wrong": "not whole before it"}', encoding="utf-8")
    main(["--pack", str(tmp_path / "rows"), str(tmp_path / "run.json.gz")])
    rows = read(tmp_path)
    assert len(rows) == 3
    assert "| core | plimsoll | 3 | 9 | 3 | 0 | 0 |" in table(rows)
    assert spread([12.0, 30.0, None]) == "12 to 30; never in 1"
