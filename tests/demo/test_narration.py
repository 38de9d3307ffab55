"""From guard's own words to lines for a reader."""

from __future__ import annotations

import pytest

from plimsoll.demo.screen import DECIDED, DID, ENDED, SAW, STEPS, StoryLine, of_change, of_entry
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, SEEN, Entry

BEGINS = {
    "at": 12.5, "engine": "b", "what": "begins", "kind": "saturated", "code": "engine.saturated",
    "sentence": "b: more requests come than it can serve (engine.saturated): expected wait 7 s and the queue grows",
}  # fmt: skip


def test_what_begins_to_hold_is_what_guard_saw() -> None:
    """The reason comes first and the code stands behind it, with the time that guard gave."""
    assert of_change(BEGINS) == StoryLine(12.5, SAW, "b", "expected wait 7 s and the queue grows (engine.saturated)")


def test_a_sentence_of_another_form_is_shown_whole() -> None:
    """What cannot be taken apart is not cut."""
    found = of_change({**BEGINS, "sentence": "b: something else"})
    assert found is not None
    assert found.text == "something else"


@pytest.mark.parametrize("what", ["acted", "reached", "unreachable", "unknown", "trouble"])
def test_other_changes_are_not_told_twice_or_not_at_all(what: str) -> None:
    """What guard did is told from its journal, which it wrote before it acted; an engine that starts is no incident."""
    assert of_change({**BEGINS, "what": what}) is None


def test_a_person_who_is_needed_is_always_told() -> None:
    """The worst news is never left out."""
    found = of_change({**BEGINS, "what": "needs-a-person", "sentence": "b: restart is held"})
    assert found == StoryLine(12.5, ENDED, "b", "restart is held")


def entry(kind: str, step: str = "", **fields: object) -> Entry:
    """One line of a journal."""
    return Entry(7, 20.0, kind, "c", "ab12", step, fields)


def test_an_action_is_told_from_its_beginning_to_its_end() -> None:
    """Opened is a decision, an outcome a deed, closed an end, each with guard's own words."""
    assert of_entry(entry(OPENED, grade="restart", why="it hangs")) == StoryLine(20.0, DECIDED, "c", "to restart")
    assert of_entry(entry(OUTCOME, "stop", done=True, says="stopped: it ended")) == StoryLine(
        20.0, DID, "c", "stopped it: it ended"
    )
    assert of_entry(entry(CLOSED, end="done", grade="restart")) == StoryLine(20.0, ENDED, "c", "restart: done and confirmed")


@pytest.mark.parametrize("step", ["lock", "unlock", "hold", "gone"])
def test_steps_that_only_keep_order_are_quiet_unless_they_fail(step: str) -> None:
    """A lock that was taken is no news; one that could not be had is."""
    assert of_entry(entry(OUTCOME, step, done=True, says="fine")) is None
    failed = of_entry(entry(OUTCOME, step, done=False, says="somebody else has it"))
    assert failed is not None
    assert failed.text == f"{step} (not done): somebody else has it"


def test_what_is_only_meant_or_only_seen_is_not_told() -> None:
    """An intent is followed by its outcome; which process answers is nobody's story."""
    assert of_entry(entry(INTENT, "stop")) is None
    assert of_entry(entry(SEEN, started=1.0)) is None


def test_every_step_of_guard_has_its_words() -> None:
    """A step that guard learns later shows under its own name; all of today's have plain words or are quiet."""
    from plimsoll.demo.screen import QUIET
    from plimsoll.guard.act.steps import Step

    assert {str(step) for step in Step} <= {*STEPS, *QUIET}


def test_an_end_that_is_not_known_is_said_as_it_stands() -> None:
    """Nothing is made up for a word of a later version."""
    found = of_entry(entry(CLOSED, end="paused", grade="shed"))
    assert found is not None
    assert found.text == "shed: paused"
