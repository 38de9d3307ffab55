"""The flags of `vllm serve`, release by release."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.engine import tables

UNKNOWN_DEFAULT = object()


class FlagRow(NamedTuple):
    """One flag over a stretch of releases in which its definition stayed the same."""

    name: str
    first: str  # first and last release of this stretch, both seen in a wheel
    last: str
    kind: str  # switch, on-off, true-false, int, human-int, human-int-or-auto, float, str, json, json-or-text, ...
    aliases: tuple[str, ...] = ()
    nargs: str | int | None = None
    choices: tuple[str, ...] | None = None
    default: Any = UNKNOWN_DEFAULT
    is_deprecated: bool = False
    repeats: bool = False
    is_optional: bool = False  # takes "None" and nothing at all as not set

    @property
    def takes_value(self) -> bool:
        """Whether anything follows the flag."""
        return self.kind not in ("switch", "on-off")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every option string the parser knows for it, without the `--no-` form."""
        return (self.name, *self.aliases)


def _row(name: str, plain: Mapping[str, Any]) -> FlagRow:
    return FlagRow(
        name=name,
        first=plain["from"],
        last=plain["to"],
        kind=plain["kind"],
        aliases=tuple(plain.get("aliases", ())),
        nargs=plain.get("nargs"),
        choices=tuple(plain["choices"]) if "choices" in plain else None,
        default=plain.get("default", UNKNOWN_DEFAULT),
        is_deprecated=plain.get("deprecated", False),
        repeats=plain.get("repeats", False),
        is_optional=plain.get("optional", False),
    )


@functools.cache
def _places() -> Mapping[str, int]:
    return {release: place for place, release in enumerate(tables.wheels())}


@functools.cache
def flags_of(release: str) -> Mapping[str, FlagRow]:
    """Every option string of one release, aliases included, to its row."""
    places = _places()
    here = places[release]
    found: dict[str, FlagRow] = {}
    for name, stretches in tables.rows("flags").items():
        for plain in stretches:
            if places[plain["from"]] <= here <= places[plain["to"]]:
                row = _row(name, plain)
                found.update(dict.fromkeys(row.spellings, row))
    return found


@functools.cache
def _names_by_alias() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, stretches in tables.rows("flags").items():
        for alias in {a for plain in stretches for a in plain.get("aliases", ())}:
            found[alias] = (*found.get(alias, ()), name)
    return found


def history_of(spelling: str) -> tuple[FlagRow, ...]:
    """Every stretch in which a parser knew this spelling, oldest first; empty if none ever did."""
    table = tables.rows("flags")
    found = [_row(spelling, plain) for plain in table.get(spelling, ())]
    for name in _names_by_alias().get(spelling, ()):
        found += [_row(name, plain) for plain in table[name] if spelling in plain.get("aliases", ())]
    return tuple(sorted(found, key=lambda row: _places()[row.first]))


def release_after(release: str) -> str | None:
    """The next release that was read; None after the newest."""
    releases = list(_places())
    place = _places()[release] + 1
    return releases[place] if place < len(releases) else None


def holds_in(stretch: Mapping[str, Any], release: str) -> bool:
    """Whether a stretch of a table, from one release to another, has this release in it."""
    return not is_before(release, stretch["from"]) and not is_before(stretch["to"], release)


def is_before(one: str, other: str) -> bool:
    """Whether one release came out of the catalogue before another."""
    return _places()[one] < _places()[other]
