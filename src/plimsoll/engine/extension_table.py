"""What each release that was read makes of plimsoll.inside, and the stretches of releases that make the same of it."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.domain.version import Version
from plimsoll.engine import tables
from plimsoll.engine.extension_needs import BY_SIGNATURE, NEEDS, TESTED
from plimsoll.engine.extension_points import Answer, State, Verdict, verdicts

OLDEST = "0.8.0"
"""The first release with worker extensions; nothing is claimed for older ones."""


class Stretch(NamedTuple):
    """Releases next to each other with the same verdicts and the same evidence."""

    first: str
    last: str
    verdicts: tuple[Verdict, ...]
    evidence: str


def answers_in(release: str) -> tuple[Answer, ...]:
    """What that release's wheel was found to have."""
    wanted = Version(release)
    found = [(need.name, span) for need in NEEDS for span in tables.spans_of("inside", need.name)]
    return tuple(
        Answer(name, State(span.facts["state"]), note=span.facts.get("note", ""))
        for name, span in found
        if span.first <= wanted <= span.last
    )


def stretches() -> list[Stretch]:
    """From the oldest release that is spoken of to the newest."""
    made: list[Stretch] = []
    for release in tables.wheels():
        if Version(release) < Version(OLDEST):
            continue
        found = verdicts(answers_in(release), NEEDS)
        evidence = TESTED.get(release, BY_SIGNATURE)
        if made and (made[-1].verdicts, made[-1].evidence) == (found, evidence):
            made[-1] = made[-1]._replace(last=release)
        else:
            made.append(Stretch(release, release, found, evidence))
    return made
