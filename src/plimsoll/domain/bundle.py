"""What goes into an archive for a ticket: its parts, as they are before anything in them is hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class TextFile(NamedTuple):
    """A text that lies in a file, plain or packed; it is read when the archive is written."""

    path: str


class Part(NamedTuple):
    """One member to be."""

    name: str  # as it will be called, "logs/server.log"; made harmless before it is used
    kind: str  # "text" or "json"
    what: str  # one sentence
    content: bytes | TextFile | Callable[[], Iterable[bytes]]


class Member(NamedTuple):
    """One member as it was written."""

    name: str  # inside the archive's folder
    size_bytes: int
    what: str
    note: str = ""  # what was left out of it


class Written(NamedTuple):
    """An archive that is there."""

    path: str
    size_bytes: int
    members: tuple[Member, ...]
    left_out: tuple[str, ...]
