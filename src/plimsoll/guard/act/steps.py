"""The steps of every action, and where each leads: a table, so that every way through it can be walked by a test.

Before `stop` everything can be undone, and is, when anything is not as it should be. From `stop` on the engine is down: then
only forward helps, and what cannot go on is held, told to a person, and left.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from plimsoll.guard.judge.tracker import Grade


class Step(StrEnum):
    """What is done next. Each can be done twice without harm: a guard that was killed in one begins it again."""

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


class About(NamedTuple):
    """What a person reads of a step before it is done."""

    does: str
    before: str
    after: str
    undo: str


ABOUT: dict[Step, About] = {
    Step.LOCK: About("takes the fleet's lock", "nobody else acts", "its number is higher than any before", "given back"),
    Step.EVIDENCE: About("keeps the log's end, the page, the stacks", "-", "a folder with what could be had", "-"),
    Step.LEAVE: About("takes it out of the balancer", "the lock is held", "read back from the balancer", "put back"),
    Step.DRAIN: About(
        "takes it out of the balancer and drains it at its gate", "the lock is held, the others can carry its load",
        "read back from both", "put back and undrained; its lease ends by itself",
    ),
    Step.IDLE: About("waits until it is idle", "it drains", "nothing in flight, running or waiting, twice", "undrained"),
    Step.STOP: About("stops it: SIGTERM to the server alone", "idle, or serving nobody", "it is gone", "started"),
    Step.GONE: About("waits until the device's memory is back", "it has stopped", "no process of it holds any", "-"),
    Step.START: About("starts it", "its memory is back", "a process is there", "-"),
    Step.READY: About("waits until it is ready, for as long as it makes progress", "it was started", "it answers", "-"),
    Step.CHECK: About("compares its KV cache with its context and its last start", "it answers", "enough for its context", "-"),
    Step.WARM: About("sends it one request", "it is ready", "answered", "-"),
    Step.UNDRAIN: About("puts it back", "it answers", "read back from balancer and gate", "-"),
    Step.UNLOCK: About("gives the lock back", "-", "-", "-"),
    Step.PROBATION: About("watches it", "it is back", "no trouble of the same kind", "-"),
    Step.SHED: About("refuses new work that would wait too long", "-", "the gate says so", "its lease ends"),
    Step.HOLD: About("goes on while the queue grows", "it sheds", "-", "-"),
    Step.UNSHED: About("takes everything again", "the queue does not grow", "the gate says so", "-"),
    Step.COMPACT: About("gives back what torch does not use", "a neighbour is in need", "the gate says so", "-"),
    Step.VERIFY: About("looks whether more is free", "-", "the device has more free than before", "-"),
}  # fmt: skip

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
    """Of an action on an engine that serves, or serves nobody."""
    return COURSES[grade][-1 if is_broken else 0]


class Next(NamedTuple):
    """What follows: another step, the same again, or the end. `is_undoing`: back, no longer forward."""

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
) -> Next:
    """What follows a step that was tried so often and is done, not done, or nobody knows.

    `is_untouched`: a stop that was not done, and it is certain that the engine runs as before.
    """
    if is_undoing:
        return _back(step, is_done=is_done, tries=tries)
    if is_done or step in _NEVER_STOPS or (is_done is None and step in _ONLY_A_NO):
        place = course.index(step) + 1
        return Next(course[place]) if place < len(course) else Next(None, End.DONE)
    if is_untouched and step is Step.STOP and is_done is False:
        return Next(UNDO[0], is_undoing=True)
    if tries < TRIES.get(step, 1):
        return Next(step)
    if step is Step.LOCK:
        return Next(None, End.STOOD_BACK)
    if Step.STOP not in course:
        return _small(step)
    if course.index(step) < course.index(Step.STOP):
        return Next(UNDO[0], is_undoing=True)
    if step is Step.PROBATION:
        return Next(None, End.FAILED)
    # It is down, or up and not fit to serve. The lock goes back, so that others can be helped.
    return Next(Step.UNLOCK, End.HELD, is_undoing=True)


_ONLY_A_NO = frozenset({Step.CHECK, Step.WARM, Step.VERIFY})
"""What nobody could ask is no failure: neither keeps it an engine that answers out of service, nor undoes what was done."""
_NEVER_STOPS = frozenset({Step.EVIDENCE, Step.UNLOCK})
"""What is not had of these is written down, and is no reason to leave an engine as it is."""


def _back(step: Step, *, is_done: bool | None, tries: int) -> Next:
    if not is_done and tries < TRIES.get(step, 1):
        return Next(step, is_undoing=True)
    if step is Step.UNDRAIN:
        # What could not be put back is out of service and nobody's: a person has to know.
        return Next(Step.UNLOCK, None if is_done else End.HELD, is_undoing=True)
    return Next(None, End.UNDONE, is_undoing=True)


def _small(step: Step) -> Next:
    """Of shedding and compaction: what took no effect needs no undoing but the lock's."""
    if step is Step.UNSHED:
        return Next(None, End.DONE)  # its lease ends by itself
    if step is Step.HOLD:
        return Next(Step.UNSHED)
    return Next(Step.UNLOCK, End.FAILED, is_undoing=True)
