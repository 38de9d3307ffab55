"""What the journal remembers: restarts, ours and others', those that did not help, and which process of an engine answered."""

from __future__ import annotations

from typing import Any

from plimsoll.guard.act.capacity import EngineLoad
from plimsoll.guard.act.decide import ActionPlan, EngineStatus, FailedRestarts, FleetView, decide
from plimsoll.guard.act.journal_entry import CLOSED, OPENED, RESTART, SEEN, SWITCH, WINDOW_S, Entry, needed
from plimsoll.guard.act.journal_replay import (
    PAUSE,
    EngineProcess,
    KnownProcess,
    failed_restarts,
    foreign_restarts,
    known_processes,
    open_actions,
    read_switches,
    unknown_actions,
)
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.steps import BROKEN
from plimsoll.unknown import Condition, Status
from tests.each import each

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


@each("end", ["failed", "held"])
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


AT = EngineProcess(100.0, 3)


@each(
    ("known", "now", "lives", "times"),
    [
        (KnownProcess(), EngineProcess(100.0), 0, 0),  # the first that was ever seen
        (KnownProcess(AT), AT, 0, 0),
        (KnownProcess(AT), EngineProcess(100.4, 3), 0, 0),  # the same start, as another clock writes it
        (KnownProcess(AT), EngineProcess(500.0, 3), 0, 1),  # while guard was down
        (KnownProcess(AT), EngineProcess(500.0, 7), 0, 4),  # and its manager knows how often
        (KnownProcess(AT), EngineProcess(500.0, 1), 0, 1),  # a count that began anew says nothing of what was before
        (KnownProcess(AT), EngineProcess(500.0), 3, 3),  # three were seen to answer
        (KnownProcess(AT), EngineProcess(None, 5), 0, 2),  # two that never answered
        (KnownProcess(AT, own=1), EngineProcess(500.0, 0), 1, 0),  # ours
        (KnownProcess(AT, own=1), EngineProcess(500.0, 0), 2, 1),  # ours, and one after it: during probation
        (KnownProcess(AT, is_awaited=True), EngineProcess(500.0, 3), 1, 0),  # counted before it answered
        (KnownProcess(AT, is_awaited=True), EngineProcess(500.0, 3), 2, 1),
        (KnownProcess(EngineProcess(None, 3)), EngineProcess(500.0, 3), 0, 0),
        (KnownProcess(), EngineProcess(), 2, 2),  # without a start time: by counters that fell
    ],
)
def test_each_is_counted_once(known: KnownProcess, now: EngineProcess, lives: int, times: int) -> None:
    """By the start time, by what was seen to answer, and by the count of whoever runs it, whichever knows most."""
    assert foreign_restarts(known, now, lives).times == times


def test_what_was_found_is_written_down_once_and_kept_where_it_is_not_known_any_more() -> None:
    """The same again is nothing new; a page that does not answer forgets nothing; one that was counted is awaited."""
    found = foreign_restarts(KnownProcess(AT), EngineProcess(None, 5), 0)
    assert (found.seen, found.is_awaited, found.is_new) == (EngineProcess(100.0, 5), True, True)
    again = foreign_restarts(KnownProcess(found.seen, is_awaited=True), EngineProcess(None, 5), 0)
    assert (again.times, again.is_new, again.is_awaited) == (0, False, True)
    answers = foreign_restarts(KnownProcess(found.seen, is_awaited=True), EngineProcess(500.0, 5), 1)
    assert (answers.times, answers.is_new, answers.is_awaited) == (0, True, False)
    assert not foreign_restarts(KnownProcess(EngineProcess(500.0, 5)), EngineProcess(500.0, 5), 0).is_new
    assert not foreign_restarts(KnownProcess(), EngineProcess(), 0).is_new


def test_an_action_of_another_version_is_known_to_be_open() -> None:
    """Its steps are not ours, so nobody goes on with it; until it is closed it is not forgotten either."""
    story = Story().note(OPENED, action="x", grade="restart", kind="dead", steps=["lock", "cordon", "stop"])
    story.note(OPENED, action="y", grade="restart", kind="dead", steps=[str(step) for step in BROKEN])
    story.note(OPENED, action="z", grade="repair", steps=["lock"])
    kept = needed(story.entries, story.at + YEAR_S)
    assert [run.action for run in open_actions(kept)] == ["y"]
    assert [entry.action for entry in unknown_actions(kept)] == ["x", "z"]
    story.note(CLOSED, action="x", kind="dead", end="held", grade="restart").note(
        CLOSED, action="z", end="held", grade="repair"
    )
    assert unknown_actions(story.entries) == []
    assert failed_restarts(story.entries)["a"].is_out
