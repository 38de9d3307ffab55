"""Every way through the steps of an action ends, and ends well; and what is left to do of one that somebody else began."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act import steps as ways
from plimsoll.guard.act.decide import Restart, Switches
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, RESTART, SWITCH, Entry
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS, open_actions, read_restarts, read_switches
from plimsoll.guard.act.steps import BROKEN, COURSES, SERVING, STEP_TEXTS, TRIES, ActionRun, End, Step, open_action
from plimsoll.guard.judge.tracker import Grade
from tests.each import each, sure

KINDS = [
    (Grade.SHED, False), (Grade.COMPACT, False), (Grade.RESTART, False), (Grade.RESTART, True),
]  # fmt: skip


def walks(course: ActionRun, most: int = 40) -> list[list[tuple[Step, bool | None]]]:
    """Every way through it with at most two steps that do not go well."""
    found = []
    for bad in itertools.chain.from_iterable(itertools.combinations(range(16), count) for count in range(4)):
        for answers in itertools.product((False, None), repeat=len(bad)):
            now = course
            walk: list[tuple[Step, bool | None]] = []
            says = dict(zip(bad, answers, strict=True))
            while now.step is not None:
                answer = says.get(len(walk), True)
                walk.append((now.step, answer))
                now = now.begun().after(is_done=answer)
                assert len(walk) < most, walk
            found.append(walk)
    return found


@each(("grade", "is_broken"), KINDS)
def test_every_way_ends_well(grade: Grade, is_broken: bool) -> None:
    """A lock that was taken is given back. A stop comes after a confirmed drain and idleness, or after one that serves nobody
    has left; and what was taken out is put back, or the end says that it is held."""
    first = open_action("a", "e", grade, "dead", is_broken=is_broken)
    for walk in walks(first):
        steps, course = [step for step, _ in walk], first
        for _, answer in walk:
            course = course.begun().after(is_done=answer)
        if (Step.LOCK, True) not in walk:
            assert steps == [Step.LOCK]
            continue
        assert Step.UNLOCK in steps, walk
        if Step.STOP in steps:
            wanted = {Step.LOCK, Step.LEAVE} if is_broken else {Step.LOCK, Step.DRAIN, Step.IDLE}
            assert wanted <= {step for step, answer in walk[: steps.index(Step.STOP)] if answer}
        if {Step.DRAIN, Step.LEAVE} & set(steps) and sure(course.end) is not End.HELD:
            assert Step.UNDRAIN in steps, walk


def test_a_walk_where_all_goes_well_is_the_course() -> None:
    """Each step once and in order, with what it does, what is checked, and how it is undone."""
    for grade, is_broken in KINDS:
        course = open_action("a", "e", grade, "dead", is_broken=is_broken)
        assert [step for step, _ in walks(course)[0]] == list(course.steps)
    assert set(STEP_TEXTS) == set(Step) == {step for courses in COURSES.values() for course in courses for step in course}
    assert all(about.does and about.before and about.after and about.undo for about in STEP_TEXTS.values())
    assert set(TRIES) <= set(Step)


def journal_of(course: ActionRun, answers: list[bool | None], cut: int) -> list[Entry]:
    """What the journal holds of it after so many writes."""
    found = [Entry(1, 0.0, OPENED, "e", "a", fields=ways.opening_fields(course))]
    for answer in answers:
        if course.step is None:
            break
        found.append(Entry(len(found) + 1, 0.0, INTENT, "e", "a", str(course.step)))
        fields = {"done": answer, "facts": {"epoch": 7} if course.step is Step.LOCK else {}}
        found.append(Entry(len(found) + 1, 0.0, OUTCOME, "e", "a", str(course.step), fields))
        course = course.begun().after(is_done=answer, facts=fields["facts"] if isinstance(fields["facts"], dict) else {})
    if course.step is None:
        found.append(Entry(len(found) + 1, 0.0, CLOSED, "e", "a"))
    return found[:cut]


@pytest.mark.parametrize(("grade", "is_broken"), KINDS)
@given(answers=st.lists(st.sampled_from((True, False, None)), min_size=30, max_size=30), cut=st.integers(1, 60))
def test_the_journal_tells_where_an_action_is(grade: Grade, is_broken: bool, answers: list[bool | None], cut: int) -> None:
    """A guard that reads it after any write knows the step, whether it was begun, and whether the engine is down."""
    written = journal_of(open_action("a", "e", grade, "dead", is_broken=is_broken), answers, cut)
    stopped = any(one.kind == INTENT and one.step == Step.STOP for one in written)
    found = open_actions(written)
    if written[-1].kind == CLOSED:
        assert found == []
        return
    now = found[0]
    if written[-1].kind == INTENT:
        assert (now.step, now.is_begun) == (written[-1].step, True)
    else:
        assert not now.is_begun
    if grade is Grade.RESTART and stopped:
        assert now.is_down or now.step in (None, Step.UNLOCK, Step.PROBATION)
    later = now.taken_over()
    if grade is Grade.RESTART and not stopped and not now.is_over:
        assert later.is_undoing or later.end is End.UNDONE, "before a stop a later guard takes it back"
    while later.step is not None:
        later = later.begun().after(is_done=True)
    assert later.end is not None or later.is_over


def at(steps: tuple[Step, ...], step: Step, *, is_begun: bool, tries: int = 0) -> ActionRun:
    grade = next(grade for grade, courses in COURSES.items() if steps in courses)
    return ActionRun("x", "a", grade, "dead", steps, step, tries=tries, is_begun=is_begun)


SHED, COMPACT = COURSES[Grade.SHED][0], COURSES[Grade.COMPACT][0]
UP = (Step.GONE, Step.START, Step.READY, Step.CHECK, Step.WARM, Step.UNDRAIN)
BOTH = (False, True)
TAKEN_OVER: list[tuple[tuple[Step, ...], Step, bool, tuple[object, ...]]] = [
    *((steps, step, is_begun, (None, End.UNDONE)) for steps, first in ((SERVING, Step.DRAIN), (BROKEN, Step.LEAVE))
      for step, is_begun in ((Step.LOCK, False), (Step.LOCK, True), (Step.EVIDENCE, True), (first, False))),
    *((steps, step, is_begun, (Step.UNDRAIN, None)) for steps, first in ((SERVING, Step.DRAIN), (BROKEN, Step.LEAVE))
      for step, is_begun in ((first, True), (Step.STOP, False))),
    *((steps, step, is_begun, (step, None)) for steps in (SERVING, BROKEN) for is_begun in BOTH for step in UP),
    *((SERVING, step, is_begun, (Step.PROBATION, None)) for step in (Step.UNLOCK, Step.PROBATION) for is_begun in BOTH),
    (SHED, Step.LOCK, True, (None, End.UNDONE)),
    *((SHED, step, True, (Step.UNSHED, None)) for step in (Step.SHED, Step.UNLOCK, Step.HOLD, Step.UNSHED)),
    *((COMPACT, step, True, (None, End.UNDONE)) for step in (Step.COMPACT, Step.VERIFY)),
    (COMPACT, Step.UNLOCK, True, (None, End.DONE)),
]  # fmt: skip
"""What changed nothing is over, what is out is put back before the stop and goes on after it; what serves is watched."""


@each(("steps", "step", "is_begun", "wanted"), TAKEN_OVER)
def test_what_the_next_guard_does(steps: tuple[Step, ...], step: Step, is_begun: bool, wanted: tuple[object, ...]) -> None:
    """It touches no balancer that nobody touched; what only waited is not waited for again."""
    found = at(steps, step, is_begun=is_begun).taken_over()
    assert (found.step, found.end) == wanted
    assert found.is_undoing is (found.step is Step.UNDRAIN and step is not Step.UNDRAIN)
    assert found.step is None or (found.tries, found.is_taken_over) == (0, True)


@each("steps", [SERVING, BROKEN])
def test_a_stop_that_was_begun_or_has_no_known_outcome_may_have_happened(steps: tuple[Step, ...]) -> None:
    """Then only forward helps."""
    for course in (at(steps, Step.STOP, is_begun=True), at(steps, Step.STOP, is_begun=False, tries=1)):
        assert course.is_down
        assert (course.taken_over().step, course.taken_over().is_undoing) == (Step.STOP, False)


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


def closed(action: str, end: End, kind: str = "dead", grade: Grade = Grade.RESTART) -> Entry:
    return Entry(9, 9.0, CLOSED, "a", action, fields={"grade": str(grade), "kind": kind, "end": str(end)})


def test_a_restart_counts_once_the_last_of_each_switch_holds_and_what_is_not_understood_is_left_alone() -> None:
    """One that was taken back is none, those of others have no action; an action of another version is not guessed at."""
    for fields in ({}, {"grade": "restart", "steps": ["lock", "dance"]}, {"grade": "restart", "steps": ["lock"]}, {"steps": 3}):
        assert open_actions([Entry(1, 0.0, OPENED, "a", "x", fields=fields)]) == []
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

    def switch(name: str, engine: str = "", *, is_on: bool = True) -> Entry:
        return Entry(1, 0.0, SWITCH, engine, step=name, fields={"on": is_on})

    entries = [switch(PAUSE), switch(PAUSE, "a"), switch(f"{RUNGS}restart"), switch(f"{RUNGS}dance"), switch("else", "b")]
    assert read_switches(entries) == Switches(True, frozenset({"a"}), frozenset({Grade.RESTART}))
    off = [switch(PAUSE, is_on=False), switch(f"{RUNGS}restart", is_on=False)]
    assert read_switches(entries + off) == Switches(False, frozenset({"a"}), frozenset())
