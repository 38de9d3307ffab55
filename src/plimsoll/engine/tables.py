"""Loads the tables that were read from the wheels, one file at a time and only when asked."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from os.path import dirname, join
from typing import Any, NamedTuple

from plimsoll.domain.version import Version

_DATA = join(dirname(__file__), "data")  # not pathlib: it would be the dearest import of `plimsoll flags`


class Span(NamedTuple):
    """A stretch of releases over which a row said the same; both ends were seen in a wheel."""

    first: Version
    last: Version
    facts: Mapping[str, Any]


@functools.cache
def _table(name: str) -> Mapping[str, Any]:
    with open(join(_DATA, f"{name}.json"), "rb") as file:
        loaded: Mapping[str, Any] = json.load(file)
    return loaded


def wheels() -> Mapping[str, str]:
    """Release to the file name of the wheel it was read from, oldest first."""
    found: Mapping[str, str] = _table("releases")["wheels"]
    return found


def rows(name: str) -> Mapping[str, list[dict[str, Any]]]:
    """A whole table, as it stands in its file."""
    found: Mapping[str, list[dict[str, Any]]] = _table(name)["rows"]
    return found


def spans_of(table: str, key: str) -> tuple[Span, ...]:
    """The stretches of one row, oldest first; empty if no release has it."""
    return tuple(span_from(row) for row in rows(table).get(key, ()))


def span_from(row: Mapping[str, Any]) -> Span:
    """One stretch out of its plain form."""
    facts = {k: v for k, v in row.items() if k not in ("from", "to")}
    return Span(Version(row["from"]), Version(row["to"]), facts)
