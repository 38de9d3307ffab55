"""What came of it: times in each state, actions, and whether all was well."""

from __future__ import annotations

import json

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


def test_an_engine_is_out_until_it_is_confirmed_back_and_actions_are_counted_by_rung_and_end() -> None:
    """Out from the moment it is taken out; shedding counts from its outcome, not where it failed; ends as journalled."""
    found = times(RESTART, ["a", "b"], 0.0, 30.0)
    assert found["a"] == {SERVING: 22.0, SHEDDING: 0.0, OUT: 8.0}
    assert found["b"] == {SERVING: 30.0, SHEDDING: 0.0, OUT: 0.0}
    assert times(RESTART[:3], ["a"], 0.0, 30.0)["a"][OUT] == 20.0
    shed = [at(5.0, OUTCOME, "shed", done=True), at(9.0, OUTCOME, "unshed", done=True)]
    assert times(shed, ["a"], 0.0, 10.0)["a"][SHEDDING] == 4.0
    assert times([at(5.0, OUTCOME, "shed", done=False)], ["a"], 0.0, 10.0)["a"][SHEDDING] == 0.0
    entries = [at(1.0, CLOSED, "", grade="shed", end="done"), at(2.0, CLOSED, "", grade="shed", end="failed")]
    assert actions([*entries, entries[0]]) == {"shed": {"done": 2, "failed": 1}}


def summary(*, lost: int = 0, wrong: str = "") -> DemoSummary:
    """A play that went so."""
    count = Count(asked=100 + lost, served=100, waited=7, told_to_wait=9, lost=[LostRequest(4.0, "no answer")] * lost)
    played = [Incident("a burst", 12.0, wrong)]
    return DemoSummary(60.0, count, 3, played, {"shed": {"done": 1}}, times(RESTART, ["a"], 0.0, 30.0), "http://x/")


def test_what_was_lost_or_wrong_is_named() -> None:
    """Fine means nothing lost and every incident as it should be."""
    assert summary().is_fine
    assert not summary(lost=1).is_fine
    found = summary(lost=1, wrong="it was not put back")
    text = "\n".join(found.lines())
    for words in ("100 served, 1 lost", "lost after 4.0 s: no answer", "not right  a burst: it was not put back"):
        assert words in text
    told = json.loads(json.dumps(found.as_json()))
    assert (told["schema"], told["fine"], told["requests"]["sent_again"]) == ("plimsoll.demo/1", False, 3)
    assert told["states"]["a"]["out of service"] == 8.0
    assert json.loads(json.dumps(summary(wrong="it was not put back").as_json()))["fine"] is False
