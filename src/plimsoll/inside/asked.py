"""What a caller of an endpoint sent: one small JSON object, each field checked. What is wrong is said in one line."""

from __future__ import annotations

import json
from typing import Any

LARGEST_BODY = 64 * 1024


class BadAsk(Exception):
    """The caller's body is wrong; the message says where."""


def fields_of(body: bytes, known: tuple[str, ...]) -> dict[str, Any]:
    """The object in the body; an empty body is an empty object. An unknown field is a mistake: it may be a misspelt bound."""
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise BadAsk("the body is not JSON") from None
    if not isinstance(found, dict):
        raise BadAsk("the body is not a JSON object")
    for name in found:
        if name not in known:
            takes = f"there is: {', '.join(known)}" if known else "it takes none"
            raise BadAsk(f"there is no field {str(name)[:40]!r}; {takes}")
    return found


def number(fields: dict[str, Any], name: str, low: float, high: float, default: float | None = None) -> float | None:
    """A number within its bounds, or the default where it is not given."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadAsk(f"{name} is not a number from {low:g} to {high:g}")
    return float(value)


def whole(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number within its bounds, or None where it is not given."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadAsk(f"{name} is not a whole number from {low} to {high}")
    return value


def switch(fields: dict[str, Any], name: str) -> bool:
    """True or false; false where it is not given."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise BadAsk(f"{name} is neither true nor false")
    return value
