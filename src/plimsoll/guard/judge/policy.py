"""The policy: the bounds of every condition and how long guard waits; `thresholds.yaml` has every number.

A policy is a table of TOML. `[dead] refused = "3m"` sets one number; the others keep their defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from plimsoll.doctor.words import words
from plimsoll.errors import BadInput
from plimsoll.guard.judge.tracker import Grade
from plimsoll.units import GIB, MIB

_UNITS = {
    "s": {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}, "share": {"%": 0.01},
    "bytes": {"KiB": 1024.0, "MiB": float(MIB), "GiB": float(GIB), "TiB": 1024.0 * GIB, "MB": 1e6, "GB": 1e9},
}  # fmt: skip
_WRITTEN = {"s": "time; write 30s, 5m or 2h", "bytes": "size; write 512MiB or 2GiB", "share": "share; write 5% or 0.05"}


class Threshold(NamedTuple):
    """One number: its condition, its name, its unit, its default and its bounds."""

    kind: str
    name: str
    unit: str  # "s", "bytes", "share", "count"
    default: float
    low: float
    high: float
    says: str


class PolicyError(BadInput):
    """A mistake in a policy; `place` is its table and its key, so that its line can be found."""

    def __init__(self, message: str, *place: str) -> None:
        super().__init__(message)
        self.place = place


def amount(name: str, value: Any, unit: str = "", low: float = 0.0, high: float = math.inf) -> float:
    """Returns a number, or a text such as "5m", in its unit: "s", "bytes", "share" or none; BadInput names what is wrong."""
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.inf  # TOML's whole numbers can exceed a float
    elif isinstance(value, str) and (found := re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z%]{0,3})\s*", value)):
        factor = {**_UNITS.get(unit, {}), "": 1.0}.get(found[2])
        number = None if factor is None else round(float(found[1]) * factor, 9)
    if number is None:
        raise BadInput(f"{name}: {str(value)[:40]!r} is no {_WRITTEN.get(unit, 'number')}")
    if not low <= number <= high:
        raise BadInput(f"{name} must lie between {low:g} and {high:g}{' s' if unit == 's' else ''}, not {number:g}")
    return number


_WINDOWS = {"for": "how long it must be seen before it becomes active", "clear": "how long it must be gone before it clears"}


def _declared() -> Iterator[Threshold]:
    for kind, rows in words("thresholds", "guard/judge").items():
        for name, row in rows.items():
            if name in _WINDOWS:
                row = {"default": row, "from": "0s", "to": "1d", "unit": "s", "says": _WINDOWS[name]}  # noqa: PLW2901
            unit = row["unit"]
            low, default, high = (amount(name, row[bound], unit) for bound in ("from", "default", "to"))
            yield Threshold(kind, name, unit, default, low, high, row["says"])


THRESHOLDS = tuple(_declared())
KINDS = tuple(dict.fromkeys(knob.kind for knob in THRESHOLDS))
GRADES: Mapping[str, Grade] = {
    "dead": Grade.RESTART, "wedged": Grade.RESTART, "hung": Grade.RESTART, "exhausted": Grade.RESTART, "saturated": Grade.SHED,
    "neighbour": Grade.COMPACT, "limping": Grade.RESTART,
}  # fmt: skip
"""The others advise. Growth with retries, which is a reason to restart, is `exhausted`."""
_BY_PLACE = {(knob.kind, knob.name): knob for knob in THRESHOLDS}
_EVERY = Threshold("every", "", "s", 5.0, 1.0, 300.0, "how often each engine is looked at")


class Policy(NamedTuple):
    """The whole policy."""

    numbers: Mapping[tuple[str, str], float] = {}
    every_s: float = 5.0

    def number(self, kind: str, name: str) -> float:
        found = self.numbers.get((kind, name))
        return _BY_PLACE[kind, name].default if found is None else found


def read_policy(tables: Mapping[str, Any]) -> Policy:
    """Reads the policy in a parsed TOML document; PolicyError, with its place, for any mistake."""
    numbers: dict[tuple[str, str], float] = {}
    for kind, table in tables.items():
        if kind != "every" and kind not in KINDS:
            raise PolicyError(f"there is no condition {kind[:40]!r}; there is: {', '.join(KINDS)}", kind)
        if kind != "every" and not isinstance(table, dict):
            raise PolicyError(f"[{kind}] is a table: {kind} = ... says nothing", kind)
        for name, value in ({"": table} if kind == "every" else table).items():
            threshold = _EVERY if kind == "every" else _BY_PLACE.get((kind, name))
            if threshold is None:
                known = ", ".join(one.name for one in THRESHOLDS if one.kind == kind)
                raise PolicyError(f"[{kind}] has no {name[:40]!r}; it has: {known}", kind, name)
            place = (kind, name) if name else (kind,)
            try:
                numbers[kind, name] = amount(".".join(place), value, threshold.unit, threshold.low, threshold.high)
            except BadInput as error:
                raise PolicyError(str(error), *place) from None
    every_s = numbers.pop(("every", ""), _EVERY.default)
    return Policy(numbers, every_s)
