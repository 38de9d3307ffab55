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
    """The reason first and the code behind it; a sentence of another form is shown whole."""
    assert of_change(BEGINS) == StoryLine(12.5, SAW, "b", "expected wait 7 s and the queue grows (engine.saturated)")
    found = of_change({**BEGINS, "sentence": "b: something else"})
    assert found is not None
    assert found.text == "something else"


@pytest.mark.parametrize("what", ["acted", "reached", "unreachable", "unknown", "trouble"])
def test_other_changes_are_not_told_twice_or_not_at_all(what: str) -> None:
    """What guard did is told from its journal, which it wrote before it acted; an engine that starts is no incident."""
    assert of_change({**BEGINS, "what": what}) is None


def test_a_person_who_is_needed_is_always_told_and_mere_intents_are_not() -> None:
    """An intent is followed by its outcome; which process answers is nobody's story."""
    found = of_change({**BEGINS, "what": "needs-a-person", "sentence": "b: restart is held"})
    assert found == StoryLine(12.5, ENDED, "b", "restart is held")
    assert of_entry(entry(INTENT, "stop")) is None
    assert of_entry(entry(SEEN, started=1.0)) is None


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


def test_every_step_of_guard_has_its_words() -> None:
    """A step or an end of a later version shows under its own name."""
    from plimsoll.demo.screen import QUIET
    from plimsoll.guard.act.steps import Step

    assert {str(step) for step in Step} <= {*STEPS, *QUIET}
    found = of_entry(entry(CLOSED, end="paused", grade="shed"))
    assert found is not None
    assert found.text == "shed: paused"
