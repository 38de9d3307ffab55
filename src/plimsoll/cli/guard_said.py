"""What the one who acts is given, and what it tells."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from plimsoll.guard.decide import LastEnd, View
from plimsoll.guard.ports import Book, Lock, Sight


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
    """What the conductor is given."""

    book: Book
    lock: Lock
    sight: Sight
    view: Callable[[frozenset[str]], View]  # the fleet now; those that are being worked on are named
    tell: Callable[[Said], None]
    wall: Callable[[], float]
    name: Callable[[], str] = lambda: secrets.token_hex(4)
