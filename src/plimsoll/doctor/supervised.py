"""What a supervisor (Kubernetes, docker, systemd) tells about a server's end, as values; and the small readers they share."""

from __future__ import annotations

import re
from typing import NamedTuple

from plimsoll.domain.log import Line

MOST_ENDINGS = 500
MOST_EVENTS = 2000
_QUANTITY = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


class Ending(NamedTuple):
    """One end of a container or unit, as its supervisor tells it."""

    kind: str  # "pod", "docker" or "systemd"
    name: str  # the container or the unit; "" where it is not named
    reason: str = ""  # OOMKilled, Error, Completed, oom-kill, exit-code, signal, timeout, ...; "" where none is given
    exit_code: int | None = None  # negative for a signal, as Python writes it
    out_of_memory: bool = False
    seconds: float | None = None  # how long it had run
    lines: tuple[Line, ...] = ()


class Probe(NamedTuple):
    """A liveness or startup probe: how long it lets a server be silent."""

    kind: str
    delay_s: int
    period_s: int
    failures: int

    @property
    def patience_s(self) -> int:
        """Seconds from the start until it gives up."""
        return self.delay_s + self.period_s * self.failures


class PodEvent(NamedTuple):
    """One event of Kubernetes."""

    reason: str
    message: str
    times: int
    line: Line


class PodFacts(NamedTuple):
    """What the supervisors' text says; None and empty where it does not."""

    endings: tuple[Ending, ...] = ()
    waiting: tuple[tuple[str, Line], ...] = ()  # why a container is not running: CrashLoopBackOff, ImagePullBackOff, ...
    restarts: int | None = None
    restarts_line: Line | None = None
    events: tuple[PodEvent, ...] = ()
    probes: tuple[Probe, ...] = ()
    memory_limit_bytes: int | None = None
    shm_mounted: bool | None = None
    shm_bytes: int | None = None
    pod_reason: str = ""
    pod_message: str = ""
    pod_lines: tuple[Line, ...] = ()
    stop_asked: tuple[Line, ...] = ()
    start_limit: tuple[Line, ...] = ()  # systemd gave up restarting
    timeouts: tuple[Line, ...] = ()  # systemd's start took too long
    notes: tuple[str, ...] = ()


def pair(text: str) -> tuple[int, str, str] | None:
    """A line of `kubectl describe`, YAML or JSON as (indent, key in small letters without spaces, value)."""
    body = text.lstrip(" \t")
    indent = len(text) - len(body)
    if body.startswith("- "):
        stripped = body[2:].lstrip()
        indent += len(body) - len(stripped)
        body = stripped
    key, colon, value = body.partition(":")
    if not colon or len(key) > 60:
        return None
    return indent, key.strip().strip('"').replace(" ", "").lower(), value.strip().rstrip(",").strip().strip('"')


def integer(text: str) -> int | None:
    """A plain whole number, or None."""
    digits = text.lstrip("-")
    return (
        int(text) if 0 < len(digits) <= 12 and digits.isascii() and digits.isdecimal() and len(text) - len(digits) < 2 else None
    )


def quantity(text: str) -> int | None:
    """A size as Kubernetes writes it: 64Gi, 64G, 65536Mi, 68719476736."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([KMGTP]i?|k|)", text.strip())
    return int(float(found[1]) * _QUANTITY[found[2]]) if found else None


def seconds_between(begin: str, end: str) -> float | None:
    """The time between two stamps of one writer (2026-11-15T08:00:00Z, or Sun, 15 Nov 2026 08:00:00 +0000), where both are."""
    first, second = _seconds(begin), _seconds(end)
    return None if first is None or second is None or second < first else second - first


def _seconds(text: str) -> float | None:
    found = re.search(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)", text)
    if found:
        year, month, day, hour, minute, second = map(int, found.groups())
    else:
        found = re.search(r"(\d\d) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d)", text)
        if found is None or found[2] not in _MONTHS:
            return None
        day, month, year = int(found[1]), _MONTHS.index(found[2]) + 1, int(found[3])
        hour, minute, second = int(found[4]), int(found[5]), int(found[6])
    if year < 1971 or not 1 <= month <= 12:
        return None  # docker writes 0001-01-01 for "not yet"
    # Days of the civil calendar, counted from March so that the leap day comes last.
    shifted = year - (month <= 2)
    days = shifted * 365 + shifted // 4 - shifted // 100 + shifted // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day
    return days * 86400.0 + hour * 3600 + minute * 60 + second
