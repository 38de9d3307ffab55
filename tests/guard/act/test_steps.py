"""Every way through the steps of an action ends, and ends well; and what is left to do of one that somebody else began."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.decide import Restart, Switches
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SWITCH, Entry
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS, open_actions, read_restarts, read_switches
from plimsoll.guard.act.steps import (
    BROKEN,
    COURSES,
    SERVING,
    STEP_TEXTS,
    TRIES,
    ActionRun,
    End,
    Step,
    open_action,
    opening_fields,
)
from plimsoll.guard.judge.tracker import Grade
from tests.each import each

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


@each(("grade", "is_broken"), KINDS)
def test_every_way_ends_well(grade: Grade, is_broken: bool) -> None:
    """A lock that was taken is given back. A stop comes after a confirmed drain and idleness, or after one that serves nobody
    has left; and what was taken out is put back, or the end says that it is held."""
    first = open_action("a", "e", grade, "dead", is_broken=is_broken)
    for walk in walks(first):
        steps, course = [step for step, _ in walk], first
        for _, answer in walk:
            course = course.begun().after(is_done=answer)
        assert course.end is not None
        if (Step.LOCK, True) not in walk:
            assert steps == [Step.LOCK]
            continue
        assert Step.UNLOCK in steps, walk
        if Step.STOP in steps:
            wanted = {Step.LOCK, Step.LEAVE} if is_broken else {Step.LOCK, Step.DRAIN, Step.IDLE}
            assert wanted <= {step for step, answer in walk[: steps.index(Step.STOP)] if answer}
        if {Step.DRAIN, Step.LEAVE} & set(steps) and course.end is not End.HELD:
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
    written = journal_of(course, answers, cut)
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


@each("steps", [SERVING, BROKEN])
def test_a_restart_that_has_changed_nothing_yet_is_over(steps: tuple[Step, ...]) -> None:
    """Locked, evidence kept, and not yet taken out: there is nothing to take back, and nobody's balancer is touched."""
    first = Step.DRAIN if Step.DRAIN in steps else Step.LEAVE
    for step, is_begun in ((Step.LOCK, False), (Step.LOCK, True), (Step.EVIDENCE, True), (first, False)):
        found = at(steps, step, is_begun=is_begun).taken_over()
        assert (found.step, found.end) == (None, End.UNDONE)


@each("steps", [SERVING, BROKEN])
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
