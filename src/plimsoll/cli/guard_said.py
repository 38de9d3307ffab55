"""What the one who acts is given, and what it tells."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from plimsoll.guard.decide import View
from plimsoll.guard.ports import Book, Lock, Sight


class Said(NamedTuple):
    """One thing to tell: what guard did, or why it did not."""

    engine: str
    says: str
    is_urgent: bool = False
    fields: Mapping[str, Any] = {}


class Ports(NamedTuple):
    """What the conductor is given."""

    book: Book
    lock: Lock
    sight: Sight
    view: Callable[[frozenset[str]], View]  # the fleet now; those that are being worked on are named
    tell: Callable[[Said], None]
    wall: Callable[[], float]
    name: Callable[[], str] = lambda: secrets.token_hex(4)
