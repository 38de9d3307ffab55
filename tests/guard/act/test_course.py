"""An action that somebody else began: what is left to do of it, and what the journal remembers of those that are over."""

from __future__ import annotations

import pytest

from plimsoll.guard.act.decide import Restart, Switches
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SWITCH, Entry
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS, open_actions, read_restarts, read_switches
from plimsoll.guard.act.steps import BROKEN, COURSES, SERVING, ActionRun, End, Step, open_action, opening_fields
from plimsoll.guard.judge.tracker import Grade


def at(steps: tuple[Step, ...], step: Step, *, is_begun: bool, tries: int = 0) -> ActionRun:
    grade = next(grade for grade, courses in COURSES.items() if steps in courses)
    return ActionRun("x", "a", grade, "dead", steps, step, tries=tries, is_begun=is_begun)


@pytest.mark.parametrize("steps", [SERVING, BROKEN])
def test_a_restart_that_has_changed_nothing_yet_is_over(steps: tuple[Step, ...]) -> None:
    """Locked, evidence kept, and not yet taken out: there is nothing to take back, and nobody's balancer is touched."""
    first = Step.DRAIN if Step.DRAIN in steps else Step.LEAVE
    for step, is_begun in ((Step.LOCK, False), (Step.LOCK, True), (Step.EVIDENCE, True), (first, False)):
        found = at(steps, step, is_begun=is_begun).taken_over()
        assert (found.step, found.end) == (None, End.UNDONE)


@pytest.mark.parametrize("steps", [SERVING, BROKEN])
def test_a_restart_is_taken_back_before_the_stop_and_goes_on_after_it(steps: tuple[Step, ...]) -> None:
    """A stop that was begun, or tried without a known outcome, may have happened: then only forward helps."""
    first = Step.DRAIN if Step.DRAIN in steps else Step.LEAVE
    for step, is_begun in ((first, True), (Step.STOP, False)):
        found = at(steps, step, is_begun=is_begun).taken_over()
        assert (found.step, found.is_undoing, found.is_taken_over) == (Step.UNDRAIN, True, True)
    for course in (at(steps, Step.STOP, is_begun=True), at(steps, Step.STOP, is_begun=False, tries=1)):
        assert course.is_down
        assert (course.taken_over().step, course.taken_over().is_undoing) == (Step.STOP, False)
    for step in (Step.GONE, Step.START, Step.READY, Step.CHECK, Step.WARM, Step.UNDRAIN, Step.PROBATION):
        for is_begun in (False, True):
            found = at(steps, step, is_begun=is_begun).taken_over()
            assert (found.step, found.is_undoing, found.tries) == (step, False, 0)


def test_an_engine_that_is_back_needs_no_lock_and_is_only_watched() -> None:
    """In unlock and in probation it serves: the next guard begins its probation anew and touches nothing."""
    for is_begun in (False, True):
        assert at(SERVING, Step.UNLOCK, is_begun=is_begun).taken_over().step is Step.PROBATION
        assert at(SERVING, Step.PROBATION, is_begun=is_begun).taken_over().step is Step.PROBATION


def test_shedding_is_ended_and_compaction_is_over() -> None:
    """What only waits is not waited for again: the gate takes everything, and torch gave back what it gave back."""
    shed, compact = COURSES[Grade.SHED][0], COURSES[Grade.COMPACT][0]
    assert at(shed, Step.LOCK, is_begun=True).taken_over().end is End.UNDONE
    for step in (Step.SHED, Step.UNLOCK, Step.HOLD, Step.UNSHED):
        assert at(shed, step, is_begun=True).taken_over().step is Step.UNSHED
    for step, end in ((Step.COMPACT, End.UNDONE), (Step.VERIFY, End.UNDONE), (Step.UNLOCK, End.DONE)):
        found = at(compact, step, is_begun=True).taken_over()
        assert (found.step, found.end) == (None, end)


def test_what_cannot_be_put_back_or_stopped_is_held() -> None:
    """Out of the balancer is not "undone"; a stop is taken back only if nothing was touched."""
    course = at(SERVING, Step.DRAIN, is_begun=True).after(is_done=False)
    while course.step is Step.UNDRAIN:
        course = course.begun().after(is_done=False)
    assert (course.step, course.end) == (Step.UNLOCK, End.HELD)
    assert course.begun().after(is_done=True).end is End.HELD
    course = at(SERVING, Step.STOP, is_begun=True)
    assert course.after(is_done=False, facts={"untouched": True}).step is Step.UNDRAIN
    for again in (course.after(is_done=False), course.after(is_done=None, facts={"untouched": True})):
        assert (again.step, again.tries, again.is_down) == (Step.STOP, 1, True)
        assert again.begun().after(is_done=None).end is End.HELD


def written(*entries: tuple[str, str, dict[str, object]]) -> list[Entry]:
    course = open_action("x", "a", Grade.RESTART, "dead", is_broken=False)
    first = Entry(1, 0.0, OPENED, "a", "x", fields={**opening_fields(course), "facts": {"started_before": 5.0}})
    return [first, *(Entry(number, 0.0, kind, "a", "x", step, one) for number, (kind, step, one) in enumerate(entries, 2))]


def test_the_entries_of_a_second_guard_are_understood_by_a_third() -> None:
    """The facts of all steps are read back, the epoch among them, wherever it turned round or died."""
    lock = {"done": True, "facts": {"epoch": 7, "left_s": 3.0}}
    found = open_actions(written((INTENT, "lock", {}), (OUTCOME, "lock", lock)))[0]
    assert (found.step, found.epoch, found.facts["started_before"]) == (Step.EVIDENCE, 7, 5.0)
    done: dict[str, object] = {"done": True, "facts": {}}
    entries = [(kind, step, done) for step in ("lock", "evidence") for kind in (INTENT, OUTCOME)]
    note: dict[str, object] = {"take-over": "ours"}
    more = [(INTENT, "drain", done), (NOTE, "", note), (INTENT, "undrain", done)]
    found = open_actions(written(*entries, *more))[0]
    assert (found.step, found.is_undoing, found.is_begun) == (Step.UNDRAIN, True, True)
    found = open_actions(written(*entries, *more, (OUTCOME, "undrain", done)))[0]
    assert found.taken_over().end is End.UNDONE


def test_what_cannot_be_understood_is_left_alone() -> None:
    """An action of another version of guard, or none at all, is not guessed at."""
    for fields in ({}, {"grade": "restart", "steps": ["lock", "dance"]}, {"grade": "restart", "steps": ["lock"]}, {"steps": 3}):
        assert open_actions([Entry(1, 0.0, OPENED, "a", "x", fields=fields)]) == []


def closed(action: str, end: End, kind: str = "dead", grade: Grade = Grade.RESTART) -> Entry:
    return Entry(9, 9.0, CLOSED, "a", action, fields={"grade": str(grade), "kind": kind, "end": str(end)})


def test_a_restart_counts_once_and_not_where_nothing_was_stopped() -> None:
    """Whoever goes on with it writes it down again; one that was taken back is none; those of others have no action."""
    own = Entry(2, 2.0, RESTART, "a", "x", fields={"own": True})
    foreign = Entry(4, 4.0, RESTART, "a", fields={"own": False})
    assert read_restarts([own, own._replace(number=3, at=3.0), foreign, foreign]) == [
        Restart(3.0, "a"), Restart(4.0, "a", is_own=False), Restart(4.0, "a", is_own=False),
    ]  # fmt: skip
    assert len(read_restarts([foreign._replace(fields={"own": False, "times": 3})])) == 3
    for odd in (0, -5, "many", None, 2.5):
        assert len(read_restarts([foreign._replace(fields={"own": False, "times": odd})])) == 1, odd
    assert read_restarts([own, closed("x", End.UNDONE)]) == []
    assert len(read_restarts([own, closed("x", End.HELD)])) == 1


def test_the_last_of_each_switch_holds() -> None:
    """Of all, of an engine, of a rung; on and off again."""

    def switch(name: str, engine: str = "", *, is_on: bool = True) -> Entry:
        return Entry(1, 0.0, SWITCH, engine, step=name, fields={"on": is_on})

    entries = [switch(PAUSE), switch(PAUSE, "a"), switch(f"{RUNGS}restart"), switch(f"{RUNGS}dance"), switch("else", "b")]
    assert read_switches(entries) == Switches(True, frozenset({"a"}), frozenset({Grade.RESTART}))
    off = [switch(PAUSE, is_on=False), switch(f"{RUNGS}restart", is_on=False)]
    assert read_switches(entries + off) == Switches(False, frozenset({"a"}), frozenset())
