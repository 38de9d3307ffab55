"""One action as its journal tells it: which step it is in, and what comes next, also for a guard that finds it half done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, Entry
from plimsoll.guard.act.steps import COURSES, UNDO, End, Next, Step, follows, steps_of
from plimsoll.guard.judge.tracker import Grade


class Course(NamedTuple):
    """An action under way."""

    action: str
    engine: str
    grade: Grade
    kind: str  # the condition it is about, or "asked" for one that a person asked for
    steps: tuple[Step, ...]
    step: Step | None  # to be done next, or begun; None: it is over
    tries: int = 0  # of this step, ended without effect
    is_begun: bool = False  # the step was begun and its end is not known
    is_undoing: bool = False
    end: End | None = None  # how it will end, once it is certain
    facts: Mapping[str, Any] = {}  # what its steps found out
    epoch: int = 0
    is_taken_over: bool = False  # begun by a guard that is no more: what it did last is not known

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.step is None

    @property
    def is_down(self) -> bool:
        """Whether the engine was stopped, or may have been."""
        if Step.STOP not in self.steps:
            return False
        if self.is_undoing or self.step is None:
            return self.end is End.HELD
        if self.step is Step.STOP:
            return self.is_begun or self.tries > 0  # tried, with whatever outcome
        return self.steps.index(self.step) > self.steps.index(Step.STOP)

    def begun(self) -> Course:
        """Its step is begun."""
        return self._replace(is_begun=True)

    def after(self, *, is_done: bool | None, facts: Mapping[str, Any] | None = None) -> Course:
        """Its step has ended so."""
        assert self.step is not None, "an action that is over has no step"
        tries = self.tries + 1
        is_untouched = bool((facts or {}).get("untouched"))  # of this outcome alone, not of one before it
        found = follows(
            self.steps, self.step, is_done=is_done, tries=tries, is_undoing=self.is_undoing, is_untouched=is_untouched
        )
        known = {**self.facts, **(facts or {})}
        epoch = int(known.get("epoch", self.epoch) or 0)
        again = found.step is self.step and found.is_undoing is self.is_undoing
        return self._replace(
            step=found.step, tries=tries if again else 0, is_begun=False, is_undoing=found.is_undoing,
            end=self._ends(found), facts=known, epoch=epoch,
        )  # fmt: skip

    def _ends(self, found: Next) -> End | None:
        # How it ends is settled by what went wrong, not by how well the lock was given back after it.
        return self.end if self.end is not None else found.end

    def taken_over(self) -> Course:
        """For a guard that finds it open: back where nothing was stopped yet, on where something was.

        A lock is not given back: the earlier guard's is gone with it, or ends by itself.
        """
        again = self._replace(tries=0, is_begun=False, is_taken_over=True)
        if self.is_over:
            return again
        if self.is_undoing:
            return again if self.step is not Step.UNLOCK else again._replace(step=None, end=self.end or End.UNDONE)
        if self.is_down:
            return again if self.step is not Step.UNLOCK else again._replace(step=Step.PROBATION)
        if not self._has_changed_anything:
            return again._replace(step=None, end=End.DONE if self.step is Step.UNLOCK else End.UNDONE)
        return again._replace(step=Step.UNSHED) if self.grade is Grade.SHED else again._replace(step=UNDO[0], is_undoing=True)

    @property
    def _has_changed_anything(self) -> bool:
        """Whether the step was begun from which on there is something to take back; a compaction leaves nothing."""
        first = next((step for step in self.steps if step in (Step.LEAVE, Step.DRAIN, Step.SHED)), None)
        if first is None or self.step is None:
            return False
        place, begins = self.steps.index(self.step), self.steps.index(first)
        return place > begins or (place == begins and self.is_begun)


def opened(action: str, engine: str, grade: Grade, kind: str, *, is_broken: bool) -> Course:
    """A new one."""
    steps = steps_of(grade, is_broken=is_broken)
    return Course(action, engine, grade, kind, steps, steps[0])


def to_fields(course: Course) -> dict[str, Any]:
    """What its first entry holds."""
    return {"grade": str(course.grade), "kind": course.kind, "steps": [str(step) for step in course.steps]}


def open_courses(entries: Iterable[Entry]) -> list[Course]:
    """Every action that was begun and is not over, as the journal tells it; one that cannot be understood is left out."""
    found: dict[str, Course] = {}
    for entry in entries:
        if entry.kind == OPENED:
            course = _read(entry)
            if course is not None:
                found[entry.action] = course
        elif entry.action in found:
            if entry.kind == CLOSED:
                del found[entry.action]
            else:
                found[entry.action] = _moved(found[entry.action], entry)
    return list(found.values())


def _read(entry: Entry) -> Course | None:
    fields = entry.fields
    try:
        grade, steps = Grade(fields["grade"]), tuple(Step(name) for name in fields["steps"])
    except (KeyError, ValueError, TypeError):
        return None
    if steps not in COURSES.get(grade, ()):
        return None  # of another version of guard: its steps are not ours
    facts = fields.get("facts")
    course = Course(entry.action, entry.engine, grade, str(fields.get("kind", "")), steps, steps[0])
    return course._replace(facts=facts) if isinstance(facts, dict) else course


def _moved(course: Course, entry: Entry) -> Course:
    if course.step is None or entry.step != course.step:
        return _took_over(course, entry)
    if entry.kind == INTENT:
        return course.begun()
    if entry.kind == OUTCOME:
        facts = entry.fields.get("facts")
        done = entry.fields.get("done")
        return course.after(is_done=done if isinstance(done, bool) else None, facts=facts if isinstance(facts, dict) else {})
    return course


def _took_over(course: Course, entry: Entry) -> Course:
    """A later guard may have turned it round: then its entries are those of the way back."""
    if entry.kind != INTENT:
        return course
    turned = course.taken_over()
    return turned.begun() if turned.step is not None and entry.step == turned.step else course
