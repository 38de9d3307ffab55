"""Numbers from words and from a plan's JSON; what is wrong with one is said in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping

from plimsoll.domain.units import parse_vllm_integer
from plimsoll.errors import BadInput

MOST = 2**31 - 2


def whole(text: str, name: str, least: int = 0, most: int = MOST) -> int:
    """A count as vLLM writes them: 2048, 2k, 1.5k."""
    try:
        number = parse_vllm_integer(text)
    except BadInput:
        raise BadInput(f"{name}: {text[:40]!r} is not a whole number, such as 2048, 2k (2,000) or 2K (2,048)") from None
    if not least <= number <= most:
        raise BadInput(f"{name} must lie between {least} and {most}, not {text}")
    return number


def decimal(text: str, name: str) -> float:
    """A finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{name} is not a number: {text[:40]!r}")
    return number


def object_in(parent: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A JSON object, or KeyError."""
    found = parent.get(name)
    if not isinstance(found, dict):
        raise KeyError(name)
    return found


def list_in(parent: Mapping[str, object], name: str) -> list[object]:
    """A JSON list, or KeyError."""
    found = parent.get(name)
    if not isinstance(found, list):
        raise KeyError(name)
    return found


def number_in(parent: Mapping[str, object], name: str) -> int:
    """A count, or KeyError."""
    found = parent.get(name)
    if not isinstance(found, int) or isinstance(found, bool):
        raise KeyError(name)
    if not 0 <= found <= MOST:
        raise BadInput(f"the plan's {name} of {found:.6g} cannot be replayed")
    return found


def amount(parent: Mapping[str, object], name: str) -> float:
    """A size that may be large, or KeyError."""
    found = parent.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= 1e18:
        raise KeyError(name)
    return float(found)
