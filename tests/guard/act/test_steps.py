"""Every way through the steps of an action ends, and ends well."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, Entry
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.act.steps import COURSES, STEP_TEXTS, TRIES, ActionRun, End, Step, open_action, opening_fields
from plimsoll.guard.judge.tracker import Grade

KINDS = [
    (Grade.SHED, False), (Grade.COMPACT, False), (Grade.RESTART, False), (Grade.RESTART, True),
]  # fmt: skip
ANSWERS = (True, False, None)


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


@pytest.mark.parametrize(("grade", "is_broken"), KINDS)
def test_every_way_ends_and_gives_the_lock_back(grade: Grade, is_broken: bool) -> None:
    """Whatever goes wrong, an action that took the lock gives it back, or tried to as often as it may."""
    for walk in walks(open_action("a", "e", grade, "dead", is_broken=is_broken)):
        steps = [step for step, _ in walk]
        if (Step.LOCK, True) in walk:
            assert Step.UNLOCK in steps, walk
        else:
            assert steps == [Step.LOCK]


@pytest.mark.parametrize("is_broken", [False, True])
def test_nothing_is_stopped_that_was_not_first_seen_to_be_out_and_idle(is_broken: bool) -> None:
    """A stop comes after the lock, and after a confirmed drain and idleness, or for one that serves nobody after it left."""
    for walk in walks(open_action("a", "e", Grade.RESTART, "dead", is_broken=is_broken)):
        if Step.STOP in [step for step, _ in walk]:
            before = walk[: [step for step, _ in walk].index(Step.STOP)]
            wanted = {Step.LOCK, Step.LEAVE} if is_broken else {Step.LOCK, Step.DRAIN, Step.IDLE}
            assert wanted <= {step for step, answer in before if answer}


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_was_taken_out_is_put_back_or_held(is_broken: bool) -> None:
    """No way ends with an engine out of service without a word: it is put back, or the end says that it is held."""
    for walk in walks(open_action("a", "e", Grade.RESTART, "dead", is_broken=is_broken)):
        course = open_action("a", "e", Grade.RESTART, "dead", is_broken=is_broken)
        for _, answer in walk:
            course = course.begun().after(is_done=answer)
        steps = [step for step, _ in walk]
        if {Step.DRAIN, Step.LEAVE} & set(steps) and course.end is not End.HELD:
            assert Step.UNDRAIN in steps, walk
        assert course.end is not None


def test_a_walk_where_all_goes_well_is_the_course() -> None:
    """Each step once and in order, with what it does, what is checked, and how it is undone."""
    for grade, is_broken in KINDS:
        course = open_action("a", "e", grade, "dead", is_broken=is_broken)
        assert [step for step, _ in walks(course)[0]] == list(course.steps)
    assert set(STEP_TEXTS) == set(Step) == {step for courses in COURSES.values() for course in courses for step in course}
    assert all(about.does and about.before and about.after and about.undo for about in STEP_TEXTS.values())
    assert set(TRIES) <= set(Step)


def entries(course: ActionRun, answers: list[bool | None], cut: int) -> list[Entry]:
    """What the journal holds of it after so many writes."""
    found = [Entry(1, 0.0, OPENED, "e", "a", fields=opening_fields(course))]
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
@given(answers=st.lists(st.sampled_from(ANSWERS), min_size=30, max_size=30), cut=st.integers(1, 60))
def test_the_journal_tells_where_an_action_is(grade: Grade, is_broken: bool, answers: list[bool | None], cut: int) -> None:
    """A guard that reads it after any write knows the step, whether it was begun, and whether the engine is down."""
    course = open_action("a", "e", grade, "dead", is_broken=is_broken)
    written = entries(course, answers, cut)
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
