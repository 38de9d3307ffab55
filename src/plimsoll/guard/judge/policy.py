"""The policy: the bounds of every condition and how long guard waits; `thresholds.yaml` has every number.

A policy is a table of TOML. `[dead] refused = "3m"` sets one number; the others keep their defaults. A `[[rule]]` of your
own, or a preset, tests the figures and can only advise.
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
RULE_FIGURES = ("kv_cache_usage", "running", "waiting", "preemptions", "device_free", "host_resident", "in_flight")
_TERM = re.compile(
    r"\s*([a-z_]{1,40})\s*(>=|<=|>|<)\s*(?:(\d{1,12}(?:\.\d{1,9})?)\s*(?:\*\s*([a-z_]{1,40}))?|([a-z_]{1,40}))\s*"
)


class Clause(NamedTuple):
    """`figure > number * other`, or `figure > number` where there is no other."""

    figure: str
    sign: str
    number: float
    other: str = ""


class UserRule(NamedTuple):
    """A rule of the user's own; it can only advise."""

    name: str
    terms: tuple[Clause, ...]
    for_s: float
    clear_s: float
    says: str


class Policy(NamedTuple):
    """The whole policy."""

    numbers: Mapping[tuple[str, str], float] = {}
    rules: tuple[UserRule, ...] = ()
    every_s: float = 5.0

    def number(self, kind: str, name: str) -> float:
        found = self.numbers.get((kind, name))
        return _BY_PLACE[kind, name].default if found is None else found


# Alerts that a widely read article recommends. They only advise: a full cache with a short queue is a healthy server.
PRESETS: Mapping[str, tuple[UserRule, ...]] = {
    "article": (
        UserRule("article-cache", (Clause("kv_cache_usage", ">", 0.95),), 300.0, 60.0, "KV cache over 95 % for 5 min"),
        UserRule("article-queue", (Clause("waiting", ">", 2.0, "running"),), 300.0, 60.0, "waiting over 2x running for 5 min"),
    ),
}  # fmt: skip


def read_policy(tables: Mapping[str, Any]) -> Policy:
    """Reads the policy in a parsed TOML document; PolicyError, with its place, for any mistake."""
    numbers: dict[tuple[str, str], float] = {}
    rules: list[UserRule] = []
    every_s = 5.0
    for kind, table in tables.items():
        if kind == "every":
            every_s = _amount(("", "every"), table, "s", 1.0, 300.0)
        elif kind == "preset":
            presets = [table] if isinstance(table, str) else table
            if not isinstance(presets, list) or not all(isinstance(name, str) and name in PRESETS for name in presets):
                raise PolicyError(("", "preset"), f"preset is one of {', '.join(PRESETS)}, or a list of them")
            rules += [rule for name in presets for rule in PRESETS[name]]
        elif kind == "rule":
            if not isinstance(table, list):
                raise PolicyError(("", kind), f"write [[{kind}]], once for each")
            rules += [_rule(one, number) for number, one in enumerate(table)]
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
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PolicyError(("", "rule"), f"there are two rules called {twice}")
    return Policy(numbers, tuple(rules), every_s)


def _rule(table: Any, number: int) -> UserRule:
    place = (f"rule.{number}", "when")
    if not isinstance(table, dict) or set(table) - {"name", "when", "for", "clear", "says"}:
        raise PolicyError((f"rule.{number}", ""), "a [[rule]] has name, when, for, clear and says")
    name, when = table.get("name"), table.get("when")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name):
        raise PolicyError((f"rule.{number}", "name"), "a rule's name is a word of small letters, digits and dashes")
    if name in KINDS or name == "plan":
        raise PolicyError((f"rule.{number}", "name"), f"{name} is a condition of guard's own; give the rule another name")
    if not isinstance(when, str) or len(when) > 400:
        raise PolicyError(place, f'rule {name}: when = "kv_cache_usage > 0.95 and waiting > 10"')
    terms = tuple(_term(place, name, text) for text in re.split(r"\sand\s", when))
    says = table.get("says", when)
    if not isinstance(says, str):
        raise PolicyError((f"rule.{number}", "says"), f"rule {name}: says is a sentence")
    for_s = _amount((f"rule.{number}", "for"), table.get("for", 60.0), "s", 0.0, 86_400.0)
    clear_s = _amount((f"rule.{number}", "clear"), table.get("clear", 60.0), "s", 0.0, 86_400.0)
    return UserRule(name, terms, for_s, clear_s, says[:200])


def _term(place: tuple[str, str], name: str, text: str) -> Clause:
    found = _TERM.fullmatch(text)
    if found is None:
        raise PolicyError(place, f"rule {name}: {text.strip()[:60]!r} is no comparison such as waiting > 2 * running")
    figure, sign, number, times, other = found.groups()
    for one in (figure, times, other):
        if one is not None and one not in RULE_FIGURES:
            raise PolicyError(place, f"rule {name}: there is no figure {one!r}; there is: {', '.join(RULE_FIGURES)}")
    return Clause(figure, sign, float(number) if number is not None else 1.0, times or other or "")
