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

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
BYTES = {"KiB": 1024.0, "MiB": float(MIB), "GiB": float(GIB), "TiB": 1024.0 * GIB, "MB": 1e6, "GB": 1e9}


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
    """A mistake in a policy, with the table and the key, so that its line can be found."""

    def __init__(self, place: tuple[str, str], message: str) -> None:
        super().__init__(message)
        self.place = place
        self.message = message


def _amount(place: tuple[str, str], value: Any, unit: str, low: float, high: float) -> float:
    name = ".".join(filter(None, place))
    units = SECONDS if unit == "s" else BYTES if unit.startswith("bytes") else {}
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PolicyError(place, f"{name} is a number{' with a unit' if units else ''}")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z%]{0,3})\s*", value)
        factor = None if found is None else {**units, "%": 0.01, "": 1.0}.get(found[2])
        if found is None or factor is None or (found[2] == "%" and unit != "share"):
            shown = {"s": "30s, 5m or 2h", "bytes": "512MiB or 2GiB", "share": "5% or 0.05"}.get(unit, "a number")
            raise PolicyError(place, f"{name}: {value[:40]!r} is none; write {shown}")
        value = float(found[1]) * factor
    if not low <= float(value) <= high:
        raise PolicyError(place, f"{name} must lie between {low:g} and {high:g}, not {value:g}")
    return float(value)


_WINDOWS = {
    "for": "how long it must be seen before it becomes active",
    "clear": "how long it must be gone before it clears",
}


def _declared() -> Iterator[Threshold]:
    for kind, rows in words("thresholds", "guard/judge").items():
        for name, row in rows.items():
            if name in _WINDOWS:
                row = {"default": row, "from": "0s", "to": "1d", "unit": "s", "says": _WINDOWS[name]}  # noqa: PLW2901
            unit = row["unit"]
            low, default, high = (_amount((kind, name), row[bound], unit, 0.0, math.inf) for bound in ("from", "default", "to"))
            yield Threshold(kind, name, unit, default, low, high, row["says"])


THRESHOLDS = tuple(_declared())
KINDS = tuple(dict.fromkeys(knob.kind for knob in THRESHOLDS))
GRADES: Mapping[str, Grade] = {
    "dead": Grade.RESTART, "wedged": Grade.RESTART, "hung": Grade.RESTART, "exhausted": Grade.RESTART, "saturated": Grade.SHED,
    "neighbour": Grade.COMPACT, "limping": Grade.RESTART,
}  # fmt: skip
"""The others advise. Growth with retries, which is a reason to restart, is `exhausted`."""
_BY_PLACE = {(knob.kind, knob.name): knob for knob in THRESHOLDS}


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
    every_s = 5.0
    for kind, table in tables.items():
        if kind == "every":
            every_s = _amount(("", "every"), table, "s", 1.0, 300.0)
        elif kind not in KINDS:
            raise PolicyError(("", str(kind)), f"there is no condition {str(kind)[:40]!r}; there is: {', '.join(KINDS)}")
        elif not isinstance(table, dict):
            raise PolicyError(("", kind), f"[{kind}] is a table: {kind} = ... says nothing")
        else:
            for name, value in table.items():
                threshold = _BY_PLACE.get((kind, str(name)))
                if threshold is None:
                    known = ", ".join(one.name for one in THRESHOLDS if one.kind == kind)
                    raise PolicyError((kind, str(name)), f"[{kind}] has no {str(name)[:40]!r}; it has: {known}")
                numbers[kind, name] = _amount((kind, name), value, threshold.unit, threshold.low, threshold.high)
    return Policy(numbers, every_s)
