"""Faults as they are written: from when, for how long, how much; and one clear line for what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.standin.faults import KINDS, Fault, FaultSchedule, make_fault, parse_fault
from tests.each import each, rows

CASES = Path(__file__).parent / "cases.txt"
NS = 10**9
ROOT = Path(__file__).parents[2]


@each(("text", "fault"), rows(CASES, "faults"))
def test_faults_are_read_as_written(text: str, fault: str) -> None:
    """Kind, onset, duration, amount."""
    found = parse_fault(text)
    assert f"{found.kind} {found.at_s:g} {found.for_s:g} {found.value:.0f}" == fault


@each("text", ["", *(text for (text,) in rows(CASES, "no faults"))])
def test_what_is_no_fault_gets_one_line(text: str) -> None:
    """It says what is wrong, not where in our code."""
    with pytest.raises(BadInput) as trouble:
        parse_fault(text)
    assert "\n" not in str(trouble.value)


@given(st.text(max_size=60))
def test_no_text_is_more_than_a_fault_or_a_line(text: str) -> None:
    """Whatever is typed."""
    try:
        parse_fault(text)
    except BadInput:
        return


def test_they_are_on_from_their_onset_to_their_end() -> None:
    """And the next change is known."""
    faults = FaultSchedule([parse_fault("wedge@10s:5s"), parse_fault("oom@1h")])
    assert [faults.active("wedge", at * NS) is not None for at in (0, 10, 14, 15)] == [False, True, True, False]
    assert [faults.next_change_ns(at * NS) for at in (0, 10, 15, 3600)] == [10 * NS, 15 * NS, 3600 * NS, None]
    faults.append(make_fault("growth", 3, 4, 1000))
    assert faults.active("growth", 5 * NS) == Fault("growth", 3.0, 4.0, 1000.0)
    faults.take_back("wedge")
    assert [fault.kind for fault in faults] == ["oom", "growth"]
    faults.take_back()
    assert not faults


def test_every_kind_is_in_the_docs() -> None:
    """docs/standin.md has the table."""
    text = (ROOT / "docs" / "standin.md").read_text(encoding="utf-8")
    assert all(f"`{kind}`" in text for kind in KINDS)
