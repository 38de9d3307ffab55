"""What the one who acts is given, and what it tells."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from plimsoll.guard.act.course import Course
from plimsoll.guard.act.decide import LastEnd, View
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OUTCOME, RESTART
from plimsoll.guard.act.outcome import Outcome
from plimsoll.guard.act.ports import Book, Lock, Sight
from plimsoll.guard.act.steps import End, Step


class Said(NamedTuple):
    """One thing to tell: what guard did, or why it did not."""

    engine: str
    says: str
    is_urgent: bool = False
    fields: Mapping[str, Any] = {}


def needs_of(engine: str, end: LastEnd) -> str:
    """What is said of an engine that restarts did not mend, and what a person does then."""
    resume = f"guardctl resume {engine} when it is mended"
    if end.end != "held":
        return f"a restart did not help ({', '.join(sorted(end.unmended))}): a person is needed ({resume})"
    if end.is_out:
        return f"held: it is down or out of service: a person is needed (guardctl undrain {engine} puts it back; {resume})"
    return f"its restart could not be finished; it was put back by hand ({resume})"


class Ports(NamedTuple):
    """What the conductor is given, as is whoever does a person's wish. What cannot be written down raises WorldFailed."""

    book: Book
    lock: Lock
    sight: Sight
    view: Callable[[frozenset[str]], View]  # the fleet now; those that are being worked on are named
    tell: Callable[[Said], None]
    wall: Callable[[], float]
    name: Callable[[], str] = lambda: secrets.token_hex(4)

    def write(self, kind: str, course: Course, fields: Mapping[str, Any], step: str = "") -> None:
        """One entry about an action."""
        self.book.append(kind, engine=course.engine, action=course.action, step=step, fields=fields)

    def write_end(self, course: Course, end: End, why: str) -> None:
        """That it is over."""
        self.write(CLOSED, course, {"end": str(end), "grade": str(course.grade), "kind": course.kind, "why": why})

    async def step(
        self, course: Course, do: Callable[[Course], Awaitable[Outcome]], show: Callable[[Course], None]
    ) -> tuple[Course, Outcome]:
        """Its next step, written down before it is done and after; it is shown as begun, and as it stands then."""
        step = course.step
        assert step is not None
        self.write(INTENT, course, {"epoch": course.epoch, "undo": course.is_undoing}, str(step))
        if step is Step.STOP and not course.tries:
            self.write(RESTART, course, {"own": True})
        show(course.begun())
        outcome = await do(course)
        fields = {"done": outcome.is_done, "says": outcome.says, "facts": dict(outcome.facts)}
        self.write(OUTCOME, course, fields, str(step))
        course = course.after(is_done=outcome.is_done, facts=outcome.facts)
        show(course)
        return course, outcome
