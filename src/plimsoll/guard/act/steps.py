"""The steps of every action, and where each leads: a table, so that every way through it can be walked by a test.

Before `stop` everything can be undone, and is undone when anything goes wrong. From `stop` on the engine is down: then only
going on helps; an action that cannot go on is held, and a person is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from plimsoll.doctor.words import words
from plimsoll.guard.judge.tracker import Grade


class Step(StrEnum):
    """One step of an action. Each can be repeated without harm: a guard that was killed in one begins it again."""

    LOCK = "lock"
    EVIDENCE = "evidence"
    LEAVE = "leave"  # out of the balancer; the engine serves nobody any more
    DRAIN = "drain"  # out of the balancer and draining at its gate
    IDLE = "idle"
    STOP = "stop"
    GONE = "gone"
    START = "start"
    READY = "ready"
    CHECK = "check"
    WARM = "warm"
    UNDRAIN = "undrain"
    UNLOCK = "unlock"
    PROBATION = "probation"
    SHED = "shed"
    HOLD = "hold"
    UNSHED = "unshed"
    COMPACT = "compact"
    VERIFY = "verify"


class End(StrEnum):
    """How an action ends."""

    DONE = "done"
    UNDONE = "undone"  # nothing was stopped, and what was begun was taken back
    STOOD_BACK = "stood-back"  # nothing was begun
    HELD = "held"  # the engine is down or out of service, and guard can do no more: a person is needed
    FAILED = "failed"  # done, and it did not help


class StepText(NamedTuple):
    """A step as shown to a person before it is done."""

    does: str
    before: str
    after: str
    undo: str


STEP_TEXTS = {Step(name): StepText(**row) for name, row in words("steps", "guard/act").items()}

_TAIL = (
    Step.STOP, Step.GONE, Step.START, Step.READY, Step.CHECK, Step.WARM, Step.UNDRAIN, Step.UNLOCK, Step.PROBATION,
)  # fmt: skip
SERVING = (Step.LOCK, Step.EVIDENCE, Step.DRAIN, Step.IDLE, *_TAIL)
"""The restart of an engine that still serves: nothing is stopped before it is idle."""
BROKEN = (Step.LOCK, Step.EVIDENCE, Step.LEAVE, *_TAIL)
"""Of one that serves nobody: dead, or proved to be stuck."""
COURSES: dict[Grade, tuple[tuple[Step, ...], ...]] = {
    Grade.SHED: ((Step.LOCK, Step.SHED, Step.UNLOCK, Step.HOLD, Step.UNSHED),),
    Grade.COMPACT: ((Step.LOCK, Step.COMPACT, Step.VERIFY, Step.UNLOCK),),
    Grade.RESTART: (SERVING, BROKEN),
}
UNDO = (Step.UNDRAIN, Step.UNLOCK)
TRIES = {Step.STOP: 2, Step.GONE: 3, Step.START: 2, Step.UNDRAIN: 3, Step.UNSHED: 2, Step.UNLOCK: 2}
"""How often a step is tried in one life of guard; once where it is not named."""


def steps_of(grade: Grade, *, is_broken: bool) -> tuple[Step, ...]:
    """Returns the steps of an action; `is_broken`: the engine serves nobody."""
    return COURSES[grade][-1 if is_broken else 0]


class NextStep(NamedTuple):
    """The next step, the same step again, or the end. `is_undoing`: the action is being undone."""

    step: Step | None
    end: End | None = None
    is_undoing: bool = False


def follows(
    course: tuple[Step, ...],
    step: Step,
    *,
    is_done: bool | None,
    tries: int = 1,
    is_undoing: bool = False,
    is_untouched: bool = False,
) -> NextStep:
    """Returns what follows a step that is done, not done, or unknown (None) after `tries` tries.

    `is_untouched`: a stop that was not done, where the engine certainly runs as before.
    """
    if is_undoing:
        if not is_done and tries < TRIES.get(step, 1):
            return NextStep(step, is_undoing=True)
        if step is Step.UNDRAIN:
            # An engine that could not be put back is out of service and nobody's: a person has to know.
            return NextStep(Step.UNLOCK, None if is_done else End.HELD, is_undoing=True)
        return NextStep(None, End.UNDONE, is_undoing=True)
    if is_done or step in _NEVER_STOPS or (is_done is None and step in _ONLY_A_NO):
        place = course.index(step) + 1
        return NextStep(course[place]) if place < len(course) else NextStep(None, End.DONE)
    if is_untouched and step is Step.STOP and is_done is False:
        return NextStep(UNDO[0], is_undoing=True)
    if tries < TRIES.get(step, 1):
        return NextStep(step)
    if step is Step.LOCK:
        return NextStep(None, End.STOOD_BACK)
    if step is Step.UNSHED:
        return NextStep(None, End.DONE)  # its lease ends by itself
    if step is Step.HOLD:
        return NextStep(Step.UNSHED)
    if Step.STOP not in course:  # shedding and compaction: without effect, only the lock has to be undone
        return NextStep(Step.UNLOCK, End.FAILED, is_undoing=True)
    if course.index(step) < course.index(Step.STOP):
        return NextStep(UNDO[0], is_undoing=True)
    if step is Step.PROBATION:
        return NextStep(None, End.FAILED)
    # It is down, or up and not fit to serve. Release the lock, so that others can be helped.
    return NextStep(Step.UNLOCK, End.HELD, is_undoing=True)


_ONLY_A_NO = frozenset({Step.CHECK, Step.WARM, Step.VERIFY})
"""What nobody could ask is no failure: neither keeps it an engine that answers out of service, nor undoes what was done."""
_NEVER_STOPS = frozenset({Step.EVIDENCE, Step.UNLOCK})
"""What is not had of these is written down, and is no reason to leave an engine as it is."""


class ActionRun(NamedTuple):
    """One run of an action: the step it is in, and how it got there."""

    action: str
    engine: str
    grade: Grade
    kind: str  # the condition it is about, or "asked" for one that a person asked for
    steps: tuple[Step, ...]
    step: Step | None  # the next one, or the one begun; None: it is over
    tries: int = 0  # tries of this step that ended without effect
    is_begun: bool = False  # the step was begun and its end is not known
    is_undoing: bool = False
    end: End | None = None  # how it will end, once it is certain
    facts: Mapping[str, Any] = {}  # what its steps found out
    epoch: int = 0
    is_taken_over: bool = False  # begun by a guard that is gone: its last act is unknown

    @property
    def is_over(self) -> bool:
        return self.step is None

    @property
    def is_down(self) -> bool:
        """True if the engine was stopped, or may have been."""
        if Step.STOP not in self.steps:
            return False
        if self.is_undoing or self.step is None:
            return self.end is End.HELD
        if self.step is Step.STOP:
            return self.is_begun or self.tries > 0  # tried, with whatever outcome
        return self.steps.index(self.step) > self.steps.index(Step.STOP)

    def begun(self) -> ActionRun:
        return self._replace(is_begun=True)

    def after(self, *, is_done: bool | None, facts: Mapping[str, Any] | None = None) -> ActionRun:
        assert self.step is not None, "an action that is over has no step"
        tries = self.tries + 1
        is_untouched = bool((facts or {}).get("untouched"))  # from this outcome alone, not an earlier one
        found = follows(
            self.steps, self.step, is_done=is_done, tries=tries, is_undoing=self.is_undoing, is_untouched=is_untouched
        )
        known = {**self.facts, **(facts or {})}
        epoch = int(known.get("epoch", self.epoch) or 0)
        again = found.step is self.step and found.is_undoing is self.is_undoing
        return self._replace(
            step=found.step, tries=tries if again else 0, is_begun=False, is_undoing=found.is_undoing,
            end=found.end if self.end is None else self.end,  # what went wrong settles it, not how the lock was given back
            facts=known, epoch=epoch,
        )  # fmt: skip

    def taken_over(self) -> ActionRun:
        """Returns the run as a later guard takes it over: undone if nothing was stopped yet, otherwise continued.

        No lock is released: the earlier guard's lock is gone with it, or expires.
        """
        again = self._replace(tries=0, is_begun=False, is_taken_over=True)
        if self.is_over:
            return again
        if self.is_undoing:
            return again if self.step is not Step.UNLOCK else again._replace(step=None, end=self.end or End.UNDONE)
        if self.is_down:
            return again if self.step is not Step.UNLOCK else again._replace(step=Step.PROBATION)
        # The first step that leaves something to undo; a compaction leaves nothing.
        first = next((place for place, step in enumerate(self.steps) if step in (Step.LEAVE, Step.DRAIN, Step.SHED)), math.inf)
        place = self.steps.index(self.step) if self.step is not None else -1
        if place < first or (place == first and not self.is_begun):
            return again._replace(step=None, end=End.DONE if self.step is Step.UNLOCK else End.UNDONE)
        return again._replace(step=Step.UNSHED) if self.grade is Grade.SHED else again._replace(step=UNDO[0], is_undoing=True)


def open_action(action: str, engine: str, grade: Grade, kind: str, *, is_broken: bool) -> ActionRun:
    steps = steps_of(grade, is_broken=is_broken)
    return ActionRun(action, engine, grade, kind, steps, steps[0])


def opening_fields(run: ActionRun) -> dict[str, Any]:
    return {"grade": str(run.grade), "kind": run.kind, "steps": [str(step) for step in run.steps]}
