"""What is done when the journal fails in the middle of an action: what is out of service is brought back, and told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from plimsoll.cli.guard_said import Said
from plimsoll.domain.outcome import Outcome
from plimsoll.guard.course import Course
from plimsoll.guard.steps import End, Step


async def end_unwritten(course: Course, do: Callable[[Course], Awaitable[Outcome]], tell: Callable[[Said], None]) -> None:
    """What the next guard would do by what the journal says already is done at once, as far as `do` does it.

    An engine that is out of service, or down, is brought back. Nothing new is begun.
    """
    course = course.taken_over()
    while course.step is not None and course.step is not Step.PROBATION:
        outcome = await do(course)
        tell(Said(course.engine, f"{course.step}: {outcome.says}", fields={"done": outcome.is_done}))
        course = course.after(is_done=outcome.is_done, facts=outcome.facts)
    if course.end is End.HELD:
        says = f"{course.grade} is held: the journal cannot be written, and it could not be brought back"
        tell(Said(course.engine, says, is_urgent=True, fields={"end": str(End.HELD)}))
