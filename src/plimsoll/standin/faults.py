"""The faults of a stand-in: which one, from when, for how long, how much of it.

wedge@60s:30s            from the 60th second on, for 30 s
neighbour@10s=3GiB       from the 10th second on, for good
start-failure=2          the first two starts fail
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from plimsoll.errors import BadInput
from plimsoll.units import parse_gib

NS = 1_000_000_000
FOREVER = math.inf
ONLY_AT_START = ("slow-start", "start-failure")
MOST = 4096  # the largest value of a counted fault


# The unit of each fault's value, "" where it takes none, and its default; docs/standin.md describes their effects.
KINDS: dict[str, tuple[str, float]] = {
    "oom": ("", 0.0),
    "wedge": ("", 0.0),
    "idle-hang": ("", 0.0),
    "slow-start": ("s", 60.0),
    "start-failure": ("count", 0.0),
    "growth": ("bytes/s", float(64 << 20)),
    "neighbour": ("bytes", float(1 << 30)),
    "preemption-storm": ("count", 0.0),
    "host-growth": ("bytes/s", float(64 << 20)),
    "frozen-gauges": ("", 0.0),
    "lying-page": ("", 0.0),
    "cut-page": ("", 0.0),
    "huge-page": ("bytes", 100e6),
    "slow-loris": ("s", 1.0),
}
_WRITTEN = re.compile(r"(?P<kind>[a-z-]+)(?:@(?P<at>[^:=]+))?(?::(?P<for>[^:=]+))?(?:=(?P<value>[^=]+))?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that begins `at_s` seconds after the start and lasts `for_s` seconds."""

    kind: str
    at_s: float = 0.0
    for_s: float = FOREVER
    value: float = 0.0

    def is_on(self, now_ns: int) -> bool:
        return self.at_s <= now_ns / NS < self.at_s + self.for_s


def parse_fault(text: str) -> Fault:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise BadInput(f"--fault {text[:80]!r}: written KIND, KIND@30s, KIND@30s:10s or KIND@30s=VALUE")
    return make_fault(match["kind"], match["at"] or "0", match["for"], match["value"])


def make_fault(kind: str, at: object = 0, lasts: object = None, value: object = None) -> Fault:
    if kind not in KINDS:
        raise BadInput(f"there is no fault {str(kind)[:40]!r}; there is: {', '.join(KINDS)}")
    unit, default = KINDS[kind]
    amount = default if value is None else _amount(kind, unit, value)
    return Fault(kind, _seconds(kind, at), FOREVER if lasts is None else _seconds(kind, lasts), amount)


def _seconds(kind: str, value: object) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d|)", str(value).strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match is not None else math.inf
    if seconds >= 1e9:
        raise BadInput(f"fault {kind}: {str(value)[:40]!r} is not a time that can be waited for; 30s, 5m and 2h are")
    return seconds


def _amount(kind: str, unit: str, value: object) -> float:
    if not unit:
        raise BadInput(f"fault {kind} takes no value")
    if unit == "s":
        return _seconds(kind, value)
    if unit.startswith("bytes") and isinstance(value, str):
        amount = float(parse_gib(value.removesuffix("/s")))
    else:
        amount = float(str(value)) if re.fullmatch(r"\d{1,18}(?:\.\d+)?", str(value)) else math.nan
    if not amount < 2**62 or (unit == "count" and not (amount.is_integer() and amount <= MOST)):
        wanted = f"a whole number, {MOST} at most" if unit == "count" else "a number of bytes"
        raise BadInput(f"fault {kind}: {str(value)[:40]!r} must be {wanted}")
    return amount


class FaultSchedule(list[Fault]):
    """The faults of one engine: past, active and future."""

    def take_back(self, kind: str | None = None) -> None:
        self[:] = [fault for fault in self if kind is not None and fault.kind != kind]

    def active(self, kind: str, now_ns: int) -> Fault | None:
        for fault in self:
            if fault.kind == kind and fault.is_on(now_ns):
                return fault
        return None

    def next_change_ns(self, now_ns: int) -> int | None:
        moments = [at for fault in self for at in (fault.at_s, fault.at_s + fault.for_s) if at < 1e9]
        return min((math.ceil(at * NS) for at in moments if at * NS > now_ns), default=None)
