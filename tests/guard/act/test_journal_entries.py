"""Entries of the journal: nothing secret gets in, which are still needed, and what is remembered by them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act import journal_entry as journal
from plimsoll.guard.act import journal_entry as words
from plimsoll.guard.act import journal_replay as replay
from plimsoll.guard.act.capacity import EngineLoad
from plimsoll.guard.act.decide import ActionPlan, EngineStatus, FailedRestarts, FleetView, decide
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, RESTART, SWITCH, WINDOW_S, Entry, cleaned, needed
from plimsoll.guard.act.journal_replay import EngineProcess, KnownProcess, failed_restarts, foreign_restarts, known_processes
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.steps import BROKEN
from plimsoll.unknown import Condition, Status
from tests.each import cases, each, trees

ENTRIES = st.builds(
    Entry, st.just(1), st.floats(0, 4e9).map(lambda at: round(at, 3)), st.text(min_size=1, max_size=20), st.text(max_size=30),
    st.text(max_size=30), st.text(max_size=30), st.dictionaries(st.text(max_size=10), trees(most=8), max_size=4),
)  # fmt: skip


@given(ENTRIES)
def test_any_entry_can_be_written(entry: Entry) -> None:
    """Whatever it was given: what is left is JSON of bounded size, in printable names."""
    found = cleaned(entry)
    assert len(json.dumps(found.fields, allow_nan=False)) <= journal.FIELDS_MAX
    assert all(len(name) <= journal.NAME_MAX and name.isprintable() for name in found[2:6])
    assert cleaned(found) == found


@each("fields", cases("guard", "secrets"))
def test_nothing_secret_is_written(fields: dict[str, object]) -> None:
    """Tokens, keys, logins in addresses and what users wrote are hidden wherever they stand."""
    assert "s3cretvalue" not in json.dumps(cleaned(Entry(1, 1.0, "note", fields=fields)))


def test_any_size_is_cut_and_names_are_cleaned() -> None:
    """Hostile sizes and depths end in a bounded entry; of an endless action the first entry and the newest are kept."""
    deep: object = "x"
    for _ in range(2_000):
        deep = {"a": deep}
    many = {str(number): "y" * 1000 for number in range(5000)}
    for fields in ({"a": "x" * 10**6}, {"a": 10**9999}, many, {"a": deep}, {"a": [["z"] * 999] * 999}):
        assert len(json.dumps(cleaned(Entry(1, 1.0, "k" * 10**5, fields=fields)))) < journal.FIELDS_MAX + 4_000
    assert "s3cretvalue" not in str(cleaned(Entry(1, 1.0, "note", engine="http://u:s3cretvalue@h:1/\n")))
    most = journal.ENTRIES_PER_ACTION
    kept = needed([entry(1, OPENED, "a"), *(entry(number, INTENT, "a") for number in range(2, 3 * most))], 0.0)
    assert (kept[0].number, kept[-1].number, len(kept)) == (1, 3 * most - 1, most + 1)


def entry(number: int, kind: str, action: str = "", *, at: float = 0.0, step: str = "", engine: str = "") -> Entry:
    return Entry(number, at, kind, engine, action, step)


def test_what_is_needed() -> None:
    """Open actions whole, what budgets count for two days, the last of each switch; and nothing else."""
    entries = [
        entry(1, OPENED, "old", at=0.0),
        entry(2, CLOSED, "old", at=1.0),
        entry(3, OPENED, "a", at=10.0),
        entry(4, INTENT, "a", at=11.0),
        entry(5, SWITCH, step="pause", at=12.0),
        entry(6, SWITCH, step="pause", at=13.0),
        entry(7, SWITCH, step="pause", engine="e", at=14.0),
        entry(8, RESTART, at=15.0),
        entry(9, "note", at=16.0),
        entry(10, OPENED, "b", at=WINDOW_S),
        entry(11, INTENT, "b", at=WINDOW_S),
        entry(12, CLOSED, "b", at=WINDOW_S),
        entry(13, OUTCOME, "b", at=WINDOW_S),  # late: it does not open the action again
        entry(14, "whatever", "a", at=WINDOW_S),
    ]
    assert [one.number for one in needed(entries, WINDOW_S + 5)] == [3, 4, 6, 7, 8, 10, 12, 14]
    assert [one.number for one in needed(entries, 9 * WINDOW_S)] == [3, 4, 6, 7, 14]


@given(st.lists(ENTRIES, max_size=30))
def test_what_is_needed_of_what_is_needed_is_the_same(entries: list[Entry]) -> None:
    """So the rest may be forgotten at any time."""
    kinds = [OPENED, INTENT, CLOSED, SWITCH]
    rows = [one._replace(number=n, kind=kinds[n % 4], action=one.action[:1]) for n, one in enumerate(entries, 1)]
    kept = needed(rows, 0.0)
    assert needed(kept, 0.0) == kept


YEAR_S = 365 * 86_400.0
AT = EngineProcess(100.0, 3)


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
        return self.note(SWITCH, engine, step=replay.PAUSE, on=is_on)

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


def test_that_it_did_not_help_or_was_held_is_remembered_until_somebody_resumes_it() -> None:
    """Dead, wedged and hung are one reason, a restart ends it; who was held or left out is out until it is put back."""
    assert Story().closed("wedged", "failed").closed("exhausted", "done").ends() == {}
    assert Story().closed("wedged", "held").switch("a", is_on=False).ends(YEAR_S) == {}
    story = Story().closed("wedged", "held").switch("a", is_on=False).switch("a", is_on=True)
    assert story.ends() == {}
    assert replay.read_switches(needed(story.entries, story.at)).paused == {"a"}
    story = Story().closed("exhausted", "failed").closed("wedged", "failed")
    assert story.ends(YEAR_S)["a"].unmended == {"exhausted", "broken"}

    def decided(kind: str) -> object:
        condition = {kind: Condition(kind, Status.TRUE, "Seen", "so it is", 0.0)}
        engine = EngineStatus("a", condition, EngineLoad("a", 0.1, 1.0, 0.0, model="m"), 1.0, last_end=story.ends()["a"])
        other = EngineStatus("b", {}, EngineLoad("b", 0.1, 1.0, 0.0, model="m"), 1.0)
        return decide(FleetView([engine, other], now=1e9), ActPolicy())[0]

    for kind in ("dead", "wedged", "hung", "exhausted"):
        assert getattr(decided(kind), "reason", "") == "CrashLoop", kind
    assert isinstance(decided("neighbour"), ActionPlan), "a compaction is no restart"
    for kind in ("dead", "drain"):
        story = Story().closed(kind, "held")
        story.closed("undrain", "stood-back").closed("undrain", "held").closed("undrain", "undone")
        assert story.ends(YEAR_S)["a"].is_out
        story.closed("undrain", "done")
        assert story.ends(YEAR_S)["a"] == FailedRestarts(kind, "held", frozenset({"broken" if kind == "dead" else kind}))
    assert not Story().closed("dead", "failed").ends()["a"].is_out


def test_which_process_answered_is_kept_and_what_was_found_is_written_down_once() -> None:
    """Whatever its age and entry, with our own restarts since; the same is nothing new, and silence forgets nothing."""
    story = Story().note(words.SEEN, started=5.0, count=1).note(RESTART, own=False, started=7.0, count=None, awaited=True)
    story.at += YEAR_S
    story.note(RESTART, action="x1", own=True).note(RESTART, action="x2", own=True).note(CLOSED, action="x2", end="undone")
    found = known_processes(needed(story.entries, story.at))["a"]
    assert found.seen is not None
    assert (found.seen.started, found.seen.restarts, found.own, found.is_awaited) == (7.0, None, 1, True)
    assert known_processes(needed(story.entries, story.at + YEAR_S))["a"].seen == found.seen
    new = foreign_restarts(KnownProcess(AT), EngineProcess(None, 5), 0)
    assert (new.seen, new.is_awaited, new.is_new) == (EngineProcess(100.0, 5), True, True)
    again = foreign_restarts(KnownProcess(new.seen, is_awaited=True), EngineProcess(None, 5), 0)
    assert (again.times, again.is_new, again.is_awaited) == (0, False, True)
    answers = foreign_restarts(KnownProcess(new.seen, is_awaited=True), EngineProcess(500.0, 5), 1)
    assert (answers.times, answers.is_new, answers.is_awaited) == (0, True, False)
    assert not foreign_restarts(KnownProcess(EngineProcess(500.0, 5)), EngineProcess(500.0, 5), 0).is_new
    assert not foreign_restarts(KnownProcess(), EngineProcess(), 0).is_new


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


def test_an_action_of_another_version_is_known_to_be_open() -> None:
    """Its steps are not ours, so nobody goes on with it; until it is closed it is not forgotten either."""
    story = Story().note(OPENED, action="x", grade="restart", kind="dead", steps=["lock", "cordon", "stop"])
    story.note(OPENED, action="y", grade="restart", kind="dead", steps=[str(step) for step in BROKEN])
    story.note(OPENED, action="z", grade="repair", steps=["lock"])
    kept = needed(story.entries, story.at + YEAR_S)
    assert [run.action for run in replay.open_actions(kept)] == ["y"]
    assert [entry.action for entry in replay.unknown_actions(kept)] == ["x", "z"]
    story.note(CLOSED, action="x", kind="dead", end="held", grade="restart")
    story.note(CLOSED, action="z", end="held", grade="repair")
    assert replay.unknown_actions(story.entries) == []
    assert failed_restarts(story.entries)["a"].is_out
