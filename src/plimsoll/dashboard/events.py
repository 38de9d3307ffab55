"""What is sent to a page that listens: everything once, then only what has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
QUIET = b": nothing has changed\n\n"


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """One server-sent event. The data is ASCII on one line, so that no text in it can end it."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


def rows_changed(before: Mapping[str, Row], now: Mapping[str, Row]) -> tuple[list[Row], list[str]]:
    """The lines that are new or other than before, and the ids of those that are gone."""
    changed = [row for key, row in now.items() if (old := before.get(key)) is not row and old != row]
    return changed, [key for key in before if key not in now]


def sections_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that are other than before; of the series only the points that are new."""
    changed = {name: section for name, section in now.items() if before.get(name) != section}
    if "series" in changed and "series" in before:
        tail = series_tail(before["series"], now["series"])
        if tail is not None:
            changed["more"] = tail
            del changed["series"]
    return changed


def series_tail(before: Mapping[str, list[Any]], now: Mapping[str, list[Any]]) -> dict[str, list[Any]] | None:
    """The points after the last one that was sent; None where that is not among them any more, or the figures are others."""
    if not before["t"] or before.keys() != now.keys():
        return None
    last = before["t"][-1]
    place = len(now["t"])
    while place and now["t"][place - 1] > last:
        place -= 1
    if not place or now["t"][place - 1] != last:
        return None
    return {name: list(values[place:]) for name, values in now.items()}
