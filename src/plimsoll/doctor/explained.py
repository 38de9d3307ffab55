"""The words of a finding, before evidence and code are added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plimsoll.domain.finding import Remedy


class Explained(NamedTuple):
    """What happened, why, what fixes it, and what does not."""

    title: str
    because: str
    remedy: Sequence[Remedy] = ()
    nots: Sequence[str] = ()


def setting(flag: str, value: object, why: str) -> Remedy:
    """A remedy that is one flag with its value."""
    return Remedy(f"{flag} {value}", why, flag, str(value))


def unique(remedies: Iterable[Remedy]) -> list[Remedy]:
    """The first offer for each flag; offers without a value by what they say."""
    kept: dict[str, Remedy] = {}
    for one in remedies:
        kept.setdefault(one.flag if one.flag and one.value else one.do, one)
    return list(kept.values())
