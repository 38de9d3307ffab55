"""The tables of the fleet's runs: pure arithmetic over recorded rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.fleet_score import broken, figures, main, read, spread, table

BEFORE = {"a": 10, "b": 20}


def asked(sent: float, end: str = "whole", **other: Any) -> dict[str, Any]:
    return {"sent": sent, "over": sent + 1, "first": 0.1, "tokens": 5, "tries": 1, "refusals": 0, "end": end, **other}


def row(**other: Any) -> dict[str, Any]:
    looks = [[-1.0, [True, True], [10, 20]], [0.0, [True, True], [10, 20]], [2.0, [False, True], [10, 20]],
             [6.0, [False, True], [0, 20]], [9.0, [False, True], [11, 20]], [12.0, [True, True], [11, 20]]]  # fmt: skip
    made = {
        "incident": "core", "way": "plimsoll", "round": 1, "before": BEFORE, "fault_at": 100.0, "back_at": 112.0, "persons": 0,
        "may_lose": "running", "looks": looks,
        "asked": [asked(99), asked(99.5, "cut"), asked(105, tries=2, refusals=1, first=3.0)],
    }  # fmt: skip
    return made | other


def test_a_row_in_numbers() -> None:
    """Requests are counted by their end, times from the fault, and an engine is restarted when its process is another one."""
    found = figures(row())
    assert (found.asked, found.whole, found.cut, found.lost, found.lost_later) == (3, 2, 1, 0, 0)
    assert (found.refusals, found.sent_again, found.slow) == (1, 1, 1)
    assert (found.acted_s, found.whole_s, found.out_s, found.persons) == (9.0, 12.0, 9.0, 0)


def test_what_was_promised_and_not_kept_is_named() -> None:
    """A crash may cost what ran, not what was sent later; planned work costs nothing; service returns without a person."""
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
