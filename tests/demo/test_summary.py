"""What came of it: times in each state, actions, and whether all was well."""

from __future__ import annotations

import json

import pytest

from plimsoll.demo.summary import OUT, SERVING, SHEDDING, DemoSummary, Incident, actions, times
from plimsoll.demo.traffic import Count, LostRequest
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OUTCOME, Entry


def at(second: float, kind: str, step: str, engine: str = "a", **fields: object) -> Entry:
    """One entry at this second."""
    return Entry(1, second, kind, engine, "x", step, fields)


RESTART = [
    at(10.0, INTENT, "leave"), at(10.1, OUTCOME, "leave", done=True), at(12.0, OUTCOME, "stop", done=True),
    at(18.0, OUTCOME, "undrain", done=True),
]  # fmt: skip


def test_an_engine_is_out_from_the_moment_it_is_taken_out_until_it_is_confirmed_back() -> None:
    """Or to the end; shedding counts from its outcome, not where it failed."""
    found = times(RESTART, ["a", "b"], 0.0, 30.0)
    assert found["a"] == {SERVING: 22.0, SHEDDING: 0.0, OUT: 8.0}
    assert found["b"] == {SERVING: 30.0, SHEDDING: 0.0, OUT: 0.0}
    assert times(RESTART[:3], ["a"], 0.0, 30.0)["a"][OUT] == 20.0
    shed = [at(5.0, OUTCOME, "shed", done=True), at(9.0, OUTCOME, "unshed", done=True)]
    assert times(shed, ["a"], 0.0, 10.0)["a"][SHEDDING] == 4.0
    assert times([at(5.0, OUTCOME, "shed", done=False)], ["a"], 0.0, 10.0)["a"][SHEDDING] == 0.0


def test_actions_are_counted_by_rung_and_end() -> None:
    """As the journal closed them."""
    entries = [at(1.0, CLOSED, "", grade="shed", end="done"), at(2.0, CLOSED, "", grade="shed", end="failed")]
    assert actions([*entries, entries[0]]) == {"shed": {"done": 2, "failed": 1}}


def summary(*, lost: int = 0, wrong: str = "", sent_again: int | None = 3) -> DemoSummary:
    """A play that went so."""
    count = Count(asked=100 + lost, served=100, waited=7, told_to_wait=9, lost=[LostRequest(4.0, "no answer")] * lost)
    played = [Incident("a burst", 12.0, wrong)]
    return DemoSummary(
        60.0, count, sent_again, played, {"shed": {"done": 1}}, times(RESTART, ["a"], 0.0, 30.0), "own", "http://x/"
    )


@pytest.mark.parametrize(("lost", "wrong", "is_fine"), [(0, "", True), (1, "", False), (0, "it was not put back", False)])
def test_one_lost_request_or_one_wrong_end_spoils_it(lost: int, wrong: str, *, is_fine: bool) -> None:
    """Fine means nothing lost and every incident as it should be."""
    found = summary(lost=lost, wrong=wrong)
    assert found.is_fine is is_fine
    assert found.as_json()["fine"] is is_fine


def test_the_lines_name_what_was_lost_and_what_was_wrong() -> None:
    """Nobody has to read JSON to see it."""
    text = "\n".join(summary(lost=1, wrong="it was not put back").lines())
    assert "100 served, 1 lost" in text
    assert "lost after 4.0 s: no answer" in text
    assert "not right  a burst: it was not put back" in text


def test_what_the_balancer_does_not_tell_is_unknown() -> None:
    """Never a made-up 0; the object is plain JSON with its schema."""
    found = summary(sent_again=None)
    assert "unknown" in "\n".join(found.lines())
    assert found.as_json()["requests"]["sent_again"] is None
    found = json.loads(json.dumps(summary().as_json()))
    assert found["schema"] == "plimsoll.demo/1"
    assert found["states"]["a"]["out of service"] == 8.0
