"""What can be made to go wrong: which fault, from when, for how long, how much of it.

wedge@60s:30s            from the 60th second on, for 30 s
neighbour@10s=3GiB       from the 10th second on, for good
start-failure=2          the first two starts fail
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.units import parse_gib

NS = 1_000_000_000
FOREVER = math.inf
MOST = 4096  # of whatever is counted


class Kind(NamedTuple):
    """One row of the table in docs/standin.md."""

    name: str
    says: str
    unit: str = ""  # of its value: "bytes", "bytes/s", "s", "count", "" for none
    default: float = 0.0


KINDS = (
    Kind("oom", "The next step runs out of memory and the engine dies as vLLM's does: log, 500, 503, port closed, exit code 0"),
    Kind("wedge", "No step ends any more; /health says 200."),
    Kind("idle-hang", "The same, but only once nothing is left to do: gauges look idle and nothing new is answered."),
    Kind("slow-start", "The start takes so much longer.", "s", 60.0),
    Kind("start-failure", "So many starts fail for want of memory, with exit code 1; 0: all of them.", "count"),
    Kind("growth", "The worker holds so much more every second, and never gives it back.", "bytes/s", float(64 << 20)),
    Kind("neighbour", "Another process takes so much of the device.", "bytes", float(1 << 30)),
    Kind("preemption-storm", "Requests of its own, with short prompts and long answers, overfill the pool.", "count"),
    Kind("host-growth", "The worker's host memory grows by so much every second.", "bytes/s", float(64 << 20)),
    Kind("frozen-gauges", "/metrics stays as it was."),
    Kind("lying-page", "/metrics shows NaN, infinities, negative counters and counters that fall."),
    Kind("cut-page", "/metrics ends in the middle of a line."),
    Kind("huge-page", "/metrics goes on for so many bytes.", "bytes", 100e6),
    Kind("slow-loris", "Answers come one byte a second.", "s", 1.0),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}
_WRITTEN = re.compile(r"(?P<kind>[a-z-]+)(?:@(?P<at>[^:=]+))?(?::(?P<for>[^:=]+))?(?:=(?P<value>[^=]+))?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}


class Fault(NamedTuple):
    """A fault that is on from `at_s` seconds after the start, for `for_s` seconds."""

    kind: str
    at_s: float = 0.0
    for_s: float = FOREVER
    value: float = 0.0

    def is_on(self, now_ns: int) -> bool:
        """Whether it is on at this moment."""
        return self.at_s <= now_ns / NS < self.at_s + self.for_s


def parse_fault(text: str) -> Fault:
    """A fault as --fault names it."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise BadInput(f"--fault {text[:80]!r}: written KIND, KIND@30s, KIND@30s:10s or KIND@30s=VALUE")
    return make_fault(found["kind"], found["at"] or "0", found["for"], found["value"])


def make_fault(kind: str, at: object = 0, lasts: object = None, value: object = None) -> Fault:
    """A fault from its parts, as words or numbers."""
    known = BY_NAME.get(kind)
    if known is None:
        raise BadInput(f"there is no fault {str(kind)[:40]!r}; there is: {', '.join(BY_NAME)}")
    amount = known.default if value is None else _amount(known, value)
    at_s = _seconds(kind, at)
    return Fault(kind, at_s, FOREVER if lasts is None else _seconds(kind, lasts), amount)


def _seconds(kind: str, said: object) -> float:
    if isinstance(said, int | float) and not isinstance(said, bool):
        seconds = float(said) if abs(said) < 1e18 else math.inf
    else:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d|)", str(said).strip())
        if found is None:
            raise BadInput(f"fault {kind}: {str(said)[:40]!r} is not a time; 30s, 5m and 2h are")
        seconds = float(found[1]) * _SECONDS[found[2]]
    if not 0 <= seconds < 1e9:
        raise BadInput(f"fault {kind}: {str(said)[:40]!r} is not a time that can be waited for")
    return seconds


def _amount(kind: Kind, said: object) -> float:
    if not kind.unit:
        raise BadInput(f"fault {kind.name} takes no value")
    if isinstance(said, int | float) and not isinstance(said, bool):
        amount = float(said) if abs(said) < 1e30 else math.inf
    elif kind.unit.startswith("bytes"):
        amount = float(parse_gib(str(said).removesuffix("/s")))
    elif kind.unit == "s":
        amount = _seconds(kind.name, said)
    else:
        if not re.fullmatch(r"\d{1,9}", str(said)):
            raise BadInput(f"fault {kind.name}: {str(said)[:40]!r} is not a number")
        amount = float(str(said))
    if kind.unit == "count" and not (amount.is_integer() and amount <= MOST):
        raise BadInput(f"fault {kind.name}: {str(said)[:40]!r} must be a whole number, {MOST} at most")
    if not 0 <= amount < 2**62:
        raise BadInput(f"fault {kind.name}: {str(said)[:40]!r} is out of range")
    return amount


class Faults:
    """The faults of one engine."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._all = list(faults)

    @property
    def all(self) -> Sequence[Fault]:
        """Every one, whether on or not."""
        return tuple(self._all)

    def add(self, fault: Fault) -> None:
        """Add a fault."""
        self._all.append(fault)

    def clear(self, kind: str | None = None) -> int:
        """Take back those of a kind, or all; how many there were."""
        kept = [fault for fault in self._all if kind is not None and fault.kind != kind]
        gone = len(self._all) - len(kept)
        self._all = kept
        return gone

    def active(self, kind: str, now_ns: int) -> Fault | None:
        """The first of this kind that is on."""
        for fault in self._all:
            if fault.kind == kind and fault.is_on(now_ns):
                return fault
        return None

    def next_change_ns(self, now_ns: int) -> int | None:
        """When the next one begins or ends."""
        moments = [at for fault in self._all for at in (fault.at_s, fault.at_s + fault.for_s) if at < 1e9]
        later = [math.ceil(at * NS) for at in moments if at * NS > now_ns]
        return min(later, default=None)
