"""Reads what docker (`inspect`, `ps`) and systemd (`systemctl status`, the journal) tell about a server's end."""

from __future__ import annotations

import re
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.doctor.words import words

MOST_ENDINGS = 500
MOST_EVENTS = 2000
_QUANTITY = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


class Termination(NamedTuple):
    """One end of a container or unit, as its supervisor tells it."""

    kind: str  # "pod", "docker" or "systemd"
    name: str  # the container or the unit; "" where it is not named
    reason: str = ""  # OOMKilled, Error, Completed, oom-kill, exit-code, signal, timeout, ...; "" where none is given
    exit_code: int | None = None  # negative for a signal, as Python writes it
    out_of_memory: bool = False
    seconds: float | None = None  # how long it had run
    lines: tuple[LogLine, ...] = ()


class PodProbe(NamedTuple):
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
    line: LogLine


class PodFacts(NamedTuple):
    """Facts from the text of supervisors; None or empty where it does not state them."""

    endings: tuple[Termination, ...] = ()
    waiting: tuple[tuple[str, LogLine], ...] = ()  # why a container is not running: CrashLoopBackOff, ImagePullBackOff, ...
    restarts: int | None = None
    restarts_line: LogLine | None = None
    restarts_apart_s: float | None = None  # how long a life was, by the times of the lines that count restarts
    events: tuple[PodEvent, ...] = ()
    probes: tuple[PodProbe, ...] = ()
    memory_limit_bytes: int | None = None
    shm_mounted: bool | None = None
    shm_bytes: int | None = None
    pod_reason: str = ""
    pod_message: str = ""
    pod_lines: tuple[LogLine, ...] = ()
    stop_asked: tuple[LogLine, ...] = ()
    start_limit: tuple[LogLine, ...] = ()  # systemd gave up restarting
    timeouts: tuple[LogLine, ...] = ()  # systemd's start took too long
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
    stamps = []
    for text in (begin, end):
        if found := re.search(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)", text):
            year, month, day, hour, minute, second = map(int, found.groups())
        elif (found := re.search(r"(\d\d) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d)", text)) and found[2] in _MONTHS:
            day, month, year = int(found[1]), _MONTHS.index(found[2]) + 1, int(found[3])
            hour, minute, second = int(found[4]), int(found[5]), int(found[6])
        else:
            return None
        if year < 1971 or not 1 <= month <= 12:
            return None  # docker writes 0001-01-01 for "not yet"
        # Days of the civil calendar, counted from March so that the leap day comes last.
        shifted = year - (month <= 2)
        days = shifted * 365 + shifted // 4 - shifted // 100 + shifted // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day
        stamps.append(days * 86400.0 + hour * 3600 + minute * 60 + second)
    return stamps[1] - stamps[0] if stamps[1] >= stamps[0] else None


_DOCKER_KEYS = frozenset("oomkilled exitcode startedat finishedat restartcount memory shmsize running name error".split())
_UNIT = r"[\w@.\\:\-]{1,150}$"
_HEADER = r"^\s{0,4}[^\w\s] (?P<unit>[\w@.\\:\-]{1,150}\.(?:service|scope))"
_CODE = r"code=(?P<how>exited|killed|dumped)(?:, (?:status=(?P<status>\d{1,5})|signal=(?P<signal>[A-Z]{2,9})))?"
_NUMBERS = {name.removeprefix("SIG"): number for number, name in words("names")["signals"].items()}
_SYSTEM_UNITS = tuple(words("names")["supervisors"]["system_units"])
_FRAME = "-packages/vllm/"  # of a traceback, where a server ended before its first record
_SYSTEMD_GATE = (".service", ".scope", "code=", "Active: failed")


def read_docker(log: Log) -> PodFacts:
    """Reads `docker inspect` and `docker ps`."""
    records: list[tuple[dict[str, str], list[LogLine]]] = []
    lines = [line for line in log.lines if not line.process]
    if any('"OOMKilled":' in line.text for line in lines):
        for line in lines:
            found = pair(line.text)
            if found is None or found[1] not in _DOCKER_KEYS:
                continue
            key, value = found[1], found[2]
            if key in ("running", "oomkilled") and (not records or key in records[-1][0]) and len(records) < MOST_ENDINGS:
                records.append(({}, []))  # a container's state begins with these
            if records:
                records[-1][0].setdefault(key, value)
                if key in ("oomkilled", "exitcode", "restartcount"):
                    records[-1][1].append(line)
    facts = PodFacts()
    endings = []
    for values, shown in records:
        code, oom = integer(values.get("exitcode", "")), values.get("oomkilled") == "true"
        restarts = integer(values.get("restartcount", ""))
        if restarts and restarts > (facts.restarts or 0):
            facts = facts._replace(restarts=restarts, restarts_line=shown[-1])
        limit, shm = integer(values.get("memory", "")), integer(values.get("shmsize", ""))
        facts = facts._replace(memory_limit_bytes=limit or facts.memory_limit_bytes, shm_bytes=shm or facts.shm_bytes)
        if oom or values.get("running") == "false":
            ran = seconds_between(values.get("startedat", ""), values.get("finishedat", ""))
            name = values.get("name", "").strip("/")[:120]
            endings.append(Termination("docker", name, "OOMKilled" if oom else "", code, oom, ran, tuple(shown[:4])))
    # The rows of `docker ps -a` that ended: the one with vllm in it, or the only one; others are notes.
    rows = [
        (line, int(ended[1]))
        for line in lines
        if ("Exited (" in line.text or "Restarting (" in line.text)
        and (ended := re.search(r"\s(?:Exited|Restarting) \((\d{1,3})\) \S", line.text))
    ]
    ours = [row for row in rows if "vllm" in row[0].text.lower()] or (rows if len(rows) == 1 else [])
    endings += [Termination("docker", row.text.split()[-1][:120], exit_code=code, lines=(row,)) for row, code in ours[:50]]
    others = [(row.text.split()[-1][:60], code) for row, code in rows if (row, code) not in ours][:20]
    notes = tuple(f"a container ended with exit code {code}: {name}" for name, code in others)
    return facts._replace(endings=tuple(endings), notes=notes)


class _Units:
    """systemd's messages, by unit."""

    def __init__(self) -> None:
        self.endings: dict[str, Termination] = {}
        self.restarts: dict[str, list[tuple[int, LogLine]]] = {}
        self.stops: dict[str, list[LogLine]] = {}
        self.limits: dict[str, list[LogLine]] = {}
        self.timeouts: dict[str, list[LogLine]] = {}

    def end(self, unit: str, line: LogLine, *, reason: str = "", code: int | None = None, oom: bool = False) -> None:
        """Join what one more line says to the unit's last end; a new exit code after a known one is a new end."""
        old = self.endings.get(unit)
        if old is None and len(self.endings) >= MOST_ENDINGS:
            return
        old = old or Termination("systemd", unit)
        if code is not None and old.exit_code is not None and code != old.exit_code:
            old = Termination("systemd", unit)
        self.endings[unit] = old._replace(
            reason=reason or old.reason,
            exit_code=old.exit_code if code is None else code,
            out_of_memory=old.out_of_memory or oom,
            lines=(*old.lines, line)[-6:],
        )

    def say(self, unit: str, what: str, line: LogLine) -> None:
        """One message about a unit."""
        code = re.search(_CODE, what)
        result = re.search(r"Failed with result '([\w-]{1,30})'|\(Result: ([\w-]{1,30})\)", what)
        counter = re.search(r"restart counter is at (\d{1,7})", what)
        if "killed by the OOM killer" in what:
            self.end(unit, line, reason="oom-kill", oom=True)
        if code and ("Main process exited" in what or "Main PID" in what):  # an exit code, or minus the signal
            number = _NUMBERS.get(code["signal"]) if code["signal"] else integer(code["status"] or "")
            is_exit = code["how"] == "exited" and not code["signal"]
            self.end(unit, line, code=number if number is None or is_exit else -number)
        if result:
            name = result[1] or result[2]
            if name == "start-limit-hit":
                self.limits.setdefault(unit, []).append(line)
            elif name != "success":
                self.end(unit, line, reason=name, oom=name == "oom-kill")
        if counter:
            self.restarts.setdefault(unit, []).append((int(counter[1]), line))
        if "Start request repeated too quickly" in what:
            self.limits.setdefault(unit, []).append(line)
        if re.search(r"[Ss]tart operation timed out|State 'start\S{0,12} timed out|Watchdog timeout", what):
            self.timeouts.setdefault(unit, []).append(line)
        if "stop-sigterm' timed out" in what or "Stopping timed out" in what:
            self.stops.setdefault(unit, []).append(line)


def read_systemd(log: Log) -> PodFacts:
    """Reads systemd's messages about units; units of the system itself become notes."""
    units, current = _Units(), ""
    for line in log.lines:
        text = line.text
        if line.process or not any(word in text for word in _SYSTEMD_GATE):
            continue
        header = re.match(_HEADER, text)
        if header:
            current = header["unit"]
        for kind in (".service", ".scope"):
            before, found, what = text.partition(f"{kind}: ")
            name = re.search(_UNIT, before[-150:]) if found else None  # from its end, so that a long line costs nothing
            if name:
                units.say(name[0] + kind, what[:400], line)
                break
        else:
            if current and ("Main PID:" in text or "Active: failed" in text):
                units.say(current, text, line)
        stop = re.search(r"Stopping ([\w@.\\:\-]{1,150}\.service)", text)
        if stop:
            units.stops.setdefault(stop[1], []).append(line)
    named = dict.fromkeys((*units.endings, *units.restarts, *units.limits, *units.timeouts, *units.stops))
    candidates = [unit for unit in named if not unit.lower().startswith(_SYSTEM_UNITS)]
    # Beside a server's log that is no journal, a unit of another name is another's.
    is_beside = any((line.place or _FRAME in line.text) and not line.server for line in log.lines)
    ours = [unit for unit in candidates if "vllm" in unit.lower()] or ([] if is_beside else candidates)
    counts = max((units.restarts[unit] for unit in ours if unit in units.restarts), key=lambda some: some[-1][0], default=[])
    times = [line.at for _, line in counts if line.at is not None]
    others = [unit for unit in units.endings if unit not in ours]
    asked, limits, timeouts = (
        tuple(line for unit in ours for line in lines.get(unit, ()))[:20]
        for lines in (units.stops, units.limits, units.timeouts)
    )
    return PodFacts(
        endings=tuple(units.endings[unit] for unit in ours if unit in units.endings),
        restarts=counts[-1][0] if counts else None, restarts_line=counts[-1][1] if counts else None,
        restarts_apart_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        stop_asked=asked, start_limit=limits, timeouts=timeouts,
        notes=tuple(f"unit {unit} also failed ({units.endings[unit].reason or 'exit code'})" for unit in others[:20]),
    )  # fmt: skip
