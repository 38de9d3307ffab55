"""What is remembered of restarts that did not help: what ends it, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.guard.act.capacity import EngineLoad
from plimsoll.guard.act.decide import ActionPlan, EngineStatus, FailedRestarts, FleetView, decide
from plimsoll.guard.act.journal_entry import CLOSED, RESTART, SEEN, SWITCH, WINDOW_S, Entry, needed
from plimsoll.guard.act.journal_replay import PAUSE, failed_restarts, known_processes, read_switches
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.unknown import Condition, Status

YEAR_S = 365 * 86_400.0


class Story:
    """A journal as it is written, and what is still needed of it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.at = 1_000.0

    def note(self, what: str, engine: str = "a", action: str = "", step: str = "", **fields: Any) -> Story:
        self.entries.append(Entry(len(self.entries) + 1, self.at, what, engine, action, step, fields))
        return self

    def closed(self, kind: str, end: str, grade: str = "restart") -> Story:
        return self.note(CLOSED, action=f"x{len(self.entries)}", kind=kind, end=end, grade=grade)

    def switch(self, engine: str, *, is_on: bool) -> Story:
        return self.note(SWITCH, engine, step=PAUSE, on=is_on)

    def ends(self, later_s: float = 0.0) -> dict[str, FailedRestarts]:
        """What is remembered so much later."""
        return failed_restarts(needed(self.entries, self.at + later_s))


@pytest.mark.parametrize("end", ["failed", "held"])
def test_neither_time_nor_what_was_taken_back_ends_it(end: str) -> None:
    """A year later, after a drain by hand, a restart that stood back or was undone, a shedding, and a pause of everything."""
    story = Story().closed("wedged", end)
    story.closed("drain", "undone").closed("asked", "stood-back").closed("dead", "undone").closed("saturated", "done", "shed")
    story.switch("", is_on=True).switch("", is_on=False).switch("b", is_on=False)
    for later_s in (0.0, WINDOW_S + 1.0, YEAR_S):
        found = story.ends(later_s)["a"]
        assert (found.end, set(found.unmended)) == (end, {"broken"}), later_s


def test_a_restart_that_is_done_or_somebody_who_resumes_the_engine_ends_it() -> None:
    """And a pause of that engine later does not bring it back, though it is the same switch."""
    assert Story().closed("wedged", "failed").closed("exhausted", "done").ends() == {}
    assert Story().closed("wedged", "held").switch("a", is_on=False).ends(YEAR_S) == {}
    story = Story().closed("wedged", "held").switch("a", is_on=False).switch("a", is_on=True)
    assert story.ends() == {}
    assert read_switches(needed(story.entries, story.at)).paused == {"a"}


def test_that_it_does_not_work_is_one_reason_and_reasons_add_up() -> None:
    """Dead, wedged and hung are one; what failed for another reason before is not forgotten for it."""
    story = Story().closed("exhausted", "failed").closed("wedged", "failed")
    assert story.ends(YEAR_S)["a"].unmended == {"exhausted", "broken"}

    def decided(kind: str) -> object:
        condition = {kind: Condition(kind, Status.TRUE, "Seen", "so it is", 0.0)}
        engine = EngineStatus("a", condition, EngineLoad("a", 0.1, 1.0, 0.0, model="m"), 1.0, last_end=story.ends()["a"])
        return decide(
            FleetView([engine, EngineStatus("b", {}, EngineLoad("b", 0.1, 1.0, 0.0, model="m"), 1.0)], now=1e9), ActPolicy()
        )[0]

    for kind in ("dead", "wedged", "hung", "exhausted"):
        assert getattr(decided(kind), "reason", "") == "CrashLoop", kind
    assert isinstance(decided("neighbour"), ActionPlan), "a compaction is no restart"


def test_one_that_was_held_is_out_until_it_is_put_back_and_is_remembered_still() -> None:
    """Also one that a drain by hand left out; a try to put it back that came to nothing changes nothing."""
    for kind in ("dead", "drain"):
        story = (
            Story().closed(kind, "held").closed("undrain", "stood-back").closed("undrain", "held").closed("undrain", "undone")
        )
        assert story.ends(YEAR_S)["a"].is_out
        story.closed("undrain", "done")
        assert story.ends(YEAR_S)["a"] == FailedRestarts(kind, "held", frozenset({"broken" if kind == "dead" else kind}))
    assert not Story().closed("dead", "failed").ends()["a"].is_out


def test_which_process_answered_is_kept_whatever_its_age() -> None:
    """The last one, by whichever entry; and our own restarts since then, without those that were taken back."""
    story = Story().note(SEEN, started=5.0, count=1).note(RESTART, own=False, started=7.0, count=None, awaited=True)
    story.at += YEAR_S
    story.note(RESTART, action="x1", own=True).note(RESTART, action="x2", own=True).note(CLOSED, action="x2", end="undone")
    found = known_processes(needed(story.entries, story.at))["a"]
    assert found.seen is not None
    assert (found.seen.started, found.seen.restarts, found.own, found.is_awaited) == (7.0, None, 1, True)
    assert known_processes(needed(story.entries, story.at + YEAR_S))["a"].seen == found.seen
